"""How the latents of a step's rows are split among programs, and the scratch memory of the parts.

A line is one head of one of a row's new tokens, token after token. Lines stand in equal tiles. Keys
are split into items as in `decode_items`: a tile of lines stands where that has a KV head. Knows no
kernel (`latent_decode.py`).
"""

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from kernels.attention.decode_items import DecodeConfig, DecodeWork, open_decode, plan_decode
from kernels.attention.latent import LatentShape
from kernels.attention.protocol import AttentionShape, RowTensors
from kernels.attention.triton_decode import MIN_DOT_ROWS
from kernels.device import DeviceProperties, stages_that_fit

_MAX_TILE_LINES = 64
_FEW_LINES = 16
_LARGE_SHARED_MEMORY = 160 * 1024  # bytes a block, from which on 64 queries fit beside keys
_MANY_PER_SM, _FEW_PER_SM = 2, 1  # programs, by what is left of an SM's shared memory
_TILE_KEYS, _MIN_TILE_KEYS = 32, 16
# Of few lines on an H200: a tile takes 1.9 us where a row's programs have an SM each, a part more
# 0.22 us in the combination.
_PARTS_A_TILE = 8
# The matrix instruction of 16 rows adds 16 columns at a time, one product after the other: a latent
# of 512 in one chunk is a chain of 32 of them, for which the loads of the next tile wait.
_MAX_CHUNKS, _LEAST_CHUNK = 4, 128
_UNSPLIT = 1 << 20  # tiles, more than any row has
# The last part to end joins those of a row one after the other. A kernel joins many parts sooner,
# but has a program for each row and head, of whole rows too: on an H200 it takes 7 us of 256 rows.
# Of 64 rows it takes 2 us more where no row is split, and 10 less where each has 4,096 keys.
_JOINED_PARTS = 4  # on average, fewer
_LEAST_JOINED = 4  # tiles of a part that is joined so
NEVER_JOINED = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentWork:
    """Rows of few new tokens, the split of their keys, and the scratch memory of the parts."""

    shape: LatentShape
    max_queries: int  # of a row; 1 = row r's query is token r
    num_chunks: int  # as of `LatentConfig`
    joins_last: bool  # the last part to end joins a row's; else a kernel that follows
    split: DecodeWork
    # [R, 2] int32  a row's first item and its number of parts; 0 parts = nothing to combine
    row_parts: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Tuning parameters: tiles of keys and the split, and equal tiles of a row's lines.

    `num_programs` of `decode` are those that the device runs at once.
    """

    decode: DecodeConfig
    num_tiles: int
    num_chunks: int = 1  # equal parts of a latent, each with products of its own
    # Rows and tiles, multiplied, from which the last part of a row to end joins them all: few then.
    joined_from: int = NEVER_JOINED


def fitted_config(
    shape: LatentShape, device: DeviceProperties, *, whole_rows: bool = False, max_queries: int = 1
) -> LatentConfig:
    """Tiles of lines and keys that fit the device's shared memory.

    Raises ValueError if none do.
    """
    memory_bytes = device.shared_memory_per_block_bytes
    most_lines = _MAX_TILE_LINES if memory_bytes >= _LARGE_SHARED_MEMORY else _FEW_LINES
    num_tiles = _num_tiles(shape.num_heads, max_queries, most_lines)
    query_rows = product_rows(-(-shape.num_heads * max_queries // num_tiles))
    is_few = query_rows <= _FEW_LINES
    # Few lines: two programs share an SM, one loads while the other computes.
    per_sm = _MANY_PER_SM if is_few else _FEW_PER_SM
    tile_keys, stages = _largest_tile(shape, query_rows, memory_bytes // per_sm)
    if stages == 0:
        raise ValueError(
            f"{device.name} has {memory_bytes} bytes of shared memory a block: too few for"
            f" {query_rows} queries of {shape.width}"
        )
    config = DecodeConfig(tile_keys=tile_keys, num_warps=4 if is_few else 8, num_stages=stages)
    if is_few:
        config = replace(config, min_part_tiles=1, parts_a_tile=_PARTS_A_TILE)
    if device.is_gpu:
        config = replace(config, num_programs=per_sm * device.num_sms)
    joined_from = NEVER_JOINED
    if whole_rows:
        config = replace(config, min_part_tiles=_UNSPLIT)
    elif is_few:
        joined_from = config.num_programs // _JOINED_PARTS
    num_chunks = max(1, min(_MAX_CHUNKS, shape.rank // _LEAST_CHUNK)) if is_few else 1
    return LatentConfig(
        decode=config, num_tiles=num_tiles, num_chunks=num_chunks, joined_from=joined_from
    )


def _largest_tile(shape: LatentShape, query_rows: int, memory_bytes: int) -> tuple[int, int]:
    """Keys of a tile and the pipeline's stages; 0 stages if no tile fits.

    The matrix instruction of 16 rows keeps one buffer fewer than there are stages.
    """
    is_few = query_rows <= _FEW_LINES
    tile_keys = _TILE_KEYS
    while True:
        buffers = stages_that_fit(
            2,
            stage_bytes=2 * tile_keys * shape.width,  # two bytes an element
            other_bytes=2 * query_rows * shape.width,
            shared_memory_bytes=memory_bytes,
        )
        if buffers == 2 or tile_keys == _MIN_TILE_KEYS:
            return tile_keys, buffers + 1 if is_few and buffers else buffers
        tile_keys //= 2


def _num_tiles(num_heads: int, max_queries: int, most_lines: int) -> int:
    """The fewest tiles of at most `most_lines` lines; of one token's equal parts of its heads."""
    num_lines = num_heads * max_queries
    least = -(-num_lines // most_lines)
    if max_queries > 1:
        return least
    return next(n for n in range(least, num_lines + 1) if num_lines % n == 0)


def _tile_lines(num_heads: int, max_queries: int, num_tiles: int) -> int:
    """With drafts a tile fills its product, so that a row of few tokens leaves tiles out."""
    if max_queries > 1:
        return product_rows(-(-num_heads * max_queries // num_tiles))
    assert num_heads % num_tiles == 0, f"{num_heads} heads in {num_tiles} tiles"
    return num_heads // num_tiles


def product_rows(tile_lines: int) -> int:
    return max(MIN_DOT_ROWS, int(triton.next_power_of_2(tile_lines)))


def open_latent(
    rows: RowTensors,
    max_keys: int,
    shape: LatentShape,
    config: LatentConfig,
    max_queries: int = 1,
) -> LatentWork:
    """Allocate memory for `rows`, each with at most `max_keys` keys; `plan_latent` must fill it.

    max_queries: new tokens of a row at most.
    """
    tile_lines = _tile_lines(shape.num_heads, max_queries, config.num_tiles)
    scratch = AttentionShape(
        num_heads=config.num_tiles * tile_lines,
        num_kv_heads=config.num_tiles,
        head_dim=shape.rank,
        layer_windows=(None,),
    )
    num_rows = len(rows.num_keys)
    row_parts = torch.zeros((num_rows, 2), dtype=torch.int32, device=rows.num_keys.device)
    decode = replace(config.decode, num_programs=_num_extra(num_rows, config))
    joins_last = max_queries == 1 and num_rows * config.num_tiles >= config.joined_from
    if joins_last:
        decode = replace(decode, min_part_tiles=max(decode.min_part_tiles, _LEAST_JOINED))
    split = open_decode(rows, max_keys, scratch, decode)
    return LatentWork(
        shape=shape,
        max_queries=max_queries,
        num_chunks=config.num_chunks,
        joins_last=joins_last,
        split=split,
        row_parts=row_parts,
    )


def _num_extra(num_rows: int, config: LatentConfig) -> int:
    """Programs beyond one a row and tile, so that all fill the device a whole number of times."""
    at_once = config.decode.num_programs
    first = num_rows * config.num_tiles
    left = -first % at_once
    # With less than a quarter of the device left hardly a row would be cut: fill it once more.
    return left if left >= at_once // 4 else left + at_once


def plan_latent(work: LatentWork) -> None:
    """Split the rows' current keys into items, on the device."""
    plan_decode(work.split)
