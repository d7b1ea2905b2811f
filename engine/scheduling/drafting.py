"""Plans the drafts of a step, and keeps what a request with drafts needs until its next step.

    ask     policy.max_drafts    requests whose newest token is known: how many drafts at most
    propose drafter.propose      the drafts; after the decision if a pass of the drafter costs time
    decide  policy.plan          how many of each are verified, by the tokens left in the step
    room    RequestBlocks        blocks for them; drafts are optional and never preempt a request
    commit  counts, _Observation what the step made of them
    settle  policy.observe       the policy learns of it, once the step's tokens are on their way

Drafts that follow from tokens on the host hold their request: it is not planned while a step that
computes it is in flight. With overlapped steps it therefore takes part in every other one, and if
all are held, the device waits for the host. A drafter on the device proposes ahead: for the tokens
that the step in flight will have given, whichever they are; so do n-grams that the device looks up
(`engine/runner/row_texts.py`), once a request has drafts from the host. Its requests take part in
every step, planned as if all drafts were right, and `commit` corrects what was counted. Held are
then only those whose choice depends on their earlier tokens, whose last token is in flight for
certain, or that are about to get their first drafts; where a model drafts, also those that had none
in a step. What a step gives a request that has ended meanwhile is dropped.

Holding costs, so the policy is told how many rows a plain step would decode, and for how long the
device had nothing to do. Rows that could go on wait for the held ones where two steps of fewer rows
cost more than the host's gap (`host_gap`), since each step reads all weights. A request without a
guess rests from being held, each time for twice as many steps. A scheduler without a drafter does
none of this.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from engine.cost_model import StepCosts, StepWork
from engine.messages import SpeculationLoad
from engine.plan import NEWEST, StepResult
from engine.request import Request, RequestKey
from engine.scheduling.drafter_prompts import DrafterPrompts
from engine.scheduling.host_gap import HostGap
from engine.scheduling.request_blocks import RequestBlocks
from engine.speculation.controller import StepDrafts, StepOffer
from engine.speculation.drafter import Drafter, DraftPolicy, most_drafts_ever
from engine.turns import Turns

_MAX_REST_STEPS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRoom:
    """What a step without drafts leaves for them."""

    work: StepWork
    costs: StepCosts
    max_tokens: int
    is_short_waiting: bool
    blocks: RequestBlocks
    num_spare_blocks: int  # that stay available
    max_model_len: int  # tokens that a row holds
    num_held_rows: int = 0  # that it would decode too, were they not held for drafts
    # Sizes that a step with prompts is padded to, ascending; () = none is.
    prompt_graph_tokens: Sequence[int] = ()
    max_prompt_step_s: float | None = None  # of a step with prompts; None = no limit

    def has_time_for(self, num_drafts: int) -> bool:
        """Whether a step with prompts and so many drafts keeps its limit; without prompts, yes.

        Most steps of long prompts do not: their chunks fill the limit. There nobody is asked who
        might have drafts, since the device would wait for the answer. Drafts that only fill what a
        graph is padded to are not given there either.
        """
        if self.work.num_prompt_tokens == 0 or self.max_prompt_step_s is None:
            return True
        work = self.work.with_work(StepWork(num_prompt_tokens=num_drafts))
        return self.costs.step_seconds(work) <= self.max_prompt_step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDrafts:
    """The drafts of one step; indices are those of its decodes."""

    drafts: dict[int, list[int]] = field(default_factory=dict)
    decision: StepDrafts | None = None  # None = no drafter was asked
    spent_s: float = 0.0  # by the drafter
    new_blocks: list[tuple[Request, list[int]]] = field(default_factory=list)  # appended for them
    # Of requests with drafts in a step in flight: tokens that it gives at most.
    nums_in_flight: dict[int, int] = field(default_factory=dict)
    max_model_len: int = 0  # as of `StepRoom`
    # Index, first token, token ids: as `StepPlan.texts`.
    texts: list[tuple[int, int, list[int]]] = field(default_factory=list)
    # Requests that from now on have drafts ahead: these are from the host, or their whole texts are
    # told to the device, both of which takes longer than what follows.
    num_beginning: int = 0
    has_time: bool = True  # for drafts, within the limit of a step with prompts

    @property
    def num_drafts(self) -> int:
        return sum([len(drafts) for drafts in self.drafts.values()])

    @property
    def guessed(self) -> list[int]:
        """Those whose number of tokens after the step is not known when it is planned."""
        return list({**self.drafts, **self.nums_in_flight})

    def in_plan(self) -> list[tuple[int, list[int]]]:
        """As `StepPlan.drafts`."""
        nums, drafts = self.nums_in_flight, self.drafts
        return [(i, [NEWEST] * nums.get(i, 0) + drafts.get(i, [])) for i in self.guessed]

    @property
    def surcharge_s(self) -> float:
        """Of `StepDrafts`; 0 without drafts."""
        return self.decision.surcharge_s if self.decision is not None and self.drafts else 0.0

    def work(self, plain: StepWork) -> StepWork:
        """The work of a step that is `plain` without drafts."""
        if not self.drafts:
            return plain
        return plain.with_work(StepWork(num_prompt_tokens=self.num_drafts))


NO_DRAFTS = PlannedDrafts()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Observation:
    """What a committed step tells the policy."""

    keys: Sequence[RequestKey]  # rows that had drafts
    num_drafts: Sequence[int]
    num_accepted: Sequence[int]
    decision: StepDrafts | None  # None = nothing is told of the step itself
    num_tokens: int = 0  # of the rows that were asked about
    seconds: float | None = None  # as of `DraftPolicy.observe_step`
    waited_s: float = 0.0

    def tell(self, policy: DraftPolicy) -> None:
        if self.keys:
            policy.observe(self.keys, self.num_drafts, self.num_accepted)
        if self.decision is not None:
            policy.observe_step(self.decision, self.num_tokens, self.seconds, self.waited_s)


@dataclass(slots=True, kw_only=True)
class DraftCounts:
    """Counters since start. Position 0 is a row's first draft."""

    num_drafted: int = 0
    num_accepted: int = 0
    num_verified: int = 0  # rows times steps with drafts; each gave one token more than accepted
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def add(self, num_drafts: Sequence[int], num_accepted: Sequence[int]) -> None:
        """Add verified rows: their drafts, and how many were accepted."""
        self.num_drafted += sum(num_drafts)
        self.num_accepted += sum(num_accepted)
        self.num_verified += len(num_drafts)
        _count_positions(self.drafted_at, num_drafts)
        _count_positions(self.accepted_at, num_accepted)
        self.accepted_at += [0] * (len(self.drafted_at) - len(self.accepted_at))


def _count_positions(counts: list[int], lengths: Sequence[int]) -> None:
    """Count one at each position below a length, for each of `lengths`."""
    for length, num in Counter(lengths).items():
        counts += [0] * (length - len(counts))
        for position in range(length):
            counts[position] += num


class Drafting:
    """The drafts of one scheduler's requests; engine thread only."""

    def __init__(
        self,
        drafter: Drafter | None,
        policy: DraftPolicy | None,
        *,
        holds: bool = True,
        graph_tokens: Sequence[int] = (),
        counts: DraftCounts | None = None,
        prompts: DrafterPrompts | None = None,
    ) -> None:
        """Both or none. `holds`: steps overlap, so requests that may get drafts must be held.

        graph_tokens: sizes that steps with drafts and without prompts are padded to, ascending; ()
        = none is. counts: of several schedulers, which have a policy in common; None = of this
        one's. prompts: of which a draft model computes K and V for decode workers; None = of none.
        """
        assert (drafter is None) == (policy is None), "a drafter and a policy go together"
        self.drafter = drafter
        self._prompts = prompts
        self._policy = policy
        self.holds = holds
        self._graph_tokens = tuple(graph_tokens)
        self._num_verified: dict[RequestKey, int] = {}  # newest tokens that no plan has named
        self._num_misses: dict[RequestKey, int] = {}  # proposals without a draft, in a row
        self._num_rest_steps: dict[RequestKey, int] = {}
        self._bounds: dict[RequestKey, int] = {}  # drafts that a request may ever have
        # Requests that go on while their step with drafts is in flight: it, and tokens at most.
        self._ahead: dict[RequestKey, tuple[PlannedDrafts, int]] = {}
        self._idle_s = self._late_s = 0.0
        self.waited_s = 0.0  # of the last planning, for passes of the drafter
        self._gap = HostGap()
        self._num_drafts_per_row = 0.0  # in the last step with drafts
        self.counts = counts or DraftCounts()
        # What happened and was not told to the policy, in its order.
        self._unsettled: list[Callable[[DraftPolicy], None]] = []

    def use_policy(self, policy: DraftPolicy) -> None:
        """From now on `policy` decides, instead of another one; no request may be here."""
        assert self._policy is not None, "nothing drafts"
        assert not self.kept_keys(), "the old policy knows requests"
        self.settle()
        self._policy = policy

    # ---- planning -------------------------------------------------------------------------------

    def planning(self, requests: Sequence[Request], room: StepRoom) -> Turns[PlannedDrafts]:
        """The drafts for a step that decodes `requests`; gives them blocks."""
        self.waited_s = 0.0
        self.settle()  # also for `to_hold`, which asks the policy after steps without decodes, too
        drafter, policy = self.drafter, self._policy
        if drafter is None or policy is None or not requests:
            return NO_DRAFTS
        in_flight = [self._num_in_flight(request) for request in requests]
        most = [0] * len(requests)
        has_time = not policy.keeps_limits or room.has_time_for(self._num_drafting(requests))
        if has_time:
            most = self._most_drafts(policy, requests, in_flight, room.max_model_len)
        found: dict[int, list[int]] = {}
        if not drafter.pass_s:
            found = yield from self._propose(drafter, requests, most, in_flight)
            most = [len(found.get(i, ())) for i in range(len(requests))]
        decision = policy.plan(self._offer(requests, most, room, drafter.pass_s), room.costs)
        new_blocks: list[tuple[Request, list[int]]] = []
        counts: list[int] = []
        for request, n, m in zip(requests, decision.num_drafts, in_flight, strict=True):
            num_tokens = request.num_known_tokens + m
            num_left = room.blocks.num_slots(request) - num_tokens
            if n > num_left:
                spare = room.num_spare_blocks
                ids = room.blocks.extend(request, num_tokens + n, num_spare_blocks=spare)
                new_blocks += [(request, ids)] if ids else []
                num_left = room.blocks.num_slots(request) - num_tokens
            counts.append(min(n, num_left))
        if drafter.pass_s:
            found = yield from self._propose(drafter, requests, counts, in_flight)
        drafts = {i: found[i][:n] for i, n in enumerate(counts) if n > 0 and i in found}
        if drafts:
            self._num_drafts_per_row = sum(map(len, drafts.values())) / len(requests)
        texts = _texts(drafter, requests, drafts)
        by_host = [i for i in drafts if not in_flight[i] and self._goes_ahead(requests[i])]
        return PlannedDrafts(
            drafts=drafts,
            decision=decision,
            new_blocks=new_blocks,
            spent_s=drafter.spent_s if any(counts) else 0.0,
            nums_in_flight={i: m for i, m in enumerate(in_flight) if m},
            texts=texts,
            num_beginning=len(by_host) + sum(start == 0 for _, start, _ in texts),
            max_model_len=room.max_model_len,
            has_time=has_time,
        )

    def _num_drafting(self, requests: Sequence[Request]) -> int:
        """Those that may have drafts, or of which that is not known yet."""
        return sum([self._bounds.get(request.key, 1) > 0 for request in requests])

    def _num_in_flight(self, request: Request) -> int:
        ahead = self._ahead.get(request.key)
        return 0 if ahead is None else ahead[1]

    def _most_drafts(
        self,
        policy: DraftPolicy,
        requests: Sequence[Request],
        in_flight: Sequence[int],
        max_model_len: int,
    ) -> list[int]:
        """Drafts to ask for; a row whose newest token is in flight, or due to end, gets none.

        Of what is in flight one token is certain, and the drafts behind all of it need their room.
        """
        most: list[int] = []
        gates = self._gates(policy, requests)
        for request, gate, num_in_flight in zip(requests, gates, in_flight, strict=True):
            num_known = len(request.tokens)
            if gate and num_known + num_in_flight - request.num_computed_tokens == 1:
                num_left = request.max_known_tokens - num_known - (num_in_flight > 0)
                num_left = min(num_left, max_model_len - num_known - num_in_flight)
                most.append(max(0, min(gate, num_left - 1)))
            else:
                most.append(0)
        return most

    def _gates(self, policy: DraftPolicy, requests: Sequence[Request]) -> list[int]:
        """Drafts at most of each, by the policy and the request itself."""
        if not requests:
            return []
        keys = [request.key for request in requests]
        bounds = list(map(self._bounds.get, keys))
        if None in bounds:
            for request in requests:
                if request.key not in self._bounds:
                    self._bounds[request.key] = most_drafts_ever(policy, request)
            bounds = list(map(self._bounds.get, keys))
        # Who may have none is not asked about: it would take the place of one that is tried.
        gates = iter(policy.max_drafts([key for key, b in zip(keys, bounds, strict=True) if b]))
        return [min(bound, next(gates)) if bound else 0 for bound in bounds]

    def _offer(
        self, requests: Sequence[Request], most: list[int], room: StepRoom, pass_s: float
    ) -> StepOffer:
        has_prompts = room.work.num_prompt_tokens > 0  # then the step replays a graph of these
        most_tokens = room.max_tokens
        largest = max(self._graph_tokens, default=0)
        if not has_prompts and largest >= 2 * len(requests):
            # Launched without a graph, a step of 1,280 tokens took 40 ms instead of 27, and the
            # host 48. Where graphs are too small for a draft of each row, the policy decides.
            most_tokens = min(most_tokens, largest - len(requests))
        return StepOffer(
            keys=[request.key for request in requests],
            max_drafts=most,
            work=room.work,
            draft_pass_s=pass_s,
            max_draft_tokens=most_tokens,
            max_step_s=room.max_prompt_step_s if has_prompts else None,
            is_short_waiting=room.is_short_waiting,
            graph_tokens=room.prompt_graph_tokens if has_prompts else self._graph_tokens,
            num_plain_rows=len(requests) + room.num_held_rows,
        )

    def _propose(
        self,
        drafter: Drafter,
        requests: Sequence[Request],
        most: Sequence[int],
        in_flight: Sequence[int],
    ) -> Turns[dict[int, list[int]]]:
        """Index -> drafts, up to the first that would end the request, of those that have any."""
        indices = [i for i, num_drafts in enumerate(most) if num_drafts > 0]
        ahead: dict[int, tuple[Request, int, int]] = {}
        asked: list[tuple[int, Request]] = []
        for i in indices:
            if self._goes_ahead(requests[i]):
                ahead[i] = requests[i], most[i], in_flight[i]
            else:
                asked.append((i, requests[i]))
        found = self._propose_ahead(drafter, ahead) if ahead else {}
        if not asked:
            return found
        proposed = yield from drafter.proposing([(request, most[i]) for i, request in asked])
        self.waited_s = drafter.spent_s
        for (i, request), drafts in zip(asked, proposed, strict=True):
            ends = (at for at, token_id in enumerate(drafts) if token_id in request.stop_ids)
            # After a token that ends the request nothing is sampled, so it need not be a draft.
            kept = drafts[: next(ends, most[i])]
            self._count_miss(request.key, has_drafts=bool(kept))
            if kept:
                found[i] = kept
        return found

    def _propose_ahead(
        self, drafter: Drafter, asked: Mapping[int, tuple[Request, int, int]]
    ) -> dict[int, list[int]]:
        """asked: by index, as of `Drafter.propose_ahead`."""
        proposed = drafter.propose_ahead(list(asked.values()))
        for (request, _, _), drafts in zip(asked.values(), proposed, strict=True):
            self._count_miss(request.key, has_drafts=bool(drafts))
        return {i: drafts for i, drafts in zip(asked, proposed, strict=True) if drafts}

    def _goes_ahead(self, request: Request) -> bool:
        """Whether the request may have drafts in a step before those of the last one are known."""
        return not request.depends_on_tokens and self._can_go_ahead

    @property
    def _can_go_ahead(self) -> bool:
        return self.holds and self.drafter is not None and self.drafter.can_propose_ahead

    def _count_miss(self, key: RequestKey, *, has_drafts: bool) -> None:
        if has_drafts:
            self._num_misses.pop(key, None)
        elif self.holds:
            self._num_misses[key] = num_misses = self._num_misses.get(key, 0) + 1
            self._num_rest_steps[key] = min(2**num_misses, _MAX_REST_STEPS)

    def to_hold(
        self, decodes: Sequence[Request], begun: Sequence[Request], planned: PlannedDrafts
    ) -> list[Request]:
        """Those that must not be planned before the result of the step just planned is known.

        `begun`: requests whose prompt this step completes.
        """
        nums = self._nums_going_on(decodes, planned)  # of each in `planned.guessed`
        held = [decodes[i] for i in nums if not self._go_on(decodes[i], i, planned, nums[i])]
        if not self.holds or self._policy is None:
            return held
        without = [r for i, r in enumerate(decodes) if i not in nums]
        awake = [r for r in (*without, *begun) if not self._rests(r)]
        if not planned.has_time:
            return held  # nor will the next step of these prompts have any
        return held + [r for r, most in zip(awake, self._gates(self._policy, awake)) if most]  # noqa: B905

    def _nums_going_on(self, decodes: Sequence[Request], planned: PlannedDrafts) -> dict[int, int]:
        """Index of each request in `guessed` -> tokens that the step just planned gives it at most.

        0 = it may not have drafts behind these: it has none in this step, and its drafter needs
        some there, or knows none, or it is not its turn to have any.
        """
        nums = dict.fromkeys(planned.guessed, 0)
        nums |= {i: 1 + len(its_drafts) for i, its_drafts in planned.drafts.items()}
        if self._policy is None or self.drafter is None or not self.drafter.resumes_ahead:
            return nums
        without = [i for i, num in nums.items() if num == 0]
        gates = self._gates(self._policy, [decodes[i] for i in without])
        for i, gate in zip(without, gates, strict=True):
            nums[i] = int(gate > 0 and decodes[i].key not in self._num_rest_steps)
        return nums

    def _go_on(self, request: Request, index: int, planned: PlannedDrafts, num: int) -> bool:
        """Let a request be planned again while this step is in flight, if it can be.

        num: tokens that the step gives it at most; 0 = it must not be.
        """
        num_certain = request.num_known_tokens + min(planned.nums_in_flight.get(index, 0), 1) + 1
        is_full = request.num_computed_tokens + 1 >= planned.max_model_len
        has_ended = num_certain >= request.max_known_tokens or is_full
        if num == 0 or has_ended or not self._goes_ahead(request):
            self._ahead.pop(request.key, None)
            return False
        self._ahead[request.key] = planned, num
        return True

    def _rests(self, request: Request) -> bool:
        """Whether the request goes on without drafts; counts a step of its rest."""
        if not self._num_rest_steps and request.decode_worker is None:
            return False
        rest = self._num_rest_steps.pop(request.key, 0)
        if rest > 1:
            self._num_rest_steps[request.key] = rest - 1
        return rest > 0 or request.decode_worker is not None

    def count_idle(self, seconds: float) -> None:
        """The device had nothing to do before the step just planned, because rows were held."""
        self._idle_s += self._gap.add(seconds)

    def count_late(self, seconds: float) -> None:
        """So long the device waited before the step that is committed next, launched too late.

        To be told before each commit, also of 0 seconds.
        """
        self._late_s = seconds  # kept: several ranks with this `Drafting` commit parts of the step

    def pays_to_wait(
        self, decodes: StepWork, num_held_rows: int, costs: StepCosts, *, num_elsewhere: int = 0
    ) -> bool:
        """As of `HostGap.is_worth_it`."""
        return self._gap.is_worth_it(
            decodes,
            num_held_rows,
            costs,
            num_drafts_per_row=self._num_drafts_per_row,
            num_elsewhere=num_elsewhere,
        )

    def count_going_on(self) -> None:
        """The rows of a step do not wait for those held, so it measures no gap."""
        self._gap.fade()

    def take_verified(self, requests: Sequence[Request]) -> dict[RequestKey, list[int]]:
        """The tokens of a step with drafts, of each of `requests` whose last one had any.

        For the next plan, which names them.
        """
        if not self._num_verified:
            return {}
        counts = [(r, self._num_verified.pop(r.key, 0)) for r in requests]
        return {r.key: r.tokens[-num_verified:] for r, num_verified in counts if num_verified}

    # ---- afterwards -----------------------------------------------------------------------------

    def nums_known(
        self, requests: Sequence[Request], planned: PlannedDrafts
    ) -> list[tuple[int, int]]:
        """Index and known tokens of the requests with drafts; before a step's are appended."""
        return [(index, requests[index].num_known_tokens) for index in planned.guessed]

    def commit(
        self,
        requests: Sequence[Request],
        planned: PlannedDrafts,
        known_before: Sequence[tuple[int, int]],
        result: StepResult,
    ) -> list[Request]:
        """Count what a step accepted and correct its requests with drafts; returns these.

        Their tokens were appended. The progress of a request was counted as if all drafts were
        right; then it counts all tokens but the newest, and a step in flight besides.
        """
        advanced: list[Request] = []
        observed: list[tuple[RequestKey, int, int]] = []
        for index, num_before in known_before:
            request = requests[index]
            if request.row is None or not result.is_finite[index]:
                continue
            key, num_known = request.key, len(request.tokens)
            num_new = num_known - num_before
            num_drafts = len(planned.drafts.get(index, ()))
            request.num_computed_tokens -= 1 + num_drafts - num_new
            self._num_verified[key] = self._num_verified.get(key, 0) + num_new
            if key in self._ahead and self._ahead[key][0] is planned:
                del self._ahead[key]  # no later step has it
            if num_known >= request.max_known_tokens:
                num_drafts = num_new - 1  # those behind its last token were not judged
            if num_drafts:
                observed.append((key, num_drafts, num_new - 1))
            advanced.append(request)
        keys, nums_drafts, nums_accepted = zip(*observed, strict=True) if observed else ((),) * 3
        self.counts.add(nums_drafts, nums_accepted)
        found = _Observation(
            keys=keys, num_drafts=nums_drafts, num_accepted=nums_accepted, decision=None
        )
        if planned.decision is not None:
            found = self._of_step(found, planned, planned.decision, result)
        if observed or planned.decision is not None:
            self._unsettled.append(found.tell)
        return advanced

    def _of_step(
        self,
        rows: _Observation,
        planned: PlannedDrafts,
        decision: StepDrafts,
        result: StepResult,
    ) -> _Observation:
        """With what the step took, and what the device waited before it."""
        idle_s, self._idle_s = self._idle_s, 0.0
        if idle_s > 0:
            decision = replace(decision, is_holding=True)
        if planned.num_beginning:
            decision = replace(decision, num_beginning=planned.num_beginning)
        num_tokens = sum(map(len, result.tokens[: len(decision.num_drafts)]))
        seconds = result.duration_s
        if seconds is not None:
            seconds += planned.spent_s
        # The drafter works while the device waits, or is what the device computes meanwhile.
        waited_s = max(0.0, max(idle_s, self._late_s) - planned.spent_s)
        return replace(
            rows, decision=decision, num_tokens=num_tokens, seconds=seconds, waited_s=waited_s
        )

    def settle(self) -> None:
        """Tell the policy of the steps that were committed since the last time.

        Nobody else needs it before the next plan, which does it if it was not done while the host
        had nothing to do.
        """
        unsettled, self._unsettled = self._unsettled, []
        if self._policy is not None:
            for tell in unsettled:
                tell(self._policy)

    def drafter_chunks(self, chunks: Sequence[tuple[Request, int]]) -> list[int]:
        """As of `DrafterPrompts.plan`."""
        return [] if self._prompts is None else self._prompts.plan(chunks)

    def arrived(self, request: Request) -> None:
        """The request joins with its KV."""
        if self.drafter is not None:
            self.drafter.arrived(request)

    def forget_blocks(self, block_ids: Sequence[int]) -> None:
        """These blocks get another content."""
        for keeper in (self.drafter, self._prompts):
            if keeper is not None:
                keeper.forget_blocks(block_ids)

    def read(self, requests: Iterable[Request]) -> None:
        """Prepare the next drafts of those that may have some, by their known tokens."""
        if self.drafter is not None:
            may = [r for r in requests if r.row is not None and self._bounds.get(r.key)]
            self.drafter.read(may)

    def unseat(self, request: Request) -> None:
        """The request leaves its row: another admission names all its tokens."""
        self._num_verified.pop(request.key, None)
        self._ahead.pop(request.key, None)
        if self.drafter is not None:
            self.drafter.forget(request)

    def bar(self, request: Request) -> None:
        """The request gets no more drafts."""
        self._bounds[request.key] = 0

    def finish(self, request: Request) -> None:
        """The request has its complete answer; `forget` follows."""
        if self.drafter is not None:
            self.drafter.add_finished(request)

    def forget(self, request: Request) -> None:
        """The request leaves for good."""
        if self._policy is not None:  # after its last step, which counts
            self._unsettled.append(lambda policy: policy.forget(request.key))
        self._num_misses.pop(request.key, None)
        self._num_rest_steps.pop(request.key, None)
        self._bounds.pop(request.key, None)

    def load(self) -> SpeculationLoad | None:
        """None = there is no drafter. Gains are those of the steps that the policy was told of."""
        if self._policy is None:
            return None
        counts, found = self.counts, self._policy.statistics()
        load = SpeculationLoad(
            num_drafts=counts.num_drafted,
            num_accepted=counts.num_accepted,
            num_rows=counts.num_verified,
            drafts_at=tuple(counts.drafted_at),
            accepted_at=tuple(counts.accepted_at),
        )
        if found is None:
            return load
        return msgspec.structs.replace(
            load,
            predicted_gain=found.predicted_gain,
            measured_gain=found.measured_gain,
            is_on=found.is_on,
            num_stops=found.num_stops,
        )

    def kept_keys(self) -> set[Hashable]:
        """Requests of which anything is kept here, for the check that none is forgotten."""
        kept = self._num_verified, self._num_misses, self._num_rest_steps, self._bounds, self._ahead
        return {key for keys in kept for key in keys}


def _texts(
    drafter: Drafter, requests: Sequence[Request], drafts: Mapping[int, Sequence[int]]
) -> list[tuple[int, int, list[int]]]:
    """What the device needs for drafts that it looks up, and was not told."""
    looked_up = [i for i, its_drafts in drafts.items() if its_drafts[0] < NEWEST]
    told = [(i, *piece) for i in looked_up for piece in drafter.tell(requests[i])]
    return [(i, start, token_ids) for i, start, token_ids in told if token_ids]
