"""Causal latent attention for prompts: keys and values are made of the latents, then attended to.

    made = up c, [keys, heads, nope + value];   score = q_nope made_k + q_rope r

The vectors [c | r] of all keys of a step's rows, histories included, are copied out of the store in
*pieces* of bounded size, each is multiplied by `up` (one product for the whole piece), and the
queries that see any of it go on with their online softmax:

    keys of the rows   | row 0 ....... | row 1 ................... | row 2 .. |
    pieces             |    0         |     1        |     2       |    3     |

Between pieces a query's mean and the log of its sum are kept in fp32, so pieces are merged exactly.
The rotated key is read where it was copied to, one for all heads: no tensor joins it to each head's
key. Against absorbed attention this costs a product of (nope + value) rank numbers a key and head
for every piece, and saves 2 rank + rope - (nope + rope + value) of them a query, key and head.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (the field's own spelling)
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.latent import LatentShape
from kernels.attention.protocol import AttentionStep, build_step
from kernels.attention.triton_prefill import _find_row
from kernels.kv.append import layer_lines
from kernels.kv.scales import KvScales, from_e4m3, of_latent
from kernels.pdl import pdl_supported

PIECE_BYTES = 512 * 2**20  # of made keys and values
_ROW_TILE = 128
_FP32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentPrefillConfig:
    """Tuning parameters."""

    tile_queries: int = 64
    tile_keys: int = 64
    num_warps: int = 4
    num_stages: int = 2


def config_for(shape: LatentShape) -> LatentPrefillConfig:
    """Wider heads than DeepSeek's have fewer keys a tile, for GPUs of 99 KiB of shared memory."""
    is_wide = max(shape.nope_dim, shape.value_dim) > 128
    return LatentPrefillConfig(tile_keys=32) if is_wide else LatentPrefillConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some of the keys of a step's rows."""

    # int64 [keys]  their lines in the store, of layer 0
    lines: Tensor
    # int32 [R, 3] per row: its first and end key in this piece, and where its key 0 would be
    spans: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentPrefill:
    """The rows of a step that have several new tokens, from token `first_token` on."""

    shape: LatentShape
    config: LatentPrefillConfig
    first_token: int
    num_tokens: int
    # int32 [R + 1], counted from `first_token`, and [R]
    cu_tokens: Tensor
    num_keys: Tensor
    # int32 [R + 1]
    cu_keys: Tensor
    max_new_tokens: int
    max_keys: int
    pieces: tuple[Piece, ...]


def keys_a_piece(shape: LatentShape, dtype: torch.dtype, piece_bytes: int) -> int:
    """Keys whose made keys, values and vectors take at most `piece_bytes`; at least one."""
    return max(1, piece_bytes // (_numbers_a_key(shape) * dtype.itemsize))


def _numbers_a_key(shape: LatentShape) -> int:
    """Of its vector, and of the key and the value that are made of it for each head."""
    return shape.num_heads * (shape.nope_dim + shape.value_dim) + shape.width


def prefill_bytes(
    shape: LatentShape,
    dtype: torch.dtype,
    *,
    num_tokens: int,
    num_keys: int,
    max_piece_keys: int,
    num_more: int = 0,
) -> int:
    """The memory of a piece, and of what is kept between pieces if there are several.

    num_more: numbers that a key has besides those here.
    """
    of_piece = min(num_keys, max_piece_keys) * (_numbers_a_key(shape) + num_more) * dtype.itemsize
    if num_keys <= max_piece_keys:
        return of_piece
    return of_piece + num_tokens * shape.num_heads * (shape.value_dim + 1) * _FP32_BYTES


def plan_prefill(
    step: AttentionStep,
    first_row: int,
    shape: LatentShape,
    config: LatentPrefillConfig,
    *,
    block_size: int,
    max_piece_keys: int,
) -> LatentPrefill:
    """Rows from `first_row` on, in pieces of at most `max_piece_keys` keys."""
    device = step.device_rows.num_keys.device
    new = step.num_new_tokens[first_row:]
    keys = step.num_computed_tokens[first_row:] + new
    pieces = []
    for spans in _spans(keys.tolist(), max_piece_keys):
        lines = [
            _lines(step.row_blocks(first_row + row), first, end, block_size, shape.num_layers)
            for row, first, end, _ in spans
        ]
        table = np.zeros((len(keys), 3), dtype=np.int32)
        for row, first, end, zero in spans:
            table[row] = first, end, zero
        pieces.append(
            Piece(
                lines=_on_device(np.concatenate(lines), device),
                spans=_on_device(table, device),
            )
        )
    return LatentPrefill(
        shape=shape,
        config=config,
        first_token=int(step.num_new_tokens[:first_row].sum()),
        num_tokens=int(new.sum()),
        cu_tokens=_on_device(np.cumsum([0, *new], dtype=np.int32), device),
        num_keys=_on_device(keys.astype(np.int32), device),
        cu_keys=_on_device(np.cumsum([0, *keys], dtype=np.int32), device),
        max_new_tokens=int(new.max()),
        max_keys=int(keys.max()),
        pieces=tuple(pieces),
    )


def _spans(num_keys: list[int], max_piece_keys: int) -> Iterator[list[tuple[int, int, int, int]]]:
    """For each piece (row, first key, end key, place of the row's key 0 in the piece)."""
    spans: list[tuple[int, int, int, int]] = []
    filled = 0
    for row, length in enumerate(num_keys):
        first = 0
        while first < length:
            end = min(length, first + max_piece_keys - filled)
            spans.append((row, first, end, filled - first))
            filled += end - first
            first = end
            if filled == max_piece_keys:
                yield spans
                spans, filled = [], 0
    if spans:
        yield spans


def _lines(
    blocks: np.ndarray, first: int, end: int, block_size: int, num_layers: int
) -> np.ndarray:
    """Layer-0 lines of keys [first, end) of a row, see kernels/kv/append.py."""
    keys = np.arange(first, end, dtype=np.int64)
    return blocks[keys // block_size].astype(np.int64) * (num_layers * block_size) + (
        keys % block_size
    )


def _on_device(values: np.ndarray, device: torch.device) -> Tensor:
    host = torch.from_numpy(values)
    if device.type != "cuda":
        return host
    return host.pin_memory().to(device, non_blocking=True)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["cu_tokens_ptr"])
def _latent_prefill_kernel(
    q_ptr,  # [T, heads, NOPE_DIM + ROPE_DIM], tokens strided
    made_ptr,  # [keys, heads, NOPE_DIM + VALUE_DIM]
    vectors_ptr,  # [keys, RANK + ROPE_DIM]
    cu_tokens_ptr,  # int32 [R + 1]
    num_keys_ptr,  # int32 [R]
    spans_ptr,  # [R, 3]
    # kept between pieces, and output
    means_ptr,  # fp32 [T, heads, VALUE_DIM]
    log_sums_ptr,  # fp32 [T, heads]
    out_ptr,  # [T, heads, VALUE_DIM]
    # constants
    num_rows,
    q_token_stride,
    SCALE_LOG2E: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NOPE_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_NOPE: tl.constexpr,
    PADDED_VALUE: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    ROW_TILE: tl.constexpr,
    IS_FIRST: tl.constexpr,
    IS_LAST: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    row, row_tile = _find_row(cu_tokens_ptr, num_rows, tile, TILE_QUERIES, ROW_TILE)
    row_start = tl.load(cu_tokens_ptr + row)
    num_new = tl.load(cu_tokens_ptr + row + 1) - row_start
    first_token = row_tile * TILE_QUERIES
    if first_token >= num_new:
        return
    num_keys = tl.load(num_keys_ptr + row)
    first_key = tl.load(spans_ptr + row * 3)
    end_key = tl.load(spans_ptr + row * 3 + 1)
    zero = tl.load(spans_ptr + row * 3 + 2).to(tl.int64)

    token = first_token + tl.arange(0, TILE_QUERIES)
    is_query = token < num_new
    tokens = (row_start + token).to(tl.int64)
    nope = tl.arange(0, PADDED_NOPE)
    rope = tl.arange(0, ROPE_DIM)
    value = tl.arange(0, PADDED_VALUE)
    q_at = q_ptr + tokens[:, None] * q_token_stride + head * (NOPE_DIM + ROPE_DIM)
    is_nope = is_query[:, None] & (nope < NOPE_DIM)[None, :]
    q_nope = tl.load(q_at + nope[None, :], mask=is_nope, other=0.0)
    q_rope = tl.load(q_at + NOPE_DIM + rope[None, :], mask=is_query[:, None], other=0.0)
    places = tokens * NUM_HEADS + head
    is_out = is_query[:, None] & (value < VALUE_DIM)[None, :]
    out_at = places[:, None] * VALUE_DIM + value[None, :]
    if IS_FIRST:
        biggest = tl.full([TILE_QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([TILE_QUERIES], tl.float32)
        acc = tl.zeros([TILE_QUERIES, PADDED_VALUE], tl.float32)
    else:
        biggest = tl.load(log_sums_ptr + places, mask=is_query, other=float("-inf"))
        total = tl.where(biggest == float("-inf"), 0.0, 1.0)
        acc = tl.load(means_ptr + out_at, mask=is_out, other=0.0)

    positions = num_keys - num_new + token
    last = tl.minimum(num_keys - num_new + first_token + TILE_QUERIES, num_keys)
    lane = tl.arange(0, TILE_KEYS)
    width: tl.constexpr = NOPE_DIM + VALUE_DIM
    for start in tl.range(first_key, tl.minimum(end_key, last), TILE_KEYS):
        keys = start + lane
        is_key = (keys < end_key)[:, None]
        at = zero + keys
        made = made_ptr + (at[:, None] * NUM_HEADS + head) * width
        k = tl.load(made + nope[None, :], mask=is_key & (nope < NOPE_DIM)[None, :], other=0.0)
        v = tl.load(
            made + NOPE_DIM + value[None, :], mask=is_key & (value < VALUE_DIM)[None, :], other=0.0
        )
        rotated = vectors_ptr + at[:, None] * (RANK + ROPE_DIM) + RANK + rope[None, :]
        k_rope = tl.load(rotated, mask=is_key, other=0.0)
        scores = tl.dot(q_nope, tl.trans(k))
        scores = tl.dot(q_rope, tl.trans(k_rope), scores) * SCALE_LOG2E
        is_seen = (keys[None, :] <= positions[:, None]) & (keys < end_key)[None, :]
        scores = tl.where(is_seen, scores, float("-inf"))
        bigger = tl.maximum(biggest, tl.max(scores, 1))
        # For a query that has seen nothing yet: -inf - 0 gives weight 0, -inf - -inf would be NaN.
        base = tl.where(bigger == float("-inf"), 0.0, bigger)
        p = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(biggest - base)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        biggest = bigger
    means = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if IS_LAST:
        tl.store(out_ptr + out_at, means.to(out_ptr.dtype.element_ty), mask=is_out)
    else:
        sums = tl.where(total == 0.0, float("-inf"), biggest + tl.log2(total))
        tl.store(means_ptr + out_at, means, mask=is_out)
        tl.store(log_sums_ptr + places, sums, mask=is_query)


def latent_prefill(
    q: Tensor,
    up: Tensor,
    out: Tensor,
    layer: int,
    store: Tensor,
    work: LatentPrefill,
    scales: KvScales | None = None,
) -> None:
    """Writes the tokens of `work` to `out`.

    q: [T, heads, nope + rope], tokens may be strided; up: [heads, nope + value, rank] contiguous;
    out: [T, heads * value] contiguous. store: [blocks, layers, 1, block_size, 1, rank + rope], with
    `scales` of uint8.
    """
    shape = work.shape
    tokens = slice(work.first_token, work.first_token + work.num_tokens)
    q, out = q[tokens], out[tokens]
    assert q.stride()[1:] == (shape.query_dim, 1), f"q has strides {q.stride()}"
    assert out.is_contiguous(), f"out has strides {out.stride()}"
    is_single = len(work.pieces) == 1
    kept = (0, 0) if is_single else (work.num_tokens, shape.num_heads)
    means = torch.empty((*kept, shape.value_dim), dtype=torch.float32, device=q.device)
    log_sums = torch.empty(kept, dtype=torch.float32, device=q.device)
    for number, piece in enumerate(work.pieces):
        made, vectors = made_keys(up, layer, store, piece, shape, scales)
        _attend_piece(
            q, made, vectors, piece, work, (means, log_sums, out),
            is_first=number == 0, is_last=number == len(work.pieces) - 1,
        )  # fmt: skip


def prepare_pieces(
    shape: LatentShape,
    config: LatentPrefillConfig,
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Compile the kernel for a first, a last, an only piece and one between."""

    def zeros(*size: int) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    step = build_step([2], [1], [[0]], device)
    q, out = zeros(2, shape.num_heads, shape.query_dim), zeros(2, shape.num_heads * shape.value_dim)
    up = zeros(shape.num_heads, shape.nope_dim + shape.value_dim, shape.rank)
    store = zeros(1, shape.num_layers, 1, block_size, 1, shape.width)
    for max_piece_keys in (3, 1):  # of the row's 3
        work = plan_prefill(
            step, 0, shape, config, block_size=block_size, max_piece_keys=max_piece_keys
        )
        latent_prefill(q, up, out, 0, store, work)


def made_keys(
    up: Tensor,
    layer: int,
    store: Tensor,
    piece: Piece,
    shape: LatentShape,
    scales: KvScales | None,
) -> tuple[Tensor, Tensor]:
    """A piece's made keys and values, [keys, heads, nope + value], and vectors, [keys, width]."""
    vectors = layer_lines(store, layer).index_select(0, piece.lines).view(-1, shape.width)
    if scales is not None:
        factors = of_latent(scales.scale[layer], shape.rank, shape.rope_dim)
        vectors = from_e4m3(vectors, up.dtype).mul_(factors)  # in fp32, rounded once
    made = F.linear(vectors[:, : shape.rank], up.flatten(0, 1))
    return made.view(len(made), shape.num_heads, -1), vectors


def _attend_piece(
    q: Tensor,
    made: Tensor,
    vectors: Tensor,
    piece: Piece,
    work: LatentPrefill,
    outputs: tuple[Tensor, Tensor, Tensor],
    *,
    is_first: bool,
    is_last: bool,
) -> None:
    shape, config = work.shape, work.config
    use_pdl = pdl_supported(q.device)
    num_tiles = work.num_tokens // config.tile_queries + len(work.num_keys)
    _latent_prefill_kernel[(shape.num_heads, num_tiles)](
        q,
        made,
        vectors,
        work.cu_tokens,
        work.num_keys,
        piece.spans,
        *outputs,
        len(work.num_keys),
        q.stride(0),
        SCALE_LOG2E=shape.scale * math.log2(math.e),
        NUM_HEADS=shape.num_heads,
        NOPE_DIM=shape.nope_dim,
        ROPE_DIM=shape.rope_dim,
        VALUE_DIM=shape.value_dim,
        RANK=shape.rank,
        PADDED_NOPE=max(16, triton.next_power_of_2(shape.nope_dim)),
        PADDED_VALUE=max(16, triton.next_power_of_2(shape.value_dim)),
        TILE_QUERIES=config.tile_queries,
        TILE_KEYS=config.tile_keys,
        ROW_TILE=_ROW_TILE,
        IS_FIRST=is_first,
        IS_LAST=is_last,
        USE_PDL=use_pdl,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        launch_pdl=use_pdl,
    )
