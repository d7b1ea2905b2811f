"""Steps that fail on demand, between the engine's loop and its executor; for tests."""

import logging
import os
import signal
import threading
from collections.abc import Sequence

import msgspec

from configs.faults import Fault, FaultKind
from engine.core import Executor, PendingStep
from engine.plan import StepPlan, StepResult

logger = logging.getLogger(__name__)


class InjectedError(Exception):
    """The error of a step that was told to fail."""


class FaultySteps:
    """An executor that counts its launches from 1."""

    def __init__(self, executor: Executor, faults: Sequence[Fault]) -> None:
        self._executor = executor
        self._kinds = {fault.number: fault.kind for fault in faults if fault.place == "step"}
        self._num_launches = 0

    def launch(self, plan: StepPlan) -> PendingStep:
        self._num_launches += 1
        kind = self._kinds.get(self._num_launches)
        if kind is not None:
            logger.warning("fault on demand: step %d, %s", self._num_launches, kind.value)
        if kind is FaultKind.DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        if kind is FaultKind.RAISE:
            raise InjectedError(f"step {self._num_launches}")
        pending = self._executor.launch(plan)
        return pending if kind is None else _FaultyStep(pending, kind)


class _FaultyStep:
    def __init__(self, step: PendingStep, kind: FaultKind) -> None:
        self._step = step
        self._kind = kind

    @property
    def is_done(self) -> bool:
        return self._kind is not FaultKind.HANG and self._step.is_done

    def wait(self) -> StepResult:
        if self._kind is FaultKind.HANG:
            threading.Event().wait()
        result = self._step.wait()
        num_rows = len(result.tokens)
        return msgspec.structs.replace(
            result, tokens=[[] for _ in range(num_rows)], is_finite=[False] * num_rows
        )
