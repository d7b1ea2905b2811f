"""What experts compute besides two products: the gate between them, and biases.

silu      inner = silu(g) * u                                       g = x Wg^T (+ bg), u likewise
clamped   inner = (u' + 1) * g' * sigmoid(alpha g')                 gpt-oss
          g' = min(g, limit), u' = max(min(u, limit), -limit)

y = weight * (inner Wd^T (+ bd))
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.moe.clamped_gate import ClampedGate
from kernels.reference import silu_mul


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertForm:
    """The gate and the biases of a layer's experts."""

    gate: ClampedGate | None = None  # None = silu
    # [experts, 2 n], gate's first; [experts, hidden]
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @property
    def gate_constants(self) -> dict[str, float]:
        """Constants of the kernels; a limit of 0 is silu."""
        if self.gate is None:
            return {"ALPHA": 0.0, "LIMIT": 0.0}
        return {"ALPHA": self.gate.alpha, "LIMIT": self.gate.limit}

    def gated(self, gate_up: Tensor) -> Tensor:
        """gate_up: [T, 2 n] = [gate | up], biases added; returns [T, n]."""
        if self.gate is None:
            return silu_mul(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        gate = gate.clamp(max=self.gate.limit)
        up = up.clamp(min=-self.gate.limit, max=self.gate.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.gate.alpha))


PLAIN = ExpertForm()


def bias_of(bias: Tensor | None, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert]
