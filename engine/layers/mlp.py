"""The feed-forward part of a layer."""

from torch import Tensor

from engine.layers.linear import Linear


class GatedMlp:
    """down(silu(gate(x)) * up(x))."""

    __slots__ = ("_down", "_gated")

    def __init__(self, *, gated: Linear, down: Linear) -> None:
        """gated: [T, hidden] -> silu(gate) * up, [T, intermediate]."""
        self._gated = gated
        self._down = down

    def __call__(self, x: Tensor, lane: int = 0) -> Tensor:
        """x: [T, hidden]; returns [T, hidden]."""
        return self._down(self._gated(x, lane), lane)
