"""The interface of a decoder layer's operations, except linear maps and attention.

Two implementations: `kernels.reference.TorchOps` (any device, the oracle) and
`kernels.fused.TritonOps` (CUDA). A model's implementation is chosen once, when it is built.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorms:
    """Weights of QK-norm: RMSNorm of each query and key head before rotation (Qwen3)."""

    # [head_dim]
    q_weight: Tensor
    # [head_dim]
    k_weight: Tensor
    eps: float


class Ops(Protocol):
    """All formulas are stated in `kernels.reference`."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x: [T, n] (rows may be strided), weight: [n], x's dtype or fp32; returns [T, n]."""
        ...

    def rms_norm_add(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Returns (rms_norm(x + residual), x + residual); may overwrite `x` and `residual`."""
        ...

    def rotary(self, cos_sin: Tensor, positions: Tensor) -> Any:  # noqa: ANN401
        """Data that `rotate_and_store` needs for a step's positions; computed once per step.

        cos_sin: fp32 [max_positions, head_dim], cos | sin; positions: int32 [T].
        """
        ...

    def rotate_and_store(
        self,
        qkv: Tensor,
        norms: HeadNorms | None,
        rotary: Any,  # noqa: ANN401
        store: Tensor,
        layer: int,
        slots: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Applies QK-norm and rotation, writes K and V to the paged store; returns q, k, v.

        qkv: [T, heads + 2 kv_heads, head_dim], contiguous; may be overwritten, and q, k, v
        ([T, heads or kv_heads, head_dim]) may be views of it. slots: int32 [T], the token's place
        in the store, block * block_size + offset; a token with slot -1 writes no K and V.
        store: [blocks, layers, 2, block_size, kv_heads, head_dim], in qkv's dtype.
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up: [T, 2 n] = [gate | up]; returns silu(gate) * up, [T, n]."""
        ...

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up: [T, 2 n] = [gate | up]; returns gelu(gate) * up in its tanh form, [T, n]."""
        ...
