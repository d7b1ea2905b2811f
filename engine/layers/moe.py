"""The feed-forward part of a layer as a mixture of experts.

    router -> experts of each token -> weighted sum (+ the expert that all tokens share)

Nothing is exchanged between ranks here: with a part of every expert on each rank, or with some of
the experts, the outputs of the ranks are to be added, as those of any feed-forward part.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.layers.context import Unsummed
from engine.layers.linear import Linear, LinearWeight
from engine.layers.mlp import FeedForward
from engine.layers.operations import Flow, Lane, Op, wait
from engine.layers.quantized_weight import dequantize
from engine.layers.shared_output import SharedOutput
from engine.layers.token_exchange import (
    add_parts,
    dispatch,
    gather_tokens,
    own_rows,
    send_back,
    spread_rows,
)
from kernels.moe import reference
from kernels.moe.form import PLAIN, ExpertForm
from kernels.moe.routes import Routes, Selection
from kernels.moe.shared import SharedMatrices


class Router(Protocol):
    def __call__(self, x: Tensor, slots: Tensor | None) -> Routes:
        """x: [T, hidden]. slots: int32 [T], -1 for padding, which gets no expert; None = none."""
        ...


class SharedExpert:
    """An expert that all tokens pass, with a gate of its own or without."""

    __slots__ = ("_gate", "_joined", "_joins", "_mlp")

    def __init__(
        self,
        *,
        mlp: FeedForward,
        gate: Linear | None,
        joined: SharedMatrices | None = None,
        joins: Callable[[int], bool] | None = None,
    ) -> None:
        """gate: hidden -> 1. joined, joins: see `Experts`."""
        assert joined is None or joins is not None, "somebody knows which steps it is joined in"
        self._mlp = mlp
        self._gate = gate
        self._joined = joined
        self._joins = joins

    def __call__(self, x: Tensor, lane: int) -> SharedOutput:
        gate = None if self._gate is None else self._gate(x, lane)
        if self._joined is not None and self._joins is not None and self._joins(len(x)):
            return SharedOutput(output=self._joined, gate=gate)
        return SharedOutput(output=self._mlp(x, lane), gate=gate)


class Experts(Protocol):
    @property
    def token_sizes(self) -> tuple[int, ...]:
        """See `FeedForward.token_sizes`."""
        ...

    def join(self, gate_up: LinearWeight, down: LinearWeight) -> SharedMatrices | None:
        """The expert that all tokens pass, if kernels of some steps compute it along with a
        token's others; None = it is computed by itself.
        """
        ...

    def joins(self, num_tokens: int) -> bool:
        """Whether steps of so many tokens compute along what `join` returned, if it did."""
        ...

    def round_inputs(self, from_tokens: int | None) -> None:
        """Round the inputs of steps of so many tokens or more to FP8; None = never.

        Before steps are captured. Raises ConfigError if no kernel rounds them.
        """
        ...

    def __call__(self, x: Tensor, routes: Routes, shared: SharedOutput | None) -> Tensor:
        """x: [T, hidden]; returns [T, hidden], zeros for a token without expert."""
        ...

    def unsummed(self, x: Tensor, routes: Routes, shared: SharedOutput | None) -> Tensor | Unsummed:
        """As a call, which may leave the sum over a token's experts to who reads it."""
        ...


class HeldExperts:
    """Those experts of a layer that this rank holds; for others a token gets nothing here."""

    __slots__ = ("_experts", "_held", "_held_routes")

    def __init__(
        self, experts: Experts, held: range, held_routes: Callable[[Routes, range], Routes]
    ) -> None:
        """experts: the held ones alone; held_routes: as in `kernels.moe.reference`."""
        self._experts = experts
        self._held = held
        self._held_routes = held_routes

    @property
    def token_sizes(self) -> tuple[int, ...]:
        return self._experts.token_sizes

    def join(self, gate_up: LinearWeight, down: LinearWeight) -> SharedMatrices | None:
        """Never: a token may have none of these experts."""
        return None

    def joins(self, num_tokens: int) -> bool:
        return False

    def round_inputs(self, from_tokens: int | None) -> None:
        self._experts.round_inputs(from_tokens)

    @property
    def own(self) -> tuple[Experts, int]:
        """The held ones, as routes among them alone see them, and how many they are."""
        return self._experts, len(self._held)

    def __call__(self, x: Tensor, routes: Routes, shared: SharedOutput | None) -> Tensor:
        """routes: to the experts of all ranks."""
        return self._experts(x, self._held_routes(routes, self._held), shared)

    def unsummed(self, x: Tensor, routes: Routes, shared: SharedOutput | None) -> Tensor | Unsummed:
        return self._experts.unsummed(x, self._held_routes(routes, self._held), shared)


_Steps = tuple[Callable[[Flow], None], Callable[[Flow], None]]


class Mixture:
    """y = sum of the weighted outputs of a token's experts."""

    __slots__ = (
        "_experts",
        "_gathers_tokens",
        "_is_replicated",
        "_shared",
        "has_dp_attention",
        "on_gathered",
        "router",
    )

    def __init__(
        self,
        *,
        router: Router,
        experts: Experts,
        shared: SharedExpert | None,
        is_replicated: bool = False,
        gathers_tokens: bool = False,
        has_dp_attention: bool = False,
    ) -> None:
        """`router` may be replaced later: benchmarks choose their own routes.

        is_replicated: every rank has all of the shared expert, and computes its own tokens.
        gathers_tokens: tokens that are shared out go to all ranks, not to those of their experts.
        has_dp_attention: every rank has rows of its own, for which `operations` exchange.
        """
        self.has_dp_attention = has_dp_attention
        # Gets the routes of all ranks' rows, wherever they meet; None = nobody counts them.
        self.on_gathered: Callable[[Routes], None] | None = None
        self._gathers_tokens = gathers_tokens
        self.router = router
        self._experts = experts
        self._shared = shared
        self._is_replicated = is_replicated

    @property
    def token_sizes(self) -> tuple[int, ...]:
        return self._experts.token_sizes

    def round_inputs(self, from_tokens: int | None) -> None:
        """See `Experts`; not the inputs of the shared expert, which is as dense layers are."""
        self._experts.round_inputs(from_tokens)

    def __call__(self, x: Tensor, lane: int = 0, slots: Tensor | None = None) -> Tensor:
        """x: [T, hidden]; slots: as of the router; returns [T, hidden]."""
        routes = self.router(x, slots)
        shared = None if self._shared is None else self._shared(x, lane)
        return self._experts(x, routes, shared)

    def operations(self) -> tuple[Op, ...]:
        normed, select, shared = ("comm_prepare_mlp_b",), "select_experts", "shared_experts"
        if self.has_dp_attention:
            return self._between_ranks(
                Op(select, self._select, needs=normed),
                (self._gather_rows, self._compute_gathered),
                (self._scatter_rows, self._add_shared),
            )
        if self._shared is None:
            return (
                Op(select, self._select, needs=normed),
                Op("experts", self._compute, needs=(select,)),
            )
        share = _share_own if self._is_replicated else _share
        return (
            Op(select, self._select, needs=normed),
            Op(shared, partial(share, self._shared), lane=Lane.SECOND_STREAM, needs=normed),
            Op("experts", self._compute, waits=(Lane.SECOND_STREAM,), needs=(select, shared)),
        )

    def exchange_operations(self) -> tuple[Op, ...]:
        """`operations` on own rows, which travel to their experts; with those that follow them."""
        select = Op("select_experts", self._select_own, needs=("comm_prepare_mlp_b",))
        if self._gathers_tokens:
            there, back = (self._gather, self._compute_gathered), (self._scatter, self._add_shared)
        else:
            there = self._dispatch, self._compute_dispatched
            back = self._send_back, self._add_parts
        return self._between_ranks(select, there, back)

    def _between_ranks(self, select: Op, there: _Steps, back: _Steps) -> tuple[Op, ...]:
        """there: dispatch and computation; back: combination and what ends it."""
        (dispatch_a, compute), (combine_a, combine_b) = there, back
        waits: tuple[Lane, ...] = (Lane.SEND,)
        shared: tuple[Op, ...] = ()
        if self._shared is not None:
            waits = (Lane.SEND, Lane.SECOND_STREAM)
            share = partial(_share, self._shared)
            shared = (Op("shared_experts", share, lane=Lane.SECOND_STREAM, needs=select.needs),)
        return (
            select,
            Op("dispatch_a", dispatch_a, lane=Lane.SEND, needs=(select.name,)),
            *shared,
            Op("dispatch_b", wait, waits=(Lane.SEND,), needs=("dispatch_a",)),
            Op("experts", compute, needs=("dispatch_b",)),
            Op("combine_a", combine_a, lane=Lane.SEND, needs=("experts",)),
            Op(
                "combine_b",
                combine_b,
                waits=waits,
                needs=("combine_a", *(op.name for op in shared)),
            ),
        )

    def _select_own(self, flow: Flow) -> None:
        flow.leave(routes=self.router(flow.x, flow.own_slots))

    def _dispatch(self, flow: Flow) -> None:
        routes, flow.routes = flow.routes, None
        assert routes is not None
        _, num_held = self._own
        flow.leave(dispatched=dispatch(flow.x, routes, num_held, flow.ctx.comm))

    def _compute_dispatched(self, flow: Flow) -> None:
        experts, _ = self._own
        sent = flow.dispatched
        assert sent is not None
        flow.leave(parts=experts(sent.x, sent.routes, None))

    def _send_back(self, flow: Flow) -> None:
        parts, flow.parts = flow.parts, None
        sent = flow.dispatched
        assert parts is not None
        assert sent is not None
        flow.leave(parts=send_back(parts, sent, flow.ctx.comm))

    def _add_parts(self, flow: Flow) -> None:
        sent, parts, shared = flow.dispatched, flow.parts, flow.shared
        flow.dispatched = flow.parts = flow.shared = None
        assert parts is not None
        assert sent is not None
        total = add_parts(parts, sent)
        if shared is not None:
            total = reference.combine(total[:, None], shared.computed, shared.gate)
        flow.x = total.to(flow.x.dtype)

    def _gather(self, flow: Flow) -> None:
        routes, flow.routes = flow.routes, None
        assert routes is not None
        flow.leave(gathered=gather_tokens(flow.x, routes, flow.ctx.comm))

    def _gather_rows(self, flow: Flow) -> None:
        routes, flow.routes, rows = flow.routes, None, flow.ctx.rows
        assert routes is not None
        assert rows is not None, "a step of ranks with rows of their own says how many each has"
        flow.leave(gathered=rows.gather(flow.x, routes))

    def _compute_gathered(self, flow: Flow) -> None:
        gathered = flow.gathered
        assert gathered is not None
        if self.on_gathered is not None:
            self.on_gathered(gathered.routes)
        flow.leave(parts=self._experts(gathered.x, gathered.routes, None))

    def _scatter(self, flow: Flow) -> None:
        parts, flow.parts = flow.parts, None
        assert parts is not None
        flow.leave(parts=flow.ctx.comm.reduce_scatter(parts))

    def _scatter_rows(self, flow: Flow) -> None:
        parts, flow.parts, rows = flow.parts, None, flow.ctx.rows
        assert parts is not None
        assert rows is not None, "as in `_gather_rows`"
        flow.leave(parts=rows.scatter(parts, len(flow.x)))

    def _add_shared(self, flow: Flow) -> None:
        parts, shared = flow.parts, flow.shared
        flow.gathered = flow.parts = flow.shared = None
        assert parts is not None
        flow.x = parts
        if shared is not None:
            flow.x = reference.combine(parts[:, None], shared.computed, shared.gate)

    @property
    def _own(self) -> tuple[Experts, int]:
        assert isinstance(self._experts, HeldExperts), "tokens travel to whole experts only"
        return self._experts.own

    def _select(self, flow: Flow) -> None:
        flow.leave(routes=self.router(flow.x, flow.slots))

    def _compute(self, flow: Flow) -> None:
        routes, shared = flow.routes, flow.shared
        flow.routes = flow.shared = None
        assert routes is not None
        if flow.ctx.comm.rank.size > 1:
            flow.x = self._experts(flow.x, routes, shared)
            return
        outputs = self._experts.unsummed(flow.x, routes, shared)
        if isinstance(outputs, Tensor):
            flow.x = outputs
        else:
            flow.unsummed = outputs


def _share(expert: SharedExpert, flow: Flow) -> None:
    flow.leave(shared=expert(flow.x, flow.ctx.lane))


def _share_own(expert: SharedExpert, flow: Flow) -> None:
    """For the tokens of this rank's share, zeros for the others; the ranks' sum has all."""
    num_tokens, comm = len(flow.x), flow.ctx.comm
    own = expert(own_rows(flow.x, comm), flow.ctx.lane)
    output = SharedOutput(
        output=spread_rows(own.computed, num_tokens, comm),
        gate=None if own.gate is None else spread_rows(own.gate, num_tokens, comm),
    )
    flow.leave(shared=output)


class TorchRouter:
    """See `kernels.moe.reference.route`."""

    __slots__ = ("_bias", "_normalises", "_num_active", "_selection", "_weight")

    def __init__(
        self,
        weight: Tensor,
        *,
        num_active: int,
        normalises: bool,
        bias: Tensor | None = None,
        selection: Selection | None = None,
    ) -> None:
        """weight: [experts, hidden]; bias: [experts]."""
        self._weight = weight
        self._bias = bias
        self._num_active = num_active
        self._normalises = normalises
        self._selection = selection

    def __call__(self, x: Tensor, slots: Tensor | None) -> Routes:
        return reference.route(
            x,
            self._weight,
            self._num_active,
            normalises=self._normalises,
            slots=slots,
            bias=self._bias,
            selection=self._selection,
        )


class QuantizedMatrices:
    """Experts that are quantised in memory; a matrix is made of one whenever it is asked for."""

    __slots__ = ("_weight", "shape")

    def __init__(self, weight: LinearWeight) -> None:
        """weight: quantised, by expert."""
        assert weight.scales is not None, f"{weight.format} without scales"
        self._weight = weight
        num_columns = weight.data.shape[2] * (2 if weight.scales.half else 1)
        self.shape = torch.Size((*weight.data.shape[:2], num_columns))

    def __getitem__(self, expert: int) -> Tensor:
        assert self._weight.scales is not None
        return dequantize(self._weight.data[expert], self._weight.scales.of_expert(expert))


def expert_matrices(weight: LinearWeight) -> reference.ExpertMatrices:
    """weight: by expert, in any format."""
    return weight.data if weight.scales is None else QuantizedMatrices(weight)


class TorchExperts:
    """One expert after the other, only those that have tokens; waits for the routes on the host."""

    __slots__ = ("_down", "_form", "_gate_up")

    token_sizes: tuple[int, ...] = ()

    def __init__(
        self,
        gate_up: reference.ExpertMatrices,
        down: reference.ExpertMatrices,
        form: ExpertForm = PLAIN,
    ) -> None:
        """gate_up: [experts, 2 I, hidden], rows of gate first; down: [experts, hidden, I]."""
        self._form = form
        self._gate_up = gate_up
        self._down = down

    def join(self, gate_up: LinearWeight, down: LinearWeight) -> SharedMatrices | None:
        """Never: torch has a product for each."""
        return None

    def joins(self, num_tokens: int) -> bool:
        return False

    def round_inputs(self, from_tokens: int | None) -> None:
        """See `Experts`."""
        if from_tokens is not None:
            raise ConfigError(
                "execution.round_expert_inputs_from: inputs are rounded on a GPU only; leave it out"
            )

    def __call__(self, x: Tensor, routes: Routes, shared: SharedOutput | None) -> Tensor:
        outputs = reference.experts(x, routes, self._gate_up, self._down, self._form)
        if shared is None:
            return reference.combine(outputs)
        return reference.combine(outputs, shared.computed, shared.gate)

    def unsummed(self, x: Tensor, routes: Routes, shared: SharedOutput | None) -> Tensor | Unsummed:
        return self(x, routes, shared)
