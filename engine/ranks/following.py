"""The loop of every rank but the first: launches what rank 0, the leader, launches (leading.py).

    plan n+1: from the ring, then launched     wait n     its result: a digest, reported, or nothing

A follower has no scheduler. It ends a step after it has launched what comes next, or sooner if
somebody waits for that end. Of a compared step it reports a digest; of a step with DP attention,
in which it has rows of its own, the result. Other results it throws away. Knows no torch and no
Ray.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.core import DraftingExecutor, Executor, PendingStep
from engine.errors import ConfigError
from engine.plan import StepPlan, StepResult
from engine.ranks.plan_ring import PlanRingReader, RingError
from engine.ranks.ring_messages import (
    Compile,
    GiveDrafts,
    LaunchPass,
    LaunchStep,
    RankFailure,
    RankTask,
    ResultPart,
    StepDigest,
    Stop,
    decode_order,
    encode,
    split_report,
    step_digest,
)
from engine.request import Constraint

MAX_IN_FLIGHT = 2  # of a follower, once one was launched; the leader never has more
MAX_REASON_CHARS = 4000
LOOK_EVERY_S = 1e-3  # at a step whose end others wait for; a socket is not waited for any shorter


@dataclass(frozen=True, slots=True)
class _Followed:
    """A step in flight; `message` = it is compared, `joined` = its number among all ranks'."""

    step: PendingStep
    message: bytes | None = None
    joined: int | None = None
    is_draft: bool = False


class Follower:
    """The loop of every rank but the first."""

    def __init__(
        self,
        executor: Executor,
        ring: PlanRingReader,
        compile_ahead: Callable[[Constraint], object],
        on_step_end: Callable[[], object] | None = None,
        begin_task: Callable[[RankTask], object] | None = None,
        drafts: DraftingExecutor | None = None,
    ) -> None:
        """compile_ahead: begins to compile a constraint, and does not wait.

        on_step_end: called after each step, soon; None = nobody waits for the end of a step.
        begin_task: begins what the leader asks for beside the steps; None = it asks for nothing.
        drafts: of a model that drafts for `executor`; None = the leader has none either.
        """
        self._executor = executor
        self._drafts = drafts
        self._ring = ring
        self._compile_ahead = compile_ahead
        self._on_step_end = on_step_end
        self._begin_task = begin_task
        self._in_flight: deque[_Followed] = deque()
        self._num_ended = 0  # steps, and passes of the model that drafts

    def run(self) -> None:
        """Launches what the leader launches, until it says stop.

        Raises RingError when the leader is dead, and what the executor raises.
        """
        while True:
            message = self._next()
            match decode_order(message):
                case Stop():
                    while self._in_flight:
                        self._finish_oldest()
                    return
                case Compile(constraint):
                    self._compile_ahead(constraint)
                case RankTask() as task:
                    assert self._begin_task is not None, "the leader knows that none is asked for"
                    while self._num_ended < task.num_ended:
                        self._finish_oldest()
                    self._begin_task(task)
                case LaunchStep(plan, is_compared):
                    self._launch(plan, message if is_compared else None)
                case LaunchPass(plan):
                    self._launch_pass(plan)
                case GiveDrafts(place):
                    assert self._drafts is not None, "the leader has a model that drafts"
                    self._drafts.give_drafts(place)

    def _launch(self, plan: StepPlan, compared: bytes | None) -> None:
        self._in_flight.append(_Followed(self._executor.launch(plan), compared, _joined(plan)))
        self._leave_in_flight(MAX_IN_FLIGHT, is_draft=False)

    def _launch_pass(self, plan: StepPlan) -> None:
        assert self._drafts is not None, "the leader has a model that drafts"
        step = self._drafts.launch(plan)
        self._in_flight.append(_Followed(step, joined=_joined(plan), is_draft=True))
        self._leave_in_flight(self._drafts.max_in_flight, is_draft=True)

    def _leave_in_flight(self, num_left: int, *, is_draft: bool) -> None:
        """Ends the oldest until so many passes, or other steps, are left at most.

        After a launch, not before: those have ended on the leader, and the device waits for the
        launch.
        """
        while [one.is_draft for one in self._in_flight].count(is_draft) > num_left:
            self._finish_oldest()

    def _next(self) -> bytes:
        """Waits for a message, and ends steps that somebody waits for as soon as they are done.

        The leader may wait for a report before it sends anything else.
        """
        while self._in_flight and (self._on_step_end or self._must_report):
            if self._in_flight[0].step.is_done:
                self._finish_oldest()
                continue
            look_s = 0.0 if self._is_joined else LOOK_EVERY_S
            if (message := self._ring.read(timeout_s=look_s)) is not None:
                return message
        message = self._ring.read()
        assert message is not None, "a read without a time limit"
        return message

    @property
    def _must_report(self) -> bool:
        return self._is_joined or any(followed.message for followed in self._in_flight)

    @property
    def _is_joined(self) -> bool:
        """Whether the leader gives out no result of a step before this rank's is there."""
        return any(followed.joined is not None for followed in self._in_flight)

    def _finish_oldest(self) -> None:
        """Waits for the step launched first: its buffers are free again, its errors are raised."""
        followed = self._in_flight.popleft()
        result = followed.step.wait()
        self._num_ended += 1
        if self._on_step_end is not None:
            self._on_step_end()
        if followed.message is not None:
            digest = StepDigest(result.step, step_digest(followed.message, result))
            self._ring.report_in_turn(encode(digest))  # answers may fill the socket
        if followed.joined is not None and result.tokens:
            self._report_result(followed.joined, followed.is_draft, result)

    def _report_result(self, step: int, is_draft: bool, result: StepResult) -> None:
        for data, goes_on in split_report(encode(result)):
            part = ResultPart(step, is_draft, data, goes_on)
            self._ring.report_in_turn(encode(part))


def _joined(plan: StepPlan) -> int | None:
    """The number of a step of ranks that have rows of their own; None = all have the same."""
    return plan.step if plan.of_ranks else None


def report_failure(ring: PlanRingReader, error: BaseException) -> None:
    """Tells the leader why this rank ends."""
    if isinstance(error, RingError):
        return  # there is nobody to tell
    reason = error.message if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
    failure = RankFailure(reason[:MAX_REASON_CHARS], isinstance(error, ConfigError))
    ring.report(encode(failure))
