"""What the trials at the start find; that ranks agree on it is in `test_shared_models.py`."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from engine.layers.context import SINGLE_RANK
from engine.layers.operations import Flow, Lane, Op
from engine.plan import StepPlan
from engine.ranks.rank import WHOLE_MODEL
from engine.runner.auto import StepSizes
from engine.runner.calibration import Room, TimedSteps
from engine.runner.overlap.rule import OverlapRule
from engine.runner.overlap.trials import OverlapTrials, TimedLanes
from tests.engine.ranks.exact_models import build_exact, save_whole_numbers
from tests.engine.runner.step_driver import StepDriver
from tests.harness.tiny_models import save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model(path)
    save_whole_numbers(path, seed=3)
    return path


# Of an executor that runs no step, and of one that does.
LARGE = Room(StepSizes(max_rows=64, max_tokens=1024, max_graph_rows=64), 4, 4096, 256)
SMALL = Room(StepSizes(max_rows=8, max_tokens=64, max_graph_rows=8), 4, 128, 64)


def _trials(folder: Path, said: list[str], room: Room) -> OverlapTrials:
    model, attention = build_exact(folder, WHOLE_MODEL)
    executor = StepDriver(model, seed=1, phased=attention).executor
    executor.overlap_two_batches(
        OverlapRule(min_prompt_tokens=77, min_decode_rows=None), threshold=0.48
    )
    return OverlapTrials(executor, room, SINGLE_RANK, said.append)


def test_sizes_that_gain_more_than_five_percent_are_kept(folder: Path) -> None:
    said: list[str] = []
    trials = _trials(folder, said, LARGE)

    def durations(steps: TimedSteps, plans: list[StepPlan]) -> list[float]:
        """Split steps are 4 % faster up to 300 tokens, then 6 %; of rows from 32 on."""
        plan = plans[0]
        is_split = trials._two_batches.rule.min_decode_rows is not None
        gains = plan.num_tokens > (31 if plan.is_decode else 300)
        return [9.0] + [1.0 / (1.06 if gains else 1.04) if is_split else 1.0] * (len(plans) - 1)

    with patch.object(TimedSteps, "durations_s", durations):
        assert trials.min_prompt_tokens(0) == 512
        assert trials.min_prompt_tokens(700) == 1024
        assert trials.min_prompt_tokens(4096) is None  # all replay graphs
        assert trials.min_decode_rows() == 32
    assert trials._two_batches.rule.min_prompt_tokens == 77  # as before
    assert "two batches: steps are split from 512 prompt tokens" in said


@pytest.mark.parametrize(("sent_s", "asked"), [(0.1, 0), (0.3, 1), (0.45, 2), (0.9, 3), (2.0, 3)])
@pytest.mark.parametrize(("gain", "is_kept"), [(1.06, True), (1.04, False)])
def test_the_lag_that_communication_asks_for_is_kept_if_it_is_faster(
    sent_s: float, asked: int, gain: float, is_kept: bool, folder: Path
) -> None:
    trials = _trials(folder, [], SMALL)
    captured: list[tuple[int, int]] = []

    def lag() -> int:
        return trials._two_batches._decode[0].lag

    def durations(steps: TimedSteps, plans: list[StepPlan]) -> list[float]:
        is_split = trials._two_batches.rule.min_decode_rows is not None
        return [1.0 / gain if is_split and lag() != 2 else 1.0] * len(plans)

    with (
        patch.object(TimedSteps, "durations_s", durations),
        patch.object(TimedLanes, "seconds", lambda self: sent_s),
    ):
        found = trials.decode_lag(lambda min_rows: captured.append((min_rows, lag())))
    assert found == (asked if is_kept else 2)
    assert captured == [(8, 2), *([(8, asked)] if asked != 2 else [])]


def test_only_what_is_sent_is_timed() -> None:
    lanes = TimedLanes(torch.device("cpu"))
    flow = Flow(ctx=None, x=torch.ones(2))  # type: ignore[arg-type]
    lanes.issue(Op("compute", lambda flow: None), flow)
    assert lanes.seconds() == 0
    with patch("engine.runner.overlap.trials.time.perf_counter", iter((1.0, 1.5)).__next__):
        lanes.issue(Op("send", lambda flow: None, lane=Lane.SEND), flow)
    assert lanes.seconds() == 0.5
