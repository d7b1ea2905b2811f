"""In which order the operations of two flows run, and that no schedule can lose one."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from engine.layers import schedules
from engine.layers.decoder import DecoderLayer
from engine.layers.mlp import GatedMlp
from engine.layers.moe import Mixture, SharedExpert
from engine.layers.operations import Flow, Lane, Op, run_in_order
from engine.layers.schedules import (
    DECODE,
    DUAL_STREAM,
    EXCHANGE_PROMPTS,
    SUM_PROMPTS,
    InlineLanes,
    Schedule,
    bind,
    drive,
    prompt_schedule,
)

PAGE = Path(__file__).parents[3] / "docs" / "layer_operations.md"
SUMMED = ("prepare", "core", "comm_prepare_mlp_a", "comm_prepare_mlp_b")
DENSE = (*SUMMED, "mlp", "combine_a", "combine_b")
MIXTURE = (*SUMMED, "select_experts", "shared_experts", "experts", "combine_a", "combine_b")
EXCHANGING = (
    *(*SUMMED, "select_experts", "dispatch_a", "shared_experts", "dispatch_b"),
    *("experts", "combine_a", "combine_b", "output"),
)


class Recorder:
    """Operations that write down which flow ran them, and in which layer."""

    def __init__(self, *layers: Sequence[str]) -> None:
        self.ran: list[str] = []
        self.layers = [self._ops(number, names) for number, names in enumerate(layers)]

    def _ops(self, layer: int, names: Sequence[str]) -> tuple[Op, ...]:
        def op(name: str) -> Op:
            return Op(name, lambda flow: self.ran.append(f"{'ab'[flow.ctx.lane]}{layer}.{name}"))

        return tuple(op(name) for name in names)

    def drive(self, schedule: Schedule) -> list[str]:
        drive(bind(self.layers, schedule), [_flow(0), _flow(1)], InlineLanes(), lag=schedule.lag)
        return self.ran


class _Context:
    def __init__(self, lane: int) -> None:
        self.lane = lane


def _flow(lane: int) -> Flow:
    return Flow(ctx=cast("Any", _Context(lane)), x=torch.empty(0))


def _published_order(layers: Sequence[Sequence[str]], schedule: Schedule) -> list[str]:
    """The published executor: A ahead by the lag, both in turn, then B alone."""
    stages: list[list[str]] = [[]]
    for number, names in enumerate(layers):
        for index, stage in enumerate(schedule.stages):
            if index > 0:
                stages.append([])
            stages[-1] += [f"{number}.{name}" for name in stage if name in names]
    a, b = ([[flow + op for op in stage] for stage in stages] for flow in "ab")
    lag, order = schedule.lag, []
    for _ in range(lag):
        order += a.pop(0)
    while a:
        order += a.pop(0) + b.pop(0)
    while b:
        order += b.pop(0)
    return order


@pytest.mark.parametrize(
    ("layers", "schedule"),
    [
        ((EXCHANGING, EXCHANGING), EXCHANGE_PROMPTS),
        ((DENSE, EXCHANGING, EXCHANGING), DECODE),
        ((DENSE, MIXTURE), DECODE),
        ((DENSE, MIXTURE, DENSE), SUM_PROMPTS),
    ],
)
def test_the_order_is_that_of_the_published_executor(
    layers: tuple[tuple[str, ...], ...], schedule: Schedule
) -> None:
    ran = Recorder(*layers).drive(schedule)
    assert ran == _published_order(layers, schedule)
    assert len(ran) == len(set(ran)) == 2 * sum(map(len, layers))


def test_a_decode_step_begins_its_second_half_two_stages_later() -> None:
    ran = Recorder(EXCHANGING).drive(DECODE)
    assert ran.index("b0.prepare") > ran.index("a0.shared_experts")
    assert ran.index("b0.prepare") < ran.index("a0.dispatch_b")
    assert DECODE.lag == 2
    assert EXCHANGE_PROMPTS.lag == SUM_PROMPTS.lag == 0


def test_every_sum_of_a_prompt_has_the_other_half_beside_it() -> None:
    ran = Recorder(DENSE, DENSE).drive(SUM_PROMPTS)
    for begins, ends in (("comm_prepare_mlp_a", "comm_prepare_mlp_b"), ("combine_a", "combine_b")):
        between = ran[ran.index(f"a0.{begins}") + 1 : ran.index(f"a0.{ends}")]
        assert between
        assert all(op.startswith("b") for op in between)


def test_one_flow_runs_the_list_as_it_stands() -> None:
    recorder = Recorder(MIXTURE)
    run_in_order(recorder.layers[0], _flow(0))
    assert recorder.ran == [f"a0.{name}" for name in MIXTURE]


def test_what_an_operation_left_and_none_took_is_an_error() -> None:
    def leave(flow: Flow) -> None:
        flow.leave(parts=torch.empty(1))

    schedule = Schedule(name="one", stages=(("mlp",),))
    with pytest.raises(AssertionError, match="nobody took"):
        drive(bind([[Op("mlp", leave)]], schedule), [_flow(0)], InlineLanes())


def test_what_nobody_took_is_not_overwritten() -> None:
    flow = _flow(0)
    flow.leave(parts=torch.zeros(1))
    with pytest.raises(AssertionError, match="parts was left before"):
        flow.leave(parts=torch.ones(1))
    flow.parts = None
    flow.leave(parts=torch.ones(1))
    with pytest.raises(AssertionError, match="residual is not left"):
        flow.leave(residual=torch.ones(1))


def test_a_flow_that_has_ended_runs_nothing_more() -> None:
    recorder = Recorder(DENSE)

    def end(flow: Flow) -> None:
        flow.has_ended = flow.ctx.lane == 1

    (ops,) = recorder.layers
    recorder.layers = [(Op("prepare", end), *ops[1:])]
    ran = recorder.drive(SUM_PROMPTS)
    assert ran == [f"a0.{name}" for name in DENSE[1:]]


@pytest.mark.parametrize(
    "names", [(*DENSE, "unknown"), (*DENSE, "core")], ids=["no place for it", "twice"]
)
def test_a_schedule_without_each_operation_once_is_an_error(names: tuple[str, ...]) -> None:
    with pytest.raises(AssertionError, match="orders"):
        bind(Recorder(names).layers, DECODE)


def test_a_schedule_against_the_needs_is_an_error() -> None:
    shared = Op("shared_experts", lambda _: None, lane=Lane.SECOND_STREAM)
    summed = Op("experts", lambda _: None, waits=(Lane.SECOND_STREAM,), needs=("shared_experts",))
    bind([(shared, summed)], SUM_PROMPTS)
    with pytest.raises(AssertionError, match="experts comes before"):
        bind([(shared, summed)], EXCHANGE_PROMPTS)


def test_layers_that_exchange_tokens_get_the_published_prompt_schedule() -> None:
    assert prompt_schedule(Recorder(DENSE, EXCHANGING).layers) is EXCHANGE_PROMPTS
    assert prompt_schedule(Recorder(DENSE, MIXTURE).layers) is SUM_PROMPTS


def test_stages_are_marked_by_flow_and_number() -> None:
    marks: list[str] = []

    def mark(name: str) -> AbstractContextManager[None]:
        marks.append(name)
        return nullcontext()

    stages = bind(Recorder(DENSE).layers, DECODE)
    drive(stages, [_flow(0), _flow(1)], InlineLanes(), lag=2, annotate=mark)
    assert marks[:4] == ["a0", "a1", "a2", "b0"]
    assert sorted(marks) == sorted(f"{flow}{number}" for flow in "ab" for number in range(6))


def _name(lane: Lane) -> str:
    return lane.name.lower().replace("_", " ")


def test_the_page_of_operations_lists_what_layers_have() -> None:
    """Every operation with its lane and waits, every schedule with its lag."""
    attention = cast("Any", object())
    expert = cast("Any", object())
    mixture = Mixture(router=expert, experts=expert, shared=cast("Any", SharedExpert))
    gated = GatedMlp(gated=expert, down=expert)
    listed: dict[str, tuple[str, str]] = {}
    for mlp in (mixture, gated):
        layer = DecoderLayer(attention_norm=expert, attention=attention, mlp_norm=expert, mlp=mlp)
        for op in layer.operations():
            waits = ", ".join(map(_name, op.waits))
            listed[op.name] = _name(op.lane), waits
    cells = [
        [cell.strip(" `") for cell in line.split("|")[1:-1]]
        for line in PAGE.read_text().splitlines()
        if line.startswith("| `")
    ]
    assert {row[0]: (row[2], row[3]) for row in cells if len(row) == 6} == listed
    lags = {row[0]: row[2] for row in cells if len(row) == 4}
    found = {
        name: "" if schedule is DUAL_STREAM else str(schedule.lag)
        for name, schedule in vars(schedules).items()
        if isinstance(schedule, Schedule)
    }
    assert lags == found
