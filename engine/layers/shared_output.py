"""The output of the expert that all tokens of a mixture pass, before it is added to the others'."""

from dataclasses import dataclass

from torch import Tensor

from kernels.moe.shared import SharedMatrices


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedOutput:
    """The output of the expert that all tokens pass; sigmoid(gate) * output is added."""

    # [T, hidden]; or the expert itself, which the kernels of the others compute along with them
    output: Tensor | SharedMatrices
    # [T, 1]; None = all of the output is added
    gate: Tensor | None

    @property
    def computed(self) -> Tensor:
        assert isinstance(self.output, Tensor), "the expert is still to be computed"
        return self.output
