"""Attention for rows of a few new tokens, as drafts are verified: keys are read once a row.

    query i of n sees the keys before num_keys - (n - 1 - i), and of those the last `window`

The decode kernel's plan (`decode_items`): a row's keys are split into items, and its last program
combines the parts. Here a program multiplies all queries of a row that share a KV head with each
tile of keys, [queries x heads that share it] lines of one product: four queries of four heads fill
the 16 lines that a product has at least. A part of a row may hold no key that some query sees; such
a query's sum is empty and weighs nothing. A row of one token is a row like any other. Which rows a
step has, and how many tokens each, is read on the device, so one captured graph serves any mix. A
store of e4m3 numbers is read as in `triton_decode`.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.decode_items import (
    ITEM_FIELDS,
    DecodeConfig,
    DecodeWork,
    open_decode,
    plan_decode,
)
from kernels.attention.eight_bits import (
    SHIFT,
    add_values,
    dot_keys,
    joined,
    split_queries,
    widen_pairs,
)
from kernels.attention.protocol import AttentionShape, AttentionStep, RowTensors
from kernels.attention.triton import check_supported, decode_config_for, fitted_decode
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
from kernels.device import device_properties
from kernels.instructions import knows_e4m3
from kernels.kv.scales import KvScales
from kernels.pdl import pdl_supported

_COMBINED_COLUMNS = 1024  # numbers of a row's output that are combined at once
_PART_TILE = 2  # parts at once
_LINES_PER_WARP = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyWork:
    """Rows of at most `max_queries` new tokens, and the split of their keys."""

    shape: AttentionShape
    max_queries: int
    split: DecodeWork  # of heads that hold all queries


@triton.jit
def _combine_parts(
    partial_ptr,
    log_sums_ptr,
    out_ptr,
    first_slot,
    num_parts,
    num_queries,
    SLOT_STRIDE: tl.constexpr,
    NUM_LINES: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    OUT_TOKEN_STRIDE: tl.constexpr,
    PART_TILE: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
):
    """Weighted mean of a row's parts, in the order of parts; `out_ptr`: of its first token."""
    for start_column in range(0, num_queries * NUM_GROUPS * HEAD_DIM, NUM_COLUMNS):
        column = start_column + tl.arange(0, NUM_COLUMNS)
        line = column // HEAD_DIM
        is_column = line < num_queries * NUM_GROUPS
        biggest = tl.full([NUM_COLUMNS], float("-inf"), tl.float32)
        total = tl.zeros([NUM_COLUMNS], tl.float32)
        out = tl.zeros([NUM_COLUMNS], tl.float32)
        for start in range(0, num_parts, PART_TILE):
            part = start + tl.arange(0, PART_TILE)
            slot = first_slot + part[:, None] * SLOT_STRIDE
            is_part = (part < num_parts)[:, None] & is_column[None, :]
            # Load from L2: another SM wrote these, and this SM's L1 may hold stale data.
            log_sum = tl.load(
                log_sums_ptr + slot * NUM_LINES + line[None, :],
                mask=is_part,
                other=float("-inf"),
                cache_modifier=".cg",
            )
            values = tl.load(
                partial_ptr + slot.to(tl.int64) * (NUM_LINES * HEAD_DIM) + column[None, :],
                mask=is_part,
                other=0.0,
                cache_modifier=".cg",
            )
            bigger = tl.maximum(biggest, tl.max(log_sum, 0))
            finite = tl.where(bigger == float("-inf"), 0.0, bigger)
            weight = tl.exp2(log_sum - finite[None, :])
            shrink = tl.exp2(biggest - finite)
            total = total * shrink + tl.sum(weight, 0)
            out = out * shrink + tl.sum(weight * values, 0)
            biggest = bigger
        out = out / tl.where(total > 0, total, 1.0)
        token, within = line // NUM_GROUPS, column % (NUM_GROUPS * HEAD_DIM)
        at = out_ptr + token.to(tl.int64) * OUT_TOKEN_STRIDE + within
        tl.store(at, out.to(out_ptr.dtype.element_ty), mask=is_column)


@triton.jit(
    do_not_specialize=["layer"],
    do_not_specialize_on_alignment=["block_ids_ptr", "cu_tokens_ptr", "num_keys_ptr"],
)
def _verify_kernel(
    q_ptr,  # [T, heads, HEAD_DIM], tokens and heads strided
    store_ptr,  # [blocks, layers, 2, block_size, kv_heads, WIDTH]
    block_ids_ptr,  # int32 [N], of all rows
    cu_tokens_ptr,  # int32 [R + 1]
    num_keys_ptr,  # int32 [R]
    items_ptr,  # int32 [items, ITEM_FIELDS], see `decode_items`
    partial_ptr,  # fp32 [items, kv_heads, MAX_QUERIES * NUM_GROUPS, HEAD_DIM]
    log_sums_ptr,  # fp32 [items, kv_heads, MAX_QUERIES * NUM_GROUPS]
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
    MAX_QUERIES: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    PART_TILE: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,  # as of the decode kernel, and SHIFT
    SHIFT: tl.constexpr,
    KNOWS_E4M3: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    NUM_LINES: tl.constexpr = MAX_QUERIES * NUM_GROUPS
    OUT_TOKEN_STRIDE: tl.constexpr = NUM_KV_HEADS * NUM_GROUPS * HEAD_DIM
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    at = items_ptr + item * ITEM_FIELDS
    row = tl.load(at)
    part = tl.load(at + 1)
    num_parts = tl.load(at + 2)
    first_key = tl.load(at + 3)
    end_key = tl.load(at + 4)
    first_block = tl.load(at + 5)
    has_work = num_parts > 0
    first_token = tl.load(cu_tokens_ptr + row, mask=has_work, other=0)
    num_queries = tl.load(cu_tokens_ptr + row + 1, mask=has_work, other=0) - first_token
    num_keys = tl.load(num_keys_ptr + row, mask=has_work, other=0)
    ids_ptr = block_ids_ptr + first_block
    lane = tl.arange(0, TILE_KEYS)
    # Ids are loaded one tile ahead, so that no K waits for them. An item without work has no keys.
    is_first_key = (first_key + lane < end_key) & has_work
    blocks = tl.load(ids_ptr + (first_key + lane) // BLOCK_SIZE, mask=is_first_key, other=0)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if num_parts == 0:
        return

    line = tl.arange(0, QUERY_ROWS)
    dim = tl.arange(0, HEAD_DIM)
    query, group = line // NUM_GROUPS, line % NUM_GROUPS
    is_line = query < num_queries
    heads = kv_head * NUM_GROUPS + group
    tokens = (first_token + query).to(tl.int64)
    q = tl.load(
        q_ptr + tokens[:, None] * Q_TOKEN_STRIDE + heads[:, None] * Q_HEAD_STRIDE + dim[None, :],
        mask=is_line[:, None],
        other=0.0,
    )
    last_seen = num_keys - num_queries + query  # the key of the query's own token
    IS_FP8: tl.constexpr = scales_ptr is not None
    number = tl.arange(0, WIDTH)
    k_ptr = store_ptr + layer.to(tl.int64) * LAYER_STRIDE + kv_head * WIDTH
    v_ptr = k_ptr + HALF_STRIDE
    score_scale = times_scale(SCALE_LOG2E, scales_ptr, layer, 0, kv_head, NUM_KV_HEADS)
    q, q_odd, score_scale = split_queries(q, score_scale, QUERY_ROWS, WIDTH, IS_FP8)
    if sinks_ptr is not None:
        sink = sink_scores(sinks_ptr, heads, is_line & (part == 0))

    biggest = tl.full([QUERY_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([QUERY_ROWS], tl.float32)
    acc = tl.zeros([QUERY_ROWS, WIDTH], tl.float32)
    acc_odd = acc
    for start in tl.range(first_key, end_key, TILE_KEYS):
        keys = start + lane
        offsets = key_offsets(blocks, keys, BLOCK_SIZE, BLOCK_STRIDE, TOKEN_STRIDE)
        is_key = keys < end_key
        k = tl.load(k_ptr + offsets[:, None] + number[None, :], mask=is_key[:, None], other=0)
        v = tl.load(v_ptr + offsets[:, None] + number[None, :], mask=is_key[:, None], other=0)
        next_keys = keys + TILE_KEYS
        blocks = tl.load(ids_ptr + next_keys // BLOCK_SIZE, mask=next_keys < end_key, other=0)
        k, k_odd = widen_pairs(k, q.dtype, IS_FP8, KNOWS_E4M3)
        v, v_odd = widen_pairs(v, q.dtype, IS_FP8, KNOWS_E4M3)
        scores = dot_keys(q, q_odd, k, k_odd, IS_FP8) * score_scale
        if SOFTCAP_LOG2E > 0:
            scores = capped(scores, SOFTCAP_LOG2E)
        is_seen = is_key[None, :] & (keys[None, :] <= last_seen[:, None])
        if WINDOW > 0:
            is_seen = is_seen & (keys[None, :] > last_seen[:, None] - WINDOW)
        scores = tl.where(is_seen, scores, float("-inf"))
        bigger = tl.maximum(biggest, tl.max(scores, 1))
        finite = tl.where(
            bigger == float("-inf"), 0.0, bigger
        )  # a tile that the query sees none of
        p = tl.exp2(scores - (finite - SHIFT)[:, None])
        shrink = tl.exp2(biggest - finite)
        total = total * shrink + tl.sum(p, 1)
        acc, acc_odd = add_values(p, v, v_odd, acc, acc_odd, shrink, IS_FP8)
        biggest = bigger
    acc = joined(acc, acc_odd, IS_FP8)
    if sinks_ptr is not None:
        biggest, total, acc = with_sink(sink, biggest, total, acc, SHIFT)
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    out = times_scale(out, scales_ptr, layer, 1, kv_head, NUM_KV_HEADS)

    head_offset = kv_head * (NUM_GROUPS * HEAD_DIM)
    if num_parts == 1:
        within = head_offset + group[:, None] * HEAD_DIM + dim[None, :]
        out_at = out_ptr + tokens[:, None] * OUT_TOKEN_STRIDE + within
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=is_line[:, None])
    else:
        slot = item * NUM_KV_HEADS + kv_head
        partial_at = partial_ptr + slot.to(tl.int64) * (NUM_LINES * HEAD_DIM)
        within = line[:, None] * HEAD_DIM + dim[None, :]
        tl.store(partial_at + within, out, mask=is_line[:, None])
        log_sum = tl.where(total > 0, biggest - SHIFT + tl.log2(total), float("-inf"))
        tl.store(log_sums_ptr + slot * NUM_LINES + line, log_sum, mask=is_line)
        # Order: all threads' stores, the barrier, one thread's release; the last's acquire, loads.
        tl.debug_barrier()
        arrived_ptr = num_arrived_ptr + row * NUM_KV_HEADS + kv_head
        ticket = tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu")
        if ticket == num_parts - 1:
            _combine_parts(
                partial_ptr,
                log_sums_ptr,
                out_ptr + first_token.to(tl.int64) * OUT_TOKEN_STRIDE + head_offset,
                (item - part) * NUM_KV_HEADS + kv_head,
                num_parts,
                num_queries,
                NUM_KV_HEADS,
                NUM_LINES,
                NUM_GROUPS,
                HEAD_DIM,
                OUT_TOKEN_STRIDE,
                PART_TILE,
                NUM_COLUMNS,
            )
            tl.store(arrived_ptr, 0)


def open_verify(
    rows: RowTensors,
    max_keys: int,
    shape: AttentionShape,
    config: DecodeConfig,
    max_queries: int,
) -> VerifyWork:
    """Allocate memory for `rows`; `plan_decode` of its split must follow."""
    split = open_decode(rows, max_keys, _widened(shape, max_queries), config)
    return VerifyWork(shape=shape, max_queries=max_queries, split=split)


def verify_attention(
    q: Tensor,
    out: Tensor,
    layer: int,
    store: Tensor,
    work: VerifyWork,
    sinks: Tensor | None = None,
    scales: KvScales | None = None,
) -> None:
    """Writes the tokens of all rows of `work` that have keys; a row has at most `max_queries`.

    q: [T, heads, head_dim], its tokens and heads may be strided; out: [T, heads * head_dim]
    contiguous. store: [blocks, layers, 2, block_size, kv_heads, head_dim], with `scales` of uint8.
    sinks: fp32 [heads].
    """
    check_store(q, store, scales)
    words = store if scales is None else store.view(torch.uint16)
    shape, split, config = work.shape, work.split, work.split.config
    assert (sinks is not None) == shape.has_sinks, f"sinks {sinks}, has_sinks {shape.has_sinks}"
    use_pdl = pdl_supported(q.device)
    items = split.items[split.shape.layer_windows[layer]]
    query_rows = max(MIN_DOT_ROWS, triton.next_power_of_2(split.shape.num_groups))
    _verify_kernel[(shape.num_kv_heads, len(items))](
        q,
        words,
        split.rows.block_ids,
        split.rows.cu_tokens,
        split.rows.num_keys,
        items,
        split.partial,
        split.log_sums,
        split.num_arrived,
        out,
        sinks,
        None if scales is None else scales.scale,
        layer,
        **layer_constants(q, layer, words, shape),
        MAX_QUERIES=work.max_queries,
        TILE_KEYS=config.tile_keys,
        QUERY_ROWS=query_rows,
        PART_TILE=_PART_TILE,
        NUM_COLUMNS=_COMBINED_COLUMNS,
        WIDTH=words.shape[5],
        SHIFT=0.0 if scales is None else SHIFT,
        KNOWS_E4M3=scales is not None and knows_e4m3(q.device),
        USE_PDL=use_pdl,
        num_warps=max(config.num_warps, min(8, query_rows // _LINES_PER_WARP)),
        num_stages=config.num_stages,
        launch_pdl=use_pdl,
    )


class TritonVerify:
    """A `GraphAttention` for steps of rows with at most `max_queries` new tokens each."""

    reads_lengths_on_device = True

    def __init__(
        self,
        shape: AttentionShape,
        *,
        max_queries: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        config: DecodeConfig | None = None,
    ) -> None:
        """Raises ValueError for a device, dtype, head size or block size without kernel support."""
        check_supported(shape, block_size, dtype, device)
        self._shape = shape
        self._max_queries = max_queries
        self._device = device_properties(device)
        self._config = config
        self._config_for(1)  # raises now if no tile fits the device

    @property
    def max_queries(self) -> int:
        return self._max_queries

    def plan(self, step: AttentionStep) -> VerifyWork:
        assert step.max_new_tokens <= self._max_queries, f"a row of {step.max_new_tokens} tokens"
        work = self._open(step.device_rows, step.max_keys)
        plan_decode(work.split)
        return work

    def run(
        self,
        q: Tensor,
        k_new: Tensor,
        v_new: Tensor,
        layer: int,
        store: Tensor,
        metadata: VerifyWork,
        out: Tensor | None = None,
        sinks: Tensor | None = None,
        scales: KvScales | None = None,
    ) -> Tensor:
        """Reads the fresh K and V from `store`, like all others."""
        if out is None:
            out = torch.empty((len(q), q.shape[1] * q.shape[2]), dtype=q.dtype, device=q.device)
        verify_attention(q, out, layer, store, metadata, sinks, scales)
        return out

    @property
    def can_capture_prompts(self) -> bool:
        """Only rows of at most `max_queries` tokens."""
        return False

    def open_graph(
        self,
        rows: RowTensors,
        *,
        max_keys: int,
        max_tokens: int | None = None,
        max_row_tokens: int | None = None,
    ) -> VerifyWork:
        return self._open(rows, max_keys)

    def begin(self, metadata: VerifyWork) -> None:
        plan_decode(metadata.split)

    def refresh(self, metadata: VerifyWork, step: AttentionStep) -> None:
        """Does nothing on the device, which plans from the rows' own buffers."""
        assert step.max_new_tokens <= self._max_queries, f"a row of {step.max_new_tokens} tokens"

    def _open(self, rows: RowTensors, max_keys: int) -> VerifyWork:
        config = self._config or self._config_for(len(rows.num_keys))
        return open_verify(rows, max_keys, self._shape, config, self._max_queries)

    def _config_for(self, num_rows: int) -> DecodeConfig:
        wide = _widened(self._shape, self._max_queries)
        return fitted_decode(decode_config_for(num_rows), wide, self._device)


def _widened(shape: AttentionShape, max_queries: int) -> AttentionShape:
    """A shape whose single queries read what a row's queries read together."""
    more = max_queries - 1
    return replace(
        shape,
        num_heads=shape.num_heads * max_queries,
        query_scale=shape.scale,
        layer_windows=tuple(None if w is None else w + more for w in shape.layer_windows),
    )
