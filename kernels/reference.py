"""Torch twins of the element-wise kernels: the oracle on a GPU, the implementation on a CPU.

Each states its formula. They know shapes and nothing of models, requests or devices.
"""

import torch
import torch.nn.functional as F  # noqa: N812  (the field's own spelling)
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last axis, mean taken in fp32.

    x: [..., n], weight: [n]; returns x's shape and dtype. arXiv:1910.07467.
    """
    return F.rms_norm(x, weight.shape, weight, eps)


def rms_norm_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """r = x + residual; returns (rms_norm(r), r).

    x, residual: [T, n], weight: [n].
    """
    residual = torch.add(x, residual)
    return F.rms_norm(residual, weight.shape, weight, eps), residual


def qk_norm(qk: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of every query and key head over its own head_dim, before rotation.

    qk: [T, heads, head_dim], weight: [heads, head_dim]: the query's weight for the leading heads,
    the key's for the others. One pass for both. arXiv:2302.05442, as in Qwen3.
    """
    return F.rms_norm(qk, (qk.shape[-1],), None, eps).mul_(weight)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """y = x * cos + swap_halves(x) * sin, computed in fp32, returned in x's dtype.

    x: [T, heads, head_dim], cos and sin: fp32 [T, 1, head_dim]. The first half of `sin` is already
    negated, so that (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) with pairs head_dim / 2 apart.
    arXiv:2104.09864 in the ordering of Hugging Face checkpoints.
    """
    rotated = torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
    return rotated.to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """y = silu(gate) * up, with gate_up = [gate | up].

    gate_up: [T, 2 n]; returns [T, n]. arXiv:2002.05202.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
