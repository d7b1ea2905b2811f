"""Causal attention over the paged store for rows with any number of new tokens.

Online softmax over key tiles (Milakov and Gimelshein, 2018; FlashAttention-2), queries aligned to
the end of their row's keys:

    token i of a row sees keys j with  p - window < j <= p,   p = num_keys - num_new + i

A token with p < 0, in a row with more new tokens than keys, sees none and gets zeros. An attention
sink is one more score without a value, as in `triton_decode`.

A program computes a tile of a row's tokens with all query heads of one KV head:

    keys    0 ... start | tiles that all its queries see | tiles to mask | end <= num_keys
                        start and all bounds between are multiples of the tile

*Fixed tiles* make a query's result bitwise independent of its surroundings: every query goes
through one kernel of one shape and sees tiles counted from key 0 in order, all of them masked. A
tile of which it sees nothing changes nothing (its maximum stays, factors are exactly 1, weights
exactly 0). Products of a store of e4m3 numbers
are those of the numbers, exact in q's dtype. Knows no requests.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.protocol import AttentionShape, RowTensors
from kernels.attention.triton_decode import (
    MIN_DOT_ROWS,
    capped,
    check_store,
    key_offsets,
    layer_constants,
    sink_scores,
    times_scale,
    with_sink,
)
from kernels.instructions import knows_e4m3, uses_ptx
from kernels.kv.scales import KvScales
from kernels.pdl import pdl_supported
from kernels.quant.dequantize import decode_e4m3

_ROW_TILE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """Tuning parameters; the defaults are for an H200."""

    # Query rows of a program, tokens * heads per KV head, a power of two.
    tile_queries: int = 128
    # Keys of one K or V tile, a power of two of 16 or more.
    tile_keys: int = 64
    num_warps: int = 8
    num_stages: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillWork:
    """Rows [first_row, first_row + num_rows) of a step, with `num_tokens` new tokens in all."""

    shape: AttentionShape
    config: PrefillConfig
    is_fixed_tile: bool
    # All rows of the step; `first_row` is an offset, because views would not be aligned.
    rows: RowTensors
    first_row: int
    num_rows: int
    num_tokens: int


def _decoding(q: Tensor, scales: KvScales | None) -> dict[str, bool]:
    """The constants by which a kernel decodes e4m3 numbers, equal for all that has none."""
    is_fp8 = scales is not None
    return {
        "KNOWS_E4M3": is_fp8 and knows_e4m3(q.device),
        "USES_PTX": is_fp8 and uses_ptx(q.device),
    }


@triton.jit
def _numbers(
    x, dtype: tl.constexpr, IS_FP8: tl.constexpr, KNOWS_E4M3: tl.constexpr, USES_PTX: tl.constexpr
):
    """A tile of the store in the dtype of products."""
    if IS_FP8:
        x = decode_e4m3(x, dtype, KNOWS_E4M3, USES_PTX, True)
    return x


@triton.jit
def _find_row(cu_tokens_ptr, num_rows, tile, TILE_TOKENS: tl.constexpr, ROW_TILE: tl.constexpr):
    """The row that a tile belongs to, and the tile's index in the row.

    Row r starts at tile (cu[r] - cu[0]) // TILE_TOKENS + r, which leaves each row enough tiles
    for any lengths, so the host need not know the lengths to launch.
    """
    lane = tl.arange(0, ROW_TILE)
    first_token = tl.load(cu_tokens_ptr)
    num_started = 0
    for start in range(0, num_rows, ROW_TILE):
        row = start + lane
        cu_tokens = tl.load(cu_tokens_ptr + row, mask=row < num_rows, other=0)
        has_started = (cu_tokens - first_token) // TILE_TOKENS + row <= tile
        num_started += tl.sum((has_started & (row < num_rows)).to(tl.int32))
    row = num_started - 1
    return row, tile - (tl.load(cu_tokens_ptr + row) - first_token) // TILE_TOKENS - row


@triton.jit
def _attend(
    q,
    k_ptr,
    v_ptr,
    ids_ptr,
    positions,
    biggest,
    total,
    acc,
    first_key,
    end_key,
    score_scale,
    IS_MASKED: tl.constexpr,
    SOFTCAP_LOG2E: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    IS_FP8: tl.constexpr,
    KNOWS_E4M3: tl.constexpr,
    USES_PTX: tl.constexpr,
):
    """Add keys [first_key, end_key) to the online softmax; unmasked: all queries see all keys."""
    lane = tl.arange(0, TILE_KEYS)
    dim = tl.arange(0, HEAD_DIM)
    # Ids are loaded one tile ahead, so that no K waits for them.
    blocks = tl.load(
        ids_ptr + (first_key + lane) // BLOCK_SIZE, mask=first_key + lane < end_key, other=0
    )
    for start in tl.range(first_key, end_key, TILE_KEYS):
        keys = start + lane
        offsets = key_offsets(blocks, keys, BLOCK_SIZE, BLOCK_STRIDE, TOKEN_STRIDE)
        next_keys = keys + TILE_KEYS
        blocks = tl.load(ids_ptr + next_keys // BLOCK_SIZE, mask=next_keys < end_key, other=0)
        if IS_MASKED:
            # Data after the row's keys is not the row's, may be NaN, and 0 * NaN is not 0.
            is_key = (keys < end_key)[:, None]
            k = tl.load(k_ptr + offsets[:, None] + dim[None, :], mask=is_key, other=0.0)
            v = tl.load(v_ptr + offsets[:, None] + dim[None, :], mask=is_key, other=0.0)
        else:
            k = tl.load(k_ptr + offsets[:, None] + dim[None, :])
            v = tl.load(v_ptr + offsets[:, None] + dim[None, :])
        k = _numbers(k, q.dtype, IS_FP8, KNOWS_E4M3, USES_PTX)
        v = _numbers(v, q.dtype, IS_FP8, KNOWS_E4M3, USES_PTX)
        scores = tl.dot(q, tl.trans(k)) * score_scale
        if SOFTCAP_LOG2E > 0:
            scores = capped(scores, SOFTCAP_LOG2E)
        if IS_MASKED:
            is_seen = keys[None, :] <= positions[:, None]
            if WINDOW > 0:
                is_seen = is_seen & (keys[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(is_seen, scores, float("-inf"))
        bigger = tl.maximum(biggest, tl.max(scores, 1))
        # For a query that has seen nothing yet: -inf - 0 gives weight 0, -inf - -inf would be NaN.
        base = tl.where(bigger == float("-inf"), 0.0, bigger)
        p = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(biggest - base)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        biggest = bigger
    return biggest, total, acc


@triton.jit(
    do_not_specialize=["layer", "first_row", "num_rows"],
    do_not_specialize_on_alignment=[
        "cu_tokens_ptr",
        "num_keys_ptr",
        "cu_blocks_ptr",
        "block_ids_ptr",
    ],
)
def _prefill_kernel(
    q_ptr,  # [T, heads, HEAD_DIM], tokens and heads strided
    store_ptr,  # [blocks, layers, 2, block_size, kv_heads, HEAD_DIM]
    cu_tokens_ptr,  # int32 [all rows + 1]
    num_keys_ptr,  # int32 [all rows]
    cu_blocks_ptr,  # int32 [all rows + 1]
    block_ids_ptr,  # int32 [N]
    out_ptr,  # [T, heads * HEAD_DIM]
    sinks_ptr,  # fp32 [heads], or None
    scales_ptr,  # fp32 [layers, 2, kv_heads] of a store of e4m3 numbers, or None
    layer,
    first_row,
    num_rows,
    SCALE_LOG2E: tl.constexpr,
    SOFTCAP_LOG2E: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    Q_TOKEN_STRIDE: tl.constexpr,
    Q_HEAD_STRIDE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    LAYER_STRIDE: tl.constexpr,
    HALF_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    ROW_TILE: tl.constexpr,
    IS_FIXED_TILE: tl.constexpr,
    KNOWS_E4M3: tl.constexpr,
    USES_PTX: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    TILE_TOKENS: tl.constexpr = TILE_QUERIES // PADDED_GROUPS
    kv_head = tl.program_id(0)
    # A row's last tiles have the most keys, so they start first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    row, row_tile = _find_row(cu_tokens_ptr + first_row, num_rows, tile, TILE_TOKENS, ROW_TILE)
    row += first_row
    row_start = tl.load(cu_tokens_ptr + row)
    num_new = tl.load(cu_tokens_ptr + row + 1) - row_start
    num_keys = tl.load(num_keys_ptr + row)
    ids_ptr = block_ids_ptr + tl.load(cu_blocks_ptr + row)
    first_token = row_tile * TILE_TOKENS
    if (first_token >= num_new) | (num_keys == 0):
        return

    query = tl.arange(0, TILE_QUERIES)
    dim = tl.arange(0, HEAD_DIM)
    token = first_token + query // PADDED_GROUPS
    group = query % PADDED_GROUPS
    is_query = ((token < num_new) & (group < NUM_GROUPS))[:, None]
    tokens = (row_start + token).to(tl.int64)
    heads = kv_head * NUM_GROUPS + group
    q = tl.load(
        q_ptr + tokens[:, None] * Q_TOKEN_STRIDE + heads[:, None] * Q_HEAD_STRIDE + dim[None, :],
        mask=is_query,
        other=0.0,
    )
    first_position = num_keys - num_new + first_token
    end_key = tl.minimum(first_position + TILE_TOKENS, num_keys)
    # Padding after the row's tokens sees what its last token sees, so that all weights are finite.
    positions = tl.minimum(num_keys - num_new + token, num_keys - 1)
    first_key = 0
    full_end = 0
    if WINDOW > 0:
        first_key = tl.maximum(first_position - WINDOW + 1, 0) // TILE_KEYS * TILE_KEYS
        full_end = first_key
    elif not IS_FIXED_TILE:
        # `first_position` is below 0 where a row has more new tokens than keys.
        full_end = tl.maximum(first_position + 1, 0) // TILE_KEYS * TILE_KEYS

    k_ptr = store_ptr + layer.to(tl.int64) * LAYER_STRIDE + kv_head * HEAD_DIM
    v_ptr = k_ptr + HALF_STRIDE
    IS_FP8: tl.constexpr = scales_ptr is not None
    score_scale = times_scale(SCALE_LOG2E, scales_ptr, layer, 0, kv_head, NUM_KV_HEADS)
    if sinks_ptr is not None:
        sink = sink_scores(sinks_ptr, heads, group < NUM_GROUPS)
    biggest = tl.full([TILE_QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([TILE_QUERIES], tl.float32)
    acc = tl.zeros([TILE_QUERIES, HEAD_DIM], tl.float32)
    # Masked and unmasked loops may round differently (multiply and subtract fuse if no mask is
    # between them). With fixed tiles a tile must always be in the same loop.
    if WINDOW == 0 and not IS_FIXED_TILE:
        biggest, total, acc = _attend(
            q, k_ptr, v_ptr, ids_ptr, positions, biggest, total, acc, first_key, full_end,
            score_scale, False, SOFTCAP_LOG2E, WINDOW,
            HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, TOKEN_STRIDE, TILE_KEYS,
            IS_FP8, KNOWS_E4M3, USES_PTX,
        )  # fmt: skip
    biggest, total, acc = _attend(
        q, k_ptr, v_ptr, ids_ptr, positions, biggest, total, acc, full_end, end_key,
        score_scale, True, SOFTCAP_LOG2E, WINDOW,
        HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, TOKEN_STRIDE, TILE_KEYS,
        IS_FP8, KNOWS_E4M3, USES_PTX,
    )  # fmt: skip
    if sinks_ptr is not None:
        biggest, total, acc = with_sink(sink, biggest, total, acc)
    # A token before the row's first key has seen nothing and gets zeros.
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out = times_scale(out, scales_ptr, layer, 1, kv_head, NUM_KV_HEADS)
    out_at = out_ptr + (tokens * NUM_KV_HEADS * NUM_GROUPS + heads)[:, None] * HEAD_DIM
    tl.store(out_at + dim[None, :], out.to(out_ptr.dtype.element_ty), mask=is_query)


def prefill_attention(
    q: Tensor,
    out: Tensor,
    layer: int,
    store: Tensor,
    work: PrefillWork,
    sinks: Tensor | None = None,
    scales: KvScales | None = None,
) -> None:
    """Writes the tokens of the rows of `work` to `out`, nothing for a row without keys.

    q: [T, heads, head_dim], tokens as in `rows.cu_tokens`, tokens and heads may be strided; out:
    [T, heads * head_dim] contiguous. store: [blocks, layers, 2, block_size, kv_heads, head_dim],
    with `scales` of uint8. sinks: fp32 [heads]; None compiles to a kernel that knows none.
    """
    shape, config = work.shape, work.config
    assert (sinks is not None) == shape.has_sinks, f"sinks {sinks}, has_sinks {shape.has_sinks}"
    check_store(q, store, scales)
    use_pdl = pdl_supported(q.device)
    padded_groups = triton.next_power_of_2(shape.num_groups)
    tile_queries = max(config.tile_queries, padded_groups, MIN_DOT_ROWS)
    num_tiles = work.num_tokens // (tile_queries // padded_groups) + work.num_rows
    _prefill_kernel[(shape.num_kv_heads, num_tiles)](
        q,
        store,
        work.rows.cu_tokens,
        work.rows.num_keys,
        work.rows.cu_blocks,
        work.rows.block_ids,
        out,
        sinks,
        None if scales is None else scales.scale,
        layer,
        work.first_row,
        work.num_rows,
        **layer_constants(q, layer, store, shape),
        PADDED_GROUPS=padded_groups,
        TILE_QUERIES=tile_queries,
        TILE_KEYS=config.tile_keys,
        ROW_TILE=_ROW_TILE,
        IS_FIXED_TILE=work.is_fixed_tile,
        **_decoding(q, scales),
        USE_PDL=use_pdl,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        launch_pdl=use_pdl,
    )
