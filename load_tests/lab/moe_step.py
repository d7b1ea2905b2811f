"""One step of a mixture of experts on a GPU, kernel by kernel: inputs, timings, floors, checks.

Routes are uniform. Several layers with weights and routes of their own take turns, so that no
weights are in the L2 cache when they are read. A time is that of one call in a CUDA graph of many.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from engine.layers.linear import LinearWeight
from engine.layers.moe import expert_matrices
from engine.layers.moe_cuda import coded_operand
from engine.layers.rounded_experts import RoundedExperts, RoundedInt4, rounded_experts
from kernels.moe.align import Blocks, align
from kernels.moe.coded import CodedExperts
from kernels.moe.combine import combine
from kernels.moe.few import few_down, few_gate_up
from kernels.moe.form import PLAIN
from kernels.moe.grouped import (
    ExpertWeight,
    by_block,
    down_reference,
    gate_up_reference,
    grouped_down,
    grouped_gate_up,
)
from kernels.moe.reference import ExpertMatrices
from kernels.moe.router import route
from kernels.moe.routes import Routes
from kernels.moe.tiles import ALWAYS, ExpertShape, FewTile, Tile, TilePlan
from load_tests.lab.bench_quant import make_weight
from load_tests.lab.floors import Machine
from load_tests.lab.pinned_routing import uniform_experts

# What device copies and dense products reached on an H200.
H200_MEASURED = Machine(bytes_per_s=3.94e12, flops_per_s=790e12)
NUM_LAYERS = 4
# Calls in a graph: so many, or those of so long, for launching it must not count.
MAX_CALLS = 32
LONG_US = 20_000.0
NUM_ROUNDS = 8
LIBRARY = "torch "  # begins the names of the library's kernels
ROUNDED = "rounded"  # likewise of steps with rounded inputs
MAX_ERROR = 2e-2  # norm of the difference over the norm, bf16 against torch's bf16
MAX_ROUNDED_ERROR = 8e-2  # inputs rounded to e4m3, 2.5 % each, of three products
ROUNDED_TILES = (
    Tile(64, 64, 64, 8, 4, 4),
    Tile(128, 64, 64, 16, 4, 4),
    Tile(128, 64, 64, 16, 4, 6),
    Tile(128, 128, 64, 16, 8, 4),
    Tile(64, 128, 64, 8, 8, 4),
)

Call = Callable[[], object]
Timer = Callable[[Sequence[Call]], float]  # of one call on average, microseconds


def graph_us(calls: Sequence[Call]) -> float:
    """Microseconds a call, the median of replays of a graph of all of them."""

    def run_all(num_repeats: int = 1) -> None:
        for _ in range(num_repeats):
            for call in calls:
                call()

    run_all()
    (alone_us,) = _durations_us(run_all, 1)
    num_repeats = num_repeats_in_graph(len(calls), alone_us)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_all(num_repeats)
    graph.replay()
    durations_us = _durations_us(graph.replay, NUM_ROUNDS)
    return statistics.median(durations_us) / (num_repeats * len(calls))


def num_repeats_in_graph(num_calls: int, us: float) -> int:
    """How often a graph has all of `num_calls` calls, which take `us` together."""
    return max(1, math.ceil(min(MAX_CALLS / num_calls, LONG_US / us)))


def _durations_us(work: Call, num_rounds: int) -> list[float]:
    """Microseconds between the ends of successive `work`, the first from the end of all before."""
    events = [_new_event() for _ in range(num_rounds + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize()
    return [1e3 * float(a.elapsed_time(b)) for a, b in itertools.pairwise(events)]


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """A layer's weights."""

    # [experts, hidden]
    router: Tensor
    # [experts, 2 inner, hidden]
    gate_up: ExpertWeight
    # [experts, hidden, inner]
    down: ExpertWeight
    # The same for torch, where they are quantised.
    matrices: tuple[ExpertMatrices, ExpertMatrices] | None = None

    @property
    def bytes_a_number(self) -> float:
        """Of the experts' weights, without scales."""
        weight = self.down
        return (weight if isinstance(weight, Tensor) else weight.data).nbytes / math.prod(
            weight.shape
        )

    def for_torch(self) -> tuple[ExpertMatrices, ExpertMatrices]:
        if self.matrices is not None:
            return self.matrices
        assert isinstance(self.gate_up, Tensor)
        assert isinstance(self.down, Tensor)
        return self.gate_up, self.down


def random_layers(
    shape: ExpertShape,
    device: torch.device,
    num_layers: int = NUM_LAYERS,
    dtype: torch.dtype = torch.bfloat16,
) -> list[Layer]:
    """Weights whose products are about as large as their inputs."""

    def draw(*sizes: int) -> Tensor:
        # Expert by expert: the fp32 numbers of all would take more than twice the memory.
        weight = torch.empty(sizes, dtype=dtype, device=device)
        for part in weight:
            part.normal_(std=sizes[-1] ** -0.5)
        return weight

    experts, hidden, inner = shape.num_experts, shape.hidden, shape.inner
    return [
        Layer(draw(experts, hidden), draw(experts, 2 * inner, hidden), draw(experts, hidden, inner))
        for _ in range(num_layers)
    ]


def quantised_layers(
    shape: ExpertShape,
    weight_format: str,
    device: torch.device,
    num_layers: int = NUM_LAYERS,
    dtype: torch.dtype = torch.bfloat16,
) -> list[Layer]:
    """weight_format: of `bench_quant.FORMATS`, but for bf16; dtype: of the inputs."""
    experts, hidden, inner = shape.num_experts, shape.hidden, shape.inner

    def layer() -> Layer:
        router = torch.randn(experts, hidden, device=device).to(dtype)
        maps = ((experts * 2 * inner, hidden), (experts * hidden, inner))
        gate_up, down = (
            make_weight(weight_format, *sizes, device.type).by_expert(experts) for sizes in maps
        )
        # Operands may take the weights' memory.
        matrices = (_matrices(gate_up, dtype), _matrices(down, dtype))
        operands = (coded_operand(gate_up, is_gated=True), coded_operand(down, is_gated=False))
        return Layer(router * hidden**-0.5, *operands, matrices)

    return [layer() for _ in range(num_layers)]


def _matrices(weight: LinearWeight, dtype: torch.dtype) -> ExpertMatrices:
    assert weight.scales is not None
    scales = replace(weight.scales, dtype=dtype)
    return expert_matrices(replace(weight, data=weight.data.clone(), scales=scales))


class MoeStep:
    """A step of `num_tokens` tokens; each method makes one call a layer of one kernel."""

    def __init__(self, shape: ExpertShape, layers: Sequence[Layer], num_tokens: int) -> None:
        device = layers[0].router.device
        self.shape = shape
        self.num_tokens = num_tokens
        self._layers = layers
        self._x = torch.randn(num_tokens, shape.hidden, device=device).to(layers[0].router.dtype)
        self.routes = [self._draw_routes(7919 * num_tokens + i, device) for i in range(len(layers))]

    def _draw_routes(self, seed: int, device: torch.device) -> Routes:
        shape = self.shape
        ids = uniform_experts(
            self.num_tokens, shape.num_experts, shape.num_active, seed=seed, device=device
        )
        weights = torch.full(ids.shape, 1.0 / shape.num_active, device=device)
        return Routes(ids=ids, weights=weights)

    @cached_property
    def _inner(self) -> Tensor:
        num_routes = self.num_tokens * self.shape.num_active
        rows = torch.randn(num_routes, self.shape.inner, device=self._x.device)
        return rows.to(self._x.dtype)

    @cached_property
    def _outputs(self) -> Tensor:
        sizes = (self.num_tokens, self.shape.num_active, self.shape.hidden)
        return torch.randn(sizes, device=self._x.device).to(self._x.dtype)

    @cached_property
    def num_distinct(self) -> float:
        """Experts with tokens, on average over the layers."""
        counts = [len(set(routes.ids.flatten().tolist())) for routes in self.routes]
        return sum(counts) / len(counts)

    def blocks(self, block_m: int) -> list[Blocks]:
        return [align(routes.ids, self.shape.num_experts, block_m) for routes in self.routes]

    # ---- calls, one a layer ----

    def router(self) -> list[Call]:
        k = self.shape.num_active
        return [partial(route, self._x, one.router, k, normalises=True) for one in self._layers]

    def align(self, block_m: int) -> list[Call]:
        experts = self.shape.num_experts
        return [partial(align, routes.ids, experts, block_m) for routes in self.routes]

    def gate_up(self, tile: Tile) -> list[Call]:
        parts = zip(self._layers, self.routes, self.blocks(tile.block_m), strict=True)
        return [partial(grouped_gate_up, self._x, w.gate_up, r, b, tile) for w, r, b in parts]

    def down(self, tile: Tile) -> list[Call]:
        parts = zip(self._layers, self.routes, self.blocks(tile.block_m), strict=True)
        return [
            partial(grouped_down, by_block(self._inner, b), w.down, r, b, tile) for w, r, b in parts
        ]

    def rounded(self, tile: Tile | None = None) -> list[Call]:
        """All from the alignment to the sum, of inputs rounded to FP8, as the engine can do it.

        tile: of experts of four bits; None = the engine's. Only where `can_be_rounded`.
        """
        return [partial(self._rounded, index, tile) for index in range(len(self._layers))]

    @property
    def can_be_rounded(self) -> bool:
        return self._products(0, None) is not None

    @property
    def rounded_tiles(self) -> Sequence[Tile]:
        """Those to try beside the engine's."""
        return ROUNDED_TILES if isinstance(self._products(0, None), RoundedInt4) else ()

    def _products(self, index: int, tile: Tile | None) -> RoundedExperts | None:
        layer = self._layers[index]
        given = layer.gate_up, layer.down, self.shape
        products = rounded_experts(*given, PLAIN)
        if tile is None or products is None:
            return products
        assert isinstance(layer.gate_up, CodedExperts)
        assert isinstance(layer.down, CodedExperts)
        return RoundedInt4(layer.gate_up, layer.down, self.shape, ((ALWAYS, tile),))

    def _rounded(self, index: int, tile: Tile | None) -> Tensor:
        products, routes = self._products(index, tile), self.routes[index]
        assert products is not None, "no kernel rounds the inputs of these experts"
        return combine(products(self._x, routes), routes)

    def rounded_error(self, tile: Tile | None = None) -> float:
        """Of all of the first layer, against torch's of inputs as they are."""
        return _error(self._rounded(0, tile), self._twin)

    @cached_property
    def _twin(self) -> Tensor:
        """The first layer's output by torch."""
        routes, (gate_up, down) = self.routes[0], self._layers[0].for_torch()
        inner = gate_up_reference(self._x, gate_up, routes)
        return down_reference(inner, down, routes).float().sum(dim=1)

    def matrices(self) -> list[Call]:
        """Both weights of a layer, of 4 bits."""
        return [partial(self._matrices, layer) for layer in self._layers]

    def _matrices(self, layer: Layer) -> None:
        for weight in (layer.gate_up, layer.down):
            if not isinstance(weight, Tensor):
                weight.matrices(self._x.dtype)

    def total(self) -> list[Call]:
        return [partial(combine, self._outputs, routes) for routes in self.routes]

    def few_gate_up(self, tile: FewTile) -> list[Call]:
        parts = zip(self._layers, self.routes, strict=True)
        return [partial(few_gate_up, self._x, _dense(w.gate_up), r, tile) for w, r in parts]

    def few_down(self, tile: FewTile) -> list[Call]:
        parts = zip(self._layers, self.routes, strict=True)
        return [partial(few_down, self._inner, _dense(w.down), r, tile) for w, r in parts]

    def library_gate_up(self) -> list[Call]:
        """torch's grouped product alone: its input is sorted before, and no gate is applied."""
        parts = zip(self._layers, self.routes, strict=True)
        return [
            self._library(
                _dense(w.gate_up), r, self._x.repeat_interleave(self.shape.num_active, dim=0)
            )
            for w, r in parts
        ]

    def library_down(self) -> list[Call]:
        """The same for the second product, without the routes' weights."""
        parts = zip(self._layers, self.routes, strict=True)
        return [self._library(_dense(w.down), r, self._inner) for w, r in parts]

    def _library(self, weight: Tensor, routes: Routes, rows: Tensor) -> Call:
        """rows: one a route."""
        ids = routes.ids.flatten().long()
        ends = ids.bincount(minlength=self.shape.num_experts).cumsum(0).int()
        rows = rows[ids.argsort(stable=True)].contiguous()
        return lambda: torch._grouped_mm(rows, weight.transpose(1, 2), offs=ends)

    def whole(self, plan: TilePlan) -> list[Call]:
        """Router to sum, with the drawn routes in place of the router's."""
        return [partial(self._whole, index, plan) for index in range(len(self._layers))]

    def _whole(self, index: int, plan: TilePlan) -> Tensor:
        layer, routes = self._layers[index], self.routes[index]
        route(self._x, layer.router, self.shape.num_active, normalises=True)
        if self.num_tokens <= plan.few_up_to:
            inner = few_gate_up(self._x, _dense(layer.gate_up), routes, plan.few_gate_up)
            return few_down(inner, _dense(layer.down), routes, plan.few_down)
        gate_up, down = plan.tiles(self.num_tokens)
        blocks = align(routes.ids, self.shape.num_experts, gate_up.block_m)
        weight = self._read(layer.gate_up, plan)
        inner = grouped_gate_up(self._x, weight, routes, blocks, gate_up)
        del weight
        outputs = grouped_down(inner, self._read(layer.down, plan), routes, blocks, down)
        return combine(outputs, routes)

    def _read(self, weight: ExpertWeight, plan: TilePlan) -> ExpertWeight:
        """The weight as the plan's products take it."""
        if not isinstance(weight, Tensor) and self.num_tokens >= plan.matrices_from:
            return weight.matrices(self._x.dtype)
        return weight

    # ---- what is known of them ----

    def floor_us(self, kernel: str, machine: Machine) -> float:
        """The least time of a call of a method of the name, or of `sum` or `whole`."""
        shape, tokens = self.shape, self.num_tokens
        routes, hidden, inner = tokens * shape.num_active, shape.hidden, shape.inner
        distinct = self.num_distinct
        distinct *= self._layers[0].bytes_a_number / 2
        rows = {  # elements of two bytes, then multiplications
            "router": (shape.num_experts * hidden + tokens * hidden, tokens * shape.num_experts),
            "align": (4 * routes, 0),
            "gate_up": (distinct * 2 * inner * hidden + tokens * hidden, 2 * routes * inner),
            "down": (distinct * inner * hidden + routes * (inner + hidden), routes * inner),
            "sum": ((routes + tokens) * hidden, 0),
            "matrices": (3 * shape.num_experts * inner * hidden, 0),  # written
        }
        kernel = kernel.removeprefix(LIBRARY)
        if kernel == "whole" or kernel.startswith(ROUNDED):
            return sum(self.floor_us(name, machine) for name in ("router", "gate_up", "down"))
        elements, products = rows[kernel]
        return 1e6 * machine.seconds(2 * elements, 2 * products * hidden)

    def worst_error(self, plan: TilePlan) -> float:
        """Of the products of the first layer, against torch's: relative, the larger one."""
        layer, routes = self._layers[0], self.routes[0]
        gate_up, down = layer.for_torch()
        inner = gate_up_reference(self._x, gate_up, routes)
        outputs = down_reference(self._inner, down, routes)
        if self.num_tokens <= plan.few_up_to:
            product = few_gate_up(self._x, _dense(layer.gate_up), routes, plan.few_gate_up)
            ours = product, self.few_down(plan.few_down)[0]()
            twins = inner, outputs.float().sum(dim=1)
        else:
            up_tile, down_tile = plan.tiles(self.num_tokens)
            blocks = self.blocks(up_tile.block_m)[0]
            lines = by_block(inner, blocks)
            is_line = ~lines[:, 0].isnan()
            up = self._read(layer.gate_up, plan)
            product = grouped_gate_up(self._x, up, routes, blocks, up_tile)
            del up
            rows, weight = by_block(self._inner, blocks), self._read(layer.down, plan)
            ours = product[is_line], grouped_down(rows, weight, routes, blocks, down_tile)
            twins = lines[is_line], outputs
        return max(_error(a, b) for a, b in zip(ours, twins, strict=True))


def _dense(weight: ExpertWeight) -> Tensor:
    assert isinstance(weight, Tensor), "only unquantised experts are computed so"
    return weight


def _error(ours: object, twin: Tensor) -> float:
    assert isinstance(ours, Tensor), "a kernel returns a tensor"
    return float((ours.float() - twin.float()).norm() / twin.float().norm())
