"""A mixture of experts on a CUDA device: which kernels of `kernels.moe` compute a step.

    route -> align -> gate and up -> down -> sum        by sorted routes
    route -> gate and up -> down and sum                up to a few tokens

Imported only for weights on a CUDA device, because the kernels need Triton.
"""

import logging
from functools import cache

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.layers.moe import SharedOutput
from kernels.device import device_properties
from kernels.moe import combine
from kernels.moe.align import ROUTE_SIZES, align
from kernels.moe.few import few_down, few_gate_up
from kernels.moe.form import PLAIN, ExpertForm
from kernels.moe.grouped import grouped_down, grouped_gate_up
from kernels.moe.router import FEW_TOKENS, route
from kernels.moe.routes import Routes, Selection
from kernels.moe.tiles import ExpertShape, TilePlan, build_plan, is_tuned

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

    __slots__ = ("_down", "_form", "_gate_up", "_num_active", "_plan")

    def __init__(
        self,
        gate_up: Tensor,
        down: Tensor,
        *,
        num_active: int,
        is_deterministic: bool,
        form: ExpertForm = PLAIN,
    ) -> None:
        """gate_up: [experts, 2 I, hidden], rows of gate first; down: [experts, hidden, I]."""
        self._gate_up = gate_up
        self._down = down
        self._form = form
        self._num_active = num_active
        num_experts, hidden, inner = down.shape
        shape = ExpertShape(
            num_experts=num_experts, num_active=num_active, hidden=hidden, inner=inner
        )
        self._plan = _plan(shape, down.device, down.element_size(), is_deterministic)

    @property
    def token_sizes(self) -> tuple[int, ...]:
        """The ends of all ranges of tokens that kernels are chosen by, and one beyond them."""
        of_routes = (size // self._num_active for size in ROUTE_SIZES)
        ends = {*self._plan.ends, *combine.TOKEN_SIZES, FEW_TOKENS, *of_routes} - {0}
        return tuple(sorted({1, *ends, max(ends) + 1}))

    def __call__(self, x: Tensor, routes: Routes, shared: SharedOutput | None) -> Tensor:
        num_tokens = x.shape[0]
        if num_tokens == 0:
            return x
        output, gate = (None, None) if shared is None else (shared.output, shared.gate)
        plan = self._plan
        if num_tokens <= plan.few_up_to:
            inner = few_gate_up(x, self._gate_up, routes, plan.few_gate_up, self._form)
            return few_down(inner, self._down, routes, plan.few_down, output, gate, self._form)
        pair = plan.pair(num_tokens)
        blocks = align(routes.ids, self._down.shape[0], pair.gate_up.block_m)
        inner = grouped_gate_up(x, self._gate_up, routes, blocks, pair.gate_up, self._form)
        outputs = grouped_down(inner, self._down, routes, blocks, pair.down, self._form)
        return combine.combine(outputs, routes, output, gate)
