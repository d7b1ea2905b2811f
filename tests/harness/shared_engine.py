"""A whole engine that several processes share: the first schedules, the others launch its plans."""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Self

import msgspec

from engine.core import Executor, PendingStep
from engine.engine import Engine
from engine.layers.context import Comm
from engine.plan import StepPlan, StepResult
from tests.engine.ranks.exact_models import planted
from tests.harness.in_process import start_engine
from tests.harness.rank_processes import RankProcesses, hear

Digests = list[bytes]


def _digest(plan: StepPlan, result: StepResult) -> bytes:
    said = plan, result.tokens, result.is_finite
    return blake2b(msgspec.msgpack.encode(said), digest_size=8).digest()


class _LeadingSteps:
    """The executor of the first rank: the others get each plan before it is launched here."""

    def __init__(self, executor: Executor, ranks: RankProcesses, digests: Digests) -> None:
        self._executor = executor
        self._ranks = ranks
        self._digests = digests

    def launch(self, plan: StepPlan) -> PendingStep:
        self._ranks.say(msgspec.msgpack.encode(plan))
        return _DigestedStep(plan, self._executor.launch(plan), self._digests)


class _DigestedStep:
    def __init__(self, plan: StepPlan, step: PendingStep, digests: Digests) -> None:
        self._plan, self._step, self._digests = plan, step, digests

    @property
    def is_done(self) -> bool:
        return self._step.is_done

    def wait(self) -> StepResult:
        result = self._step.wait()
        self._digests.append(_digest(self._plan, result))
        return result


def _follow(comm: Comm, settings: Mapping[str, object], fault: str | None) -> Digests:
    """All that another rank does: build, and launch what the first launches."""
    executor = start_engine(comm, **settings).executor
    digests: Digests = []
    with planted(fault if comm.rank.index == comm.rank.size - 1 else None):
        while (message := hear()) is not None:
            plan = msgspec.msgpack.decode(message, type=StepPlan)
            digests.append(_digest(plan, executor.launch(plan).wait()))
    return digests


class SharedEngine:
    """The first rank's engine, and what all its steps came to, while the context is open.

    At its end every rank must have had the same plans and the same tokens.
    """

    def __init__(
        self, ranks: RankProcesses, settings: Mapping[str, object], fault: str | None = None
    ) -> None:
        """fault: a mistake of the last rank, see `planted`."""
        self.engine: Engine
        self.digests: Digests = []
        self._ranks = ranks
        self._settings = settings
        self._fault = fault

    def __enter__(self) -> Self:
        self._ranks.start(_follow, self._settings, self._fault)
        try:
            self.engine = start_engine(self._ranks.comm, **self._settings)
        except BaseException:
            self._ranks.say(None)
            raise
        self.engine.core.wrap_executor(
            lambda executor: _LeadingSteps(executor, self._ranks, self.digests)
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        """Raises AssertionError where a rank had other plans or tokens."""
        self._ranks.say(None)
        if kind is not None:
            return
        for index, digests in enumerate(self._ranks.answers(), start=1):
            assert digests == self.digests, f"rank {index} had other plans or tokens"
