"""A tile of latents in equal parts of its columns, its chunks, in which kernels keep it.

A chunk's product adds fewer columns one after the other than a latent has. Of a store of e4m3
numbers a chunk is two tiles, of the even and of the odd numbers (`eight_bits`).
"""

import triton
import triton.language as tl

from kernels.attention.eight_bits import add_values, dot_keys, fitting_powers, joined, widen_pairs


@triton.jit
def load_chunks(pointers, mask, WIDTH: tl.constexpr, CHUNKS: tl.constexpr):  # noqa: ANN201
    """`CHUNKS` tiles of `WIDTH` columns each from `pointers` on; these and mask: [lines, 1]."""
    chunks = tl.tuple(())
    columns = tl.arange(0, WIDTH)[None, :]
    for chunk in tl.static_range(CHUNKS):
        chunks += (tl.load(pointers + (chunk * WIDTH + columns), mask=mask, other=0),)
    return chunks


@triton.jit
def no_sums(LINES: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr):  # noqa: ANN201
    """Zeros in fp32, of every chunk."""
    sums = tl.tuple(())
    for _ in tl.static_range(CHUNKS):
        sums += (tl.zeros([LINES, WIDTH], tl.float32),)
    return sums


@triton.jit
def split_latent_queries(q_latent, q_rope, scales_ptr, layer, CHUNKS: tl.constexpr):  # noqa: ANN201
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
def add_scores(q, q_odd, k, k_odd, scores, score_scale, CHUNKS: tl.constexpr, IS_FP8: tl.constexpr):  # noqa: ANN201
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
def widen_chunks(  # noqa: ANN201
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
def add_chunks(  # noqa: ANN201
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
def store_means(
    pointers, acc, acc_odd, factor, mask, WIDTH: tl.constexpr, CHUNKS: tl.constexpr,
    IS_FP8: tl.constexpr,
) -> None:  # fmt: skip
    """The sums times `factor`, at `pointers` as `load_chunks` would read them."""
    columns = tl.arange(0, WIDTH)[None, :]
    for chunk in tl.static_range(CHUNKS):
        means = joined(acc[chunk], acc_odd[chunk], IS_FP8) * factor
        at = pointers + (chunk * WIDTH + columns)
        tl.store(at, means.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def add_part(sums, pointers, mask, shrink, weight, WIDTH: tl.constexpr, CHUNKS: tl.constexpr):  # noqa: ANN201
    """Sums of means, times `shrink`, and one part's more, times `weight`."""
    columns = tl.arange(0, WIDTH)[None, :]
    added = tl.tuple(())
    for chunk in tl.static_range(CHUNKS):
        at = pointers + (chunk * WIDTH + columns)
        means = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
        added += (sums[chunk] * shrink[:, None] + means * weight[:, None],)
    return added
