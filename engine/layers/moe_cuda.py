"""A mixture of experts on a CUDA device: which kernels of `kernels.moe` compute a step.

    route -> align -> gate and up -> down -> sum        by sorted routes
    route -> gate and up -> down and sum                up to a few tokens, unless quantised

The expert that all tokens pass is computed along where the plan says so, and of one token: of the
few beyond one each would read all of it.

Quantised experts are decoded on their way to the matrix units, those of 4 bits in steps of many
tokens to matrices first. Inputs are not rounded, unless `round_inputs` says from where on.

Imported only for weights on a CUDA device, because the kernels need Triton.
"""

import logging
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.layers.expert_order import take_orders
from engine.layers.linear import LinearWeight, WeightFormat
from engine.layers.moe import SharedOutput
from engine.layers.quantized_operands import check_dtype, check_e4m3, four_bit_codes, unreadable
from engine.layers.quantized_weight import compacted
from engine.layers.rounded_experts import RoundedExperts, rounded_experts
from kernels.device import device_properties
from kernels.moe import combine
from kernels.moe.align import (
    ROUTE_SIZES,
    Blocks,
    align,
    blocks_of_one_token,
    can_join,
    one_each,
)
from kernels.moe.coded import CodedExperts, supports_coded
from kernels.moe.combine import ExpertOutputs
from kernels.moe.few import few_down, few_gate_up
from kernels.moe.form import PLAIN, ExpertForm
from kernels.moe.grouped import ExpertWeight, grouped_down, grouped_gate_up
from kernels.moe.mxfp4 import Mxfp4Experts, mxfp4_experts, supports_mxfp4
from kernels.moe.route_rows import route_rows
from kernels.moe.router import FEW_TOKENS, route
from kernels.moe.routes import Routes, Selection
from kernels.moe.shared import JoinedExperts, SharedMatrices
from kernels.moe.tiles import (
    ALWAYS,
    ExpertShape,
    Tile,
    TilePlan,
    build_coded_plan,
    build_plan,
    fitted,
    is_tuned,
)
from kernels.quant.steps import Codes

# The router chooses among all experts at once, in registers.
MAX_EXPERTS = 1024

logger = logging.getLogger(__name__)


@cache
def _plan(
    shape: ExpertShape, device: torch.device, element_bytes: int, is_deterministic: bool
) -> TilePlan:
    """The tiling of all mixtures of a shape; logs once that a GPU has no table for it."""
    properties = device_properties(device)
    if not is_deterministic and not is_tuned(shape, properties):
        logger.info(
            "no tuned tiles for %s on %s: using general ones"
            " (python -m load_tests.lab.bench_moe --tune)",
            shape,
            properties.name,
        )
    return build_plan(
        shape, properties, element_bytes=element_bytes, is_deterministic=is_deterministic
    )


class TritonRouter:
    """See `kernels.moe.router`."""

    __slots__ = (
        "_bias",
        "_is_deterministic",
        "_normalises",
        "_num_active",
        "_selection",
        "_weight",
    )

    def __init__(
        self,
        weight: Tensor,
        *,
        num_active: int,
        normalises: bool,
        is_deterministic: bool,
        bias: Tensor | None = None,
        selection: Selection | None = None,
    ) -> None:
        """weight: [experts, hidden]; bias: [experts].

        Raises ConfigError for more experts than can be routed.
        """
        if weight.shape[0] > MAX_EXPERTS:
            raise ConfigError(
                f"model.path: {weight.shape[0]} experts a layer; at most {MAX_EXPERTS} are"
                " supported on a GPU"
            )
        self._weight = weight
        self._bias = bias
        self._num_active = num_active
        self._normalises = normalises
        self._is_deterministic = is_deterministic
        self._selection = selection

    def __call__(self, x: Tensor, slots: Tensor | None) -> Routes:
        return route(
            x,
            self._weight,
            self._num_active,
            normalises=self._normalises,
            slots=slots,
            is_deterministic=self._is_deterministic,
            bias=self._bias,
            selection=self._selection,
        )


class TritonExperts:
    """See `kernels.moe`; all launches are of sizes known on the host, so that they are captured."""

    __slots__ = (
        *("_down", "_form", "_gate_up", "_is_deterministic", "_num_active", "_one_each", "_order"),
        *("_plan", "_rounded", "_rounded_from", "_shape"),
    )

    def __init__(
        self,
        gate_up: LinearWeight,
        down: LinearWeight,
        *,
        num_active: int,
        is_deterministic: bool,
        num_experts: int | None = None,
        form: ExpertForm = PLAIN,
    ) -> None:
        """gate_up: [held, 2 I, hidden], rows of gate first; down: [held, hidden, I].

        Memory of quantised weights may be written anew. num_experts: those of all ranks, which
        share a step's tokens; None = the held. Raises ConfigError for quantised weights that no
        kernel reads.
        """
        gate_up, down, self._order = take_orders(gate_up, down)
        self._gate_up = _operand(gate_up, is_gated=True)
        self._down = _operand(down, is_gated=False)
        self._form = form
        self._num_active = num_active
        num_held, hidden, inner = self._down.shape
        self._shape = shape = ExpertShape(
            num_experts=num_experts or num_held, num_active=num_active, hidden=hidden, inner=inner
        )
        self._is_deterministic = is_deterministic
        self._rounded: RoundedExperts | None = None
        self._rounded_from = ALWAYS  # tokens
        self._plan = expert_plan(
            shape, self._gate_up, self._down, is_deterministic=is_deterministic
        )
        block_m, device = self._plan.tiles(1)[0].block_m, gate_up.data.device
        self._one_each = one_each(num_active, block_m, device)

    @property
    def token_sizes(self) -> tuple[int, ...]:
        """The ends of all ranges of tokens that kernels are chosen by, and one beyond them."""
        of_routes = (size // self._num_active for size in ROUTE_SIZES)
        ends = {*self._plan.ends, *combine.TOKEN_SIZES, FEW_TOKENS, *of_routes} - {0}
        if self._rounded is not None:
            ends |= {self._rounded_from - 1, *self._rounded.ends} - {0}
        return tuple(sorted({1, *ends, max(ends) + 1}))

    def round_inputs(self, from_tokens: int | None) -> None:
        """See `Experts`."""
        self._rounded, self._rounded_from = None, ALWAYS
        if from_tokens is None:
            return
        assert not self._is_deterministic, "in deterministic mode no inputs are rounded"
        if self._order is None:
            self._rounded = rounded_experts(self._gate_up, self._down, self._shape, self._form)
        if self._rounded is None:
            raise ConfigError(
                "execution.round_expert_inputs_from: no kernel rounds the inputs of these experts;"
                " it takes a Hopper GPU and experts in FP8 (of which config.json says that inputs"
                " are rounded) or in integers of 4 bits, without biases and activation order; leave"
                " it out"
            )
        self._rounded_from = from_tokens

    def join(self, gate_up: LinearWeight, down: LinearWeight) -> SharedMatrices | None:
        """See `Experts`: if it is as large as one or several of these, and computed alike."""
        plan = self._plan
        if max(plan.few_up_to, plan.joined_up_to) == 0 or self._form.gate is not None:
            return None
        own = self._down
        if not isinstance(own, Tensor):
            return None
        for weight in (gate_up, down):
            is_plain = weight.scales is None and weight.bias is None
            if not is_plain or weight.data.dtype != own.dtype or not weight.data.is_contiguous():
                return None
        matrices = SharedMatrices(gate_up=gate_up.data, down=down.data)
        return matrices if matrices.num_parts(own.shape[2]) > 0 else None

    def joins(self, num_tokens: int) -> bool:
        """See `Experts`."""
        if num_tokens <= self._plan.few_up_to:
            return num_tokens <= 1
        return num_tokens <= self._plan.joined_up_to and can_join(num_tokens * self._num_active)

    def __call__(self, x: Tensor, routes: Routes, shared: SharedOutput | None) -> Tensor:
        outputs = self.unsummed(x, routes, shared)
        return outputs if isinstance(outputs, Tensor) else outputs.sum()

    def unsummed(
        self, x: Tensor, routes: Routes, shared: SharedOutput | None
    ) -> Tensor | ExpertOutputs:
        """See `Experts`; of few tokens the second product is the sum already."""
        num_tokens = x.shape[0]
        if num_tokens == 0:
            return x
        if num_tokens <= self._plan.few_up_to:
            return self._compute_few(x, routes, shared)
        output, gate = (None, None) if shared is None else (shared.output, shared.gate)
        if isinstance(output, SharedMatrices):
            return self._compute_joined(x, routes, output, gate)
        if self._rounded is not None and num_tokens >= self._rounded_from:
            outputs = self._rounded(x, routes)
            return ExpertOutputs(outputs=outputs, routes=routes, shared=output, gate=gate)
        plan = self._plan
        gate_up_tile, down_tile = plan.tiles(num_tokens)
        makes_matrices = num_tokens >= plan.matrices_from
        blocks = self._blocks(routes.ids, gate_up_tile.block_m)
        weight = _matrices(self._gate_up, x.dtype) if makes_matrices else self._gate_up
        rows, each = self._in_order(x, routes)
        inner = grouped_gate_up(rows, weight, each, blocks, gate_up_tile, self._form)
        del weight  # both at once would take half as much memory again
        weight = _matrices(self._down, x.dtype) if makes_matrices else self._down
        outputs = grouped_down(inner, weight, routes, blocks, down_tile, self._form)
        return ExpertOutputs(outputs=outputs, routes=routes, shared=output, gate=gate)

    def _compute_joined(
        self, x: Tensor, routes: Routes, shared: SharedMatrices, gate: Tensor | None
    ) -> ExpertOutputs:
        gate_up, down = self._gate_up, self._down
        assert isinstance(gate_up, Tensor), "nothing joins quantised experts"
        assert isinstance(down, Tensor)
        gate_up_tile, down_tile = self._plan.tiles(len(x))
        num_parts = shared.num_parts(down.shape[2])
        blocks = align(routes.ids, len(down), gate_up_tile.block_m, num_parts)
        joined = JoinedExperts(own=gate_up, shared=shared.gate_up)
        inner = grouped_gate_up(x, joined, routes, blocks, gate_up_tile)
        joined = JoinedExperts(own=down, shared=shared.down)
        outputs = grouped_down(inner, joined, routes, blocks, down_tile)
        return ExpertOutputs(outputs=outputs, routes=routes, gate=gate)

    def _in_order(self, x: Tensor, routes: Routes) -> tuple[Tensor, Routes]:
        """A row for every route, as if it were a token's; where inputs are in order, as given."""
        if self._order is None:
            return x, routes
        each = Routes(ids=routes.ids.view(-1, 1), weights=routes.weights.view(-1, 1))
        return route_rows(x, routes.ids, self._order), each

    def _compute_few(self, x: Tensor, routes: Routes, shared: SharedOutput | None) -> Tensor:
        assert isinstance(self._gate_up, Tensor), "a plan of quantised experts has no few"
        assert isinstance(self._down, Tensor)
        plan, form = self._plan, self._form
        output, gate = (None, None) if shared is None else (shared.output, shared.gate)
        joined = output if isinstance(output, SharedMatrices) else None
        inner = few_gate_up(x, self._gate_up, routes, plan.few_gate_up, form, joined)
        return few_down(inner, self._down, routes, plan.few_down, output, gate, form)

    def _blocks(self, ids: Tensor, block_m: int) -> Blocks:
        if ids.shape == (1, self._num_active):
            return blocks_of_one_token(ids, self._one_each)
        return align(ids, self._down.shape[0], block_m)


def expert_plan(
    shape: ExpertShape,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    *,
    is_deterministic: bool = False,
) -> TilePlan:
    """The tilings of a mixture on the GPU that its weights are on."""
    if isinstance(gate_up, Tensor) and isinstance(down, Tensor):
        return _plan(shape, down.device, down.element_size(), is_deterministic)
    coded = [weight for weight in (gate_up, down) if not isinstance(weight, Tensor)]
    can_be_matrices = all(weight.can_be_matrices for weight in coded)
    fits = [_fit(weight) for weight in (gate_up, down)]
    return build_coded_plan(
        shape,
        *fits,
        is_deterministic=is_deterministic,
        is_mxfp4=isinstance(gate_up, Mxfp4Experts) and isinstance(down, Mxfp4Experts),
        matrix_device=device_properties(coded[0].data.device) if can_be_matrices else None,
    )


def _matrices(weight: ExpertWeight, dtype: torch.dtype) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.matrices(dtype)


def _fit(weight: ExpertWeight) -> Callable[[Tile], Tile]:
    """What makes a tile one for this weight: one of two may be left unquantised."""
    if isinstance(weight, Tensor):
        return partial(fitted, device=device_properties(weight.device))
    return partial(weight.fit, device=device_properties(weight.data.device))


def _operand(weight: LinearWeight, *, is_gated: bool) -> ExpertWeight:
    return weight.data if weight.scales is None else coded_operand(weight, is_gated=is_gated)


def coded_operand(weight: LinearWeight, *, is_gated: bool) -> CodedExperts | Mxfp4Experts:
    """A quantised weight as the kernels take it, in its memory, which may be written anew.

    is_gated: whether it is of gate and up. Raises ConfigError if no kernel reads the weight.
    """
    assert weight.scales is not None, f"{weight.format} without scales"
    scales = compacted(weight.scales)
    check_dtype(scales)
    assert scales.order is None, "its rows or inputs are in order by now"
    codes, values = Codes.FP8, scales.values
    if weight.format is not WeightFormat.FP8:
        codes, values = four_bit_codes(scales)
    operand = CodedExperts(
        codes=codes,
        data=weight.data.view(torch.uint8),
        scales=values,
        tile_rows=scales.rows,
        tile_columns=scales.columns,
        half=scales.half,
        factors=scales.factors,
        rounds_inputs=scales.quantizes_inputs,
    )
    if not supports_coded(operand):
        raise unreadable(weight, f"groups of {scales.columns} inputs")
    if codes is Codes.FP8:
        check_e4m3(weight.data)
    if codes is Codes.MXFP4_SMALL and supports_mxfp4(values, scales.half, scales.dtype):
        return mxfp4_experts(weight.data, values, is_gated=is_gated)
    return operand
