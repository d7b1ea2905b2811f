"""The feed-forward part of a layer; a mixture of experts (moe.py) may stand in its place."""

from typing import Protocol

from torch import Tensor

from engine.layers.build_linear import build_gated, build_linear
from engine.layers.linear import Linear, LinearWeight
from engine.layers.operations import Op, plain_mlp
from kernels.ops import Ops


class FeedForward(Protocol):
    @property
    def token_sizes(self) -> tuple[int, ...]:
        """Numbers of tokens that between them run every kernel which is chosen by that number."""
        ...

    def __call__(self, x: Tensor, lane: int = 0, slots: Tensor | None = None) -> Tensor:
        """x: [T, hidden]; returns [T, hidden].

        slots: int32 [T], -1 for padding, whose output does not matter; None = there is none.
        """
        ...

    def operations(self) -> tuple[Op, ...]:
        """The same as operations on `Flow.x`, normalised; the last one leaves the output there."""
        ...


def build_mlp(
    gate_up: LinearWeight, down: LinearWeight, ops: Ops, *, is_deterministic: bool = False
) -> FeedForward:
    """down(silu(gate(x)) * up(x)) by the weights' formats; see `build_gated`, `build_linear`."""
    gated = build_gated(gate_up, ops, is_deterministic=is_deterministic)
    back = build_linear(down, is_deterministic=is_deterministic)
    if gate_up.scales is not None and down.scales is not None and down.data.device.type == "cuda":
        from engine.layers.quantized_cuda import CodedMlp, QuantizedLinear

        assert isinstance(gated, QuantizedLinear)
        assert isinstance(back, QuantizedLinear)
        if gated.takes_coded and back.takes_coded:
            return CodedMlp(gated, back)
    return GatedMlp(gated=gated, down=back)


class GatedMlp:
    """down(silu(gate(x)) * up(x))."""

    __slots__ = ("_down", "_gated")

    token_sizes: tuple[int, ...] = ()  # of linear maps, steps of every kind run all

    def __init__(self, *, gated: Linear, down: Linear) -> None:
        """gated: [T, hidden] -> silu(gate) * up, [T, intermediate]."""
        self._gated = gated
        self._down = down

    def __call__(self, x: Tensor, lane: int = 0, slots: Tensor | None = None) -> Tensor:
        """x: [T, hidden]; returns [T, hidden]; padding is computed as all else."""
        return self._down(self._gated(x, lane), lane)

    def operations(self) -> tuple[Op, ...]:
        return plain_mlp(self)
