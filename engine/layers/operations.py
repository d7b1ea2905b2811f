"""A layer as a list of named operations over a `Flow`, which a schedule may order (schedules.py).

    export             only where a drafter reads the stream that enters the layer: a copy of it
    prepare            norm, projections, K and V written
    core               attention, its output product
    comm_prepare_mlp_a the sum over the ranks begins
    comm_prepare_mlp_b ... has ended; norm
    select_experts     of a mixture: the router
    shared_experts     of a mixture: the expert that all tokens pass
    mlp | experts      the feed-forward part
    combine_a          the sum over the ranks begins
    combine_b          ... has ended

Where ranks have shares of the tokens between attention and attention (token_exchange.py), `prepare`
gathers all tokens before its projections, and these differ:

    comm_prepare_mlp_a the sum over the ranks, each rank's rows of it
    dispatch_a         rows go to the ranks of their experts; of a dense layer, all to all ranks
    dispatch_b         ... have come
    combine_a          outputs go back; of a dense layer, each rank's rows of the sum
    combine_b          ... have come; added up

An operation names the lane that it may run in. In the order of its list every operation finds what
it needs, whatever the lanes are: that is the ordinary forward pass.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from torch import Tensor

from engine.layers.attention import ProjectedTokens
from engine.layers.context import ForwardContext, Unsummed
from engine.layers.shared_output import SharedOutput
from engine.layers.token_exchange import Dispatched, Gathered
from kernels.moe.routes import Routes
from kernels.quant.coded_tokens import CodedTokens


class Lane(Enum):
    COMPUTE = "the flow's own order"
    SEND = "communication; others may compute meanwhile"
    SECOND_STREAM = "computation in a second stream, beside that of the flow"


_BETWEEN_OPERATIONS = ("coded", "tokens", "routes", "shared", "dispatched", "gathered", "parts")


@dataclass(slots=True, kw_only=True, eq=False)
class Flow:
    """One batch on its way through the layers. Operations overwrite it; nothing else does."""

    ctx: ForwardContext
    # [T, hidden]  the output of the part before, not added to `residual` yet; or normalised
    x: Tensor
    residual: Tensor | None = None  # None = the stream begins with `x`
    # `x` normalised, in FP8, for the product that comes next and clears it; None = `x` itself is
    coded: CodedTokens | None = None
    # `x` is this rank's part of a sum, which the norm that follows takes (`FusedSums`).
    owes_sum: bool = False
    # The same, of which this rank takes its rows alone; `residual` has only these.
    owes_share: bool = False
    # The output of the part before is the sum of this, and not `x`: the norm that follows takes it.
    # On a single rank alone.
    unsummed: Unsummed | None = None
    # of `FeedForward`; None where no token is padding
    slots: Tensor | None = None
    # [S] integer  the tokens that the last layer keeps; None = all, or those of `ctx.last`
    chosen: Tensor | None = None
    checks_finite: bool = False
    # fp32 [T]  `StoredTokens.finite_sums` of this rank; None = not checked. Added over the ranks
    # when all flows have ended: operations may send at the same time.
    finite_sums: Tensor | None = None
    # [T, hidden] by layer: the streams that `Export.layers` asks for
    entering: dict[int, Tensor] = field(default_factory=dict)
    has_ended: bool = False  # nothing more is needed than K and V: the other operations are left
    # between operations of one layer: left by `leave`; the last reader clears them
    tokens: ProjectedTokens | None = None
    routes: Routes | None = None
    shared: SharedOutput | None = None
    dispatched: Dispatched | None = None
    gathered: Gathered | None = None
    # [R, hidden], then [S, hidden]  outputs of the rows that came, then of those that were sent
    parts: Tensor | None = None
    # [P] as of `slots`, of the own rows, where ranks have shares of the tokens
    own_slots: Tensor | None = None

    def leave(self, **left: object) -> None:
        """Leave values for later operations of this layer, by names of `_BETWEEN_OPERATIONS`.

        What an operation left and none has taken is never overwritten.
        """
        for name, value in left.items():
            assert name in _BETWEEN_OPERATIONS, f"{name} is not left between operations"
            assert getattr(self, name) is None, f"{name} was left before, and nobody took it"
            setattr(self, name, value)

    def left_over(self) -> tuple[str, ...]:
        """What an operation left for another of its layer, and none has taken."""
        return tuple(name for name in _BETWEEN_OPERATIONS if getattr(self, name) is not None)

    def tensors(self) -> tuple[object, ...]:
        """All that an operation of this flow may read; whoever has them keeps their memory."""
        routed = self.routes, self.shared, self.dispatched, self.gathered, self.parts
        return self.x, self.residual, self.coded, self.tokens, *routed, self.unsummed


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of a layer."""

    name: str
    run: Callable[[Flow], None]
    lane: Lane = Lane.COMPUTE
    # Lanes whose operations of this flow must have ended.
    waits: tuple[Lane, ...] = ()
    # Names of operations of the same layer that must come before.
    needs: tuple[str, ...] = ()


def plain_mlp(compute: Callable[[Tensor, int], Tensor]) -> tuple[Op, ...]:
    """The operations of a feed-forward part that is one call: of x [T, hidden] and its lane."""

    def run(flow: Flow) -> None:
        flow.x = compute(flow.x, flow.ctx.lane)

    return (Op("mlp", run, needs=("comm_prepare_mlp_b",)),)


class CodedCompute(Protocol):
    """A feed-forward part that also takes what the norm before it has coded (`CodedReader`)."""

    def __call__(self, x: Tensor, lane: int = 0) -> Tensor: ...

    def of_coded(self, x: CodedTokens, lane: int = 0) -> Tensor: ...


def coded_operations(compute: CodedCompute) -> tuple[Op, ...]:
    """As `plain_mlp`."""

    def run(flow: Flow) -> None:
        coded, lane = flow.coded, flow.ctx.lane
        flow.x = compute(flow.x, lane) if coded is None else compute.of_coded(coded, lane)
        flow.coded = None

    return (Op("mlp", run, needs=("comm_prepare_mlp_b",)),)


def wait(flow: Flow) -> None:
    """An operation that only waits for lanes."""


def run_in_order(ops: Iterable[Op], flow: Flow) -> None:
    """The ordinary forward pass: one flow, one operation after the other."""
    for op in ops:
        op.run(flow)
        if flow.has_ended:
            return
