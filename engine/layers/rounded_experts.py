"""Both products of quantised experts, of inputs rounded to FP8, on Hopper's FP8 units.

    experts in FP8      groups of 128 inputs, or all of a line, share a scale: kernels.moe.rounded
    integers of 4 bits  all inputs of a line share a scale: kernels.moe.rounded_int4

Weights are as they are; outputs are some 3 to 5 % off those of inputs as they are. Imported only
for weights on a CUDA device, because the kernels need Triton.
"""

from typing import Protocol

from torch import Tensor

from kernels.moe.align import align
from kernels.moe.coded import CodedExperts
from kernels.moe.form import ExpertForm
from kernels.moe.grouped import ExpertWeight
from kernels.moe.rounded import (
    choose_tile,
    input_form,
    rounded_down,
    rounded_gate_up,
    supports_rounded,
)
from kernels.moe.rounded_int4 import (
    BY_ROUTES,
    rounded_int4_down,
    rounded_int4_gate_up,
    sum_columns,
    supports_rounded_int4,
)
from kernels.moe.rounded_lines import round_lines
from kernels.moe.routes import Routes
from kernels.moe.tiles import ALWAYS, ExpertShape, Tile, tiles_by_tokens
from kernels.quant.token_groups import code_tokens

# Routes an expert, at most -> tile.
Tiles = tuple[tuple[int, Tile], ...]


class RoundedExperts(Protocol):
    ends: tuple[int, ...]  # numbers of tokens up to which one of the tilings is used, but the last

    def __call__(self, x: Tensor, routes: Routes) -> Tensor:
        """x: [T, hidden]; returns [T, k, hidden], weighted; routes without expert get anything."""
        ...


class RoundedFp8:
    """Of experts in FP8."""

    ends: tuple[int, ...] = ()

    def __init__(self, gate_up: CodedExperts, down: CodedExperts) -> None:
        self._gate_up, self._down = gate_up, down

    def __call__(self, x: Tensor, routes: Routes) -> Tensor:
        up, down, dtype = self._gate_up, self._down, x.dtype
        blocks = align(routes.ids, down.shape[0], choose_tile(up).block_m)
        inner = rounded_gate_up(code_tokens(x, input_form(up)), up, routes, blocks, dtype)
        lines = code_tokens(inner, input_form(down), blocks=blocks)
        return rounded_down(lines, down, routes, blocks, dtype)


class RoundedInt4:
    """Of experts in integers of four bits."""

    def __init__(
        self,
        gate_up: CodedExperts,
        down: CodedExperts,
        shape: ExpertShape,
        by_routes: Tiles = BY_ROUTES,
    ) -> None:
        """shape: with the experts of all ranks, which share a step's tokens."""
        self._gate_up, self._down = gate_up, down
        self._tiles = tiles_by_tokens(shape, by_routes)
        self.ends = tuple(end for end, _ in self._tiles if end < ALWAYS)

    def __call__(self, x: Tensor, routes: Routes) -> Tensor:
        up, down, dtype = self._gate_up, self._down, x.dtype
        tile = next(tile for most, tile in self._tiles if len(x) <= most)
        blocks = align(routes.ids, down.shape[0], tile.block_m)
        lines = round_lines(x, sum_columns(up))
        inner = rounded_int4_gate_up(lines, up, routes, blocks, dtype, tile)
        lines = round_lines(inner, sum_columns(down), blocks)
        return rounded_int4_down(lines, down, routes, blocks, dtype, tile)


def rounded_experts(
    gate_up: ExpertWeight, down: ExpertWeight, shape: ExpertShape, form: ExpertForm
) -> RoundedExperts | None:
    """None = no kernel computes with these experts, or not on their GPU."""
    if not isinstance(gate_up, CodedExperts) or not isinstance(down, CodedExperts):
        return None
    if form.gate is not None or form.gate_up_bias is not None or form.down_bias is not None:
        return None
    if supports_rounded(gate_up) and supports_rounded(down):
        return RoundedFp8(gate_up, down)
    if supports_rounded_int4(gate_up) and supports_rounded_int4(down):
        return RoundedInt4(gate_up, down, shape)
    return None
