"""One rank leads and the others follow: each launches the same plans in the same order.

    leader     plan n+1: into the ring, then launched     wait n     commit n
    follower   plan n+1: from the ring, then launched

The leader has the only scheduler. A follower decides nothing: what it computes, samples and keeps
follows from the plans alone, so its tokens are the leader's. That is checked: every so many steps
the followers report a digest of the plan and its tokens, and the leader gives the next step's
result out only when all agree. The reports come while that step computes, so nobody waits for them.
Where every step is compared, none is given out before. Results of other steps a follower throws
away, after it has launched what comes next.

Where a model drafts, its passes go the same way, between the steps (`LeadingPasses`). They are not
compared: other drafts would show in the tokens of the step that verifies them.

With DP attention a follower has rows that the leader has not. It reports the results of each step,
and the leader gives out those of all ranks together.

What a rank says last, and its death, come to `RankReports.on_end`. Knows no torch and no Ray.
"""

import hashlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from engine.core import DraftingExecutor, Executor, PendingStep
from engine.errors import ConfigError, WorkerError
from engine.plan import StepPlan, StepResult
from engine.ranks.asides import Aside, AsideAnswer, AsideAnswers
from engine.ranks.heartbeat import LOOKS
from engine.ranks.plan_ring import MAX_REPORT_BYTES, PlanRing, PlanRingReader, RingError
from engine.request import Constraint

logger = logging.getLogger(__name__)
T = TypeVar("T")
K = TypeVar("K", int, tuple[int, bool])

COMPARE_EVERY = 64  # steps
MAX_IN_FLIGHT = 2  # of a follower, once one was launched; the leader never has more
MAX_REASON_CHARS = 4000
LOOK_EVERY_S = 1e-3  # at a step whose end others wait for; a socket is not waited for any shorter


class Launch(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Leader -> followers: launch this plan next."""

    plan: StepPlan
    is_compared: bool


class Draft(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Leader -> followers: launch this pass of the model that drafts next."""

    plan: StepPlan


class GiveDrafts(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Leader -> followers: what that pass drew is this draft of its rows."""

    place: int


class Compile(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Leader -> followers: a constraint that a plan will bring, to be compiled until then."""

    constraint: Constraint


class Stop(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Leader -> followers: nothing comes any more."""


class StepDigest(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Follower -> leader: what a plan and its tokens come to."""

    step: int
    digest: bytes


class ResultPiece(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Follower -> leader: the next part of its encoded result of a step with DP attention."""

    step: int  # of the plan of all ranks
    is_draft: bool  # a pass of a model that drafts, which has numbers of its own
    data: bytes
    goes_on: bool


class RankFailure(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Follower -> leader: why this rank ends."""

    reason: str
    is_config: bool  # a configuration that cannot be used: another try would end alike


_encoder = msgspec.msgpack.Encoder()
_orders = msgspec.msgpack.Decoder(Launch | Draft | GiveDrafts | Compile | Aside | Stop)
_reports = msgspec.msgpack.Decoder(StepDigest | ResultPiece | AsideAnswer | RankFailure)
_results = msgspec.msgpack.Decoder(StepResult)
_PIECE_BYTES = MAX_REPORT_BYTES - 64  # beside the rest of a `ResultPiece`


def _digest(message: bytes, result: StepResult) -> bytes:
    """Of a Launch as it was sent, and of the tokens that came of it."""
    drawn = _encoder.encode((result.tokens, result.is_finite))
    return hashlib.blake2b(drawn, key=hashlib.blake2b(message).digest(), digest_size=16).digest()


# ---- the leader ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """A rank has ended, or is about to; the ranks cannot go on without it."""

    rank: int  # from 1
    reason: str = "its process is dead"
    is_config: bool = False
    is_dead: bool = False  # and said nothing

    def error(self) -> WorkerError | ConfigError:
        kind = ConfigError if self.is_config else WorkerError
        return kind(f"rank {self.rank}: {self.reason}")


class RankReports:
    """Takes what the followers say, on a thread of its own."""

    def __init__(self, ring: PlanRing, num_ranks: int, on_end: Callable[[RankEnd], object]) -> None:
        """`on_end` is called on the thread, once, with the first end of any follower."""
        self._ring = ring
        self._num_followers = num_ranks - 1
        self._on_end = on_end
        self._changed = threading.Condition()
        self._digests: dict[int, dict[int, bytes]] = {}  # step -> rank -> digest
        self._pieces: dict[int, list[bytes]] = {}  # rank -> of a result that is not whole yet
        # (step, whether it is a pass of a model that drafts) -> rank -> result
        self._results: dict[tuple[int, bool], dict[int, StepResult]] = {}
        self._asides = AsideAnswers()
        self._end: RankEnd | None = None

    def start(self) -> None:
        """Call it once every follower is connected."""
        threading.Thread(target=self._take, name="rank reports", daemon=True).start()

    def wait_digests(self, step: int, timeout_s: float) -> dict[int, bytes]:
        """Rank -> its digest of a step. Raises WorkerError if one says nothing in time, or ends."""
        return self._wait(self._digests, step, range(1, self._num_followers + 1), timeout_s)

    def wait_results(
        self, step: int, is_draft: bool, ranks: Sequence[int], timeout_s: float
    ) -> dict[int, StepResult]:
        """Rank -> its result of a step. Raises WorkerError if one comes too late, or ends."""
        return self._wait(self._results, (step, is_draft), ranks, timeout_s) if ranks else {}

    def _wait(
        self, said: dict[K, dict[int, T]], step: K, ranks: Sequence[int], timeout_s: float
    ) -> dict[int, T]:
        """Takes what all `ranks` said of a step; said: step -> rank -> it."""
        with self._changed:

            def is_complete() -> bool:
                return len(said.get(step, {})) == len(ranks)

            for _ in range(LOOKS):  # each is cut short where all ranks are stopped and go on
                if self._changed.wait_for(lambda: is_complete() or self._end, timeout_s / LOOKS):
                    break
            if is_complete():
                return said.pop(step)
            if self._end is not None:
                raise self._end.error()
            heard = sorted(said.get(step, {}))
            number, is_draft = step if isinstance(step, tuple) else (step, False)
            raise WorkerError(
                f"{'pass' if is_draft else 'step'} {number}: only ranks {heard} of {list(ranks)}"
                f" followed within {timeout_s:.0f} s"
            )

    def wait_answers(self, number: int) -> list[bytes]:
        """What an aside came to on each follower, however long it takes.

        Raises WorkerError if one ends, HandoffError if one could not do it.
        """
        with self._changed:

            def is_complete() -> bool:
                return self._asides.num_of(number) == self._num_followers

            self._changed.wait_for(lambda: is_complete() or self._end)
            if is_complete():
                return self._asides.take(number)
            assert self._end is not None, "nothing else ends the wait"
            raise self._end.error()

    def wait_end(self, timeout_s: float) -> RankEnd | None:
        """The first end of a follower; None = none has ended within `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._end, timeout_s)
            return self._end

    def _take(self) -> None:
        while self._end is None:
            for reader, report in self._ring.wait_reports():
                if report != b"":
                    self._take_one(reader + 1, report)
        self._on_end(self._end)

    def _take_one(self, rank: int, report: bytes | None) -> None:
        """What cannot be taken ends its rank, because others would wait for it for ever."""
        try:
            self._note(rank, report)
        except Exception as error:
            logger.exception("a report of rank %d", rank)
            with self._changed:
                reason = f"its report cannot be taken: {type(error).__name__}: {error}"
                self._end = self._end or RankEnd(rank=rank, reason=reason)
                self._changed.notify_all()

    def _note(self, rank: int, report: bytes | None) -> None:
        said = None if report is None else _reports.decode(report)
        with self._changed:
            match said:
                case StepDigest():
                    self._digests.setdefault(said.step, {})[rank] = said.digest
                case ResultPiece():
                    self._pieces.setdefault(rank, []).append(said.data)
                    if not said.goes_on:
                        result = _results.decode(b"".join(self._pieces.pop(rank)))
                        step = said.step, said.is_draft
                        self._results.setdefault(step, {})[rank] = result
                case AsideAnswer():
                    self._asides.add(rank, said)
                case RankFailure() if self._end is None:
                    self._end = RankEnd(rank=rank, reason=said.reason, is_config=said.is_config)
                case None if self._end is None:
                    self._end = RankEnd(rank=rank, is_dead=True)
            self._changed.notify_all()


class StepCounts:
    """How many steps of rank 0 were launched and have ended; others read it from any thread.

    Passes of a model that drafts are steps, too. They all end in the order of their launches, so
    one that was waited for has ended all before it.
    """

    def __init__(self) -> None:
        self.num_launched = 0
        self.num_ended = 0


class LeadingExecutor:
    """The `Executor` of rank 0: every plan goes to the followers, then to its own executor."""

    def __init__(
        self,
        executor: Executor,
        ring: PlanRing,
        reports: RankReports,
        *,
        compare_every: int,
        patience_s: float,
        steps: StepCounts | None = None,
    ) -> None:
        """compare_every: steps; 1 = no result is given out before all ranks agree on it.

        patience_s: so long followers may take to report a step. steps: kept here; None = nobody
        asks.
        """
        self._executor = executor
        self._ring = ring
        self._reports = reports
        self._compare_every = compare_every
        self._patience_s = patience_s
        self._steps = steps or StepCounts()
        self._num_launched = 0
        self._comparison: _Comparison | None = None  # of the step launched last, if it is compared

    def lead_drafts(self, executor: DraftingExecutor) -> "LeadingPasses":
        """The executor of rank 0 that drafts for this one's rows, led likewise."""
        given = self._ring, self._reports, self._patience_s, self._steps
        return LeadingPasses(executor, *given)

    def launch(self, plan: StepPlan) -> PendingStep:
        """Raises WorkerError when a follower is dead or has been stuck for too long."""
        self._num_launched += 1
        is_compared = self._num_launched % self._compare_every == 0 and not plan.of_ranks
        message = _encoder.encode(Launch(plan, is_compared))
        self._ring.write(message)
        pending = _launch_counted(self._executor, plan, self._steps)
        if plan.of_ranks:
            return _JoinedStep(plan, pending, self._reports, self._patience_s)
        before, self._comparison = self._comparison, None
        if before is not None:
            pending = _StepAfter(pending, before)
        if not is_compared:
            return pending
        comparison = _Comparison(message, self._reports, self._patience_s)
        pending = _ComparedStep(pending, comparison)
        if self._compare_every == 1:
            return _StepAfter(pending, comparison)
        self._comparison = comparison
        return pending

    def compile(self, constraint: Constraint) -> None:
        """Tell the followers to compile a constraint in the background; on the launching thread."""
        self._ring.write(_encoder.encode(Compile(constraint)))

    def stop(self) -> None:
        """Tell the followers that nothing comes any more."""
        self._ring.write(_encoder.encode(Stop()))


class LeadingPasses:
    """The `DraftingExecutor` of rank 0: the followers launch its passes between the same steps."""

    def __init__(
        self,
        executor: DraftingExecutor,
        ring: PlanRing,
        reports: RankReports,
        patience_s: float,
        steps: StepCounts,
    ) -> None:
        self._executor = executor
        self._ring = ring
        self._reports = reports
        self._patience_s = patience_s
        self._steps = steps

    @property
    def max_in_flight(self) -> int:
        return self._executor.max_in_flight

    def launch(self, plan: StepPlan) -> PendingStep:
        """Raises WorkerError as `LeadingExecutor.launch` does."""
        self._ring.write(_encoder.encode(Draft(plan)))
        pending = _launch_counted(self._executor, plan, self._steps)
        if not plan.of_ranks:
            return pending
        return _JoinedStep(plan, pending, self._reports, self._patience_s, is_draft=True)

    def give_drafts(self, place: int) -> None:
        """Raises WorkerError as `launch` does."""
        self._ring.write(_encoder.encode(GiveDrafts(place)))
        self._executor.give_drafts(place)


def _launch_counted(executor: Executor, plan: StepPlan, steps: StepCounts) -> PendingStep:
    steps.num_launched += 1
    return _CountedStep(executor.launch(plan), steps, steps.num_launched)


class _CountedStep:
    """A step that counts as ended, with all before it, once it was waited for."""

    def __init__(self, pending: PendingStep, steps: StepCounts, number: int) -> None:
        """number: among all that were launched, from 1."""
        self._pending = pending
        self._steps = steps
        self._number = number

    @property
    def is_done(self) -> bool:
        return self._pending.is_done

    def wait(self) -> StepResult:
        result = self._pending.wait()
        self._steps.num_ended = max(self._steps.num_ended, self._number)
        return result


class _Comparison:
    """Of what a step came to on every rank."""

    def __init__(self, message: bytes, reports: RankReports, patience_s: float) -> None:
        """message: the step's Launch, as it was sent."""
        self._message = message
        self._reports = reports
        self._patience_s = patience_s
        self._own: StepResult | None = None  # None = the step has not ended

    def take(self, own: StepResult) -> None:
        self._own = own

    def check(self) -> None:
        """Raises WorkerError if a rank has other tokens, or says nothing in time."""
        assert self._own is not None, "steps are waited for in the order of their launches"
        step, digest = self._own.step, _digest(self._message, self._own)
        found = self._reports.wait_digests(step, self._patience_s)
        others = sorted(rank for rank, other in found.items() if other != digest)
        if others:
            raise WorkerError(f"step {step}: ranks {others} have other tokens than rank 0")


class _ComparedStep:
    """A step whose result the other ranks report, too."""

    def __init__(self, pending: PendingStep, comparison: _Comparison) -> None:
        self._pending = pending
        self._comparison = comparison

    @property
    def is_done(self) -> bool:
        return self._pending.is_done

    def wait(self) -> StepResult:
        result = self._pending.wait()
        self._comparison.take(result)
        return result


class _StepAfter:
    """A step whose result is given out only after a comparison."""

    def __init__(self, pending: PendingStep, comparison: _Comparison) -> None:
        """comparison: of the step before, or of this one."""
        self._pending = pending
        self._comparison = comparison

    @property
    def is_done(self) -> bool:
        return self._pending.is_done

    def wait(self) -> StepResult:
        """Raises WorkerError as `_Comparison.check` does."""
        result = self._pending.wait()
        self._comparison.check()
        return result


class _JoinedStep:
    """A step of ranks that have rows of their own, each of which reports its results."""

    def __init__(
        self,
        plan: StepPlan,
        pending: PendingStep,
        reports: RankReports,
        patience_s: float,
        *,
        is_draft: bool = False,
    ) -> None:
        """pending: of rank 0. is_draft: a pass of a model that drafts."""
        self._plan = plan
        self._pending = pending
        self._reports = reports
        self._patience_s = patience_s
        self._is_draft = is_draft

    @property
    def is_done(self) -> bool:
        """Of rank 0: the ranks end a step at about the same time."""
        return self._pending.is_done

    def wait(self) -> StepResult:
        """Raises WorkerError if a rank ends, or says nothing in time."""
        own, plans = self._pending.wait(), self._plan.of_ranks
        busy = [rank for rank, plan in enumerate(plans) if plan.rows and rank > 0]
        given = self._plan.step, self._is_draft, busy, self._patience_s
        found = self._reports.wait_results(*given)
        others = [
            found.get(rank) or StepResult(step=plan.step, tokens=[], logprobs=[], is_finite=[])
            for rank, plan in enumerate(plans)
            if rank > 0
        ]
        return StepResult(
            step=self._plan.step,
            tokens=[],
            logprobs=[],
            is_finite=[],
            duration_s=own.duration_s,
            of_ranks=[own, *others],
        )


# ---- a follower ----------------------------------------------------------------------------------


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
        begin_aside: Callable[[Aside], object] | None = None,
        drafts: DraftingExecutor | None = None,
    ) -> None:
        """compile_ahead: begins to compile a constraint, and does not wait.

        on_step_end: called after each step, soon; None = nobody waits for the end of a step.
        begin_aside: begins what the leader asks for beside the steps; None = it asks for nothing.
        drafts: of a model that drafts for `executor`; None = the leader has none either.
        """
        self._executor = executor
        self._drafts = drafts
        self._ring = ring
        self._compile_ahead = compile_ahead
        self._on_step_end = on_step_end
        self._begin_aside = begin_aside
        self._in_flight: deque[_Followed] = deque()
        self._num_ended = 0  # steps, and passes of the model that drafts

    def run(self) -> None:
        """Launches what the leader launches, until it says stop.

        Raises RingError when the leader is dead, and what the executor raises.
        """
        while True:
            message = self._next()
            match _orders.decode(message):
                case Stop():
                    while self._in_flight:
                        self._finish_oldest()
                    return
                case Compile(constraint):
                    self._compile_ahead(constraint)
                case Aside() as aside:
                    assert self._begin_aside is not None, "the leader knows that none is asked for"
                    while self._num_ended < aside.num_ended:
                        self._finish_oldest()
                    self._begin_aside(aside)
                case Launch(plan, is_compared):
                    self._launch(plan, message if is_compared else None)
                case Draft(plan):
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
            digest = StepDigest(result.step, _digest(followed.message, result))
            self._ring.report_in_turn(_encoder.encode(digest))  # answers may fill the socket
        if followed.joined is not None and result.tokens:
            self._report_result(followed.joined, followed.is_draft, result)

    def _report_result(self, step: int, is_draft: bool, result: StepResult) -> None:
        data = _encoder.encode(result)
        for start in range(0, len(data), _PIECE_BYTES):
            end = start + _PIECE_BYTES
            piece = ResultPiece(step, is_draft, data[start:end], goes_on=end < len(data))
            self._ring.report_in_turn(_encoder.encode(piece))


def _joined(plan: StepPlan) -> int | None:
    """The number of a step of ranks that have rows of their own; None = all have the same."""
    return plan.step if plan.of_ranks else None


def report_failure(ring: PlanRingReader, error: BaseException) -> None:
    """Tells the leader why this rank ends."""
    if isinstance(error, RingError):
        return  # there is nobody to tell
    reason = error.message if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
    failure = RankFailure(reason[:MAX_REASON_CHARS], isinstance(error, ConfigError))
    ring.report(_encoder.encode(failure))
