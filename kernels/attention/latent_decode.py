"""Absorbed latent attention for rows of few new tokens: each latent is read once for many heads.

    s_j = (q_latent c_j + q_rope r_j) scale log2 e,   out = sum_j 2^(s_j - m) c_j / l

with the store's vectors [c | r] of the keys j. Keys are split into items as in `triton_decode`,
whose plan and scratch memory are used: a tile of lines stands where that has a KV head. A line is
one head of one of a row's new tokens, token after token. A program computes one item for one tile;
all its lines share the loads, and values are the same loads again. Of more than 64 lines
(DeepSeek-V3 has 128 heads) each tile reads the keys, all but the first from L2. Parts of a row are
combined by a second kernel or, of many rows with few lines, by the last part to end, in part order:
the result depends on no order of programs.

Rows that verify drafts have up to `max_queries` tokens, as many as `cu_tokens` says when the step
runs: query i of n sees the keys before num_keys - (n - 1 - i). A part may hold no key that a query
sees; its sum is empty and weighs nothing. Decode steps compile without all of that.

Of a store of e4m3 numbers (`kernels.kv.scales`) products are those of the numbers, exact in
float16, in which they are read (`eight_bits`). The latents' scale is part of the factor on scores
and multiplies the means; a rotated query is multiplied by how much larger its keys' scale is.

Without a split (`whole_rows`) a row's bits do not depend on its batch.
"""

import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.eight_bits import (
    SHIFT,
    add_values,
    dot_keys,
    fitting_powers,
    joined,
    widen_pairs,
)
from kernels.attention.latent import LatentShape
from kernels.attention.protocol import AttentionShape, RowTensors
from kernels.attention.triton_decode import (
    MIN_DOT_ROWS,
    DecodeConfig,
    DecodeWork,
    check_store,
    key_offsets,
    open_decode,
    plan_decode,
)
from kernels.device import DeviceProperties, stages_that_fit
from kernels.instructions import knows_e4m3
from kernels.kv.scales import KvScales
from kernels.pdl import pdl_supported

_ITEM_FIELDS = tl.constexpr(8)  # of an item, see `triton_decode`
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
_JOINED_PARTS = 5  # on average, at most
_LEAST_JOINED = 4  # tiles of a part that is joined so
_NEVER = 1 << 30
_PART_TILE = 4  # parts combined at once


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
    joined_from: int = _NEVER


@triton.jit
def _load_chunks(pointers, mask, WIDTH: tl.constexpr, CHUNKS: tl.constexpr):
    """`CHUNKS` tiles of `WIDTH` columns each from `pointers` on; these and mask: [lines, 1]."""
    chunks = tl.tuple(())
    columns = tl.arange(0, WIDTH)[None, :]
    for chunk in tl.static_range(CHUNKS):
        chunks += (tl.load(pointers + (chunk * WIDTH + columns), mask=mask, other=0),)
    return chunks


@triton.jit
def _no_sums(LINES: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr):
    """Zeros in fp32, of every chunk."""
    sums = tl.tuple(())
    for _ in tl.static_range(CHUNKS):
        sums += (tl.zeros([LINES, WIDTH], tl.float32),)
    return sums


@triton.jit
def _split_queries(q_latent, q_rope, scales_ptr, layer, CHUNKS: tl.constexpr):
    """Both parts' even and odd columns, the queries' factors on scores, and that on means.

    q_latent: its chunks. Of a store without scales what is given, and ones.
    """
    lines: tl.constexpr = q_rope.shape[0]
    q_latent_odd, q_rope_odd = q_latent, q_rope
    inverse = tl.full([lines], 1.0, tl.float32)
    mean_scale = 1.0
    if scales_ptr is not None:
        mean_scale = tl.load(scales_ptr + layer * 2)
        rope = q_rope.to(tl.float32) * (tl.load(scales_ptr + layer * 2 + 1) / mean_scale)
        biggest = tl.max(tl.abs(rope), 1)
        for chunk in tl.static_range(CHUNKS):
            biggest = tl.maximum(biggest, tl.max(tl.abs(q_latent[chunk].to(tl.float32)), 1))
        factor, inverse = fitting_powers(biggest)
        q_rope, q_rope_odd = _even_and_odd(rope * factor[:, None], q_rope.dtype)
        even, odd = tl.tuple(()), tl.tuple(())
        for chunk in tl.static_range(CHUNKS):
            fitted = q_latent[chunk].to(tl.float32) * factor[:, None]
            one, other = _even_and_odd(fitted, q_latent[chunk].dtype)
            even += (one,)
            odd += (other,)
        q_latent, q_latent_odd = even, odd
    return q_latent, q_latent_odd, q_rope, q_rope_odd, inverse * mean_scale, mean_scale


@triton.jit
def _even_and_odd(fitted, dtype: tl.constexpr):
    """The columns of a tile in fp32, in float16 unless queries have 32 bits."""
    if dtype != tl.float32:
        fitted = fitted.to(tl.float16)
    return tl.split(tl.reshape(fitted, [fitted.shape[0], fitted.shape[1] // 2, 2]))


@triton.jit
def _row_tokens(cu_tokens_ptr, row, has_work):
    """The first token of a row, int64, and how many it has."""
    first_token, num_queries = row, 1
    if cu_tokens_ptr is not None:
        first_token = tl.load(cu_tokens_ptr + row, mask=has_work, other=0).to(tl.int64)
        num_queries = tl.load(cu_tokens_ptr + row + 1, mask=has_work, other=0) - first_token
    return first_token, num_queries


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


@triton.jit
def _add_scores(
    q, q_odd, k, k_odd, scores, score_scale, CHUNKS: tl.constexpr, IS_FP8: tl.constexpr
):
    """score_scale * (scores + the products of all chunks).

    Several are scaled before they are added: the compiler would make one chain of bare products.
    """
    if CHUNKS == 1:
        total = dot_keys(q[0], q_odd[0], k[0], k_odd[0], IS_FP8, scores) * score_scale
    else:
        total = scores * score_scale
        for chunk in tl.static_range(CHUNKS):
            total += dot_keys(q[chunk], q_odd[chunk], k[chunk], k_odd[chunk], IS_FP8) * score_scale
    return total


@triton.jit
def _widen_chunks(
    words, dtype: tl.constexpr, CHUNKS: tl.constexpr, IS_FP8: tl.constexpr, KNOWS_E4M3: tl.constexpr
):
    """`widen_pairs` of every chunk: the even and the odd numbers."""
    all_even, all_odd = tl.tuple(()), tl.tuple(())
    for chunk in tl.static_range(CHUNKS):
        even, odd = widen_pairs(words[chunk], dtype, IS_FP8, KNOWS_E4M3)
        all_even += (even,)
        all_odd += (odd,)
    return all_even, all_odd


@triton.jit
def _add_chunks(
    p, v, v_odd, acc, acc_odd, shrink, CHUNKS: tl.constexpr, IS_FP8: tl.constexpr
):  # fmt: skip
    """`add_values` of every chunk."""
    sums, sums_odd = tl.tuple(()), tl.tuple(())
    for chunk in tl.static_range(CHUNKS):
        even, odd = add_values(
            p, v[chunk], v_odd[chunk], acc[chunk], acc_odd[chunk], shrink, IS_FP8
        )
        sums += (even,)
        sums_odd += (odd,)
    return sums, sums_odd


@triton.jit
def _store_means(
    pointers, acc, acc_odd, factor, mask, WIDTH: tl.constexpr, CHUNKS: tl.constexpr,
    IS_FP8: tl.constexpr,
) -> None:  # fmt: skip
    """The sums times `factor`, at `pointers` as `_load_chunks` would read them."""
    columns = tl.arange(0, WIDTH)[None, :]
    for chunk in tl.static_range(CHUNKS):
        means = joined(acc[chunk], acc_odd[chunk], IS_FP8) * factor
        at = pointers + (chunk * WIDTH + columns)
        tl.store(at, means.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def _join_if_last(
    num_arrived_ptr, partial_ptr, log_sums_ptr, out_pointers, row_tile, first_slot, num_parts,
    member, is_line, SLOT_STRIDE: tl.constexpr, RANK: tl.constexpr, CHUNKS: tl.constexpr,
) -> None:  # fmt: skip
    """Where this is the last part of its row and tile to arrive, the mean of all, in their order.

    out_pointers: [lines, 1]. num_arrived_ptr: None = a kernel that follows joins them.
    """
    if num_arrived_ptr is not None:
        # Order: all threads' stores, the barrier, one thread's release; the last's acquire, loads.
        tl.debug_barrier()
        arrived_ptr = num_arrived_ptr + row_tile
        ticket = tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu")
        if ticket == num_parts - 1:
            width: tl.constexpr = RANK // CHUNKS
            biggest = tl.full([member.shape[0]], float("-inf"), tl.float32)
            total = tl.zeros([member.shape[0]], tl.float32)
            sums = _no_sums(member.shape[0], width, CHUNKS)
            for part in range(num_parts):
                lines = first_slot + part * SLOT_STRIDE + member
                # Load from L2: another SM wrote these, and this SM's L1 may hold stale data.
                log_sums = tl.load(
                    log_sums_ptr + lines, mask=is_line, other=0.0, cache_modifier=".cg"
                )
                bigger = tl.maximum(biggest, log_sums)
                weight = tl.exp2(log_sums - bigger)
                shrink = tl.exp2(biggest - bigger)
                total = total * shrink + weight
                sums = _add_part(
                    sums, partial_ptr + lines[:, None] * RANK, is_line[:, None], shrink, weight,
                    width, CHUNKS,
                )  # fmt: skip
                biggest = bigger
            factor = (1.0 / total)[:, None]
            _store_means(out_pointers, sums, sums, factor, is_line[:, None], width, CHUNKS, False)
            tl.store(arrived_ptr, 0)


@triton.jit
def _add_part(sums, pointers, mask, shrink, weight, WIDTH: tl.constexpr, CHUNKS: tl.constexpr):
    """Sums of means, times `shrink`, and one part's more, times `weight`."""
    columns = tl.arange(0, WIDTH)[None, :]
    added = tl.tuple(())
    for chunk in tl.static_range(CHUNKS):
        at = pointers + (chunk * WIDTH + columns)
        means = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
        added += (sums[chunk] * shrink[:, None] + means * weight[:, None],)
    return added


@triton.jit
def _finite(biggest, HAS_DRAFTS: tl.constexpr):
    """What is taken off scores: their maximum, where a query has seen any."""
    finite = biggest
    if HAS_DRAFTS:
        finite = tl.where(biggest == float("-inf"), 0.0, biggest)
    return finite


@triton.jit
def _divisor(total, HAS_DRAFTS: tl.constexpr):
    """A sum of weights, or 1 where a query has seen no key."""
    divisor = total
    if HAS_DRAFTS:
        divisor = tl.where(total > 0, total, 1.0)
    return divisor


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
    items_ptr,  # int32 [items, _ITEM_FIELDS], see `triton_decode`
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
    at = items_ptr + item * _ITEM_FIELDS
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
    first_token, num_queries = _row_tokens(cu_tokens_ptr, row, num_parts > 0)
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
    q_latent = _load_chunks(q_latent_ptr + first + within, has_line, chunk_dim, CHUNKS)
    places = _query_places(lines, NUM_HEADS, Q_TOKEN_STRIDE, QUERY_DIM, HAS_DRAFTS)
    rotated = places + (QUERY_DIM - ROPE_DIM) + rope[None, :]
    q_rope = tl.load(q_ptr + first_token * Q_TOKEN_STRIDE + rotated, mask=has_line, other=0.0)
    q_latent, q_latent_odd, q_rope, q_rope_odd, score_scale, mean_scale = _split_queries(
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
    acc = _no_sums(QUERY_ROWS, chunk_words, CHUNKS)
    acc_odd = acc
    for start in tl.range(first_key, end_key, TILE_KEYS):
        keys = start + lane
        is_key = keys < end_key
        offsets = key_offsets(blocks, keys, BLOCK_SIZE, BLOCK_STRIDE, rank_words + rope_words)
        vectors = keys_ptr + offsets[:, None]
        words = _load_chunks(vectors, is_key[:, None], chunk_words, CHUNKS)
        rotated_keys = tl.load(vectors + of_key[None, :], mask=is_key[:, None], other=0)
        next_keys = keys + TILE_KEYS
        blocks = tl.load(ids_ptr + next_keys // BLOCK_SIZE, mask=next_keys < end_key, other=0)
        keys_even, keys_odd = widen_pairs(rotated_keys, q_rope.dtype, IS_FP8, KNOWS_E4M3)
        latents, latents_odd = _widen_chunks(words, q_rope.dtype, CHUNKS, IS_FP8, KNOWS_E4M3)
        scores = dot_keys(q_rope, q_rope_odd, keys_even, keys_odd, IS_FP8)
        scores = _add_scores(
            q_latent, q_latent_odd, latents, latents_odd, scores, score_scale, CHUNKS, IS_FP8
        )
        is_seen = is_key[None, :]
        if HAS_DRAFTS:
            is_seen = is_seen & (keys[None, :] <= last_seen)
        scores = tl.where(is_seen, scores, float("-inf"))
        bigger = tl.maximum(biggest, tl.max(scores, 1))
        finite = _finite(bigger, HAS_DRAFTS)  # each tile has a key, but maybe none that is seen
        p = tl.exp2(scores - (finite - SHIFT)[:, None])
        shrink = tl.exp2(biggest - finite)
        weights = weights * shrink[:, None] + p
        acc, acc_odd = _add_chunks(p, latents, latents_odd, acc, acc_odd, shrink, CHUNKS, IS_FP8)
        biggest = bigger
    total = tl.sum(weights, 1)
    factor = (mean_scale / _divisor(total, HAS_DRAFTS))[:, None]
    if num_parts == 1:
        whole = out_ptr + first + within
        _store_means(whole, acc, acc_odd, factor, has_line, chunk_dim, CHUNKS, IS_FP8)
    else:
        slot = (item * NUM_TILES + tile).to(tl.int64) * TILE_LINES
        partial = partial_ptr + (slot + member[:, None]) * RANK
        _store_means(partial, acc, acc_odd, factor, has_line, chunk_dim, CHUNKS, IS_FP8)
        log_sums = biggest - SHIFT + tl.log2(total)  # of an empty sum -inf
        tl.store(log_sums_ptr + slot + member, log_sums, mask=is_line)
        _join_if_last(
            num_arrived_ptr, partial_ptr, log_sums_ptr, out_ptr + first + within,
            row * NUM_TILES + tile, slot - part.to(tl.int64) * NUM_TILES * TILE_LINES, num_parts,
            member, is_line, NUM_TILES * TILE_LINES, RANK, CHUNKS,
        )  # fmt: skip


@triton.jit
def _latent_combine_kernel(
    partial_ptr,  # fp32 [items, NUM_LINES, RANK]
    log_sums_ptr,  # fp32 [items, NUM_LINES]
    row_parts_ptr,  # int32 [R, 2], first item and number of parts
    cu_tokens_ptr,  # of rows of several tokens, or None
    out_ptr,  # [T, heads, RANK]
    NUM_HEADS: tl.constexpr,
    NUM_LINES: tl.constexpr,  # of all tiles
    RANK: tl.constexpr,
    PART_TILE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Weighted mean of a row's parts for one line, with the parts in order."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    line = tl.program_id(1)
    first_item = tl.load(row_parts_ptr + row * 2)
    num_parts = tl.load(row_parts_ptr + row * 2 + 1)
    if num_parts < 2:
        return
    HAS_DRAFTS: tl.constexpr = cu_tokens_ptr is not None
    first_token, num_queries = _row_tokens(cu_tokens_ptr, row, True)
    if HAS_DRAFTS:  # noqa: SIM102 - decided while compiling
        if line >= num_queries * NUM_HEADS:
            return
    rank = tl.arange(0, RANK)
    biggest = float("-inf")
    total = 0.0
    out = tl.zeros([RANK], tl.float32)
    for start in range(0, num_parts, PART_TILE):
        part = start + tl.arange(0, PART_TILE)
        is_part = part < num_parts
        slot = (first_item + part).to(tl.int64) * NUM_LINES + line
        log_sums = tl.load(log_sums_ptr + slot, mask=is_part, other=float("-inf"))
        values = tl.load(
            partial_ptr + slot[:, None] * RANK + rank[None, :], mask=is_part[:, None], other=0.0
        )
        bigger = tl.maximum(biggest, tl.max(log_sums, 0))
        finite = _finite(bigger, HAS_DRAFTS)
        weights = tl.exp2(log_sums - finite)
        shrink = tl.exp2(biggest - finite)
        total = total * shrink + tl.sum(weights, 0)
        out = out * shrink + tl.sum(weights[:, None] * values, 0)
        biggest = bigger
    place = out_ptr + (first_token * NUM_HEADS + line) * RANK + rank
    tl.store(place, (out / _divisor(total, HAS_DRAFTS)).to(out_ptr.dtype.element_ty))


def fitted_config(
    shape: LatentShape, device: DeviceProperties, *, whole_rows: bool = False, max_queries: int = 1
) -> LatentConfig:
    """Tiles of lines and keys that fit the device's shared memory.

    Raises ValueError if none do.
    """
    memory_bytes = device.shared_memory_per_block_bytes
    most_lines = _MAX_TILE_LINES if memory_bytes >= _LARGE_SHARED_MEMORY else _FEW_LINES
    num_tiles = _num_tiles(shape.num_heads, max_queries, most_lines)
    query_rows = _query_rows(-(-shape.num_heads * max_queries // num_tiles))
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
    joined_from = _NEVER
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
        return _query_rows(-(-num_heads * max_queries // num_tiles))
    assert num_heads % num_tiles == 0, f"{num_heads} heads in {num_tiles} tiles"
    return num_heads // num_tiles


def _query_rows(tile_lines: int) -> int:
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
        QUERY_ROWS=_query_rows(tile_lines),
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
    _latent_combine_kernel[(len(work.row_parts), work.max_queries * shape.num_heads)](
        split.partial,
        split.log_sums,
        work.row_parts,
        cu_tokens,
        out,
        NUM_HEADS=shape.num_heads,
        NUM_LINES=tiles * tile_lines,
        RANK=shape.rank,
        PART_TILE=_PART_TILE,
        USE_PDL=use_pdl,
        num_warps=4,
        launch_pdl=use_pdl,
    )
