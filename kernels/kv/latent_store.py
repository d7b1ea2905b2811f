"""Norm, rotation and the write to the paged store for latent attention on a GPU, in one pass.

    latent = latent / sqrt(mean(latent^2) + eps) * weight
    (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)     of the key and of the end of each query

The latent and the rotated key of a token are then written to its slot, one vector for all heads, as
they are or as e4m3 numbers of a scale of each of both (`kernels.kv.scales`). A pair are neighbours
or halves, and stays where it was. All in fp32, rounded once at the end, and once more to e4m3. A
token's first program computes what is kept, the others some heads of its query each; sums are taken
in the same order in any batch. Torch twin: `kernels.reference.TorchOps.rotate_and_store_latent`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.instructions import knows_e4m3
from kernels.kv.scales import KvScales
from kernels.ops import LatentNorm
from kernels.pdl import pdl_supported
from kernels.quant.dequantize import encode_e4m3

_PAIRS = 1024  # of queries, a program
_NUM_WARPS = 4


@triton.jit
def _kept(x, inverse_ptr, layer, part: tl.constexpr, KNOWS_E4M3: tl.constexpr):
    """What the store keeps of latents (part 0) or rotated keys (1)."""
    if inverse_ptr is not None:
        x = encode_e4m3(x.to(tl.float32) * tl.load(inverse_ptr + layer * 2 + part), KNOWS_E4M3)
    return x


@triton.jit
def _rotate(pointers, mask, cos, sin, HALF_DIM: tl.constexpr, IS_INTERLEAVED: tl.constexpr):
    """Rotates pairs in place; `pointers` are those of their first numbers. Returns both parts."""
    apart: tl.constexpr = 1 if IS_INTERLEAVED else HALF_DIM
    x1 = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(pointers + apart, mask=mask, other=0.0).to(tl.float32)
    out1 = (x1 * cos - x2 * sin).to(pointers.dtype.element_ty)
    out2 = (x2 * cos + x1 * sin).to(pointers.dtype.element_ty)
    tl.store(pointers, out1, mask=mask)
    tl.store(pointers + apart, out2, mask=mask)
    return out1, out2


@triton.jit(
    do_not_specialize=["layer"], do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"]
)
def _latent_store_kernel(
    q_ptr,  # [T, heads, QUERY_DIM], tokens strided
    kv_ptr,  # [T, RANK + ROPE_DIM], tokens strided
    weight_ptr,  # [RANK]
    cos_sin_ptr,  # [max_positions, ROPE_DIM], cos | sin
    positions_ptr,  # [T]
    slots_ptr,  # [T]
    store_ptr,  # [blocks, layers, 1, block_size, 1, RANK + ROPE_DIM]
    inverse_ptr,  # fp32 [layers, 2, 1] of a store of e4m3 numbers, or None
    layer,
    eps: tl.constexpr,
    Q_TOKEN_STRIDE: tl.constexpr,
    KV_TOKEN_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    QUERY_DIM: tl.constexpr,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    NUM_LAYERS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    KNOWS_E4M3: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    half_dim: tl.constexpr = ROPE_DIM // 2
    step: tl.constexpr = 2 if IS_INTERLEAVED else 1
    token = (tl.program_id(0)).to(tl.int64)
    pairs = tl.arange(0, HALF)
    is_pair = pairs < half_dim
    angles = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * ROPE_DIM + pairs
    cos = tl.load(angles, mask=is_pair, other=0.0)
    sin = tl.load(angles + half_dim, mask=is_pair, other=0.0)
    if tl.program_id(1) == 0:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        line = ((slot // BLOCK_SIZE) * NUM_LAYERS + layer) * BLOCK_SIZE + slot % BLOCK_SIZE
        kept = store_ptr + line * (RANK + ROPE_DIM)
        columns = tl.arange(0, PADDED_RANK)
        is_column = columns < RANK
        place = kv_ptr + token * KV_TOKEN_STRIDE
        raw = tl.load(place + columns, mask=is_column, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(raw * raw, axis=0) / RANK + eps)
        normed = (raw * scale * weight).to(kv_ptr.dtype.element_ty)
        tl.store(place + columns, normed, mask=is_column)
        normed = _kept(normed, inverse_ptr, layer, 0, KNOWS_E4M3)
        tl.store(kept + columns, normed, mask=is_column & (slot >= 0))
        first = RANK + step * pairs
        apart: tl.constexpr = 1 if IS_INTERLEAVED else half_dim
        key1, key2 = _rotate(place + first, is_pair, cos, sin, half_dim, IS_INTERLEAVED)
        key1 = _kept(key1, inverse_ptr, layer, 1, KNOWS_E4M3)
        key2 = _kept(key2, inverse_ptr, layer, 1, KNOWS_E4M3)
        tl.store(kept + first, key1, mask=is_pair & (slot >= 0))
        tl.store(kept + first + apart, key2, mask=is_pair & (slot >= 0))
    else:
        heads = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)
        mask = (heads < NUM_HEADS)[:, None] & is_pair[None, :]
        ends = heads[:, None] * QUERY_DIM + (QUERY_DIM - ROPE_DIM) + step * pairs[None, :]
        queries = q_ptr + token * Q_TOKEN_STRIDE + ends
        _rotate(queries, mask, cos[None, :], sin[None, :], half_dim, IS_INTERLEAVED)


def rotate_and_store_latent(
    q: Tensor,
    kv: Tensor,
    norm: LatentNorm,
    cos_sin: Tensor,
    positions: Tensor,
    store: Tensor,
    layer: int,
    slots: Tensor,
    scales: KvScales | None = None,
) -> tuple[Tensor, Tensor]:
    """Writes norm and rotation into q and kv, and kv to `store`; returns q, and kv [T, 1, width].

    q: [T, heads, nope + rope], heads contiguous, tokens may be strided; kv: [T, rank + rope],
    likewise; both in the store's dtype. cos_sin: fp32 [max_positions, rope]; positions, slots:
    int32 [T]; a slot of -1 is not stored. store: [blocks, layers, 1, block_size, 1, rank + rope];
    with `scales` of uint8, e4m3 numbers.
    """
    num_tokens, num_heads, query_dim = q.shape
    _, num_layers, _, block_size, _, width = store.shape
    rank, rope_dim = norm.weight.shape[0], cos_sin.shape[1]
    _check(q, kv, norm, cos_sin, positions, store, slots)
    expected = kv.dtype if scales is None else torch.uint8
    assert store.dtype == expected, f"{kv.dtype} into a store in {store.dtype}"
    assert 0 <= layer < num_layers, f"layer {layer} of {num_layers}"
    half = triton.next_power_of_2(rope_dim // 2)
    heads = min(max(_PAIRS // half, 1), triton.next_power_of_2(max(num_heads, 1)))
    use_pdl = pdl_supported(q.device)
    if num_tokens > 0:
        _latent_store_kernel[(num_tokens, 1 + triton.cdiv(num_heads, heads))](
            q,
            kv,
            norm.weight,
            cos_sin,
            positions,
            slots,
            store,
            None if scales is None else scales.inverse,
            layer,
            eps=norm.eps,
            Q_TOKEN_STRIDE=q.stride(0) if num_heads else 0,
            KV_TOKEN_STRIDE=kv.stride(0),
            NUM_HEADS=num_heads,
            QUERY_DIM=query_dim,
            RANK=rank,
            ROPE_DIM=rope_dim,
            NUM_LAYERS=num_layers,
            BLOCK_SIZE=block_size,
            IS_INTERLEAVED=norm.is_interleaved,
            HEADS=heads,
            HALF=half,
            PADDED_RANK=triton.next_power_of_2(rank),
            KNOWS_E4M3=scales is not None and knows_e4m3(q.device),
            USE_PDL=use_pdl,
            num_warps=_NUM_WARPS,
            launch_pdl=use_pdl,
        )
    return q, kv.view(num_tokens, 1, width)


def _check(
    q: Tensor,
    kv: Tensor,
    norm: LatentNorm,
    cos_sin: Tensor,
    positions: Tensor,
    store: Tensor,
    slots: Tensor,
) -> None:
    num_tokens, num_heads, query_dim = q.shape
    width = norm.weight.shape[0] + cos_sin.shape[1]
    assert kv.shape == (num_tokens, width), f"{list(kv.shape)} for {num_tokens} of {width}"
    assert store.shape[2] == store.shape[4] == 1, f"a store {list(store.shape)}"
    assert store.shape[5] == width, f"vectors of {width} in a store of {store.shape[5]}"
    assert q.dtype == kv.dtype, f"queries in {q.dtype}, latents in {kv.dtype}"
    assert kv.stride(1) == 1, f"kv with strides {kv.stride()}"
    assert num_heads == 0 or q.stride()[1:] == (query_dim, 1), f"q with strides {q.stride()}"
    assert store.is_contiguous(), f"store with strides {store.stride()}"
    assert norm.weight.is_contiguous(), f"weight with stride {norm.weight.stride()}"
    assert cos_sin.dtype == torch.float32, f"angles in {cos_sin.dtype}"
    assert cos_sin.is_contiguous(), f"angles with strides {cos_sin.stride()}"
    for indices in (positions, slots):
        assert indices.shape == (num_tokens,), f"{list(indices.shape)} for {num_tokens} tokens"
        assert indices.dtype == torch.int32, f"{indices.dtype} instead of int32"
        assert indices.is_contiguous(), f"indices with stride {indices.stride()}"
