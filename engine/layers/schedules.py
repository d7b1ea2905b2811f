"""Orders the operations of two flows, so that one computes while the other communicates.

    lag 0    A0 B0 | A1 B1 | A2 B2 | ...            stage by stage, both
    lag 2    A0 | A1 | A2 B0 | A3 B1 | ... | Bn     the second two stages behind

A `Schedule` is data: stages of operation names, and how far the second flow lags. A stage is what
one flow does before the other has its turn. Names that a layer lacks are skipped, so dense layers
and mixtures follow one schedule. The last stage of a layer and the first of the next are one.
"""

import string
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from engine.layers.operations import Flow, Op

Stage = tuple[Op, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    name: str
    stages: tuple[tuple[str, ...], ...]
    lag: int = 0


# SGLang's schedules of decode steps, and of prompts whose tokens travel to their experts. There,
# `dispatch` sends tokens to the ranks of their experts, and `combine` brings the outputs back.
DECODE = Schedule(
    name="decode",
    stages=(
        ("export", "prepare"),
        ("core", "comm_prepare_mlp_a", "comm_prepare_mlp_b", "select_experts"),
        ("dispatch_a", "shared_experts"),
        ("dispatch_b", "mlp", "experts", "combine_a"),
        ("combine_b",),
        ("output",),
    ),
    lag=2,
)
EXCHANGE_PROMPTS = Schedule(
    name="prompts",
    stages=(
        (
            *("export", "prepare", "core", "comm_prepare_mlp_a", "comm_prepare_mlp_b"),
            *("select_experts", "dispatch_a"),
        ),
        ("dispatch_b", "mlp", "experts", "combine_a"),
        ("shared_experts", "combine_b", "output"),
    ),
)
# Layers that add their outputs over the ranks communicate after each of their parts, so there is a
# boundary after each; and the shared expert comes before the sum that it is in.
SUM_PROMPTS = Schedule(
    name="prompts, summed",
    stages=(
        ("export", "prepare", "core", "comm_prepare_mlp_a"),
        ("comm_prepare_mlp_b", "select_experts", "shared_experts", "mlp", "experts", "combine_a"),
        ("combine_b", "output"),
    ),
)

# Ranks have shares of the tokens, but for the last layer, which adds as those of `SUM_PROMPTS` do.
SHARE_PROMPTS = Schedule(
    name="prompts, shared out",
    stages=(
        ("export", "prepare", "core", "comm_prepare_mlp_a"),
        ("comm_prepare_mlp_b", "select_experts", "dispatch_a"),
        ("dispatch_b", "shared_experts", "mlp", "experts", "combine_a"),
        ("combine_b", "output"),
    ),
)
# One flow, whose shared expert has a stream of its own: it begins before the router.
DUAL_STREAM = Schedule(
    name="dual stream",
    stages=(
        (
            *("export", "prepare", "core", "comm_prepare_mlp_a", "comm_prepare_mlp_b"),
            "shared_experts",
            *("select_experts", "dispatch_a", "dispatch_b", "mlp", "experts", "combine_a"),
            *("combine_b", "output"),
        ),
    ),
)


def prompt_schedule(layers: Sequence[Sequence[Op]]) -> Schedule:
    """By whether any layer's tokens travel to their experts."""
    travels = any(op.name == "dispatch_a" for ops in layers for op in ops)
    return EXCHANGE_PROMPTS if travels else SUM_PROMPTS


def bind(layers: Sequence[Sequence[Op]], schedule: Schedule) -> list[Stage]:
    """The stages of all layers, one layer after the other."""
    stages: list[Stage] = []
    for ops in layers:
        first, *others = _bind_layer(ops, schedule)
        stages[-1:] = [(*stages[-1], *first) if stages else first]
        stages += others
    return stages


def _bind_layer(ops: Sequence[Op], schedule: Schedule) -> list[Stage]:
    by_name = {op.name: op for op in ops}
    stages = [tuple(by_name[n] for n in names if n in by_name) for names in schedule.stages]
    order = [op.name for stage in stages for op in stage]
    names = sorted(op.name for op in ops)
    assert sorted(order) == names, f"schedule {schedule.name!r} of {names} orders {order}"
    for place, name in enumerate(order):
        missing = set(by_name[name].needs) - set(order[:place])
        assert not missing, f"schedule {schedule.name!r}: {name} comes before {sorted(missing)}"
    return stages


class Lanes(Protocol):
    """Where operations run."""

    def issue(self, op: Op, flow: Flow) -> None:
        """Run `op`, or queue it in its lane, after the lanes of `flow` that it waits for."""
        ...


class InlineLanes:
    """Everything at once and in place; on a CPU, and for a single flow."""

    def issue(self, op: Op, flow: Flow) -> None:
        op.run(flow)


# Marks a stage for a profiler; "b17" is the second flow's stage 17.
Annotate = Callable[[str], AbstractContextManager[object]]


def _without_marks(name: str) -> AbstractContextManager[object]:
    return nullcontext()


def drive(
    stages: Sequence[Stage],
    flows: Sequence[Flow],
    lanes: Lanes,
    *,
    lag: int = 0,
    annotate: Annotate = _without_marks,
) -> None:
    """Take every flow through all stages; flow k is k * lag stages behind the first.

    Each flow ends with nothing left of what operations leave for each other.
    """
    flow_names = string.ascii_lowercase
    for turn in range(len(stages) + lag * (len(flows) - 1)):
        for index, flow in enumerate(flows):
            number = turn - index * lag
            if not 0 <= number < len(stages):
                continue
            with annotate(f"{flow_names[index]}{number}"):
                for op in stages[number]:
                    if flow.has_ended:
                        break
                    lanes.issue(op, flow)
    for flow in flows:
        assert flow.has_ended or not flow.left_over(), f"nobody took {flow.left_over()}"
