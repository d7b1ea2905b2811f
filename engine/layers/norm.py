"""RMS normalisation as an object that owns its weight."""

from torch import Tensor

from engine.layers.context import FusedSums, Unsummed
from kernels.ops import Ops
from kernels.quant.coded_tokens import CodedTokens, InputForm


class RmsNorm:
    """Root-mean-square norm over the last axis, optionally with a residual addition before it."""

    __slots__ = ("_eps", "_ops", "_weight")

    def __init__(self, weight: Tensor, eps: float, ops: Ops) -> None:
        """weight: [hidden]."""
        self._weight = weight
        self._eps = eps
        self._ops = ops

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, hidden]; returns a new tensor."""
        return self._ops.rms_norm(x, self._weight, self._eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """x, residual: [T, hidden]; returns (norm(x + residual), x + residual), may overwrite both.

        `residual` None: the stream begins with `x`, which is not changed.
        """
        if residual is None:
            return self(x), x
        return self._ops.rms_norm_add(x, residual, self._weight, self._eps)

    def add_coded(
        self, x: Tensor, residual: Tensor | None, form: InputForm
    ) -> tuple[CodedTokens, Tensor]:
        """As `add`, with the norm coded."""
        return self._ops.rms_norm_coded(x, residual, self._weight, self._eps, form)

    def add_sum(self, x: Tensor, residual: Tensor, sums: FusedSums) -> tuple[Tensor, Tensor]:
        """As `add` of the sum of `x` over the ranks."""
        return sums.add_norm(x, residual, self._weight, self._eps)

    def add_share(self, x: Tensor, residual: Tensor, sums: FusedSums) -> tuple[Tensor, Tensor]:
        """As `add` of this rank's rows of that sum, which `residual` has, too."""
        return sums.share_add_norm(x, residual, self._weight, self._eps)

    def add_unsummed(self, x: Unsummed, residual: Tensor) -> tuple[Tensor, Tensor]:
        """As `add` of the sum of `x`."""
        return x.add_norm(residual, self._weight, self._eps)
