"""Absorbed latent attention for rows of few new tokens: each latent is read once for many heads.

    s_j = (q_latent c_j + q_rope r_j) scale log2 e,   out = sum_j 2^(s_j - m) c_j / l

with the store's vectors [c | r] of the keys j. A line is one head of one of a row's new tokens,
token after token. A program computes one item (`decode_items`) for one tile of lines; all its lines
share the loads, and values are the same loads again. Of more than 64 lines (DeepSeek-V3 has 128
heads) each tile reads the keys, all but the first from L2. latent_work.py has the split into items,
latent_parts.py how the parts of a row are joined, latent_chunks.py the products.

Rows that verify drafts have up to `max_queries` tokens, as many as `cu_tokens` says when the step
runs: query i of n sees the keys before num_keys - (n - 1 - i). A part may hold no key that a query
sees; its sum is empty and weighs nothing. Decode steps compile without all of that.

Of a store of e4m3 numbers (`kernels.kv.scales`) products are those of the numbers, exact in
float16, in which they are read (`eight_bits`). The latents' scale is part of the factor on scores
and multiplies the means; a rotated query is multiplied by how much larger its keys' scale is.

Without a split (`whole_rows`) a row's bits do not depend on its batch.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.decode_items import ITEM_FIELDS
from kernels.attention.eight_bits import SHIFT, dot_keys, widen_pairs
from kernels.attention.latent_chunks import (
    add_chunks,
    add_scores,
    load_chunks,
    no_sums,
    split_latent_queries,
    store_means,
    widen_chunks,
)
from kernels.attention.latent_parts import (
    combine_parts,
    divisor_of,
    finite_maximum,
    join_if_last,
    row_tokens,
)
from kernels.attention.latent_work import LatentWork, product_rows
from kernels.attention.triton_decode import check_store, key_offsets
from kernels.instructions import knows_e4m3
from kernels.kv.scales import KvScales
from kernels.pdl import pdl_supported


@triton.jit
def _query_places(
    lines,
    NUM_HEADS: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    QUERY_DIM: tl.constexpr,
    HAS_DRAFTS: tl.constexpr,
):
    """Where the queries of a row's lines begin, from its first token's on, [lines, 1]."""
    places = lines[:, None] * QUERY_DIM
    if HAS_DRAFTS:
        places = (lines // NUM_HEADS * TOKEN_STRIDE + lines % NUM_HEADS * QUERY_DIM)[:, None]
    return places


@triton.jit(
    do_not_specialize=["layer"],
    do_not_specialize_on_alignment=["block_ids_ptr", "cu_tokens_ptr", "num_keys_ptr"],
)
def _latent_decode_kernel(
    q_latent_ptr,  # [T, heads, RANK]
    q_ptr,  # [T, heads, QUERY_DIM], tokens strided; its end is rotated
    # [blocks, layers, 1, block_size, 1, RANK + ROPE_DIM], of words of two e4m3 numbers with scales
    store_ptr,
    scales_ptr,  # fp32 [layers, 2, 1] of a store of e4m3 numbers, or None
    cu_tokens_ptr,  # int32 [R + 1] of rows of several tokens, or None
    num_keys_ptr,  # int32 [R], with `cu_tokens_ptr`
    block_ids_ptr,  # int32 [N], of all rows
    items_ptr,  # int32 [items, ITEM_FIELDS], see `decode_items`
    # outputs
    partial_ptr,  # fp32 [items, tiles, TILE_LINES, RANK]
    log_sums_ptr,  # fp32 [items, tiles, TILE_LINES]
    row_parts_ptr,  # int32 [R, 2]
    num_arrived_ptr,  # int32 [R, tiles], zeros, or None
    out_ptr,  # [T, heads, RANK]
    # constants
    layer,
    SCALE_LOG2E: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_TILES: tl.constexpr,
    TILE_LINES: tl.constexpr,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    QUERY_DIM: tl.constexpr,
    Q_TOKEN_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    LAYER_STRIDE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,  # of a latent
    SHIFT: tl.constexpr,  # by which power of two weights are too large
    KNOWS_E4M3: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    tile = tl.program_id(0)
    item = tl.program_id(1)
    at = items_ptr + item * ITEM_FIELDS
    row = tl.load(at).to(tl.int64)
    part = tl.load(at + 1)
    num_parts = tl.load(at + 2)
    first_key = tl.load(at + 3)
    end_key = tl.load(at + 4)
    ids_ptr = block_ids_ptr + tl.load(at + 5)
    lane = tl.arange(0, TILE_KEYS)
    # An item without work has no keys.
    is_first_key = (first_key + lane < end_key) & (num_parts > 0)
    blocks = tl.load(ids_ptr + (first_key + lane) // BLOCK_SIZE, mask=is_first_key, other=0)
    HAS_DRAFTS: tl.constexpr = cu_tokens_ptr is not None
    first_token, num_queries = row_tokens(cu_tokens_ptr, row, num_parts > 0)
    if HAS_DRAFTS:
        num_keys = tl.load(num_keys_ptr + row, mask=num_parts > 0, other=0)
    if USE_PDL:
        # Items and rows are older: a kernel that waits runs between `plan_decode` and layer 0.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if num_parts == 0:
        return
    if (part == 0) & (tile == 0):
        tl.store(row_parts_ptr + row * 2, item)
        tl.store(row_parts_ptr + row * 2 + 1, num_parts)

    member = tl.arange(0, QUERY_ROWS)
    is_line = member < TILE_LINES
    lines = tile * TILE_LINES + member
    if HAS_DRAFTS:
        if tile * TILE_LINES >= num_queries * NUM_HEADS:
            return
        queries = lines // NUM_HEADS
        is_line = is_line & (queries < num_queries)
        last_seen = (num_keys - num_queries + queries)[:, None]  # the key of the query's own token
    has_line = is_line[:, None]
    rope = tl.arange(0, ROPE_DIM)
    first = first_token * (NUM_HEADS * RANK)
    chunk_dim: tl.constexpr = RANK // CHUNKS
    within = lines[:, None] * RANK
    q_latent = load_chunks(q_latent_ptr + first + within, has_line, chunk_dim, CHUNKS)
    places = _query_places(lines, NUM_HEADS, Q_TOKEN_STRIDE, QUERY_DIM, HAS_DRAFTS)
    rotated = places + (QUERY_DIM - ROPE_DIM) + rope[None, :]
    q_rope = tl.load(q_ptr + first_token * Q_TOKEN_STRIDE + rotated, mask=has_line, other=0.0)
    q_latent, q_latent_odd, q_rope, q_rope_odd, score_scale, mean_scale = split_latent_queries(
        q_latent, q_rope, scales_ptr, layer, CHUNKS
    )
    score_scale = (score_scale * SCALE_LOG2E)[:, None]
    IS_FP8: tl.constexpr = scales_ptr is not None
    chunk_words: tl.constexpr = chunk_dim // 2 if IS_FP8 else chunk_dim
    rope_words: tl.constexpr = ROPE_DIM // 2 if IS_FP8 else ROPE_DIM
    rank_words: tl.constexpr = chunk_words * CHUNKS
    of_key = rank_words + tl.arange(0, rope_words)

    keys_ptr = store_ptr + layer.to(tl.int64) * LAYER_STRIDE
    biggest = tl.full([QUERY_ROWS], float("-inf"), tl.float32)
    weights = tl.zeros([QUERY_ROWS, TILE_KEYS], tl.float32)
    acc = no_sums(QUERY_ROWS, chunk_words, CHUNKS)
    acc_odd = acc
    for start in tl.range(first_key, end_key, TILE_KEYS):
        keys = start + lane
        is_key = keys < end_key
        offsets = key_offsets(blocks, keys, BLOCK_SIZE, BLOCK_STRIDE, rank_words + rope_words)
        vectors = keys_ptr + offsets[:, None]
        words = load_chunks(vectors, is_key[:, None], chunk_words, CHUNKS)
        rotated_keys = tl.load(vectors + of_key[None, :], mask=is_key[:, None], other=0)
        next_keys = keys + TILE_KEYS
        blocks = tl.load(ids_ptr + next_keys // BLOCK_SIZE, mask=next_keys < end_key, other=0)
        keys_even, keys_odd = widen_pairs(rotated_keys, q_rope.dtype, IS_FP8, KNOWS_E4M3)
        latents, latents_odd = widen_chunks(words, q_rope.dtype, CHUNKS, IS_FP8, KNOWS_E4M3)
        scores = dot_keys(q_rope, q_rope_odd, keys_even, keys_odd, IS_FP8)
        scores = add_scores(
            q_latent, q_latent_odd, latents, latents_odd, scores, score_scale, CHUNKS, IS_FP8
        )
        is_seen = is_key[None, :]
        if HAS_DRAFTS:
            is_seen = is_seen & (keys[None, :] <= last_seen)
        scores = tl.where(is_seen, scores, float("-inf"))
        bigger = tl.maximum(biggest, tl.max(scores, 1))
        finite = finite_maximum(
            bigger, HAS_DRAFTS
        )  # each tile has a key, but maybe none that is seen
        p = tl.exp2(scores - (finite - SHIFT)[:, None])
        shrink = tl.exp2(biggest - finite)
        weights = weights * shrink[:, None] + p
        acc, acc_odd = add_chunks(p, latents, latents_odd, acc, acc_odd, shrink, CHUNKS, IS_FP8)
        biggest = bigger
    total = tl.sum(weights, 1)
    factor = (mean_scale / divisor_of(total, HAS_DRAFTS))[:, None]
    if num_parts == 1:
        whole = out_ptr + first + within
        store_means(whole, acc, acc_odd, factor, has_line, chunk_dim, CHUNKS, IS_FP8)
    else:
        slot = (item * NUM_TILES + tile).to(tl.int64) * TILE_LINES
        partial = partial_ptr + (slot + member[:, None]) * RANK
        store_means(partial, acc, acc_odd, factor, has_line, chunk_dim, CHUNKS, IS_FP8)
        log_sums = biggest - SHIFT + tl.log2(total)  # of an empty sum -inf
        tl.store(log_sums_ptr + slot + member, log_sums, mask=is_line)
        join_if_last(
            num_arrived_ptr, partial_ptr, log_sums_ptr, out_ptr + first + within,
            row * NUM_TILES + tile, slot - part.to(tl.int64) * NUM_TILES * TILE_LINES, num_parts,
            member, is_line, NUM_TILES * TILE_LINES, RANK, CHUNKS,
        )  # fmt: skip


def latent_decode(
    q_latent: Tensor,
    q: Tensor,
    out: Tensor,
    layer: int,
    store: Tensor,
    work: LatentWork,
    scales: KvScales | None = None,
) -> None:
    """Writes the means of latents that a row's tokens see, nothing for a row without keys.

    q_latent: [T, heads, rank] and out: [T, heads, rank], contiguous; q: [T, heads, nope + rope],
    tokens may be strided. store: [blocks, layers, 1, block_size, 1, rank + rope], with `scales` of
    uint8.
    """
    shape, split, config = work.shape, work.split, work.split.config
    items = split.items[None]
    tiles = split.shape.num_kv_heads
    tile_lines = split.shape.num_groups
    has_drafts = work.max_queries > 1
    cu_tokens = split.rows.cu_tokens if has_drafts else None
    assert q_latent.is_contiguous(), f"q_latent has strides {q_latent.stride()}"
    assert out.is_contiguous(), f"out has strides {out.stride()}"
    assert q.stride()[1:] == (shape.query_dim, 1), f"q has strides {q.stride()}"
    assert store.stride()[3:] == (shape.width, shape.width, 1), f"the store: {store.stride()}"
    check_store(q, store, scales)
    words = store if scales is None else store.view(torch.uint16)
    use_pdl = pdl_supported(q.device)
    _latent_decode_kernel[(tiles, len(items))](
        q_latent,
        q,
        words,
        None if scales is None else scales.scale,
        cu_tokens,
        split.rows.num_keys if has_drafts else None,
        split.rows.block_ids,
        items,
        split.partial,
        split.log_sums,
        work.row_parts,
        split.num_arrived if work.joins_last else None,
        out,
        layer,
        SCALE_LOG2E=shape.scale * math.log2(math.e),
        NUM_HEADS=shape.num_heads,
        NUM_TILES=tiles,
        TILE_LINES=tile_lines,
        RANK=shape.rank,
        ROPE_DIM=shape.rope_dim,
        QUERY_DIM=shape.query_dim,
        Q_TOKEN_STRIDE=q.stride(0),
        BLOCK_SIZE=words.shape[3],
        BLOCK_STRIDE=words.stride(0),
        LAYER_STRIDE=words.stride(1),
        TILE_KEYS=config.tile_keys,
        QUERY_ROWS=product_rows(tile_lines),
        CHUNKS=work.num_chunks,
        SHIFT=0.0 if scales is None else SHIFT,
        KNOWS_E4M3=scales is not None and knows_e4m3(q.device),
        USE_PDL=use_pdl,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        launch_pdl=use_pdl,
    )
    if work.joins_last or len(items) == len(work.row_parts):
        return  # no row has two parts, or they are joined
    combine_parts(work, cu_tokens, out, use_pdl=use_pdl)
