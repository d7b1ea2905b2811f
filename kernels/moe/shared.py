"""An expert that all tokens pass, as matrices that kernels read along with those of a token's own.

y[t] += sigmoid(gate[t]) * (silu(x[t] Wg^T) * (x[t] Wu^T)) Wd^T
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedMatrices:
    """An expert that all tokens pass, of m inner units: a multiple of the others' n."""

    # [2 m, hidden], gate's rows first
    gate_up: Tensor
    # [hidden, m]
    down: Tensor

    def num_parts(self, inner: int) -> int:
        """How many experts of `inner` units it is as large as; 0 = no whole number."""
        num_parts, left = divmod(self.down.shape[1], inner)
        return num_parts if left == 0 else 0
