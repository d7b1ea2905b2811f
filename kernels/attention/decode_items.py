"""How the keys of rows with few new tokens are split over programs, and the memory of the parts.

Split over key ranges as in Flash-Decoding (Dao et al., 2023). A program computes one *item*, a part
of a row's keys, for one KV head. `plan_decode` divides all rows of a step into items on the device,
from their current lengths, so every replay of a captured graph is balanced anew:

    rows     | 0 | 1  |      2      |
    keys     |---|----|----|----|---|     parts of a row are equal and whole tiles
    items      4    3   0    1    2       last row first: rows are sorted, long ones start early

Knows no kernel that computes items (`triton_decode`, `triton_verify`, `latent_decode`).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.protocol import AttentionShape, RowTensors

# int32 fields of an item: row, part, the row's number of parts (0 = no work), first and end key,
# the row's first block in block_ids, the first key that the query sees; one unused.
ITEM_FIELDS = tl.constexpr(8)
_ROW_TILE = tl.constexpr(1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """Tuning parameters; the defaults are for an H200."""

    # Keys of one K or V tile, a power of two of 16 or more.
    tile_keys: int = 64
    num_warps: int = 4
    num_stages: int = 3
    # A row with at most this many tiles is not split: combining costs about as much as four tiles.
    min_part_tiles: int = 4
    # Parts that are combined in the time of one tile: a row of n tiles gets parts of at least
    # sqrt(n / this), which take the least time where no other row waits. 0 = of any size.
    parts_a_tile: int = 0
    # Desired number of programs beyond one per row and KV head: four for each of 132 SMs; a
    # backend replaces it by four for each of its device's.
    num_programs: int = 528


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeWork:
    """Rows of one new token, the split of their keys, and the scratch memory of the parts."""

    shape: AttentionShape
    config: DecodeConfig
    rows: RowTensors
    # per window: [num_items, 8] int32, written by `plan_decode`
    items: dict[int | None, Tensor]
    # [num_items, kv_heads, groups, head_dim] fp32
    partial: Tensor
    # [num_items, kv_heads, groups] fp32  log2 of the sum of 2^score
    log_sums: Tensor
    # [R, kv_heads] int32  number of parts that have finished; 0 between kernels
    num_arrived: Tensor


@triton.jit
def _num_tiles(num_keys, TILE_KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """Number of tiles with keys that the query sees, aligned to key 0; the first such key."""
    first_seen = tl.maximum(num_keys - WINDOW, 0) if WINDOW > 0 else num_keys * 0
    return (num_keys + TILE_KEYS - 1) // TILE_KEYS - first_seen // TILE_KEYS, first_seen


@triton.jit(
    do_not_specialize=["num_rows", "num_items", "max_extra_items"],
    do_not_specialize_on_alignment=["num_keys_ptr", "cu_blocks_ptr"],
)
def _plan_kernel(
    num_keys_ptr,  # [R]
    cu_blocks_ptr,  # [R + 1]
    items_ptr,  # [num_items, ITEM_FIELDS], the output
    num_rows,
    num_items,
    max_extra_items,
    MIN_PART_TILES: tl.constexpr,
    PARTS_A_TILE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    lane = tl.arange(0, _ROW_TILE)
    num_all_tiles = 0
    for start in range(0, num_rows, _ROW_TILE):
        num_keys = tl.load(num_keys_ptr + start + lane, mask=start + lane < num_rows, other=0)
        num_tiles, _ = _num_tiles(num_keys, TILE_KEYS, WINDOW)
        num_all_tiles += tl.sum(num_tiles)
    # sum of ceil(tiles / limit) over rows <= rows + all tiles / limit <= rows + max_extra_items
    limit = tl.maximum(tl.cdiv(num_all_tiles, max_extra_items), MIN_PART_TILES)
    num_used = 0
    for start in range(0, num_rows, _ROW_TILE):
        row = num_rows - 1 - start - lane
        num_keys = tl.load(num_keys_ptr + row, mask=row >= 0, other=0)
        first_block = tl.load(cu_blocks_ptr + row, mask=row >= 0, other=0)
        num_tiles, first_seen = _num_tiles(num_keys, TILE_KEYS, WINDOW)
        least = limit
        if PARTS_A_TILE > 0:
            balanced = tl.sqrt(num_tiles.to(tl.float32) / PARTS_A_TILE) + 0.5
            least = tl.maximum(limit, balanced.to(tl.int32))
        part_tiles = tl.maximum(tl.cdiv(num_tiles, tl.maximum(tl.cdiv(num_tiles, least), 1)), 1)
        num_parts = tl.cdiv(num_tiles, part_tiles)
        first_item = num_used + tl.cumsum(num_parts) - num_parts
        for part in range(tl.max(num_parts)):
            item = first_item + part
            is_item = (part < num_parts) & (item < num_items)
            first_key = (first_seen // TILE_KEYS + part * part_tiles) * TILE_KEYS
            at = items_ptr + item * ITEM_FIELDS
            tl.store(at, row, mask=is_item)
            tl.store(at + 1, lane * 0 + part, mask=is_item)
            tl.store(at + 2, num_parts, mask=is_item)
            tl.store(at + 3, first_key, mask=is_item)
            tl.store(at + 4, tl.minimum(first_key + part_tiles * TILE_KEYS, num_keys), mask=is_item)
            tl.store(at + 5, first_block, mask=is_item)
            tl.store(at + 6, first_seen, mask=is_item)
        num_used += tl.sum(num_parts)
    for start in range(num_used, num_items, _ROW_TILE):
        item = start + lane
        tl.store(items_ptr + item * ITEM_FIELDS + 2, lane * 0, mask=item < num_items)


def open_decode(
    rows: RowTensors, max_keys: int, shape: AttentionShape, config: DecodeConfig
) -> DecodeWork:
    """Allocate memory for `rows`, each with at most `max_keys` keys; `plan_decode` must fill it."""
    num_rows = len(rows.num_keys)
    max_tiles = triton.cdiv(max_keys, config.tile_keys)
    num_items = min(
        num_rows + _max_extra_items(shape, config),
        num_rows * triton.cdiv(max_tiles, config.min_part_tiles),
    )
    slots = (num_items, shape.num_kv_heads, shape.num_groups)
    device = rows.num_keys.device
    return DecodeWork(
        shape=shape,
        config=config,
        rows=rows,
        items={
            window: torch.empty((num_items, ITEM_FIELDS.value), dtype=torch.int32, device=device)
            for window in dict.fromkeys(shape.layer_windows)
        },
        partial=torch.empty((*slots, shape.head_dim), dtype=torch.float32, device=device),
        log_sums=torch.empty(slots, dtype=torch.float32, device=device),
        num_arrived=torch.zeros((num_rows, shape.num_kv_heads), dtype=torch.int32, device=device),
    )


def plan_decode(work: DecodeWork) -> None:
    """Split the rows' current keys into items, on the device; writes `work.items`."""
    for window, items in work.items.items():
        _plan_kernel[(1,)](
            work.rows.num_keys,
            work.rows.cu_blocks,
            items,
            len(work.rows.num_keys),
            len(items),
            _max_extra_items(work.shape, work.config),
            MIN_PART_TILES=work.config.min_part_tiles,
            PARTS_A_TILE=work.config.parts_a_tile,
            TILE_KEYS=work.config.tile_keys,
            WINDOW=window or 0,
        )


def _max_extra_items(shape: AttentionShape, config: DecodeConfig) -> int:
    """Maximum number of items beyond one per row."""
    return max(config.num_programs // shape.num_kv_heads, 1)
