"""The operations of a decoder layer as Triton kernels (CUDA, 16-bit or fp32 elements).

Each works in place where its contract allows. None has a size of the step as a constant, so a
model's kernels are compiled once for all steps.
"""

from dataclasses import dataclass

from torch import Tensor

from kernels.gelu_mul import gelu_mul
from kernels.kv.latent_store import rotate_and_store_latent
from kernels.kv.rotate_and_store import rotate_and_store
from kernels.kv.scales import KvScales
from kernels.ops import HeadNorms, LatentNorm
from kernels.quant.coded_norm import rms_norm_coded
from kernels.quant.coded_tokens import CodedTokens, InputForm
from kernels.rms_norm import rms_norm, rms_norm_add
from kernels.silu_mul import silu_mul


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryPositions:
    """The table of angles and the positions of a step's tokens in it; the kernel reads both."""

    # fp32 [max_positions, head_dim]
    cos_sin: Tensor
    # int32 [T]
    positions: Tensor


class TritonOps:
    """See `kernels.ops.Ops`."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x: [T, n], weight: [n]; returns [T, n]."""
        return rms_norm(x, weight, eps)

    def rms_norm_add(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """x, residual: [T, n], both overwritten, weight: [n]; returns them."""
        return rms_norm_add(x, residual, weight, eps)

    def rms_norm_coded(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, form: InputForm
    ) -> tuple[CodedTokens, Tensor]:
        """x: [T, n], residual: [T, n], overwritten; weight: [n]; returns (norm in e4m3, sum)."""
        coded = rms_norm_coded(x, residual, weight, eps, form)
        return coded, x if residual is None else residual

    def rotary(self, cos_sin: Tensor, positions: Tensor) -> RotaryPositions:
        """cos_sin: fp32 [max_positions, head_dim]; positions: int32 [T]."""
        return RotaryPositions(cos_sin=cos_sin, positions=positions)

    def rotate_and_store(
        self,
        qkv: Tensor,
        norms: HeadNorms | None,
        rotary: RotaryPositions,
        store: Tensor,
        layer: int,
        slots: Tensor,
        scales: KvScales | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """qkv: [T, heads + 2 kv_heads, head_dim], overwritten; returns its views q, k, v."""
        return rotate_and_store(
            qkv, norms, rotary.cos_sin, rotary.positions, store, layer, slots, scales
        )

    def rotate_and_store_latent(
        self,
        q: Tensor,
        kv: Tensor,
        norm: LatentNorm,
        rotary: RotaryPositions,
        store: Tensor,
        layer: int,
        slots: Tensor,
        scales: KvScales | None = None,
    ) -> tuple[Tensor, Tensor]:
        """q: [T, heads, nope + rope], kv: [T, rank + rope]; both overwritten and returned."""
        return rotate_and_store_latent(
            q, kv, norm, rotary.cos_sin, rotary.positions, store, layer, slots, scales
        )

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up: [T, 2 n]; returns [T, n]."""
        return silu_mul(gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up: [T, 2 n]; returns [T, n]."""
        return gelu_mul(gate_up)
