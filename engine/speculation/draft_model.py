"""Drafts by a smaller model of the same vocabulary, which samples with the target's own noise.

    pass 0    what the draft model has not computed of each request, up to its newest token -> d1
    pass 1    d1 -> d2            each pass is a step of the draft model's own executor
    pass 2    d2 -> d3            with the same rows and the same blocks as the target's

The draft model's sampler gets the request's parameters: seed, output index, penalties, constraint.
Noise is named by seed, index and token, so where both models' logits lead to the same token, the
draft is right at any temperature.

A pass is launched before the one before it is waited for, as steps of the target are: it reads the
newest draft on the device. Only for requests whose choice depends on which tokens the drafts are
(penalties, constraints) is every pass waited for.

Where the target's steps overlap (`propose_ahead`), no pass is waited for: drafts stay on the device
for the target's next step. Pass 0 then computes what the target's step in flight sampled, right or
not, and draws after the last sample that counts. The later passes begin there, too.

Its KV lies in a store of its own with as many blocks as the target's and under the same block ids.
So there is one accounting: whoever holds a block holds it in both stores, and nothing is allocated
or freed here. The target's prefix index says nothing of this store: `_contents` knows which of its
blocks hold the KV of which content, and what is missing is computed, at most `max_tokens` a pass. A
request that is not caught up gets no drafts yet. A wrong value here could only make a draft wrong.

Where prompts move between workers, both stores are one (`KvLayout.drafter`), and a prefill worker
has computed the draft model's KV beside the target's (engine/runner/prompt_passes.py). A request
says of how many tokens it came; the rest is computed here, as all is where the stores are two.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from engine.core import DraftingExecutor, PendingStep
from engine.plan import NEWEST, RowAdmission, StepPlan, StepResult, all_given
from engine.request import Request, RequestKey, SamplingParams
from engine.turns import Turns, run_alone

_FIRST_PASS_S = 1e-3  # until one was timed
_DECAY = 0.9  # of the mean duration of a pass, a pass
_MAX_IN_FLIGHT = 1  # passes while the next one is launched: what an executor has memory for


@dataclass(slots=True, kw_only=True)
class _Seat:
    """A request in a row of the draft model's executor."""

    row: int
    num_known_tokens: int  # that the executor was told
    num_computed_tokens: int  # true ones that have KV in this store
    num_blocks: int  # that the executor was told
    # of the last proposal, all but the last with KV
    drafts: list[int] = field(default_factory=list)
    num_sampled_tokens: int = 0  # behind those with KV: computed as the step in flight sampled them

    def num_true_tokens(self, num_known: int) -> int:
        """Tokens with KV, once the step then in flight and no other has given its tokens."""
        return min(self.num_computed_tokens + self.num_sampled_tokens, num_known)

    def catch_up(self, new: list[int], *, keeps_drafts: bool) -> None:
        """Take in the request's new tokens; `keeps_drafts`: KV of drafts that were right stays."""
        if keeps_drafts and self.num_computed_tokens == self.num_known_tokens:
            for token_id, draft in zip(new, self.drafts[:-1], strict=False):
                if token_id != draft:
                    break
                self.num_computed_tokens += 1
        # The newest token is always computed: its logits are what the first draft is drawn from.
        self.num_known_tokens += len(new)
        self.num_computed_tokens = min(self.num_computed_tokens, self.num_known_tokens - 1)
        self.drafts = []
        self.num_sampled_tokens = 0

    def go_ahead(self, num_new: int, num_in_flight: int) -> None:
        """Take in `num_new` tokens of the step before, all with KV; the next ones are in flight."""
        self.num_known_tokens += num_new
        self.num_computed_tokens = self.num_known_tokens
        self.num_sampled_tokens = num_in_flight
        self.drafts = []


@dataclass(slots=True, kw_only=True, eq=False)
class _Proposal:
    """Drafts that are being made; places are indices of `asked`."""

    asked: Sequence[tuple[Request, int]]
    found: list[list[int]]  # drafts that are known here
    # Tokens that a step in flight gives a place at most; others are in none.
    nums_in_flight: Mapping[int, int] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)  # places that get no more
    # Passes not waited for: their places, and whether it is another than the first.
    launched: deque[tuple[list[int], PendingStep, bool]] = field(default_factory=deque)

    def going_on(self, places: Sequence[int], num_drawn: int) -> list[int]:
        """Those of the places, with `num_drawn` drafts each, that ask for more."""
        return [i for i in places if num_drawn < self.asked[i][1] and i not in self.ended]

    def must_know_drafts(self, places: Sequence[int]) -> bool:
        """Whether the next draft of any depends on which tokens the drafts before are."""
        params = [self.asked[place][0].params for place in places]
        return any(p.needs_history or p.is_constrained for p in params)


class _Span(msgspec.Struct, frozen=True, kw_only=True):
    """What the first pass computes of a request."""

    place: int  # in `asked`
    seat: _Seat
    first: int  # token
    num_new: int
    is_in_flight: bool  # the new tokens are what the target's step in flight samples

    @property
    def is_end(self) -> bool:
        """Whether a draft follows."""
        return self.is_in_flight or self.first + self.num_new == self.seat.num_known_tokens

    @property
    def samples(self) -> list[int]:
        """As in `StepPlan.drafts`."""
        return all_given(self.num_new) if self.is_in_flight else []


@dataclass(frozen=True, slots=True)
class _RowChanges:
    """What a pass tells the executor of its rows; as the fields of `StepPlan`."""

    admissions: list[RowAdmission] = field(default_factory=list)
    verified: list[tuple[int, list[int]]] = field(default_factory=list)
    new_block_ids: list[list[int]] = field(default_factory=list)


class DraftModel:
    """A drafter over an executor that nobody else launches steps on; engine thread only."""

    # Tokens at a request's start that the model does not read. Of one that reads each token beside
    # what the target made of the token before (EAGLE-3), 1: it then begins with the second, at
    # position 0, and its KV at a position depends on the next token, too; so do hashes of blocks.
    num_skipped_tokens = 0
    keeps_drafts = True  # whether KV of drafts that were right is what their tokens would have

    def __init__(
        self,
        executor: DraftingExecutor,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        max_tokens: int,
        now_s: Callable[[], float],
        can_propose_ahead: bool = False,
    ) -> None:
        """num_blocks, block_size: of the target's cache and of both stores. max_tokens: of a pass.

        max_model_len: of the draft model; longer requests get no drafts. can_propose_ahead: the
        executor gives drafts to the target's steps; else they must come to the host.
        """
        self._executor = executor
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._max_tokens = max_tokens
        self._now_s = now_s
        self._can_propose_ahead = can_propose_ahead
        self._unsettled: list[_Proposal] = []  # whose passes were not waited for
        self._seats: dict[RequestKey, _Seat] = {}
        self._released_rows: list[int] = []
        self._zero_block_ids: list[int] = []
        # [num_blocks]  hash of the content whose KV is complete in each block here; b"" = none
        self._contents: list[bytes] = [b""] * num_blocks
        self._num_steps = 0
        self._pass_s = _FIRST_PASS_S
        self._spent_s = 0.0
        self.num_computed_tokens = 0  # since the start

    @property
    def executor(self) -> DraftingExecutor:
        return self._executor

    def wrap_executor(self, wrap: Callable[[DraftingExecutor], DraftingExecutor]) -> None:
        """Wrap the executor; call it before the first pass."""
        self._executor = wrap(self._executor)

    @property
    def pass_s(self) -> float:
        return self._pass_s

    @property
    def spent_s(self) -> float:
        return self._spent_s

    def propose(self, asked: Sequence[tuple[Request, int]]) -> list[list[int]]:
        return run_alone(self.proposing(asked))

    def proposing(self, asked: Sequence[tuple[Request, int]]) -> Turns[list[list[int]]]:
        start_s = self._now_s()
        proposal = _Proposal(asked=asked, found=[[] for _ in asked])
        places, num_drawn = self._first_pass(asked, proposal), 1
        while places := proposal.going_on(places, num_drawn):
            num_left = 0 if proposal.must_know_drafts(places) else _MAX_IN_FLIGHT
            if len(proposal.launched) > num_left:
                yield
            self._settle(proposal, num_left)
            if places := proposal.going_on(places, num_drawn):
                self._next_pass(places, num_drawn, proposal)
            num_drawn += 1
        if proposal.launched:
            yield
        self._settle(proposal, 0)
        for (request, _), drafts in zip(asked, proposal.found, strict=True):
            if (seat := self._seats.get(request.key)) is not None:
                seat.drafts = list(drafts)
        self._spent_s = self._now_s() - start_s
        return proposal.found

    @property
    def can_propose_ahead(self) -> bool:
        return self._can_propose_ahead

    @property
    def resumes_ahead(self) -> bool:
        """No: a pass computes what one step gave, and not also what the step before did."""
        return False

    def propose_ahead(self, asked: Sequence[tuple[Request, int, int]]) -> list[list[int]]:
        assert self._can_propose_ahead, "the drafts must come to the host"
        for earlier in self._unsettled:
            self._settle_ahead(earlier)
        proposal = _Proposal(
            asked=[(request, num_drafts) for request, num_drafts, _ in asked],
            found=[[] for _ in asked],
            nums_in_flight={place: num for place, (_, _, num) in enumerate(asked) if num},
        )
        self._unsettled = [proposal]
        drafting = places = self._first_pass(proposal.asked, proposal)
        num_drawn = 0
        while places:
            self._executor.give_drafts(num_drawn)
            num_drawn += 1
            if places := proposal.going_on(places, num_drawn):
                self._next_pass(places, num_drawn, proposal)
        self._spent_s = num_drawn * self._pass_s
        found: list[list[int]] = [[] for _ in asked]
        for place in drafting:
            found[place] = all_given(asked[place][1])
        return found

    def tell(self, request: Request) -> list[tuple[int, list[int]]]:
        """Nothing: passes read the device's samples themselves."""
        return []

    def read(self, requests: Iterable[Request]) -> None:
        """Does nothing: passes read the tokens."""

    def add_finished(self, request: Request) -> None:
        """Does nothing: a model does not learn from answers."""

    def forget(self, request: Request) -> None:
        seat = self._seats.pop(request.key, None)
        if seat is not None:
            self._released_rows.append(seat.row)

    def arrived(self, request: Request) -> None:
        complete = range(request.num_indexed_blocks, request.num_drafter_tokens // self._block_size)
        for i in complete[: max(0, len(request.block_hashes) - complete.start)]:
            self._contents[request.block_ids[i]] = request.block_hashes[i]

    def forget_blocks(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self._contents[block_id] = b""

    # ---- passes ---------------------------------------------------------------------------------

    def _first_pass(self, asked: Sequence[tuple[Request, int]], proposal: _Proposal) -> list[int]:
        """Compute what is missing of all; a first draft for those caught up. Returns these."""
        changes, spans, num_left = _RowChanges(), list[_Span](), self._max_tokens
        for place in self._least_missing_first(proposal):
            request, num_drafts = asked[place]
            num_in_flight = proposal.nums_in_flight.get(place, 0)
            if not self._can_pass(request, num_drafts, num_in_flight, num_left):
                continue
            seat = self._take_seat(request, num_in_flight, changes)
            missing = num_in_flight or seat.num_known_tokens - seat.num_computed_tokens
            span = _Span(
                place=place,
                seat=seat,
                first=seat.num_computed_tokens,
                num_new=min(missing, num_left),
                is_in_flight=num_in_flight > 0,
            )
            spans.append(span)
            num_left -= span.num_new
        if not spans:
            return []
        self._begin_writing(asked, spans)
        num_samples = [int(span.is_end) for span in spans]
        plan = StepPlan(
            step=self._num_steps,
            rows=[span.seat.row for span in spans],
            num_new_tokens=[span.num_new for span in spans],
            num_computed_tokens=[span.first for span in spans],
            num_samples=num_samples,
            new_block_ids=changes.new_block_ids,
            admissions=changes.admissions,
            verified_tokens=changes.verified,
            drafts=[(i, span.samples) for i, span in enumerate(spans) if span.is_end],
            open_ended=[i for i, span in enumerate(spans) if span.is_in_flight],
        )
        places = [span.place for span in spans]
        proposal.launched.append((places, self._launch(plan), False))
        self._end_writing(asked, spans)
        return [span.place for span in spans if span.is_end]

    def _least_missing_first(self, proposal: _Proposal) -> list[int]:
        """All places, in the order in which the first pass takes them on.

        So whoever is caught up, or nearly so, gets drafts while the prompts of others are computed.
        """
        missing = [
            proposal.nums_in_flight.get(place) or self._num_missing(request)
            for place, (request, _) in enumerate(proposal.asked)
        ]
        return sorted(range(len(missing)), key=missing.__getitem__)

    def _num_missing(self, request: Request) -> int:
        """Known tokens without KV in this store; drafts that were right may have some."""
        seat = self._seats.get(request.key)
        num_known = request.num_known_tokens - self.num_skipped_tokens
        return num_known - (self._num_stored(request) if seat is None else seat.num_computed_tokens)

    def _can_pass(
        self, request: Request, num_drafts: int, num_in_flight: int, num_left: int
    ) -> bool:
        """num_left: tokens of the pass."""
        known = request.num_known_tokens
        num_known = known - self.num_skipped_tokens
        if num_left == 0 or num_known <= 0:
            return False
        if known + num_in_flight + num_drafts > self._max_model_len:
            return False
        if num_in_flight == 0:
            return True
        seat = self._seats.get(request.key)
        is_ready = seat is not None and seat.num_true_tokens(num_known) == num_known
        return is_ready and num_in_flight <= num_left

    def _take_seat(self, request: Request, num_in_flight: int, changes: _RowChanges) -> _Seat:
        """The request's seat, which knows all that is known of it from now on."""
        seat = self._seats.get(request.key)
        appended: list[int] = []
        if seat is None:
            seat = self._seat(request)
            changes.admissions.append(self._admission(request, seat))
        else:
            if new := request.tokens[self.num_skipped_tokens + seat.num_known_tokens :]:
                changes.verified.append((seat.row, new))
            if num_in_flight:
                before = seat.num_computed_tokens
                seat.go_ahead(len(new), num_in_flight)
                self._complete(request, before, seat.num_computed_tokens)
            else:
                seat.catch_up(new, keeps_drafts=self.keeps_drafts)
            appended = self._usable_blocks(request)[seat.num_blocks :]
        seat.num_blocks = len(self._usable_blocks(request))
        changes.new_block_ids.append(appended)
        return seat

    def _next_pass(self, places: list[int], num_drawn: int, proposal: _Proposal) -> None:
        """Compute the newest of the `num_drawn` drafts of each of `places`, draw the next one."""
        seats = [self._seats[proposal.asked[place][0].key] for place in places]
        counts = [1] * len(places)
        in_flight = [proposal.nums_in_flight.get(place, 0) for place in places]
        if proposal.launched:
            drafts = [[NEWEST] * (num + num_drawn) for num in in_flight]
        else:
            drafts = [list(proposal.found[place]) for place in places]
        nums_before = [seat.num_known_tokens + n for seat, n in zip(seats, in_flight, strict=True)]
        no_blocks: list[int] = []
        plan = StepPlan(
            step=self._num_steps,
            rows=[seat.row for seat in seats],
            num_new_tokens=counts,
            num_computed_tokens=[num + num_drawn - 1 for num in nums_before],
            num_samples=counts,
            new_block_ids=[no_blocks] * len(places),
            drafts=list(enumerate(drafts)),
            ahead=[i for i, num in enumerate(in_flight) if num],
        )
        proposal.launched.append((places, self._launch(plan), True))

    def _wait_pass(self, proposal: _Proposal) -> tuple[list[int], StepResult]:
        """Wait for the first of the launched passes; its places, and what it drew."""
        places, pending, is_later = proposal.launched.popleft()
        result = pending.wait()
        if is_later and result.duration_s is not None:
            self._pass_s += (1 - _DECAY) * (result.duration_s - self._pass_s)
        return places, result

    def _settle_ahead(self, proposal: _Proposal) -> None:
        """Wait for all launched passes. The target has their drafts, so only bad rows matter."""
        while proposal.launched:
            places, result = self._wait_pass(proposal)
            for place, is_finite in zip(places, result.is_finite, strict=True):
                if not is_finite and place not in proposal.ended:
                    self._take(proposal, place, None)

    def _settle(self, proposal: _Proposal, num_left: int) -> None:
        """Wait for the launched passes but the last `num_left`, and take what they drew."""
        while len(proposal.launched) > num_left:
            places, result = self._wait_pass(proposal)
            for place, drawn, is_finite in zip(
                places, result.tokens, result.is_finite, strict=True
            ):
                if place not in proposal.ended:
                    self._take(proposal, place, drawn if is_finite else None)
            proposal.ended.update(places[i] for i in result.allows_nothing)

    def _take(self, proposal: _Proposal, place: int, drawn: list[int] | None) -> None:
        """Append what was drawn; None = the row's numbers are not finite."""
        request = proposal.asked[place][0]
        if drawn is None:  # zero what the row wrote, and begin anew
            self._zero_block_ids += request.block_ids
            self.forget_blocks(request.block_ids)
            request.num_drafter_tokens = 0
            self.forget(request)
            proposal.found[place] = []
            proposal.ended.add(place)
        elif drawn:
            proposal.found[place] += drawn
            if drawn[0] in request.stop_ids:
                proposal.ended.add(place)

    def _launch(self, plan: StepPlan) -> PendingStep:
        """Rows that were left and blocks to be zeroed since the last step are added to the plan."""
        released, self._released_rows = self._released_rows, []
        zeroed, self._zero_block_ids = self._zero_block_ids, []
        plan = msgspec.structs.replace(
            plan, zero_block_ids=list(dict.fromkeys(zeroed)), released_rows=released
        )
        self._num_steps += 1
        self.num_computed_tokens += plan.num_tokens
        return self._executor.launch(plan)

    # ---- blocks ---------------------------------------------------------------------------------

    def _usable_blocks(self, request: Request) -> list[int]:
        """The request may have more, for drafts beyond this model's context."""
        return request.block_ids[: -(-self._max_model_len // self._block_size)]

    def _seat(self, request: Request) -> _Seat:
        """A seat in the target's row, with the leading blocks whose KV is here already."""
        assert request.row is not None, f"{request.key} has no row"
        num_known = request.num_known_tokens - self.num_skipped_tokens
        seat = _Seat(
            row=request.row,
            num_known_tokens=num_known,
            num_computed_tokens=min(self._num_stored(request), num_known - 1),
            num_blocks=len(self._usable_blocks(request)),
        )
        self._seats[request.key] = seat
        return seat

    def _num_stored(self, request: Request) -> int:
        """Leading tokens of a request without a seat whose KV is here already."""
        num_found = 0
        for block_id, content in zip(request.block_ids, request.block_hashes, strict=False):
            if self._contents[block_id] != content:
                break
            num_found += self._block_size
        # Of the last block, which is not full, only the request says what came.
        num_came = request.num_drafter_tokens
        return num_came if num_came - num_found in range(self._block_size) else num_found

    def _begin_writing(self, asked: Sequence[tuple[Request, int]], spans: Sequence[_Span]) -> None:
        """No block that the passes write, with drafts or tokens, is complete meanwhile."""
        for span in spans:
            for block_id in asked[span.place][0].block_ids[span.first // self._block_size :]:
                self._contents[block_id] = b""

    def _end_writing(self, asked: Sequence[tuple[Request, int]], spans: Sequence[_Span]) -> None:
        """Record what is computed now: the blocks that true tokens fill are complete."""
        for span in spans:
            if not span.is_in_flight:
                span.seat.num_computed_tokens = end = span.first + span.num_new
                self._complete(asked[span.place][0], span.first, end)

    def _complete(self, request: Request, start: int, end: int) -> None:
        """Record that the true tokens [start, end) have KV, as all before."""
        for i in range(start // self._block_size, end // self._block_size):
            if i < len(request.block_hashes):
                self._contents[request.block_ids[i]] = request.block_hashes[i]

    def _admission(self, request: Request, seat: _Seat) -> RowAdmission:
        skipped = self.num_skipped_tokens
        return RowAdmission(
            row=seat.row,
            token_ids=request.tokens[skipped:],
            num_prompt_tokens=request.num_prompt_tokens - skipped,
            params=_without_logprobs(request.params),
            block_ids=self._usable_blocks(request),
            num_computed_tokens=seat.num_computed_tokens,
        )


def _without_logprobs(params: SamplingParams) -> SamplingParams:
    """The same choice of tokens, of which nobody wants to know how likely they were."""
    return msgspec.structs.replace(
        params, logprobs=None, logprob_token_ids=(), prompt_logprobs=None
    )
