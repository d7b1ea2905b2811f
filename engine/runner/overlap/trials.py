"""Measures on a warm, idle executor whether two batches are faster, and how far the second lags.

    lag          the usual one, or what the share of communication asks for if that is faster (in
                 simulation it is not, load_tests/results/two_batches_simulated.md)
    thresholds   per size: ten steps whole, ten as two batches (`OverlapTuner` keeps gains over 5 %)

Every rank runs the same steps and goes by the times of the first, so that all split the same steps
afterwards. As in the calibration, the steps write to blocks that nothing holds yet.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from engine.layers.context import Comm
from engine.layers.operations import Flow, Lane, Op
from engine.layers.schedules import DECODE
from engine.plan import StepPlan
from engine.ranks.agreement import value_of_first
from engine.runner.calibration import Room, TimedSteps
from engine.runner.executor import Executor
from engine.runner.overlap.rule import OverlapRule
from engine.runner.overlap.tuning import MIN_SPEEDUP, NUM_STEPS, OverlapTuner, adaptive_lag
from engine.runner.warm_up import DummyRow, dummy_step, release_step

# Below these, others have found two batches slower whatever the model (SGLang's MIN_TBO_BS).
MIN_DECODE_ROWS = 16
_NUM_PROMPT_SIZES = 4
_DECODE_KEYS = 256
WHOLE = OverlapRule(min_prompt_tokens=None, min_decode_rows=None)
SPLIT = OverlapRule(min_prompt_tokens=2, min_decode_rows=2)


class TimedLanes:
    """Runs everything in place and adds up the time of what is sent."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []

    def issue(self, op: Op, flow: Flow) -> None:
        if op.lane is not Lane.SEND:
            op.run(flow)
            return
        begin = self._mark()
        op.run(flow)
        self._spans.append((begin, self._mark()))

    def seconds(self) -> float:
        """Of all operations so far; waits for the last."""
        if not self._is_cuda:
            return float(sum(end - begin for begin, end in self._spans))
        torch.cuda.synchronize()
        return float(sum(begin.elapsed_time(end) for begin, end in self._spans)) / 1e3

    def _mark(self) -> Any:  # noqa: ANN401
        if not self._is_cuda:
            return time.perf_counter()
        cuda: Any = torch.cuda  # its stubs lack types
        event = cuda.Event(enable_timing=True)
        event.record()
        return event


class OverlapTrials:
    """Trials of one executor; `executor.two_batches` is left with the rule that it had."""

    def __init__(
        self, executor: Executor, room: Room, comm: Comm, report: Callable[[str], None]
    ) -> None:
        self._executor = executor
        self._two_batches = executor.two_batches
        self._room = room
        self._comm = comm
        self._report = report
        self._steps = TimedSteps(executor, comm)

    def decode_lag(self, capture: Callable[[int], None] | None = None) -> int | None:
        """The lag for the largest decode step there is room for; None = for none of two rows.

        capture: captures split decode steps of so many rows or more with the lag that is set; None
        = steps replay no graphs. Leaves the executor with any of the lags tried.
        """
        sizes = [n for n in self._decode_sizes(2) if self._decodes(n) is not None]
        plan = self._decodes(sizes[-1]) if sizes else None
        if plan is None:
            return None
        with self._ruled(WHOLE):
            whole_s = median(self._durations(plan))
        with self._ruled(SPLIT):
            communication_s = [self._communication_s(plan) for _ in range(2)][1]  # the first warms
        communication_s, whole_s = value_of_first(self._comm, [communication_s, whole_s])
        computation_s = max(whole_s - communication_s, 1e-9)
        asked, usual = adaptive_lag(communication_s, computation_s), DECODE.lag
        split_s = {lag: self._split_s(plan, lag, capture) for lag in dict.fromkeys((usual, asked))}
        lag = asked if split_s[usual] >= MIN_SPEEDUP * split_s[asked] else usual
        self._report(
            f"two batches: {len(plan.rows)} rows communicate for {communication_s * 1e3:.2f} of"
            f" {whole_s * 1e3:.2f} ms; by lag, ms: "
            + ", ".join(f"{k} {seconds * 1e3:.2f}" for k, seconds in split_s.items())
            + f"; the second lags by {lag} stages"
        )
        return lag

    def min_prompt_tokens(self, largest_graph: int) -> int | None:
        """The number of tokens from which steps with prompts gain; None = none does.

        largest_graph: tokens of the largest step that replays a graph, which is never split.
        """
        most = self._room.max_tokens
        sizes = [most >> shift for shift in reversed(range(_NUM_PROMPT_SIZES))]
        plans = {n: self._prompts(n) for n in sizes if n > max(largest_graph, 1)}
        return self._threshold("prompt tokens", plans)

    def min_decode_rows(self) -> int | None:
        """The number of rows from which decode steps gain; None = none does."""
        plans = {n: self._decodes(n) for n in self._decode_sizes(MIN_DECODE_ROWS)}
        return self._threshold("decode rows", plans)

    def _split_s(self, plan: StepPlan, lag: int, capture: Callable[[int], None] | None) -> float:
        """Median of split steps with a lag."""
        self._two_batches.lag_by(lag)
        if capture is not None:
            capture(len(plan.rows))
        with self._ruled(SPLIT):
            return median(self._durations(plan))

    def _threshold(self, what: str, plans: dict[int, StepPlan | None]) -> int | None:
        fitting = {size: plan for size, plan in plans.items() if plan is not None}
        tuner = OverlapTuner(list(fitting))
        while (ask := tuner.next_step()) is not None:
            with self._ruled(SPLIT if ask.splits else WHOLE):
                for duration_s in self._durations(fitting[ask.num_tokens]):
                    tuner.measured(duration_s)
        for trial in tuner.trials:
            self._report(
                f"two batches: {trial.num_tokens} {what} take {trial.whole_s * 1e3:.2f} ms whole,"
                f" {trial.split_s * 1e3:.2f} ms split"
            )
        found = tuner.threshold()
        self._report(f"two batches: steps are split from {found} {what}")
        return found

    @contextmanager
    def _ruled(self, rule: OverlapRule) -> Iterator[None]:
        before = self._two_batches.rule
        self._two_batches.rule = rule
        try:
            yield
        finally:
            self._two_batches.rule = before

    def _durations(self, plan: StepPlan) -> list[float]:
        """Of `NUM_STEPS` steps behind one that warms up; equal on all ranks."""
        durations_s = self._steps.durations_s([plan] * (1 + NUM_STEPS))
        return value_of_first(self._comm, durations_s[1:])

    def _communication_s(self, plan: StepPlan) -> float:
        lanes = TimedLanes(self._executor.model.device)
        with self._two_batches.running_in(lanes):
            self._executor.forward_logits(plan)
            seconds = lanes.seconds()
        self._executor.launch(release_step(len(plan.rows))).wait()
        return seconds

    def _prompts(self, num_tokens: int) -> StepPlan | None:
        rows = self._room.prompts(num_tokens)
        return None if rows is None else dummy_step(rows, self._room.block_size)

    def _decode_sizes(self, least: int) -> Sequence[int]:
        """Powers of two from `least` on, and as many rows as there are."""
        most, size, sizes = self._room.max_rows, least, []
        while size < most:
            sizes.append(size)
            size *= 2
        return [*sizes, most] if most >= least else sizes

    def _decodes(self, num_rows: int) -> StepPlan | None:
        keys = min(_DECODE_KEYS, self._room.max_row_tokens(num_rows))
        if keys < 1:
            return None
        row = DummyRow(num_computed_tokens=keys - 1, num_new_tokens=1)
        return dummy_step([row] * num_rows, self._room.block_size)
