"""Normalisations as objects that own their weight."""

from typing import Protocol

import torch
from torch import Tensor

from kernels.reference import qk_norm, rms_norm, rms_norm_add


class RmsNorm:
    """Root-mean-square norm over the last axis, with or without the residual addition before."""

    __slots__ = ("_eps", "_weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self._weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """x, residual: [T, hidden]; returns (norm(x + residual), x + residual)."""
        return rms_norm_add(x, residual, self._weight, self._eps)


class HeadNorm(Protocol):
    def __call__(self, qk: Tensor) -> Tensor:
        """qk: [T, heads + kv_heads, head_dim], queries first; returns the same shape."""
        ...


class NoHeadNorm:
    """Queries and keys are rotated as projected."""

    def __call__(self, qk: Tensor) -> Tensor:
        return qk


class QkNorm:
    """Each query and key head normalised over head_dim before rotation (Qwen3)."""

    __slots__ = ("_eps", "_weight")

    def __init__(
        self, q_weight: Tensor, k_weight: Tensor, *, num_heads: int, num_kv_heads: int, eps: float
    ) -> None:
        """q_weight, k_weight: [head_dim]."""
        # [heads + kv_heads, head_dim]
        self._weight = torch.cat(
            (q_weight.expand(num_heads, -1), k_weight.expand(num_kv_heads, -1))
        )
        self._eps = eps

    def __call__(self, qk: Tensor) -> Tensor:
        return qk_norm(qk, self._weight, self._eps)
