"""Joins each head's made key and the rotated key that all heads share, for kernels that take one.

    k[j, h] = [made[j, h, : nope] | vectors[j, rank :]]

`made` also has each head's value after its key: that part is read where it is. A program joins one
key for some heads; the shared part is read once for them. Torch twin: `join_keys_torch`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.latent import LatentShape
from kernels.pdl import pdl_supported

_HEADS = 16  # of a program
_NUM_WARPS = 4


@triton.jit
def _join_keys_kernel(
    made_ptr,  # [keys, heads, NOPE_DIM + VALUE_DIM]
    vectors_ptr,  # [keys, RANK + ROPE_DIM]
    # outputs
    k_ptr,  # [keys, heads, NOPE_DIM + ROPE_DIM]
    # constants
    NUM_HEADS: tl.constexpr,
    NOPE_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_NOPE: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    HEADS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    key = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    nope = tl.arange(0, PADDED_NOPE)
    rope = tl.arange(0, PADDED_ROPE)
    places = key * NUM_HEADS + heads
    is_head = (heads < NUM_HEADS)[:, None]
    is_nope = is_head & (nope < NOPE_DIM)[None, :]
    is_rope = rope < ROPE_DIM
    made = made_ptr + places[:, None] * (NOPE_DIM + VALUE_DIM) + nope[None, :]
    shared = vectors_ptr + key * (RANK + ROPE_DIM) + RANK + rope
    own = tl.load(made, mask=is_nope, other=0.0)
    rotated = tl.load(shared, mask=is_rope, other=0.0)
    k = k_ptr + places[:, None] * (NOPE_DIM + ROPE_DIM)
    tl.store(k + nope[None, :], own, mask=is_nope)
    rotated = tl.broadcast_to(rotated[None, :], (HEADS, PADDED_ROPE))
    tl.store(k + NOPE_DIM + rope[None, :], rotated, mask=is_head & is_rope[None, :])


def join_keys(made: Tensor, vectors: Tensor, shape: LatentShape) -> Tensor:
    """made: [keys, heads, nope + value]; vectors: [keys, rank + rope]; both contiguous.

    Returns [keys, heads, nope + rope].
    """
    num_keys, num_heads, made_dim = made.shape
    assert made_dim == shape.nope_dim + shape.value_dim, f"{made_dim} numbers of a head"
    assert vectors.shape == (num_keys, shape.width), f"{list(vectors.shape)} for {num_keys} keys"
    assert made.is_contiguous(), f"made keys with strides {made.stride()}"
    assert vectors.is_contiguous(), f"vectors with strides {vectors.stride()}"
    k = torch.empty((num_keys, num_heads, shape.query_dim), dtype=made.dtype, device=made.device)
    if num_keys == 0:
        return k
    use_pdl = pdl_supported(made.device)
    _join_keys_kernel[(num_keys, triton.cdiv(num_heads, _HEADS))](
        made,
        vectors,
        k,
        NUM_HEADS=num_heads,
        NOPE_DIM=shape.nope_dim,
        ROPE_DIM=shape.rope_dim,
        VALUE_DIM=shape.value_dim,
        RANK=shape.rank,
        PADDED_NOPE=triton.next_power_of_2(shape.nope_dim),
        PADDED_ROPE=triton.next_power_of_2(shape.rope_dim),
        HEADS=_HEADS,
        USE_PDL=use_pdl,
        num_warps=_NUM_WARPS,
        launch_pdl=use_pdl,
    )
    return k


def join_keys_torch(made: Tensor, vectors: Tensor, shape: LatentShape) -> Tensor:
    """The torch twin of `join_keys`."""
    rotated = vectors[:, None, shape.rank :].expand(-1, made.shape[1], -1)
    return torch.cat((made[..., : shape.nope_dim], rotated), dim=-1)
