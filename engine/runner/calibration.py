"""Measures steps of a loaded model: rows that decode, and prompts of growing lengths.

The steps are those that requests will cause, CUDA graphs included, and go the same way through the
executor: each is launched while the one before it computes, so that no launch is counted. As in the
warm-up they write to blocks that nothing holds yet. Of several ranks all go by the times of the
first. Chooses nothing.
"""

import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from engine.clock import Clock
from engine.cost_model import StepWork
from engine.layers.context import SINGLE_RANK, Comm
from engine.plan import StepPlan
from engine.ranks.agreement import value_of_first
from engine.runner.auto import Calibration, StepSizes
from engine.runner.executor import Executor
from engine.runner.results import EmptyStep, IdleStep, PendingStep
from engine.runner.warm_up import DummyRow, dummy_step, release_step

BUDGET_S = 2.0  # for all steps; some decode steps and the two shortest prompts run in any case

_SHARE = 0.12  # of the budget for one length, unless a single run takes longer
_MAX_RUNS = 4  # of a length; the first is not counted if there are others
_DECODE_ROWS = 16
_DECODE_KEYS = 256  # that each of them attends to
_FEW_DECODES, _MAX_DECODES = 3, 10
_FIRST_LENGTH, _SECOND_LENGTH = 16, 64  # tokens; later lengths double


def calibrate(
    executor: Executor,
    sizes: StepSizes,
    *,
    num_blocks: int,
    max_row_tokens: int,
    clock: Clock,
    budget_s: float = BUDGET_S,
    comm: Comm = SINGLE_RANK,
) -> Calibration:
    """Run steps of up to `sizes` on an executor that is warm and idle.

    num_blocks: of its cache. max_row_tokens: of a row, at most. Lengths grow until the blocks or
    the time are used up.
    """
    steps = TimedSteps(executor, comm)
    started_s = clock.now_s()
    room = Room(sizes, executor.layout.block_size, num_blocks, max_row_tokens)
    decode_s = _measure_decodes(steps, room, budget_s)
    chunks: list[tuple[int, float]] = []
    for num_tokens in room.chunk_lengths():
        expected_s = 2.0 * chunks[-1][1] if chunks else decode_s
        left_s = budget_s - value_of_first(comm, clock.now_s() - started_s)
        rows = room.prompts(num_tokens)
        if rows is None or (len(chunks) >= 2 and expected_s > left_s):
            break
        num_runs = min(max(int(_SHARE * budget_s / expected_s), 1), _MAX_RUNS)
        plan = dummy_step(rows, room.block_size)
        chunks.append((num_tokens, steps.median_s([plan] * num_runs, work_of(rows))))
    assert chunks, f"{num_blocks} blocks hold no prompt of {max_row_tokens} tokens"
    found = Calibration(
        decode_s=decode_s,
        chunks=tuple(chunks),
        samples=tuple(steps.samples),
        took_s=clock.now_s() - started_s,
    )
    return value_of_first(comm, found)


def chunk_lengths(max_tokens: int, max_row_tokens: int) -> list[int]:
    """Tokens of the steps with prompts that are tried, ascending.

    The first is one row's, of at most `max_row_tokens`; the last is exactly `max_tokens`.
    """
    lengths = [min(_FIRST_LENGTH, max_row_tokens, max_tokens)]
    length = _SECOND_LENGTH
    while length < max_tokens:
        lengths.append(length)
        length *= 2
    return lengths if lengths[-1] == max_tokens else [*lengths, max_tokens]


def work_of(rows: Sequence[DummyRow]) -> StepWork:
    """The work of a step as a scheduler counts it: a row of one token with a history decodes."""
    decodes = [row for row in rows if row.num_new_tokens == 1 and row.num_computed_tokens > 0]
    prompts = [row for row in rows if row not in decodes]
    decoding = StepWork(
        num_decode_rows=len(decodes), num_decode_keys=sum(row.num_tokens for row in decodes)
    )
    return decoding.with_work(
        StepWork.of_prompts((row.num_new_tokens, row.num_computed_tokens) for row in prompts)
    )


def _measure_decodes(steps: "TimedSteps", room: "Room", budget_s: float) -> float:
    """Median seconds of a decode step; few steps show how many more there is time for."""
    rows = room.decodes()
    work = work_of(rows)
    few_s = steps.median_s(room.decode_steps(rows, _FEW_DECODES), work)
    num_runs = min(int(_SHARE * budget_s / few_s), room.max_decodes)
    if num_runs <= _FEW_DECODES:
        return few_s
    return steps.median_s(room.decode_steps(rows, num_runs), work)


class Room:
    """What fits an executor's rows and blocks."""

    def __init__(
        self, sizes: StepSizes, block_size: int, num_blocks: int, max_row_tokens: int
    ) -> None:
        self.block_size = block_size
        self._sizes = sizes
        self._num_blocks = num_blocks
        self._max_row_tokens = max_row_tokens
        self._num_decodes = min(_DECODE_ROWS, sizes.max_rows, num_blocks)
        row_room = num_blocks // self._num_decodes * block_size
        self._decode_keys = min(_DECODE_KEYS, row_room, max_row_tokens)

    @property
    def max_rows(self) -> int:
        return self._sizes.max_rows

    @property
    def max_tokens(self) -> int:
        """Of one step."""
        return min(self._sizes.max_tokens, self._num_blocks * self.block_size)

    def max_row_tokens(self, num_rows: int) -> int:
        """Tokens of each of so many equal rows; 0 = there is no room for them."""
        return min(self._num_blocks // num_rows * self.block_size, self._max_row_tokens)

    @property
    def max_decodes(self) -> int:
        """Decode steps that the same rows can run."""
        return min(_MAX_DECODES, self._decode_keys)

    def chunk_lengths(self) -> list[int]:
        capacity = self._num_blocks * self.block_size
        most = min(self._sizes.max_tokens, capacity)
        return chunk_lengths(most, min(self._max_row_tokens, capacity))

    def prompts(self, num_tokens: int) -> list[DummyRow] | None:
        """Prompts of `num_tokens` in all, as few as possible; None if they do not fit."""
        longest = self._max_row_tokens
        rows = [
            DummyRow(num_computed_tokens=0, num_new_tokens=min(longest, num_tokens - start))
            for start in range(0, num_tokens, longest)
        ]
        num_blocks = sum(-(-row.num_tokens // self.block_size) for row in rows)
        fits = len(rows) <= self._sizes.max_rows and num_blocks <= self._num_blocks
        return rows if fits else None

    def decodes(self) -> list[DummyRow]:
        """Rows before their first decode step; after `max_decodes` they are full."""
        num_computed = self._decode_keys - self.max_decodes
        return [DummyRow(num_computed_tokens=num_computed, num_new_tokens=1)] * self._num_decodes

    def decode_steps(self, rows: Sequence[DummyRow], num_steps: int) -> Iterator[StepPlan]:
        """The rows' next steps, one token of each row a step."""
        plan = dummy_step(rows, self.block_size)
        next_block = sum(len(admission.block_ids) for admission in plan.admissions)
        yield plan
        for step in range(1, min(num_steps, self.max_decodes)):
            num_computed = rows[0].num_computed_tokens + step
            new_block_ids: list[list[int]] = [[] for _ in rows]
            if num_computed % self.block_size == 0:
                new_block_ids = [[next_block + index] for index in range(len(rows))]
                next_block += len(rows)
            yield msgspec.structs.replace(
                plan,
                admissions=[],
                num_computed_tokens=[num_computed] * len(rows),
                new_block_ids=new_block_ids,
            )


class TimedSteps:
    """Runs steps of one executor and keeps a sample of each that counts."""

    def __init__(self, executor: Executor, comm: Comm) -> None:
        self.samples: list[tuple[StepWork, float]] = []
        self._executor = executor
        self._comm = comm

    def median_s(self, plans: Iterable[StepPlan], work: StepWork) -> float:
        """Median duration of steps of the same rows, without the first, which waits for the host.

        A single step counts all the same.
        """
        durations_s = self.durations_s(plans)
        counted_s = durations_s[1:] or durations_s
        self.samples += [(work, seconds) for seconds in counted_s]
        return value_of_first(self._comm, statistics.median(counted_s))

    def durations_s(self, plans: Iterable[StepPlan]) -> list[float]:
        """Launches each step while the one before it computes, as the step loop does."""
        durations_s: list[float] = []
        pending: deque[PendingStep | EmptyStep | IdleStep] = deque()
        num_rows = 0
        for plan in plans:
            num_rows = len(plan.rows)
            pending.append(self._executor.launch(plan))
            if len(pending) > 1:
                durations_s.append(_wait_s(pending.popleft()))
        durations_s += [_wait_s(step) for step in pending]
        self._executor.launch(release_step(num_rows)).wait()
        return durations_s


def _wait_s(step: PendingStep | EmptyStep | IdleStep) -> float:
    duration_s = step.wait().duration_s
    assert duration_s is not None, "a step with rows is timed"
    return duration_s
