"""Attention for rows with one new token: keys are split over programs, the last one combines.

    out = sum_j 2^(s_j - m) v_j / l,  l = sum_j 2^(s_j - m),  s_j = q k_j scale log2 e,  m = max s_j

A program computes one *item* (decode_items.py), a part of a row's keys, for one KV head; the
queries that share the head share each tile of keys.

Parts of a row write (out, m + log2 l) to scratch memory. The last program to finish combines them
in part order, so the result does not depend on which program that is. An attention sink is one more
score of a row's first part, without a value: it is loaded at the start and added at the end, so
that no key waits for it. Of a store of e4m3 numbers (`kernels.kv.scales`) products are those of the
numbers, exact in float16, in which they are read (`eight_bits`); K's scale is part of the factor on
the scores, V's is multiplied at the end. Knows no requests and no prefill.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.decode_items import ITEM_FIELDS, DecodeConfig, DecodeWork
from kernels.attention.eight_bits import (
    SHIFT,
    add_values,
    dot_keys,
    joined,
    split_queries,
    widen_pairs,
)
from kernels.attention.protocol import AttentionShape
from kernels.instructions import knows_e4m3
from kernels.kv.scales import KvScales
from kernels.pdl import pdl_supported, prefetch

# Smallest number of rows of tl.dot; fewer queries per KV head are padded to it.
MIN_DOT_ROWS = 16
_LOG2E = tl.constexpr(math.log2(math.e))
_LINE_BYTES = 128  # of the cache
# Elements of parts combined at once; more would need more registers than the main loop.
_COMBINED_ELEMENTS = 2048


def layer_constants(
    q: Tensor, layer: int, store: Tensor, shape: AttentionShape
) -> dict[str, int | float]:
    """The constants of a kernel: the model's sizes, and the strides of q and the store in elements.

    HALF_STRIDE is from a block's K to its V.
    """
    assert q.stride(2) == 1, f"the numbers of a query lie {q.stride(2)} apart"
    assert store.stride()[4:] == (store.shape[5], 1), f"strides of the store: {store.stride()}"
    return {
        "SCALE_LOG2E": shape.scale * math.log2(math.e),
        "SOFTCAP_LOG2E": (shape.softcap or 0.0) * math.log2(math.e),  # 0: none
        "WINDOW": shape.layer_windows[layer] or 0,  # 0: none
        "NUM_KV_HEADS": shape.num_kv_heads,
        "NUM_GROUPS": shape.num_groups,
        "HEAD_DIM": shape.head_dim,
        "BLOCK_SIZE": store.shape[3],
        "Q_TOKEN_STRIDE": q.stride(0),
        "Q_HEAD_STRIDE": q.stride(1),
        "BLOCK_STRIDE": store.stride(0),
        "LAYER_STRIDE": store.stride(1),
        "HALF_STRIDE": store.stride(2),
        "TOKEN_STRIDE": store.stride(3),
    }


def check_store(q: Tensor, store: Tensor, scales: KvScales | None) -> None:
    expected = q.dtype if scales is None else torch.uint8
    assert store.dtype == expected, f"queries in {q.dtype} of a store in {store.dtype}"


@triton.jit
def key_offsets(  # noqa: ANN201
    blocks, keys, BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr
):
    """Offsets of keys in their half of the store, int64: it has more than 2^31 elements."""
    return blocks.to(tl.int64) * BLOCK_STRIDE + (keys % BLOCK_SIZE) * TOKEN_STRIDE


@triton.jit
def capped(scores, SOFTCAP: tl.constexpr):  # noqa: ANN201
    """SOFTCAP * tanh(scores / SOFTCAP), whose error beside the cap is that of fp32."""
    return SOFTCAP * (2.0 * tl.sigmoid(scores * (2.0 / SOFTCAP)) - 1.0)


@triton.jit
def sink_scores(sinks_ptr, heads, is_counted):  # noqa: ANN201
    """The logits of the heads' sinks as powers of two; none where the sink is not counted."""
    return tl.load(sinks_ptr + heads, mask=is_counted, other=float("-inf")) * _LOG2E


@triton.jit
def with_sink(sink, biggest, total, acc, SHIFT: tl.constexpr = 0.0):  # noqa: ANN201
    """An online softmax with one more score, which has no value; weights are 2^SHIFT too large."""
    bigger = tl.maximum(biggest, sink)
    base = tl.where(bigger == float("-inf"), 0.0, bigger)
    shrink = tl.exp2(biggest - base)
    return bigger, total * shrink + tl.exp2(sink - base + SHIFT), acc * shrink[:, None]


@triton.jit
def times_scale(  # noqa: ANN201
    x, scales_ptr, layer, plane: tl.constexpr, kv_head, NUM_KV_HEADS: tl.constexpr
):
    """x times the scale of one head's K (plane 0) or V (1); x itself of a store without scales."""
    if scales_ptr is not None:
        x = x * tl.load(scales_ptr + (layer * 2 + plane) * NUM_KV_HEADS + kv_head)
    return x


@triton.jit
def _combine_parts(
    partial_ptr,
    log_sums_ptr,
    out_ptr,
    first_slot,
    num_parts,
    SLOT_STRIDE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PART_TILE: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
):
    """Weighted mean of a row's parts, column by column, with the parts in order."""
    column = tl.arange(0, NUM_COLUMNS)
    is_column = column < NUM_GROUPS * HEAD_DIM
    biggest = tl.full([NUM_COLUMNS], float("-inf"), tl.float32)
    total = tl.zeros([NUM_COLUMNS], tl.float32)
    out = tl.zeros([NUM_COLUMNS], tl.float32)
    for start in range(0, num_parts, PART_TILE):
        part = start + tl.arange(0, PART_TILE)
        slot = first_slot + part[:, None] * SLOT_STRIDE
        is_part = (part < num_parts)[:, None] & is_column[None, :]
        # Load from L2: another SM wrote these, and this SM's L1 may hold stale data.
        log_sum = tl.load(
            log_sums_ptr + slot * NUM_GROUPS + (column // HEAD_DIM)[None, :],
            mask=is_part,
            other=float("-inf"),
            cache_modifier=".cg",
        )
        values = tl.load(
            partial_ptr + slot.to(tl.int64) * (NUM_GROUPS * HEAD_DIM) + column[None, :],
            mask=is_part,
            other=0.0,
            cache_modifier=".cg",
        )
        log_sum = tl.where(is_column[None, :], log_sum, 0.0)
        bigger = tl.maximum(biggest, tl.max(log_sum, 0))
        weight = tl.exp2(log_sum - bigger[None, :])
        shrink = tl.exp2(biggest - bigger)
        total = total * shrink + tl.sum(weight, 0)
        out = out * shrink + tl.sum(weight * values, 0)
        biggest = bigger
    tl.store(out_ptr + column, (out / total).to(out_ptr.dtype.element_ty), mask=is_column)


@triton.jit
def _has_no_work(item, num_parts, USE_PDL: tl.constexpr):
    """Whether a program may leave: at once, so that the others need not wait for its place.

    The first waits, so that the kernel never ends before those that came before it.
    """
    if USE_PDL:  # noqa: SIM102 - a constant beside a number of the GPU's
        if (num_parts == 0) & (item == 0):
            tl.extra.cuda.gdc_wait()
    return num_parts == 0


@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["block_ids_ptr"])
def _decode_kernel(
    q_ptr,  # [T, heads, HEAD_DIM], tokens and heads strided
    store_ptr,  # [blocks, layers, 2, block_size, kv_heads, WIDTH]
    block_ids_ptr,  # int32 [N], of all rows
    items_ptr,  # int32 [items, ITEM_FIELDS], see `decode_items`
    partial_ptr,  # fp32 [items, kv_heads, NUM_GROUPS, HEAD_DIM]
    log_sums_ptr,  # fp32 [items, kv_heads, NUM_GROUPS]
    num_arrived_ptr,  # int32 [R, kv_heads], zeros before and after
    out_ptr,  # [T, heads * HEAD_DIM]
    sinks_ptr,  # fp32 [heads], or None
    scales_ptr,  # fp32 [layers, 2, kv_heads] of a store of e4m3 numbers, or None
    layer,
    SCALE_LOG2E: tl.constexpr,
    SOFTCAP_LOG2E: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    Q_TOKEN_STRIDE: tl.constexpr,
    Q_HEAD_STRIDE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    LAYER_STRIDE: tl.constexpr,
    HALF_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    PART_TILE: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,  # of a head in the store: words of two e4m3 numbers, or head_dim
    NUM_LINES: tl.constexpr,  # of the cache that a head's key takes
    SHIFT: tl.constexpr,  # by which power of two weights are too large
    KNOWS_E4M3: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    at = items_ptr + item * ITEM_FIELDS
    num_parts = tl.load(at + 2)
    if _has_no_work(item, num_parts, USE_PDL):
        return
    row = tl.load(at)
    part = tl.load(at + 1)
    first_key = tl.load(at + 3)
    end_key = tl.load(at + 4)
    first_block = tl.load(at + 5)
    first_seen = tl.load(at + 6)
    ids_ptr = block_ids_ptr + first_block
    lane = tl.arange(0, TILE_KEYS)
    # Ids are loaded one tile ahead, so that no K waits for them.
    is_first_key = first_key + lane < end_key
    blocks = tl.load(ids_ptr + (first_key + lane) // BLOCK_SIZE, mask=is_first_key, other=0)
    column = tl.arange(0, WIDTH)
    k_ptr = store_ptr + layer.to(tl.int64) * LAYER_STRIDE + kv_head * WIDTH
    v_ptr = k_ptr + HALF_STRIDE
    if USE_PDL:
        # Items and ids are older: a kernel that waits runs between `plan_decode` and layer 0. Keys
        # and values may be in writing, and are not read before the wait; a prefetch sees no values.
        offsets = key_offsets(blocks, first_key + lane, BLOCK_SIZE, BLOCK_STRIDE, TOKEN_STRIDE)
        lines = tl.arange(0, NUM_LINES) * (WIDTH // NUM_LINES)
        prefetch(k_ptr + offsets[:, None] + lines[None, :])
        prefetch(v_ptr + offsets[:, None] + lines[None, :])
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    group = tl.arange(0, QUERY_ROWS)
    dim = tl.arange(0, HEAD_DIM)
    is_group = (group < NUM_GROUPS)[:, None]
    heads = kv_head * NUM_GROUPS + group
    q = tl.load(
        q_ptr + row.to(tl.int64) * Q_TOKEN_STRIDE + heads[:, None] * Q_HEAD_STRIDE + dim[None, :],
        mask=is_group,
        other=0.0,
    )
    IS_FP8: tl.constexpr = scales_ptr is not None
    score_scale = times_scale(SCALE_LOG2E, scales_ptr, layer, 0, kv_head, NUM_KV_HEADS)
    q, q_odd, score_scale = split_queries(q, score_scale, QUERY_ROWS, WIDTH, IS_FP8)
    if sinks_ptr is not None:
        sink = sink_scores(sinks_ptr, heads, (group < NUM_GROUPS) & (part == 0))

    biggest = tl.full([QUERY_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([QUERY_ROWS], tl.float32)
    acc = tl.zeros([QUERY_ROWS, WIDTH], tl.float32)
    acc_odd = acc
    for start in tl.range(first_key, end_key, TILE_KEYS):
        keys = start + lane
        offsets = key_offsets(blocks, keys, BLOCK_SIZE, BLOCK_STRIDE, TOKEN_STRIDE)
        is_key = keys < end_key
        k = tl.load(k_ptr + offsets[:, None] + column[None, :], mask=is_key[:, None], other=0)
        v = tl.load(v_ptr + offsets[:, None] + column[None, :], mask=is_key[:, None], other=0)
        next_keys = keys + TILE_KEYS
        blocks = tl.load(ids_ptr + next_keys // BLOCK_SIZE, mask=next_keys < end_key, other=0)
        k, k_odd = widen_pairs(k, q.dtype, IS_FP8, KNOWS_E4M3)
        v, v_odd = widen_pairs(v, q.dtype, IS_FP8, KNOWS_E4M3)
        scores = dot_keys(q, q_odd, k, k_odd, IS_FP8) * score_scale
        if SOFTCAP_LOG2E > 0:
            scores = capped(scores, SOFTCAP_LOG2E)
        is_seen = is_key
        if WINDOW > 0:
            is_seen = is_seen & (keys >= first_seen)
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        # Each tile has a key that the query sees, so the maximum is finite.
        bigger = tl.maximum(biggest, tl.max(scores, 1))
        p = tl.exp2(scores - (bigger - SHIFT)[:, None])
        shrink = tl.exp2(biggest - bigger)
        total = total * shrink + tl.sum(p, 1)
        acc, acc_odd = add_values(p, v, v_odd, acc, acc_odd, shrink, IS_FP8)
        biggest = bigger
    acc = joined(acc, acc_odd, IS_FP8)
    if sinks_ptr is not None:
        biggest, total, acc = with_sink(sink, biggest, total, acc, SHIFT)
    out = times_scale(acc / total[:, None], scales_ptr, layer, 1, kv_head, NUM_KV_HEADS)

    first_out_ptr = out_ptr + (row.to(tl.int64) * NUM_KV_HEADS + kv_head) * (NUM_GROUPS * HEAD_DIM)
    within = group[:, None] * HEAD_DIM + dim[None, :]
    if num_parts == 1:
        tl.store(first_out_ptr + within, out.to(out_ptr.dtype.element_ty), mask=is_group)
    else:
        slot = item * NUM_KV_HEADS + kv_head
        partial_at = partial_ptr + slot.to(tl.int64) * (NUM_GROUPS * HEAD_DIM)
        tl.store(partial_at + within, out, mask=is_group)
        tl.store(
            log_sums_ptr + slot * NUM_GROUPS + group,
            biggest - SHIFT + tl.log2(total),
            mask=group < NUM_GROUPS,
        )
        # Order: all threads' stores, the barrier, one thread's release; the last's acquire, loads.
        tl.debug_barrier()
        arrived_ptr = num_arrived_ptr + row * NUM_KV_HEADS + kv_head
        ticket = tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu")
        if ticket == num_parts - 1:
            _combine_parts(
                partial_ptr,
                log_sums_ptr,
                first_out_ptr,
                (item - part) * NUM_KV_HEADS + kv_head,
                num_parts,
                NUM_KV_HEADS,
                NUM_GROUPS,
                HEAD_DIM,
                PART_TILE,
                NUM_COLUMNS,
            )
            tl.store(arrived_ptr, 0)


def decode_attention(
    q: Tensor,
    out: Tensor,
    layer: int,
    store: Tensor,
    work: DecodeWork,
    sinks: Tensor | None = None,
    scales: KvScales | None = None,
) -> None:
    """Row r's query is token r of `q`; writes token r of `out`, nothing for a row without keys.

    q: [T, heads, head_dim], T >= R, its tokens and heads may be strided; out: [T, heads *
    head_dim] contiguous. store: [blocks, layers, 2, block_size, kv_heads, head_dim], with `scales`
    of uint8. sinks: fp32 [heads]; None compiles to a kernel that does not know of them.
    """
    shape, config = work.shape, work.config
    assert (sinks is not None) == shape.has_sinks, f"sinks {sinks}, has_sinks {shape.has_sinks}"
    check_store(q, store, scales)
    words = store if scales is None else store.view(torch.uint16)
    use_pdl = pdl_supported(q.device)
    items = work.items[shape.layer_windows[layer]]
    num_columns = triton.next_power_of_2(shape.num_groups) * shape.head_dim
    _decode_kernel[(shape.num_kv_heads, len(items))](
        q,
        words,
        work.rows.block_ids,
        items,
        work.partial,
        work.log_sums,
        work.num_arrived,
        out,
        sinks,
        None if scales is None else scales.scale,
        layer,
        **layer_constants(q, layer, words, shape),
        TILE_KEYS=config.tile_keys,
        QUERY_ROWS=max(MIN_DOT_ROWS, num_columns // shape.head_dim),
        PART_TILE=max(1, _COMBINED_ELEMENTS // num_columns),
        NUM_COLUMNS=num_columns,
        WIDTH=words.shape[5],
        NUM_LINES=max(1, words.shape[5] * words.element_size() // _LINE_BYTES),
        SHIFT=0.0 if scales is None else SHIFT,
        KNOWS_E4M3=scales is not None and knows_e4m3(q.device),
        USE_PDL=use_pdl,
        num_warps=config.num_warps,
        num_stages=_num_stages(config, in_fp8=scales is not None),
        launch_pdl=use_pdl,
    )


def _num_stages(config: DecodeConfig, *, in_fp8: bool) -> int:
    """Three at least of e4m3 numbers, as far as the memory of `config` goes: half as large each."""
    return max(config.num_stages, min(3, 2 * config.num_stages)) if in_fp8 else config.num_stages
