"""Schedulers with one bug each, which the machine of random histories has to find."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from configs.schema import SchedulerConfig
from engine.plan import StepPlan, StepResult
from engine.request import Request, RequestKey
from engine.scheduling.admission import Admission
from engine.scheduling.capacity import Capacity
from engine.scheduling.contracts import StepOutput
from engine.scheduling.drafting import Drafting
from engine.scheduling.finish import Ending, FinishRules, SampledTokens
from engine.scheduling.in_flight import StepInFlight, StepsInFlight
from engine.scheduling.request_blocks import RequestBlocks
from engine.scheduling.running import RunningRequests
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.short_reserve import Holdings, ShortReserve
from engine.scheduling.waiting import by_priority
from tests.engine.scheduling.world import BLOCK_SIZE


class AbortKeepsTheBlocks(Scheduler):
    def abort(self, key: RequestKey) -> bool:
        requests = [r for r in self._all_requests() if r.key == key]
        for request in requests:
            self._cache._pool.acquire(request.block_ids)
        return super().abort(key)


class WithPlantedBlocks(Scheduler):
    """A scheduler whose `RequestBlocks` have the bug."""

    blocks_class: type[RequestBlocks]

    def __init__(self, config: SchedulerConfig, **parts: Any) -> None:
        super().__init__(config, **parts)
        self._blocks.__class__ = self.blocks_class


class WithPlantedAdmission(Scheduler):
    """A scheduler whose `Admission` has the bug."""

    admission_class: type[Admission]

    def __init__(self, config: SchedulerConfig, **parts: Any) -> None:
        super().__init__(config, **parts)
        self._admission.__class__ = self.admission_class


class CountsOneBlockTooFew(WithPlantedBlocks):
    class blocks_class(RequestBlocks):  # noqa: N801 - an attribute
        def full(self, requests: Iterable[Request]) -> list[Request]:
            return super().full(requests)[1:]


class IndexesBeforeTheStepHasRun(WithPlantedAdmission):
    class admission_class(Admission):  # noqa: N801 - an attribute
        def _acquire_blocks(self, request: Request, now_s: float) -> bool:
            is_admitted = super()._acquire_blocks(request, now_s)
            if is_admitted:
                self._state.blocks.hash_full(request)
                for i in range(request.num_indexed_blocks, request.num_known_tokens // BLOCK_SIZE):
                    parent = request.block_hashes[i - 1] if i else None
                    self._state.cache.index(request.block_ids[i], request.block_hashes[i], parent)
            return is_admitted


class CountsTokensAnewAfterPreemption(Scheduler):
    def commit(self, plan: StepPlan, result: StepResult) -> StepOutput:
        preempted = {request.key for request in self._running if request.num_preemptions > 0}
        output = super().commit(plan, result)
        for i, (ingress_id, record) in enumerate(output.tokens):
            index = record.index + int(record.key in preempted)
            output.tokens[i] = ingress_id, msgspec.structs.replace(record, index=index)
        return output


class TakesOneTokenMoreThanTheBudget(Scheduler):
    def __init__(self, config: SchedulerConfig, **parts: Any) -> None:
        generous = msgspec.structs.replace(
            config, max_num_batched_tokens=config.max_num_batched_tokens + 1
        )
        super().__init__(generous, **parts)


class PreemptionKeepsTheProgress(WithPlantedAdmission):
    class admission_class(Admission):  # noqa: N801 - an attribute
        def _acquire_blocks(self, request: Request, now_s: float) -> bool:
            num_computed_tokens = request.num_computed_tokens
            is_admitted = super()._acquire_blocks(request, now_s)
            request.num_computed_tokens = max(num_computed_tokens, request.num_computed_tokens)
            return is_admitted

    def _preempt(self, request: Request) -> None:
        num_computed_tokens = request.num_computed_tokens
        super()._preempt(request)
        request.num_computed_tokens = num_computed_tokens


class RowsAreLost(Scheduler):
    def _unseat(self, request: Request) -> None:
        self._running.remove(request)
        request.row = None


class HitsTheWholePrompt(WithPlantedAdmission):
    class admission_class(Admission):  # noqa: N801 - an attribute
        def _acquire_blocks(self, request: Request, now_s: float) -> bool:
            request.tokens.append(0)
            is_admitted = super()._acquire_blocks(request, now_s)
            request.tokens.pop()
            return is_admitted


class PoisonedBlocksAreNotZeroed(Scheduler):
    def plan(self, now_s: float) -> StepPlan | None:
        self._cache.release(self._blocks.take_nonfinite())
        return super().plan(now_s)


class PoisonedBlocksCanBeFound(Scheduler):
    def _leave_without_token(self, request: Request, *, is_finite: bool) -> None:
        super()._leave_without_token(request, is_finite=is_finite)
        poisoned = self._blocks.nonfinite_block_ids
        for i, block_id in enumerate(poisoned[: len(request.block_hashes)]):
            parent = request.block_hashes[i - 1] if i else None
            self._cache.index(block_id, request.block_hashes[i], parent)


class AsksForASpareBlock(WithPlantedAdmission):
    class admission_class(Admission):  # noqa: N801 - an attribute
        def _acquire_blocks(self, request: Request, now_s: float) -> bool:
            num_blocks = -(-request.num_known_tokens // BLOCK_SIZE)
            is_last = num_blocks == self._state.cache.num_blocks
            return not is_last and super()._acquire_blocks(request, now_s)


class TwinsDecideDifferently(Scheduler):
    """As if an order came from a set or from addresses: every other instance turns it round."""

    num_built = 0

    def __init__(self, config: SchedulerConfig, **parts: Any) -> None:
        super().__init__(config, **parts)
        type(self).num_built += 1
        self._turns_round = self.num_built % 2 == 0

    def plan(self, now_s: float) -> StepPlan | None:
        if self._turns_round:
            self._running.decodes = dict(reversed(self._running.decodes.items()))
            self._running._columns = None  # made of them anew
        return super().plan(now_s)


class _CheckedCapacity(Capacity):
    def victim(self, full: Sequence[Request], num_left: int) -> tuple[Request | None, bool]:
        victim, is_for_others = super().victim(full, num_left)
        if victim is None:
            return victim, is_for_others
        reserve = self._reserve
        longs = [r for r in self._running if reserve.is_long(r)]
        waiting = [r for r in self._waiting if reserve.is_long(r)]
        if is_for_others:
            num_made = victim.num_known_tokens - victim.num_known_at_preemption
            assert victim in longs
            assert num_made >= reserve.threshold, f"{victim.key} made {num_made} tokens"
            before = [r for r in waiting if by_priority(r) < by_priority(victim)]
            place = by_priority(victim)
            is_first = all(place < by_priority(r) for r in longs if r is not victim)
            assert before or not is_first, f"{victim.key} was the first"
        return victim, is_for_others


class KeepsItsBounds(Scheduler):
    """Not a bug: checks what `short_reserve` says of everybody who gives way."""

    def __init__(self, config: SchedulerConfig, **parts: Any) -> None:
        super().__init__(config, **parts)
        self._capacity.__class__ = _CheckedCapacity


class WhoIsBackGivesWayAtOnce(KeepsItsBounds):
    def __init__(self, config: SchedulerConfig, **parts: Any) -> None:
        super().__init__(config, **parts)

        class Reserve(ShortReserve):
            def _has_progressed(self, request: Request) -> bool:
                return True

        self._reserve.__class__ = Reserve


class TheFirstGivesWay(KeepsItsBounds):
    def __init__(self, config: SchedulerConfig, **parts: Any) -> None:
        super().__init__(config, **parts)

        class Reserve(ShortReserve):
            def may_give_way(self, held: Holdings) -> bool:
                return len(held.longs) > 0

            def first_running_long(self, held: Holdings) -> Request | None:
                return None

        self._reserve.__class__ = Reserve


# ---- planted bugs that need a step in flight -----------------------------------------------------


class EmitsTheTokenAfterTheLast(Scheduler):
    """What comes for a request that has left is not dropped."""

    def __init__(self, config: SchedulerConfig, **parts: Any) -> None:
        super().__init__(config, **parts)

        class Sampled(SampledTokens):
            def append_all(
                self, step: StepInFlight, result: StepResult, output: StepOutput
            ) -> list[Ending]:
                gone = [request for request in step.requests if request.row is None]
                for request in gone:
                    request.row = 0
                endings = super().append_all(step, result, output)
                for request in gone:
                    request.row = None
                return [(request, finish) for request, finish in endings if request not in gone]

        self._sampled = Sampled(self._finish_rules)


class IndexesWhatIsStillInFlight(WithPlantedBlocks):
    class blocks_class(RequestBlocks):  # noqa: N801 - an attribute
        def index_full(self, request: Request, num_computed_tokens: int) -> None:
            num_tokens = min(request.num_computed_tokens, request.num_known_tokens)
            super().index_full(request, num_tokens)


class PreemptsWithAStepInFlight(Scheduler):
    """And takes a request that is back in a row for the one that the step computed."""

    def _grow_rows(self) -> dict[int, list[int]] | None:
        in_flight, self._in_flight = self._in_flight, StepsInFlight()
        grown = super()._grow_rows()
        self._in_flight = in_flight
        return grown


class FreesBlocksOfAStepInFlight(Scheduler):
    def _leave(self, request: Request) -> None:
        in_flight, self._in_flight = self._in_flight, StepsInFlight()
        super()._leave(request)
        self._in_flight = in_flight


class FreesBlocksOfAStepInFlightTwice(Scheduler):
    def _leave(self, request: Request) -> None:
        block_ids = list(request.block_ids)
        super()._leave(request)
        self._cache.release(block_ids)


class GoesOnPastItsLastToken(Scheduler):
    def __init__(self, config: SchedulerConfig, **parts: Any) -> None:
        super().__init__(config, **parts)

        class Rules(FinishRules):
            def at_last_token(self, requests: Iterable[Request]) -> list[Request]:
                return []

        self._finish_rules.__class__ = Rules


class PausesOneTokenTooSoon(Scheduler):
    def __init__(self, config: SchedulerConfig, **parts: Any) -> None:
        super().__init__(config, **parts)

        class Rules(FinishRules):
            def last_count(self, request: Request) -> int:
                return super().last_count(request) - 1

        self._finish_rules.__class__ = Rules


class WhoLeavesIsPlannedOn(Scheduler):
    def __init__(self, config: SchedulerConfig, **parts: Any) -> None:
        super().__init__(config, **parts)

        class Running(RunningRequests):
            def remove(self, request: Request) -> None:
                is_decode = request.key in self.decodes
                super().remove(request)
                if is_decode:
                    self.decodes[request.key] = request

        self._running.__class__ = Running


class ADecodeThatEndsIsPassedOver(Scheduler):
    """The short way for decodes is taken by all that have one token left, too."""

    def __init__(self, config: SchedulerConfig, **parts: Any) -> None:
        super().__init__(config, **parts)

        class Sampled(SampledTokens):
            def append_all(
                self, step: StepInFlight, result: StepResult, output: StepOutput
            ) -> list[Ending]:
                endings = super().append_all(step, result, output)
                return [(r, f) for r, f in endings if r not in step.requests[: step.num_decodes]]

        self._sampled = Sampled(self._finish_rules)


class ZeroedBlocksAreFreeAtOnce(WithPlantedBlocks):
    class blocks_class(RequestBlocks):  # noqa: N801 - an attribute
        def take_nonfinite(self) -> list[int]:
            block_ids = super().take_nonfinite()
            self._cache.release(block_ids)
            return block_ids


class AnnouncesWhatIsStillInFlight(Scheduler):
    def plan(self, now_s: float) -> StepPlan | None:
        plan = super().plan(now_s)
        for request in self._running.prompts.values():
            num_indexed_blocks = request.num_indexed_blocks
            request.num_indexed_blocks = request.num_computed_tokens // BLOCK_SIZE
            self._handoff_queue.advance(request)
            request.num_indexed_blocks = num_indexed_blocks
        return plan


class WithPlantedDrafting(Scheduler):
    """A scheduler whose `Drafting` has the bug."""

    drafting_class: type[Drafting]

    def __init__(self, config: SchedulerConfig, **parts: Any) -> None:
        super().__init__(config, **parts)
        self.drafting.__class__ = self.drafting_class


class TokensInFlightAreForgotten(WithPlantedDrafting):
    class drafting_class(Drafting):  # noqa: N801 - an attribute
        def _num_in_flight(self, request: Request) -> int:
            return 0


class WhoLeavesStaysAhead(WithPlantedDrafting):
    class drafting_class(Drafting):  # noqa: N801 - an attribute
        def unseat(self, request: Request) -> None:
            ahead = dict(self._ahead)
            super().unseat(request)
            self._ahead = ahead
