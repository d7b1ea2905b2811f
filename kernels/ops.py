"""The interface of a decoder layer's operations, except linear maps and attention.

Two implementations: `kernels.reference.TorchOps` (any device, the oracle) and
`kernels.fused.TritonOps` (CUDA). A model's implementation is chosen once, when it is built.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from kernels.kv.scales import KvScales
from kernels.quant.coded_tokens import CodedTokens, InputForm


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorms:
    """Weights of QK-norm: RMSNorm of each query and key head before rotation (Qwen3)."""

    # [head_dim]
    q_weight: Tensor
    # [head_dim]
    k_weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentNorm:
    """Of latent attention: the norm of the latent, and how its rotated part is paired."""

    # [rank]
    weight: Tensor
    eps: float
    is_interleaved: bool  # neighbours are pairs; else halves


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

    def rms_norm_coded(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, form: InputForm
    ) -> tuple[CodedTokens, Tensor]:
        """As `rms_norm_add` with the norm coded; without `residual`, the sum is `x`."""
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
        scales: KvScales | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Applies QK-norm and rotation, writes K and V to the paged store; returns q, k, v.

        qkv: [T, heads + 2 kv_heads, head_dim], contiguous; may be overwritten, and q, k, v
        ([T, heads or kv_heads, head_dim]) may be views of it. slots: int32 [T], the token's place
        in the store, block * block_size + offset; a token with slot -1 writes no K and V.
        store: [blocks, layers, 2, block_size, kv_heads, head_dim], in qkv's dtype; with `scales` of
        uint8, e4m3 numbers (`kernels.kv.scales`) of the k and v that are returned.
        """
        ...

    def rotate_and_store_latent(
        self,
        q: Tensor,
        kv: Tensor,
        norm: LatentNorm,
        rotary: Any,  # noqa: ANN401
        store: Tensor,
        layer: int,
        slots: Tensor,
        scales: KvScales | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Normalises the latent, rotates q and the key, writes both to the store; returns q, kv.

        q: [T, heads, nope + rope], of which the end is rotated; kv: [T, rank + rope]. Both may have
        a larger token stride and may be overwritten; pairs stay where they are. Returns q as given
        and kv as [T, 1, rank + rope]. store: [blocks, layers, 1, block_size, 1, rank + rope]; with
        `scales` of uint8, e4m3 numbers of what is returned.
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up: [T, 2 n] = [gate | up]; returns silu(gate) * up, [T, n]."""
        ...

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up: [T, 2 n] = [gate | up]; returns gelu(gate) * up in its tanh form, [T, n]."""
        ...
