"""An expert that all tokens pass, as matrices that kernels read along with those of a token's own.

y[t] += sigmoid(gate[t]) * (silu(x[t] Wg^T) * (x[t] Wu^T)) Wd^T
"""

from dataclasses import dataclass

from torch import Size, Tensor


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JoinedExperts:
    """One weight of all experts, and that of an expert that all tokens pass, as large as several.

    Its parts are experts after the others: of m / n parts, part i has units [i n, (i + 1) n).
    """

    # [experts, 2 n, hidden] or [experts, hidden, n]
    own: Tensor
    # [2 m, hidden] or [hidden, m]
    shared: Tensor

    @property
    def shape(self) -> Size:
        """Of the experts without the shared one."""
        return self.own.shape

    @property
    def num_parts(self) -> int:
        return self.shared.numel() // self.own[0].numel()
