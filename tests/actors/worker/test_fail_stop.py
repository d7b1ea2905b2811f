"""An engine that failed or hangs ends its worker process, and says why; an idle one goes on."""

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from actors.worker.engine_thread import EngineThread
from actors.worker.stall_watch import EXIT_FAILED, LOOKS, StallWatch
from engine.core import EngineCore
from engine.plan import StepPlan, StepResult
from tests.engine.scheduling.replica import Replica, prompt_of
from tests.harness.fakes import FakePendingStep


def _turns(turns: Iterator[int | None]) -> StallWatch:
    return StallWatch(60.0, lambda: next(turns), lambda: None)


class TestLooking:
    def test_a_turn_that_lasts_is_a_stall(self) -> None:
        watch = _turns(iter([7] * (LOOKS + 1)))
        assert [watch.look() for _ in range(LOOKS + 1)] == [False] * LOOKS + [True]

    def test_an_idle_engine_never_stalls(self) -> None:
        watch = _turns(iter([None] * (9 * LOOKS)))
        assert not any(watch.look() for _ in range(9 * LOOKS))

    def test_long_turns_one_after_the_other_are_progress(self) -> None:
        turns = [turn for turn in range(9) for _ in range(LOOKS)]
        watch = _turns(iter(turns))
        assert not any(watch.look() for _ in turns)

    def test_work_after_a_pause_is_counted_anew(self) -> None:
        turns = [3] * LOOKS + [None] + [3] * LOOKS
        watch = _turns(iter(turns))
        assert not any(watch.look() for _ in turns)


class _StuckStep:
    def __init__(self, step: FakePendingStep, may_end: threading.Event) -> None:
        self._step = step
        self._may_end = may_end

    def wait(self) -> StepResult:
        assert self._may_end.wait(20)
        return self._step.wait()


class _StuckExecutor:
    """A device that does not answer before the test lets it."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.may_end = threading.Event()

    def launch(self, plan: StepPlan) -> _StuckStep:
        return _StuckStep(self._replica.executor.launch(plan), self.may_end)


def test_a_step_that_hangs_is_noticed_while_an_idle_thread_is_not() -> None:
    replica = Replica()
    executor = _StuckExecutor(replica)
    core = EngineCore(replica.scheduler, executor, replica.clock, overlap=False)  # type: ignore[arg-type]
    has_stepped, has_stalled = threading.Event(), threading.Event()
    failures: list[BaseException] = []
    thread = EngineThread(core, on_step=lambda _: has_stepped.set(), on_failure=failures.append)
    watch = StallWatch(0.02, lambda: thread.turn, has_stalled.set)
    assert thread.turn is None, "it has not started"
    thread.start()
    thread.post(lambda: replica.add("a", prompt_of(5)))
    watch.start()
    assert has_stalled.wait(20)
    assert not has_stepped.is_set()
    executor.may_end.set()
    assert has_stepped.wait(20)
    thread.close()
    assert thread.turn is None
    assert not failures


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            "exit_failed('decode-0', RuntimeError('CUDA error: an illegal memory access'))",
            ["decode-0: the engine failed, exiting", "RuntimeError: CUDA error: an illegal"],
        ),
        (
            "exit_stalled('decode-0', 60.0)",
            ["decode-0: the engine made no progress for 60 s, exiting", "Current thread"],
        ),
    ],
)
def test_the_process_ends_with_its_reason_on_stderr(call: str, expected: list[str]) -> None:
    code = f"from actors.worker.stall_watch import exit_failed, exit_stalled; {call}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == EXIT_FAILED
    for line in expected:
        assert line in done.stderr
