"""Decides how many drafts each row of a step verifies; replayable, without clock and device.

Three questions, each with its own part:

    RequestRecord   may this request speculate, and how deep?   the gates below
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

Budget of a step. A draft's survival is the probability that it and all before it are accepted: the
product of estimates by position. Drafts are taken in the order of survival, so a row's are a
prefix. Of all budgets the one with the most expected tokens per second wins:

    (rows + sum of the survivals taken) / (seconds of these rows + what the drafts add)

A step that verifies costs what the cost model predicts for the plain step with the drafts as more
new tokens: products cost by the token, and a row's keys are read once for all its queries. So the
model learns the price of drafts from plain steps of more rows. Prompts of the same step are paid
in any case and are not counted. What steps with drafts take beyond the prediction, lately, is added
to it (`surcharge_s`): other graphs, kernels that read keys more than once. Drafts are optional and
shrink first: to the tokens and seconds that the step has left, and while short prompts wait to
`short_slack` of the plain step's time.

Purse. Steps with drafts pay into it what they gain over plain steps, or take out what they lose;
each step adds `refill`. An empty purse stops speculation until it is half full, so the loss is at
most `refill` of the time and `purse_steps` plain steps, whatever is accepted or mispredicted.

Time is counted in steps. The same calls in the same order give the same decisions.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from engine.cost_model import SEGMENTS, StepCosts, StepWork

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationRules:
    """Every threshold of the controller."""

    max_temperature: float = 0.7  # above it a request does not speculate
    first_drafts: int = 4
    retry_drafts: int = 2  # at most, until the window after a retry is full
    max_drafts: int = 8
    window: int = 10  # attempts
    off_below: float = 0.5  # acceptance over the window
    stops_always: bool = False  # below it, even if drafts pay by the fitted costs
    fewer_below: float = 0.6
    back_above: float = 0.6  # of the first window after a retry
    more_above: float = 0.8
    retry_steps: int = 32  # of a request
    max_retry_steps: int = 1024
    min_gain: float = 1.03  # predicted, over the plain step; with less there are no drafts
    short_slack: float = 0.05  # share of the plain step that drafts may add while shorts wait
    purse_steps: float = 4.0  # plain steps that may be lost at once
    refill: float = 0.005  # of a plain step, for each step


DEFAULT_RULES = SpeculationRules()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOffer:
    """A step without drafts, and what may be added to it."""

    keys: Sequence[Hashable]  # [R] requests that sample one token each without drafts
    max_drafts: Sequence[int]  # [R] what the drafter has for the row, within its gate; 0 = none
    work: StepWork  # of the whole step without drafts, prompts included
    draft_pass_s: float = 0.0  # of the drafter, for each position that any row drafts
    max_draft_tokens: int | None = None  # left of the step's token budget; None = no limit
    max_step_s: float | None = None  # of the step with drafts; None = no limit
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
    is_holding: bool = False  # rows are held back, so that even without drafts it may lose
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
    ends = np.array([0.0, *(end for _, end in SEGMENTS[:-1]), 1e9])  # tokens
    at_ends_s = np.concatenate([[0.0], np.cumsum(np.diff(ends) * costs.slopes_s)])
    tokens = work.num_new_tokens + num_drafts
    if graph_tokens:
        sizes = np.array(graph_tokens, dtype=np.float64)
        at = np.searchsorted(sizes, tokens)
        tokens = np.where(at < len(sizes), sizes[np.minimum(at, len(sizes) - 1)], tokens)
    rest_s = costs.step_seconds(work) - float(np.interp(work.num_new_tokens, ends, at_ends_s))
    seconds: Vector = rest_s + np.interp(tokens, ends, at_ends_s)
    return seconds


def verify_work(work: StepWork, num_drafts: int) -> StepWork:
    """What the cost model observes of the step `work` that verified so many drafts in all."""
    return work.with_work(StepWork(num_prompt_tokens=num_drafts))


def choose_drafts(
    survivals: Sequence[Sequence[float]],
    offer: StepOffer,
    costs: StepCosts,
    rules: SpeculationRules = DEFAULT_RULES,
    surcharge_s: float = 0.0,
) -> StepDrafts:
    """The drafts with the most expected tokens per second.

    `survivals` [R][max_drafts] descend. `surcharge_s` is added to a step with any draft.
    """
    num_rows = len(survivals)
    depth = max((len(s) for s in survivals), default=0)
    # Position by position, so that of equal survivals the earlier position comes first.
    flat = np.array([[*s, *[0.0] * (depth - len(s))] for s in survivals]).T.ravel()
    order = np.argsort(-flat, kind="stable")
    order = order[: int((flat > 0.0).sum())]  # [drafts]: position * R + row
    step_s = verify_seconds(costs, offer.work, np.arange(len(order) + 1.0), offer.graph_tokens)
    plain_s = float(step_s[0])
    added_s = step_s[1:] - plain_s + surcharge_s  # [drafts]: of so many drafts and one
    rows_s = costs.step_seconds(_rows_alone(offer.work)) if num_rows else 0.0
    limit_s = _limit_s(offer, plain_s, rules) - plain_s
    best, best_rate, best_s = order[:0], 0.0, 0.0
    for deepest in range(1, depth + 1) if offer.draft_pass_s else [depth]:
        taken = order[order < deepest * num_rows][: offer.max_draft_tokens]
        seconds = added_s[: len(taken)] + deepest * offer.draft_pass_s
        num_fitting = int(np.searchsorted(seconds, limit_s, side="right"))
        if num_fitting == 0:
            break
        rates = (num_rows + np.cumsum(flat[taken[:num_fitting]])) / (rows_s + seconds[:num_fitting])
        num = int(rates.argmax()) + 1
        if rates[num - 1] > best_rate:
            best, best_rate, best_s = taken[:num], float(rates[num - 1]), float(seconds[num - 1])
    plain_rate = _plain_rate(offer, costs)
    if best_rate < rules.min_gain * plain_rate:
        best, best_s = order[:0], 0.0
    counts = np.bincount(best % max(num_rows, 1), minlength=num_rows)
    return StepDrafts(
        num_drafts=counts.tolist(),
        expected_tokens=num_rows + float(flat[best].sum()),
        plain_s=plain_s,
        step_s=plain_s + best_s,
        rows_s=rows_s,
        plain_rate=plain_rate,
        is_holding=(offer.num_plain_rows or 0) > num_rows,
        reason="most expected tokens per second" if len(best) else "no draft pays",
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
    limit_s = float("inf") if offer.max_step_s is None else offer.max_step_s
    return min(limit_s, plain_s * (1 + rules.short_slack)) if offer.is_short_waiting else limit_s


class AcceptanceRate:
    """The acceptance of all requests together, from which a request's own estimate starts."""

    FIRST_RATE = 0.7  # hopeful, so that it is tried
    FIRST_WEIGHT = 10.0  # judged drafts
    DECAY = 0.995  # an attempt

    def __init__(self) -> None:
        self.may_explore = True  # whether a new request is tried as if it accepted FIRST_RATE
        self._accepted = self._judged = 0.0

    @property
    def rate(self) -> float:
        return (self._accepted + self.FIRST_RATE * self.FIRST_WEIGHT) / (
            self._judged + self.FIRST_WEIGHT
        )

    def observe(self, num_judged: int, num_accepted: int) -> None:
        self._accepted = self._accepted * self.DECAY + num_accepted
        self._judged = self._judged * self.DECAY + num_judged


class RequestRecord:
    """The gate and the estimates of one request."""

    DECAY = 0.9  # of own counts, an attempt: they hold about a window
    WEIGHT = 3.0  # judged drafts that an estimate's start counts for
    NUM_TRIES = 2  # attempts that explore, before its own estimate counts
    NUM_REFUSALS = 4  # steps in a row in which none of its drafts paid, before it rests

    def __init__(self, rules: SpeculationRules, everyone: AcceptanceRate) -> None:
        self._rules = rules
        self._everyone = everyone
        self._depth = rules.first_drafts
        self._wait_steps = rules.retry_steps  # until the next retry
        self._retry_step = 0  # the step from which it may speculate
        self._num_refusals = 0  # since its last attempt
        self._is_retry = False
        self._clear()

    def _clear(self) -> None:
        """Forget what was observed; only the gate's bound and its waits remain."""
        self._attempts: deque[tuple[int, int]] = deque(maxlen=self._rules.window)
        self._accepted = [0.0] * self._rules.max_drafts  # by position
        self._judged = [0.0] * self._rules.max_drafts
        self._num_attempts = 0
        self._estimate()

    def max_drafts(self, step: int) -> int:
        """The gate: how many drafts at most in `step`."""
        return self._depth if step >= self._retry_step else 0

    def refuse(self, step: int) -> None:
        """None of its drafts paid in `step`. A request that rests is neither asked nor held."""
        self._num_refusals += 1
        if self._num_refusals >= self.NUM_REFUSALS:
            self._rest(step)

    def observe(self, num_drafts: int, num_accepted: int, step: int, *, may_stop: bool) -> None:
        """Record an attempt and apply the gates; `may_stop` False leaves that to the budget."""
        num_judged = min(num_accepted + 1, num_drafts)
        for position in range(num_drafts):
            self._accepted[position] *= self.DECAY
            self._judged[position] *= self.DECAY
        for position in range(num_judged):
            self._accepted[position] += position < num_accepted
            self._judged[position] += 1.0
        self._everyone.observe(num_judged, num_accepted)
        self._attempts.append((num_judged, num_accepted))
        self._num_attempts += 1
        self._num_refusals = 0
        if len(self._attempts) == self._rules.window:
            self._apply_gates(step, may_stop)
        self._estimate()

    def _apply_gates(self, step: int, may_stop: bool) -> None:
        rules = self._rules
        judged, accepted = map(sum, zip(*self._attempts, strict=True))
        acceptance = accepted / judged
        if may_stop and acceptance < (rules.back_above if self._is_retry else rules.off_below):
            self._stop(step)
            return
        if self._is_retry:
            self._is_retry, self._depth = False, rules.first_drafts
        if acceptance >= rules.back_above:
            self._wait_steps = rules.retry_steps
        if acceptance > rules.more_above:
            self._depth = min(rules.max_drafts, self._depth + 1)
        elif acceptance < rules.fewer_below and self._depth > rules.first_drafts:
            self._depth -= 1
            self._attempts.clear()  # one step down for each full window

    def _stop(self, step: int) -> None:
        self._is_retry, self._depth = True, min(self._rules.retry_drafts, self._depth)
        self._rest(step)

    def _rest(self, step: int) -> None:
        """Wait, and then start again as a request that nothing is known of."""
        self._retry_step = step + 1 + self._wait_steps
        self._wait_steps = min(2 * self._wait_steps, self._rules.max_retry_steps)
        self._num_refusals = 0
        self._clear()

    def _estimate(self) -> None:
        """`survival`: the probability, by position, that a draft and all before it are accepted."""
        weight = self.WEIGHT
        start = self._everyone.rate
        if self._num_attempts < self.NUM_TRIES and self._everyone.may_explore:
            start = max(start, self._everyone.FIRST_RATE)
        own = (sum(self._accepted) + weight * start) / (sum(self._judged) + weight)
        survival, product = [], 1.0  # up to the gate's bound
        for accepted, judged in islice(zip(self._accepted, self._judged), self._depth):  # noqa: B905
            product *= (accepted + weight * own) / (judged + weight)
            survival.append(product)
        self.survival = survival


class Purse:
    """What speculation may lose, in plain steps, and whether it is on."""

    BIAS_DECAY = 0.95  # of the cost model's error on plain steps, a step
    GAIN_DECAY = 0.98  # of the measured gain, a step with drafts
    SURCHARGE_SHARE = 0.2  # of a step's error that the surcharge takes over
    SURCHARGE_DECAY = 0.998  # a plain step: what nothing has shown lately is tried again

    def __init__(self, rules: SpeculationRules) -> None:
        self._rules = rules
        self.balance = rules.purse_steps
        self.is_on = True
        self.num_stops = 0
        self._bias = 1.0  # measured over predicted seconds of plain steps
        self.surcharge_s = 0.0  # of steps with drafts, beyond their prediction
        self._gain = self._predicted = self._weight = 0.0  # decayed sums

    @property
    def is_half_full(self) -> bool:
        return self.balance >= self._rules.purse_steps / 2

    @property
    def gain(self) -> float | None:
        """Measured tokens per second over those of plain steps; None before a step with drafts."""
        return self._gain / self._weight if self._weight else None

    @property
    def predicted_gain(self) -> float | None:
        """The same as it was predicted for these steps."""
        return self._predicted / self._weight if self._weight else None

    def observe(self, drafts: StepDrafts, num_tokens: int, seconds: float) -> None:
        """Add a step's gain or loss, and stop or start."""
        self.balance += self._rules.refill
        if drafts.has_drafts or drafts.is_holding:
            self._add_gain(drafts, num_tokens, seconds / self._bias)
        else:
            self.surcharge_s *= self.SURCHARGE_DECAY
            self._bias += (1 - self.BIAS_DECAY) * (seconds / drafts.plain_s - self._bias)
        self.balance = min(self.balance, self._rules.purse_steps)
        if self.is_on and self.balance < 0:
            self.is_on = False
            self.num_stops += 1
        elif self.is_half_full:
            self.is_on = True

    def _add_gain(self, drafts: StepDrafts, num_tokens: int, seconds: float) -> None:
        earned_s = num_tokens / drafts.plain_rate
        spent_s = max(drafts.rows_s + seconds - drafts.plain_s, 0.1 * drafts.rows_s)
        self.balance += (earned_s - spent_s) / drafts.rows_s
        if drafts.has_drafts:
            error_s = seconds - drafts.step_s
            self.surcharge_s = max(0.0, self.surcharge_s + self.SURCHARGE_SHARE * error_s)
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

    def __init__(self, rules: SpeculationRules = DEFAULT_RULES) -> None:
        self._rules = rules
        self._everyone = AcceptanceRate()
        self._records: dict[Hashable, RequestRecord] = {}
        self._purse = Purse(rules)
        self._step = 0  # steps observed
        self._are_costs_fitted = False  # in the last plan
        self._judged = [0] * rules.max_drafts  # by position, since the start
        self._accepted = [0] * rules.max_drafts
        self._num_drafts = self._num_attempts = 0

    def max_drafts(self, key: Hashable, temperature: float, limit: int | None = None) -> int:
        """How many drafts to ask the drafter for, by the gates; 0 = none.

        `limit` is the request's own bound; None = that of the rules.
        """
        if temperature > self._rules.max_temperature or not self._purse.is_on:
            return 0
        record = self._records.get(key)
        if record is None:
            record = self._records[key] = RequestRecord(self._rules, self._everyone)
        gate = record.max_drafts(self._step)
        return gate if limit is None else min(gate, limit)

    def plan(self, offer: StepOffer, costs: StepCosts) -> StepDrafts:
        """How many drafts of each row the step verifies; a request often refused rests a while."""
        self._are_costs_fitted = costs.is_fitted
        survivals = [
            self._records[key].survival[:most] if most else []
            for key, most in zip(offer.keys, offer.max_drafts, strict=True)
        ]
        drafts = choose_drafts(survivals, offer, costs, self._rules, self._purse.surcharge_s)
        if not offer.is_short_waiting:
            for key, most, num in zip(offer.keys, offer.max_drafts, drafts.num_drafts, strict=True):
                if most and not num:
                    self._records[key].refuse(self._step)
        return drafts

    def observe(self, key: Hashable, num_drafts: int, num_accepted: int) -> None:
        """Record a verified row: of its `num_drafts` >= 1, so many were accepted."""
        assert 0 <= num_accepted <= num_drafts, f"{num_accepted} of {num_drafts} accepted"
        num_judged = min(num_accepted + 1, num_drafts)
        for position in range(num_judged):
            self._judged[position] += 1
            self._accepted[position] += position < num_accepted
        self._num_drafts += num_drafts
        self._num_attempts += 1
        record = self._records.get(key)
        if record is not None:  # else it ended meanwhile
            may_stop = self._rules.stops_always or not self._are_costs_fitted
            record.observe(num_drafts, num_accepted, self._step, may_stop=may_stop)

    def observe_step(self, drafts: StepDrafts, num_tokens: int, seconds: float | None) -> None:
        """Record a step of these rows: the tokens they sampled, and its seconds on the device.

        `seconds` includes the drafter's passes; None = not measured, or shared with another step.
        """
        if seconds is not None and drafts.num_drafts:
            self._purse.observe(drafts, num_tokens, seconds)
            self._everyone.may_explore = self._purse.is_half_full
        self._step += 1

    def forget(self, key: Hashable) -> None:
        """Drop the request's record; an unknown key is ignored."""
        self._records.pop(key, None)

    def statistics(self) -> SpeculationStatistics:
        pairs = zip(self._accepted, self._judged, strict=True)
        return SpeculationStatistics(
            num_drafts=self._num_drafts,
            num_accepted=sum(self._accepted),
            num_attempts=self._num_attempts,
            acceptance_by_position=[a / j if j else None for a, j in pairs],
            measured_gain=self._purse.gain,
            predicted_gain=self._purse.predicted_gain,
            is_on=self._purse.is_on,
            num_stops=self._purse.num_stops,
        )
