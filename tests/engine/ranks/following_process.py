"""A follower over a device of integers: `python -m tests.engine.ranks.following_process ...`

Arguments: NAME of the ring, NUMBER of the reader, FAULT, STEP. The fault comes with launch STEP:
`drift` (other tokens), `raise`, `hang`, `none`. Prints a digest of all plans and of
all constraints to compile when it is stopped.
"""

import hashlib
import sys
import threading
from collections.abc import Sequence

import msgspec

from engine.core import PendingStep
from engine.plan import StepPlan, StepResult
from engine.ranks.following import MAX_IN_FLIGHT, Follower, report_failure
from engine.ranks.plan_ring import PlanRingReader
from engine.request import Constraint
from tests.engine.ranks.ring_ends import PATIENCE_S
from tests.engine.scheduling.replica import Replica
from tests.harness.fakes import FakeExecutor


def digest_of(records: Sequence[msgspec.Struct]) -> str:
    return hashlib.blake2b(msgspec.msgpack.encode(records), digest_size=8).hexdigest()


def make_replica() -> Replica:
    """Equal in all ranks."""
    return Replica(overlap=True, num_blocks=64, max_num_batched_tokens=24)


class _Drifted:
    def __init__(self, step: PendingStep) -> None:
        self._step = step

    @property
    def is_done(self) -> bool:
        return self._step.is_done

    def wait(self) -> StepResult:
        result = self._step.wait()
        tokens = [[token + 1 for token in row] for row in result.tokens]
        return msgspec.structs.replace(result, tokens=tokens)


class FaultyExecutor:
    def __init__(self, executor: FakeExecutor, fault: str, at_launch: int) -> None:
        self.executor = executor
        self._fault = fault
        self._at_launch = at_launch
        self._num_launches = 0

    def launch(self, plan: StepPlan) -> PendingStep:
        self._num_launches += 1
        step = self.executor.launch(plan)
        if self._num_launches != self._at_launch:
            return step
        match self._fault:
            case "raise":
                raise RuntimeError("told to")
            case "hang":
                threading.Event().wait()
            case "drift":
                return _Drifted(step)
        return step


def main(name: str, number: str, fault: str, at_launch: str) -> None:
    device, constraints = make_replica().executor, list[Constraint]()
    device.is_idle = True
    device.max_in_flight = MAX_IN_FLIGHT + 1  # it launches a step, and then ends the oldest
    ring = PlanRingReader(name, int(number), PATIENCE_S, PATIENCE_S)
    try:
        Follower(FaultyExecutor(device, fault, int(at_launch)), ring, constraints.append).run()
    except RuntimeError as error:
        report_failure(ring, error)
        sys.exit(1)
    print(digest_of(device.plans), digest_of(constraints))


if __name__ == "__main__":
    main(*sys.argv[1:])
