"""Decides how many drafts each row of a step verifies; replayable, without clock and device.

Three questions, each with its own part:

    RequestGates    may this request speculate, and how deep?   gates.py, by the rules below
    choose_drafts   which drafts pay in this step?              expected tokens per second
    Purse           does speculation pay at all?                measured against plain steps

Gates of a request. Above `max_temperature` it has no drafts. At first it may have `first_drafts`.
Acceptance over its last `window` attempts is the share of judged drafts that were accepted; drafts
after the first rejected one are not judged. Above `more_above` it gets one draft more, up to
`max_drafts`; below `fewer_below` one less, down to `first_drafts`. Below `off_below` it stops, and
tries again `retry_steps` steps later, twice as late after each failure; after a retry it needs
`back_above` to stay. A fixed threshold stands in for costs: an acceptance of 0.3 pays in a step of
one row, and 0.5 does not in one of 256. So once the costs are fitted the budget decides whether
low acceptance pays, and the threshold only holds with `stops_always`.

Trials. What a request of which nothing is known accepts is taken from all others (`everyone`).
Where drafts do not pay by that, `trial_rows` such requests at a time are tried, with `trial_drafts`
each as far as the step has room, if drafts would pay were all rows to accept much: a trial of all
256 rows of a step costs over a plain step, and several such steps are in flight before the first
result. Until something is known of any, the rest wait for those. Afterwards new trials begin
`retry_steps` later, and each time after four times as long, up to `max_retry_steps`, until drafts
pay without a trial. Other requests of which nothing is known are not even asked while drafts do not
pay by what all others accept: to be asked they may have to be held. Where requests differ in what
they accept by more than chance, what others do says little, and all are tried.

Budget of a step. A draft's survival is the probability that it and all before it are accepted: the
product of estimates by position. Drafts are taken in the order of survival, so a row's are a
prefix. Of all budgets the one with the most expected tokens per second wins:

    (rows + sum of the survivals taken) / (seconds of these rows + what the drafts add)

If requests differ by no more than chance, a choice among them would be one of luck, and a row left
without drafts only waits longer for those of others. Then all rows get as many, or none, unless
that gives up more than `fair_slack` of these tokens.

A step that verifies costs what the cost model predicts for the plain step with the drafts as more
new tokens: products cost by the token, and a row's keys are read once for all its queries. So the
model learns the price of drafts from plain steps of more rows. Prompts of the same step are paid
in any case and are not counted; the padding that drafts add to its graph is. What steps with drafts
of about that size took beyond the prediction is added to it (`surcharge.py`).

Drafts are optional and shrink first: to the tokens that the step has left, and beside prompts or
while short ones wait to `prompt_slack` of the plain step's time. A prompt waits for all of its
step, and one that comes meanwhile for the rest of it. A request rests if none of its drafts paid in
a few steps in a row. Steps with prompts do not count: the next step may
have room for drafts.

Purse. Steps with drafts pay into it what they gain over plain steps, or take out what they lose;
each step adds `refill` up to `purse_steps`. An empty purse stops speculation until it is half full,
so the loss is at most `refill` of the time and `purse_steps` plain steps, whatever is accepted or
mispredicted. A step of more than `most_times` its prediction counts as that much: else a pause of
the host, as while a kernel compiles, would be owed for thousands of steps. Beside prompts drafts
count as at most twice what the cost model says that they add: the prediction of a long prompt is
wrong by more than a plain step. Of what was gained `saved_steps` more are kept: drafts that pay are
not stopped by a pause, and drafts that no longer do may lose that much of what they gained.

Time is counted in steps. The same calls in the same order give the same decisions.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from engine.cost_model import SEGMENTS, StepCosts, StepWork
from engine.speculation.gates import Integers, RequestGates, Vector
from engine.speculation.rules import DEFAULT_RULES, SpeculationRules
from engine.speculation.surcharge import StepKind, Surcharge

NO_GRAPH = StepKind()
_NO_SURCHARGE = Surcharge()
_SEGMENT_ENDS = np.array([0.0, *(end for _, end in SEGMENTS[:-1]), 1e9])  # tokens of a step
_SEGMENT_TOKENS = np.diff(_SEGMENT_ENDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOffer:
    """A step without drafts, and what may be added to it."""

    keys: Sequence[Hashable]  # [R] requests that sample one token each without drafts; distinct
    max_drafts: Sequence[int]  # [R] what the drafter has for the row, within its gate; 0 = none
    work: StepWork  # of the whole step without drafts, prompts included
    draft_pass_s: float = 0.0  # of the drafter, for each position that any row drafts
    max_draft_tokens: int | None = None  # left of the step's token budget; None = no limit
    # Of the step with drafts, unless it takes longer without any; None = no limit.
    max_step_s: float | None = None
    is_short_waiting: bool = False
    graph_tokens: Sequence[int] = ()  # ascending sizes that a step's tokens are padded to
    # Rows that a step would sample if none speculated: more than R if some are held back because
    # drafts need their newest token on the host. None = R.
    num_plain_rows: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDrafts:
    """The decision for a step, and the prediction that it rests on."""

    num_drafts: list[int]  # [R]
    expected_tokens: float  # of these rows
    plain_s: float  # predicted, of the step without drafts
    step_s: float  # predicted, with drafts and the drafter's passes
    rows_s: float = 0.0  # predicted, of a step of these rows alone, without prompts and drafts
    plain_rate: float = 0.0  # predicted tokens per second of steps without speculation; 0 = unknown
    surcharge_s: float = 0.0  # part of step_s
    wait_s: float = 0.0  # part of step_s, in which the device waits for the drafts
    num_tokens: int = 0  # of the step, prompts and drafts included
    kind: StepKind = NO_GRAPH
    is_holding: bool = False  # rows are held back, so that even without drafts it may lose
    was_asked: bool = False  # some row might have had drafts
    num_beginning: int = 0  # rows that begin to have drafts, for which the host needs longer
    reason: str = ""

    @property
    def has_drafts(self) -> bool:
        return any(self.num_drafts)

    @property
    def predicted_gain(self) -> float:
        """Tokens per second over those of plain steps, prompts of the step not counted."""
        if not self.plain_rate:
            return 1.0
        return self.expected_tokens / (self.rows_s + self.step_s - self.plain_s) / self.plain_rate


def verify_seconds(
    costs: StepCosts, work: StepWork, num_drafts: Vector, graph_tokens: Sequence[int] = ()
) -> Vector:
    """Predicted seconds [N] of the step `work` with each of `num_drafts` [N] drafts in all."""
    ends, at_ends_s = _SEGMENT_ENDS, _seconds_at_ends(costs.slopes_s)
    tokens = work.num_new_tokens + num_drafts
    if graph_tokens:
        sizes = _vector(tuple(graph_tokens))
        at = np.searchsorted(sizes, tokens)
        tokens = np.where(at < len(sizes), sizes[np.minimum(at, len(sizes) - 1)], tokens)
    rest_s = costs.step_seconds(work) - float(np.interp(work.num_new_tokens, ends, at_ends_s))
    seconds: Vector = rest_s + np.interp(tokens, ends, at_ends_s)
    return seconds


@lru_cache(maxsize=8)  # costs change with a fit, and sizes never; several steps ask of the same
def _seconds_at_ends(slopes_s: tuple[float, ...]) -> Vector:
    seconds = np.zeros(len(_SEGMENT_ENDS))
    np.cumsum(_SEGMENT_TOKENS * slopes_s, out=seconds[1:])
    return seconds


@lru_cache(maxsize=8)
def _vector(numbers: tuple[int, ...]) -> Vector:
    return np.array(numbers, dtype=np.float64)


def verify_work(work: StepWork, num_drafts: int) -> StepWork:
    """What the cost model observes of the step `work` that verified so many drafts in all."""
    return work.with_work(StepWork(num_prompt_tokens=num_drafts))


def choose_drafts(
    survivals: Vector,
    offer: StepOffer,
    costs: StepCosts,
    rules: SpeculationRules = DEFAULT_RULES,
    surcharge: Surcharge = _NO_SURCHARGE,
) -> StepDrafts:
    """The drafts with the most expected tokens per second.

    `survivals` [R, depth] descend; 0 = there is no draft.
    """
    num_rows, depth = survivals.shape
    # Position by position, so that of equal survivals the earlier position comes first.
    flat = survivals.T.ravel()
    (given,) = flat.nonzero()
    # Of 16 bits, which sort in a tenth of the time: drafts that differ by less count as equal.
    ranks = ((1.0 - flat[given]) * 0xFFFF).astype(np.uint16)
    order = given[ranks.argsort(kind="stable")]  # [drafts]: position * R + row
    nums = np.arange(len(order) + 1.0)
    step_s = verify_seconds(costs, offer.work, nums, offer.graph_tokens)
    plain_s = float(step_s[0])
    # [drafts]: of so many drafts and one
    added_s = step_s[1:] - plain_s + _surcharge_s(surcharge, offer, nums[1:]) + surcharge.wait_s
    rows_s = costs.step_seconds(_rows_alone(offer.work)) if num_rows else 0.0
    limit_s = _limit_s(offer, plain_s, rules) - plain_s
    best, best_rate = order[:0], 0.0
    for deepest in range(1, depth + 1) if offer.draft_pass_s else [depth]:
        taken = order[order < deepest * num_rows][: offer.max_draft_tokens]
        seconds = added_s[: len(taken)] + deepest * offer.draft_pass_s
        num_fitting = int(np.searchsorted(seconds, limit_s, side="right"))
        if num_fitting == 0:
            break
        rates = (num_rows + np.cumsum(flat[taken[:num_fitting]])) / (rows_s + seconds[:num_fitting])
        num = int(rates.argmax()) + 1
        if rates[num - 1] > best_rate:
            best, best_rate = taken[:num], float(rates[num - 1])
    alike, alike_rate = _best_alike(survivals, offer, added_s, rows_s, limit_s)
    plain_rate = _plain_rate(offer, costs)
    if max(alike_rate, plain_rate) >= (1 - rules.fair_slack) * best_rate:
        best, best_rate = order[order < alike * num_rows], alike_rate
    is_small = num_rows <= rules.trial_rows
    if best_rate < (rules.min_gain if is_small else rules.many_gain) * plain_rate:
        best = order[:0]
    counts = np.bincount(best % max(num_rows, 1), minlength=num_rows)
    return price_drafts(counts, survivals, offer, costs, surcharge)


def _largest_graph(offer: StepOffer) -> int:
    """Tokens of it; 0 = there is none."""
    return max(offer.graph_tokens, default=0)


def _kind(offer: StepOffer, *, has_graph: bool) -> StepKind:
    return StepKind(has_prompts=offer.work.num_prompt_tokens > 0, has_graph=has_graph)


def _surcharge_s(surcharge: Surcharge, offer: StepOffer, num_drafts: Vector) -> Vector:
    """[N] of the step with so many drafts [N] in all; without a graph no less than with one."""
    tokens = offer.work.num_new_tokens + num_drafts
    with_graph, without = (
        surcharge.seconds(_kind(offer, has_graph=has_graph), tokens) for has_graph in (True, False)
    )
    has_graph = tokens <= _largest_graph(offer)
    found: Vector = np.where(has_graph, with_graph, np.maximum(with_graph, without))
    return found


def _best_alike(
    survivals: Vector, offer: StepOffer, added_s: Vector, rows_s: float, limit_s: float
) -> tuple[int, float]:
    """The drafts of each row, and tokens per second, of the best step in which all have as many.

    A row that has fewer gives these. 0 = there is no such step within the limits.
    """
    best, best_rate = 0, 0.0
    nums = np.count_nonzero(survivals, axis=0).cumsum()  # [depth]
    tokens = len(survivals) + survivals.sum(0).cumsum()
    most = float("inf") if offer.max_draft_tokens is None else offer.max_draft_tokens
    for index, num in enumerate(nums.tolist()):
        if not 0 < num <= most:
            break
        seconds = float(added_s[num - 1]) + (index + 1) * offer.draft_pass_s
        rate = float(tokens[index]) / (rows_s + seconds)
        if seconds <= limit_s and rate > best_rate:
            best, best_rate = index + 1, rate
    return best, best_rate


def price_drafts(
    counts: Integers,
    survivals: Vector,
    offer: StepOffer,
    costs: StepCosts,
    surcharge: Surcharge = _NO_SURCHARGE,
) -> StepDrafts:
    """The step in which the rows verify `counts` [R] drafts, as it is predicted."""
    num_rows, depth = survivals.shape
    num_drafts = int(counts.sum())
    nums = np.array([0.0, num_drafts])
    plain_s, step_s = verify_seconds(costs, offer.work, nums, offer.graph_tokens).tolist()
    surcharge_s = wait_s = 0.0
    if num_drafts:
        (surcharge_s,), wait_s = _surcharge_s(surcharge, offer, nums[1:]).tolist(), surcharge.wait_s
        step_s += surcharge_s + wait_s + int(counts.max()) * offer.draft_pass_s
    num_tokens = offer.work.num_new_tokens + num_drafts
    is_taken = np.arange(depth) < counts[:, None]
    return StepDrafts(
        num_drafts=counts.tolist(),
        expected_tokens=num_rows + float(survivals[is_taken].sum()),
        plain_s=plain_s,
        step_s=step_s if num_drafts else plain_s,
        rows_s=costs.step_seconds(_rows_alone(offer.work)) if num_rows else 0.0,
        plain_rate=_plain_rate(offer, costs),
        surcharge_s=surcharge_s,
        wait_s=wait_s,
        num_tokens=num_tokens,
        kind=_kind(offer, has_graph=num_tokens <= _largest_graph(offer)),
        is_holding=(offer.num_plain_rows or 0) > num_rows,
        was_asked=any(offer.max_drafts),
        reason="most expected tokens per second" if num_drafts else "no draft pays",
    )


def _rows_alone(work: StepWork) -> StepWork:
    return StepWork(num_decode_rows=work.num_decode_rows, num_decode_keys=work.num_decode_keys)


def _plain_rate(offer: StepOffer, costs: StepCosts) -> float:
    """Predicted tokens per second of steps without speculation; 0 if there are no rows."""
    num_rows = len(offer.keys)
    if num_rows == 0:
        return 0.0
    num_plain = max(num_rows, offer.num_plain_rows or 0)
    plain = StepWork(
        num_decode_rows=offer.work.num_decode_rows * num_plain // num_rows,
        num_decode_keys=offer.work.num_decode_keys * num_plain // num_rows,
    )
    return num_plain / costs.step_seconds(plain)


def _limit_s(offer: StepOffer, plain_s: float, rules: SpeculationRules) -> float:
    """Seconds of the step with drafts, at most."""
    limit_s = float("inf") if offer.max_step_s is None else max(offer.max_step_s, plain_s)
    delays_prompts = offer.is_short_waiting or offer.work.num_prompt_tokens > 0
    return min(limit_s, plain_s * (1 + rules.prompt_slack)) if delays_prompts else limit_s


def _num_fitting(
    nums: Integers,
    depth: int,
    offer: StepOffer,
    costs: StepCosts,
    rules: SpeculationRules,
    surcharge: Surcharge,
) -> int:
    """How many of `nums`, drafts of a step in all, ascending, are within the offer's limits.

    depth: the most drafts of a row.
    """
    seconds = verify_seconds(costs, offer.work, np.array([0, *nums]), offer.graph_tokens)
    limit_s = _limit_s(offer, float(seconds[0]), rules)
    more_s = _surcharge_s(surcharge, offer, nums.astype(np.float64)) + surcharge.wait_s
    seconds = seconds[1:] + more_s
    seconds += depth * offer.draft_pass_s
    num_in_time = int(np.searchsorted(seconds, limit_s, side="right"))
    if offer.max_draft_tokens is None:
        return num_in_time
    return min(num_in_time, int(np.searchsorted(nums, offer.max_draft_tokens, side="right")))


class Purse:
    """What speculation may lose, in plain steps, and whether it is on."""

    NUM_PLAIN = 5  # plain steps whose errors are kept
    GAIN_DECAY = 0.98  # of the measured gain, a step with drafts
    SURCHARGE_DECAY = 0.998  # a plain step: what nothing has shown lately is tried again
    # Rows that begin to have drafts, in a step that says what such steps take: of more the host
    # launches it late, once. It kept up with 64 beside an H200, and not with 256.
    MOST_BEGINNING = 64

    def __init__(self, rules: SpeculationRules) -> None:
        self._rules = rules
        self.balance = rules.purse_steps
        self.is_on = True
        self.num_stops = 0
        # Measured over predicted seconds of plain steps.
        self._ratios: deque[float] = deque(maxlen=self.NUM_PLAIN)
        self._bias = 1.0  # their median
        self._plain_waits_s: deque[float] = deque(maxlen=self.NUM_PLAIN)
        self.surcharge = Surcharge()
        self._gain = self._predicted = self._weight = 0.0  # decayed sums

    @property
    def is_half_full(self) -> bool:
        return self.balance >= self._rules.purse_steps / 2

    @property
    def _plain_wait_s(self) -> float:
        waits_s = sorted(self._plain_waits_s)
        return waits_s[len(waits_s) // 2] if waits_s else 0.0

    @property
    def gain(self) -> float | None:
        """Measured tokens per second over those of plain steps; None before a step with drafts."""
        return self._gain / self._weight if self._weight else None

    @property
    def predicted_gain(self) -> float | None:
        """The same as it was predicted for these steps."""
        return self._predicted / self._weight if self._weight else None

    def observe(
        self, drafts: StepDrafts, num_tokens: int, seconds: float, waited_s: float = 0.0
    ) -> None:
        """Add a step's gain or loss, and stop or start.

        waited_s: before it, in which the device had nothing to do. What it waits before plain steps
        too does not count.
        """
        rules = self._rules
        self.balance = max(self.balance, min(self.balance + rules.refill, rules.purse_steps))
        if drafts.has_drafts or drafts.is_holding:
            counted_s = self._counted_s(drafts, seconds / self._bias)
            more_s = min(max(0.0, waited_s - self._plain_wait_s) / self._bias, drafts.step_s)
            self._add_gain(drafts, num_tokens, counted_s, more_s)
        else:
            self.surcharge.fade(self.SURCHARGE_DECAY)
            self._ratios.append(seconds / drafts.plain_s)
            self._bias = sorted(self._ratios)[len(self._ratios) // 2]
            # Else it may have waited for the answer, or for its prompts.
            if not (drafts.was_asked or drafts.kind.has_prompts):
                self._plain_waits_s.append(waited_s)
        self.balance = min(self.balance, rules.purse_steps + rules.saved_steps)
        if self.is_on and self.balance < 0:
            self.is_on = False
            self.num_stops += 1
        elif self.is_half_full:
            self.is_on = True

    def _counted_s(self, drafts: StepDrafts, seconds: float) -> float:
        """As much of a step's seconds as is the doing of its drafts, for all that is known."""
        if not drafts.kind.has_prompts:
            return min(seconds, self._rules.most_times * drafts.step_s)
        # Without the surcharge: it would grow with each step, up to the error of the prompts.
        added_s = drafts.step_s - drafts.wait_s - drafts.surcharge_s - drafts.plain_s
        return float(np.clip(seconds, drafts.plain_s, drafts.plain_s + 2 * added_s))

    def _add_gain(
        self, drafts: StepDrafts, num_tokens: int, seconds: float, waited_s: float
    ) -> None:
        earned_s = num_tokens / drafts.plain_rate
        error_s = seconds - (drafts.step_s - drafts.wait_s) + drafts.surcharge_s
        spent_s = max(drafts.rows_s + seconds + waited_s - drafts.plain_s, 0.1 * drafts.rows_s)
        self.balance += (earned_s - spent_s) / drafts.rows_s
        if drafts.has_drafts:
            if drafts.num_beginning <= self.MOST_BEGINNING:
                self.surcharge.observe(drafts.kind, drafts.num_tokens, error_s, waited_s)
            self._gain = self._gain * self.GAIN_DECAY + earned_s / spent_s
            self._predicted = self._predicted * self.GAIN_DECAY + drafts.predicted_gain
            self._weight = self._weight * self.GAIN_DECAY + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStatistics:
    """What speculation came to since the start."""

    num_drafts: int  # verified
    num_accepted: int
    num_attempts: int  # rows of steps that verified drafts
    acceptance_by_position: list[float | None]  # of judged drafts; None = none was judged
    measured_gain: float | None  # tokens per second over those of plain steps, lately
    predicted_gain: float | None  # of the last steps with drafts
    is_on: bool
    num_stops: int  # of all speculation, by an empty purse

    @property
    def num_wasted(self) -> int:
        """Drafts that were verified and not accepted."""
        return self.num_drafts - self.num_accepted

    @property
    def accepted_length(self) -> float | None:
        """Tokens of a row and step that verified drafts."""
        return 1 + self.num_accepted / self.num_attempts if self.num_attempts else None


class SpeculationController:
    """The gates of all requests, the budget of each step and the purse, for one worker."""

    keeps_limits = True

    def __init__(self, rules: SpeculationRules = DEFAULT_RULES) -> None:
        self._rules = rules
        self._gates = RequestGates(rules)
        self._purse = Purse(rules)
        self._step = 0  # steps observed
        self._are_costs_fitted = False  # in the last plan
        # Of the last step without prompts.
        self._newest: tuple[StepOffer, StepCosts] | None = None
        # By position, since the start.
        self._judged: Integers = np.zeros(rules.max_drafts, np.int64)
        self._accepted: Integers = np.zeros(rules.max_drafts, np.int64)
        self._num_drafts = self._num_attempts = 0

    def bound(self, temperature: float, limit: int | None) -> int:
        """How many drafts a request may ever have; `limit` is its own bound, None = the rules'."""
        if temperature > self._rules.max_temperature:
            return 0
        return self._rules.max_drafts if limit is None else min(limit, self._rules.max_drafts)

    def max_drafts(self, keys: Sequence[Hashable]) -> list[int]:
        """How many drafts to ask the drafter for, by the gates; 0 = none."""
        if not self._purse.is_on:
            return [0] * len(keys)
        slots = self._gates.slots_of(keys)
        most: list[int] = self._gates.max_drafts(slots, self._step, self._pays_unseen).tolist()
        return most

    def _pays_unseen(self) -> bool:
        """Whether drafts of rows that nothing is known of pay in steps like the last one."""
        if self._newest is None:
            return True
        offer, costs = self._newest
        return self._would_pay(offer, costs, self._gates.everyone.rate)

    def plan(self, offer: StepOffer, costs: StepCosts) -> StepDrafts:
        """How many drafts of each row the step verifies; a request often refused rests a while.

        Not because of a step with prompts: what drafts cost beside these says nothing of others.
        """
        self._are_costs_fitted = costs.is_fitted
        if offer.work.num_prompt_tokens == 0 and not offer.is_short_waiting:
            self._newest = replace(offer, num_plain_rows=None), costs
        most = np.array(offer.max_drafts, dtype=np.int64)
        asked = np.flatnonzero(most)
        slots = self._gates.slots_of([offer.keys[i] for i in asked.tolist()])
        survivals = np.zeros((len(most), int(most.max(initial=0))))
        survivals[asked] = self._gates.survivals(slots, most[asked])[:, : survivals.shape[1]]
        surcharge = self._purse.surcharge
        if len(asked) == 0:
            return price_drafts(np.zeros_like(most), survivals, offer, costs, surcharge)
        rules = self._rules
        if self._gates.do_differ:
            rules = replace(rules, fair_slack=0.0, many_gain=rules.min_gain)
        drafts = choose_drafts(survivals, offer, costs, rules, surcharge)
        if offer.is_short_waiting:
            return drafts
        counts = np.array(drafts.num_drafts, dtype=np.int64)
        is_tried = self._gates.is_tried(slots)
        if counts[asked[~is_tried]].any():
            self._gates.end_waiting()
        elif len(most) > rules.trial_rows:
            counts[asked] = np.minimum(counts[asked], rules.trial_drafts)
            drafts = price_drafts(counts, survivals, offer, costs, surcharge)
        tried = asked[is_tried & (counts[asked] == 0)]
        if len(tried) and self._would_pay(offer, costs, self._gates.everyone.FIRST_RATE):
            trial = np.minimum(most[tried], rules.trial_drafts)
            nums = counts.sum() + trial.cumsum()
            depth = max(int(counts.max()), int(trial.max()))
            num_fitting = _num_fitting(nums, depth, offer, costs, rules, surcharge)
            counts[tried[:num_fitting]] = trial[:num_fitting]
            drafts = price_drafts(counts, survivals, offer, costs, surcharge)
        refused = slots[counts[asked] == 0]
        if len(refused) and offer.work.num_prompt_tokens == 0:
            self._gates.refuse(refused, self._step)
        return drafts

    def _would_pay(self, offer: StepOffer, costs: StepCosts, rate: float) -> bool:
        """Whether drafts would pay if each row had some, and accepted each at this rate."""
        survivals = rate ** np.arange(1.0, self._rules.first_drafts + 1)
        everyone = np.tile(survivals, (len(offer.keys), 1))
        surcharge = self._purse.surcharge
        return choose_drafts(everyone, offer, costs, self._rules, surcharge).has_drafts

    def observe(
        self, keys: Sequence[Hashable], num_drafts: Sequence[int], num_accepted: Sequence[int]
    ) -> None:
        """Record verified rows: of a row's drafts, at least one, so many were accepted."""
        drafts, accepted = np.array(num_drafts, np.int64), np.array(num_accepted, np.int64)
        is_wrong = (drafts < 1) | (accepted < 0) | (accepted > drafts)
        assert not is_wrong.any(), f"{num_accepted} of {num_drafts} accepted"
        num_judged = np.minimum(accepted + 1, drafts)
        self._judged += self._count_positions(num_judged)
        self._accepted += self._count_positions(accepted)
        self._num_drafts += int(drafts.sum())
        self._num_attempts += len(drafts)
        slots = self._gates.known_slots(keys)
        here = slots >= 0  # the others ended meanwhile
        if here.any():
            may_stop = self._rules.stops_always or not self._are_costs_fitted
            verified = slots[here], drafts[here], accepted[here]
            self._gates.observe(*verified, self._step, may_stop=may_stop)

    def _count_positions(self, lengths: Integers) -> Integers:
        """[max_drafts]  how many of `lengths` reach beyond each position."""
        counts = np.bincount(lengths, minlength=self._rules.max_drafts + 1)
        reached: Integers = counts[:0:-1].cumsum()[::-1]
        return reached

    def observe_step(
        self, drafts: StepDrafts, num_tokens: int, seconds: float | None, waited_s: float = 0.0
    ) -> None:
        """Record a step of these rows: the tokens they sampled, and its seconds on the device.

        `seconds` includes the drafter's passes; None = not measured, or shared with another step.
        `waited_s` before that the device had nothing to do: drafts were not known yet, or the host
        took longer than the step before.
        Nothing is learned from a step of zero duration, which a coarse clock may report.
        """
        if seconds is not None and seconds > 0.0 and drafts.num_drafts:
            self._purse.observe(drafts, num_tokens, seconds, waited_s)
            self._gates.everyone.may_explore = self._purse.is_half_full
        self._step += 1

    def forget(self, key: Hashable) -> None:
        """Drop the request's record; an unknown key is ignored."""
        self._gates.forget(key)

    def statistics(self) -> SpeculationStatistics:
        pairs = zip(self._accepted.tolist(), self._judged.tolist(), strict=True)
        return SpeculationStatistics(
            num_drafts=self._num_drafts,
            num_accepted=int(self._accepted.sum()),
            num_attempts=self._num_attempts,
            acceptance_by_position=[a / j if j else None for a, j in pairs],
            measured_gain=self._purse.gain,
            predicted_gain=self._purse.predicted_gain,
            is_on=self._purse.is_on,
            num_stops=self._purse.num_stops,
        )
