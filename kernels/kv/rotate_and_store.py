"""QK-norm, rotation and the write to the paged store on a GPU, in one pass over qkv.

For each head of q and k, with (x1, x2) the halves of its head_dim:

    x = x / sqrt(mean(x^2) + eps) * weight                     QK-norm, if the model has it
    (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)             arXiv:2104.09864, halves as pairs

k and v are then written to their token's slot, as they are or as e4m3 numbers of a scale (see
`kernels.kv.scales`). All in fp32, rounded once at the end, and once more to e4m3. A program
computes a few heads of one token; a head's sum is taken in the same order in any batch.
Torch twin: `kernels.reference.TorchOps.rotate_and_store`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.instructions import knows_e4m3
from kernels.kv.scales import KvScales
from kernels.ops import HeadNorms
from kernels.pdl import pdl_supported
from kernels.quant.dequantize import encode_e4m3

# Pairs per program: with 16-bit elements a thread loads 16 bytes of either half of a head.
_PAIRS = 1024
_NUM_WARPS = 4


@triton.jit(
    do_not_specialize=["layer"], do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"]
)
def _rotate_and_store_kernel(
    qkv_ptr,  # [T, heads + 2 kv_heads, head_dim]
    cos_sin_ptr,  # [max_positions, head_dim], cos | sin
    positions_ptr,  # [T]
    slots_ptr,  # [T]
    q_weight_ptr,  # [head_dim]
    k_weight_ptr,  # [head_dim]
    store_ptr,  # [blocks, layers, 2, block_size, kv_heads, head_dim]
    inverse_ptr,  # fp32 [layers, 2, kv_heads] of a store of e4m3 numbers, or None
    layer,
    eps: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_LAYERS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    KNOWS_E4M3: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    half_dim: tl.constexpr = HEAD_DIM // 2
    num_rotated: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    num_all: tl.constexpr = num_rotated + NUM_KV_HEADS
    programs_per_token: tl.constexpr = (num_all + HEADS - 1) // HEADS
    token = (tl.program_id(0) // programs_per_token).to(tl.int64)
    heads = (tl.program_id(0) % programs_per_token) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, HALF)
    is_column = columns < half_dim
    mask = (heads < num_all)[:, None] & is_column[None, :]
    if HAS_NORM:
        is_q = (heads < NUM_HEADS)[:, None]
        q_weight = tl.load(q_weight_ptr + columns, mask=is_column, other=0.0)
        k_weight = tl.load(k_weight_ptr + columns, mask=is_column, other=0.0)
        weight1 = tl.where(is_q, q_weight[None, :], k_weight[None, :]).to(tl.float32)
        q_weight = tl.load(q_weight_ptr + half_dim + columns, mask=is_column, other=0.0)
        k_weight = tl.load(k_weight_ptr + half_dim + columns, mask=is_column, other=0.0)
        weight2 = tl.where(is_q, q_weight[None, :], k_weight[None, :]).to(tl.float32)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()

    place = qkv_ptr + token * (num_all * HEAD_DIM) + heads[:, None] * HEAD_DIM + columns[None, :]
    raw1 = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    raw2 = tl.load(place + half_dim, mask=mask, other=0.0).to(tl.float32)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    angles = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * HEAD_DIM + columns
    cos = tl.load(angles, mask=is_column, other=0.0)[None, :]
    sin = tl.load(angles + half_dim, mask=is_column, other=0.0)[None, :]
    x1, x2 = raw1, raw2
    if HAS_NORM:
        mean = tl.sum(raw1 * raw1 + raw2 * raw2, axis=1) / HEAD_DIM
        scale = tl.rsqrt(mean + eps)[:, None]
        x1 = raw1 * scale * weight1
        x2 = raw2 * scale * weight2
    is_rotated = (heads < num_rotated)[:, None]
    out1 = tl.where(is_rotated, x1 * cos - x2 * sin, raw1).to(qkv_ptr.dtype.element_ty)
    out2 = tl.where(is_rotated, x2 * cos + x1 * sin, raw2).to(qkv_ptr.dtype.element_ty)
    tl.store(place, out1, mask=mask & is_rotated)
    tl.store(place + half_dim, out2, mask=mask & is_rotated)

    kv_heads = heads - NUM_HEADS  # K's, then V's
    is_v = (kv_heads >= NUM_KV_HEADS).to(tl.int64)
    half_block = (slot // BLOCK_SIZE) * (NUM_LAYERS * 2) + layer * 2 + is_v
    line = half_block * BLOCK_SIZE + slot % BLOCK_SIZE
    start = line * (NUM_KV_HEADS * HEAD_DIM) + (kv_heads - is_v * NUM_KV_HEADS) * HEAD_DIM
    kept = store_ptr + start[:, None] + columns[None, :]
    is_kept = mask & (kv_heads >= 0)[:, None] & (slot >= 0)
    if inverse_ptr is not None:
        factors = inverse_ptr + layer * (2 * NUM_KV_HEADS) + kv_heads
        is_head = (kv_heads >= 0) & (heads < num_all)
        inverse = tl.load(factors, mask=is_head, other=0.0)[:, None]
        out1 = encode_e4m3(out1.to(tl.float32) * inverse, KNOWS_E4M3)
        out2 = encode_e4m3(out2.to(tl.float32) * inverse, KNOWS_E4M3)
    tl.store(kept, out1, mask=is_kept)
    tl.store(kept + half_dim, out2, mask=is_kept)


def rotate_and_store(
    qkv: Tensor,
    norms: HeadNorms | None,
    cos_sin: Tensor,
    positions: Tensor,
    store: Tensor,
    layer: int,
    slots: Tensor,
    scales: KvScales | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotates q and k in `qkv`, in place; writes k and v to `store`; returns views q, k, v.

    qkv: [T, heads + 2 kv_heads, head_dim], contiguous, in the store's dtype; cos_sin: fp32
    [max_positions, head_dim]; positions, slots: int32 [T]; a slot of -1 writes no k and v. Without
    query heads q is empty. store: [blocks, layers, 2, block_size, kv_heads, head_dim]; with
    `scales` of uint8, e4m3 numbers.
    """
    num_tokens, num_all_heads, head_dim = qkv.shape
    _, num_layers, _, block_size, num_kv_heads, _ = store.shape
    num_heads = num_all_heads - 2 * num_kv_heads
    _check(qkv, norms, cos_sin, positions, store, layer, slots, scales)
    half = triton.next_power_of_2(head_dim // 2)
    heads = min(max(_PAIRS // half, 1), triton.next_power_of_2(num_all_heads))
    use_pdl = pdl_supported(qkv.device)
    if num_tokens > 0:
        _rotate_and_store_kernel[(num_tokens * triton.cdiv(num_all_heads, heads),)](
            qkv,
            cos_sin,
            positions,
            slots,
            qkv if norms is None else norms.q_weight,
            qkv if norms is None else norms.k_weight,
            store,
            None if scales is None else scales.inverse,
            layer,
            eps=0.0 if norms is None else norms.eps,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            NUM_LAYERS=num_layers,
            BLOCK_SIZE=block_size,
            HAS_NORM=norms is not None,
            HEADS=heads,
            HALF=half,
            KNOWS_E4M3=scales is not None and knows_e4m3(qkv.device),
            USE_PDL=use_pdl,
            num_warps=_NUM_WARPS,
            launch_pdl=use_pdl,
        )
    q, k, v = torch.split(qkv, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    return q, k, v


def _check(
    qkv: Tensor,
    norms: HeadNorms | None,
    cos_sin: Tensor,
    positions: Tensor,
    store: Tensor,
    layer: int,
    slots: Tensor,
    scales: KvScales | None,
) -> None:
    num_tokens, num_all_heads, head_dim = qkv.shape
    assert 0 <= layer < store.shape[1], f"layer {layer} of {store.shape[1]}"
    assert store.shape[5] == head_dim, f"heads of {head_dim} in a store of {store.shape[5]}"
    assert num_all_heads >= 2 * store.shape[4], f"{num_all_heads} heads, {store.shape[4]} of K"
    stored = qkv.dtype if scales is None else torch.uint8
    assert store.dtype == stored, f"{qkv.dtype} into a store in {store.dtype}"
    if scales is not None:
        num_layers, *found = scales.inverse.shape
        assert layer < num_layers, f"layer {layer}, scales of {num_layers}"
        assert found == [2, store.shape[4]], f"scales {found} for {store.shape[4]} KV heads"
    assert qkv.is_contiguous(), f"qkv with strides {qkv.stride()}"
    assert store.is_contiguous(), f"store with strides {store.stride()}"
    assert cos_sin.dtype == torch.float32, f"angles in {cos_sin.dtype}"
    assert cos_sin.is_contiguous(), f"angles with strides {cos_sin.stride()}"
    assert cos_sin.shape[1] == head_dim, f"angles of {cos_sin.shape[1]} for heads of {head_dim}"
    for indices in (positions, slots):
        assert indices.shape == (num_tokens,), f"{list(indices.shape)} for {num_tokens} tokens"
        assert indices.dtype == torch.int32, f"{indices.dtype} instead of int32"
        assert indices.is_contiguous(), f"indices with stride {indices.stride()}"
    if norms is not None:
        for weight in (norms.q_weight, norms.k_weight):
            assert weight.shape == (head_dim,), f"weight {list(weight.shape)} for {head_dim}"
            assert weight.is_contiguous(), f"weight with stride {weight.stride()}"
