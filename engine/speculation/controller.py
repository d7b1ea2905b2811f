"""Decides how many drafts each row of a step verifies; replayable, without clock and device.

Three questions, each with its own part:

    RequestRecord   may this request speculate, and how deep?   the gates below
    choose_drafts   which drafts pay in this step?              expected tokens per second
    EngineSwitch    does speculation pay at all?                measured against plain steps

Gates of a request. Above `max_temperature` it has no drafts. At first it may have `first_drafts`.
Acceptance over its last `window` attempts is the share of judged drafts that were accepted; drafts
after the first rejected one are not judged. Below `off_below` it stops, and tries again
`retry_steps` steps later, twice as late after each failure; after a retry it needs `back_above` to
stay. Above `more_above` it gets one draft more, up to `max_drafts`; below `fewer_below` one less.

Budget of a step. A draft's survival is the probability that it and all before it are accepted: the
product of estimates by position. Drafts are taken in the order of survival, so a row's are a
prefix. Of all budgets the one with the most expected tokens per second wins:

    (rows + sum of the survivals taken) / (seconds of the step with them + passes of the drafter)

A step that verifies costs what the cost model predicts for the plain step with the drafts as more
new tokens: products cost by the token, and a row's keys are read once for all its queries. So the
model learns the price of drafts from plain steps of more rows. Drafts are optional and shrink
first: to the tokens and seconds that the step has left, and while short prompts wait to
`short_slack` of the plain step's time.

Time is counted in steps. The same calls in the same order give the same decisions.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.cost_model import SEGMENTS, StepCosts, StepWork

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationRules:
    """Every threshold of the controller."""

    max_temperature: float = 0.7  # above it a request does not speculate
    first_drafts: int = 4
    min_drafts: int = 2  # lowest bound that the gate sets, other than none
    max_drafts: int = 8
    window: int = 10  # attempts
    off_below: float = 0.5  # acceptance over the window
    fewer_below: float = 0.6
    back_above: float = 0.6  # of the first window after a retry
    more_above: float = 0.8
    retry_steps: int = 32  # of a request
    max_retry_steps: int = 1024
    min_gain: float = 1.03  # predicted, over the plain step; with less there are no drafts
    short_slack: float = 0.05  # share of the plain step that drafts may add while shorts wait
    trial_steps: int = 8  # steps with drafts before the engine's gain is judged
    engine_retry_steps: int = 256
    max_engine_retry_steps: int = 8192


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDrafts:
    """The decision for a step, and the prediction that it rests on."""

    num_drafts: list[int]  # [R]
    expected_tokens: float  # of these rows
    plain_s: float  # predicted, of the step without drafts
    step_s: float  # predicted, with drafts and the drafter's passes
    reason: str

    @property
    def has_drafts(self) -> bool:
        return any(self.num_drafts)

    @property
    def predicted_gain(self) -> float:
        """Tokens per second, over those of the plain step."""
        if not self.num_drafts:
            return 1.0
        return self.expected_tokens / len(self.num_drafts) * self.plain_s / self.step_s


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


def choose_drafts(
    survivals: Sequence[Sequence[float]],
    offer: StepOffer,
    costs: StepCosts,
    rules: SpeculationRules = DEFAULT_RULES,
) -> StepDrafts:
    """The drafts with the most expected tokens per second. `survivals` [R][max_drafts] descend."""
    num_rows = len(survivals)
    depth = max((len(s) for s in survivals), default=0)
    # Position by position, so that of equal survivals the earlier position comes first.
    flat = np.array([[*s, *[0.0] * (depth - len(s))] for s in survivals]).T.ravel()
    order = np.argsort(-flat, kind="stable")
    order = order[: int((flat > 0.0).sum())]  # [drafts]: position * R + row
    if offer.max_draft_tokens is not None and not offer.draft_pass_s:
        order = order[: offer.max_draft_tokens]
    step_s = verify_seconds(costs, offer.work, np.arange(len(order) + 1.0), offer.graph_tokens)
    plain_s = float(step_s[0])
    best_rate, best_s, best = rules.min_gain * num_rows / plain_s, plain_s, order[:0]
    for deepest in range(1, depth + 1) if offer.draft_pass_s else [depth]:
        taken = order[order < deepest * num_rows]
        taken = taken[: offer.max_draft_tokens]
        seconds = step_s[: len(taken) + 1] + deepest * offer.draft_pass_s
        seconds = seconds[seconds <= _limit_s(offer, plain_s, rules)][1:]
        tokens = num_rows + np.cumsum(flat[taken[: len(seconds)]])
        rates = tokens / seconds
        if len(rates) and rates.max() > best_rate:
            num = int(rates.argmax()) + 1
            best_rate, best_s, best = float(rates.max()), float(seconds[num - 1]), taken[:num]
    counts = np.bincount(best % max(num_rows, 1), minlength=num_rows)
    return StepDrafts(
        num_drafts=counts.tolist(),
        expected_tokens=num_rows + float(flat[best].sum()),
        plain_s=plain_s,
        step_s=best_s,
        reason="most expected tokens per second" if len(best) else "no draft pays",
    )


def _limit_s(offer: StepOffer, plain_s: float, rules: SpeculationRules) -> float:
    limit_s = float("inf") if offer.max_step_s is None else offer.max_step_s
    return min(limit_s, plain_s * (1 + rules.short_slack)) if offer.is_short_waiting else limit_s


class AcceptanceRate:
    """The acceptance of all requests together, from which a request's own estimate starts."""

    FIRST_RATE = 0.7  # hopeful, so that it is tried
    FIRST_WEIGHT = 10.0  # judged drafts
    DECAY = 0.995  # an attempt

    def __init__(self) -> None:
        self.epoch = 0  # how often it was forgotten
        self._accepted = self._judged = 0.0

    @property
    def rate(self) -> float:
        return (self._accepted + self.FIRST_RATE * self.FIRST_WEIGHT) / (
            self._judged + self.FIRST_WEIGHT
        )

    def observe(self, num_judged: int, num_accepted: int) -> None:
        self._accepted = self._accepted * self.DECAY + num_accepted
        self._judged = self._judged * self.DECAY + num_judged

    def forget(self) -> None:
        self._accepted = self._judged = 0.0
        self.epoch += 1


class RequestRecord:
    """The gate and the estimates of one request."""

    DECAY = 0.9  # of own counts, an attempt: they hold about a window
    WEIGHT = 3.0  # judged drafts that an estimate's start counts for

    def __init__(self, rules: SpeculationRules, everyone: AcceptanceRate) -> None:
        self._rules = rules
        self._everyone = everyone
        self._depth = rules.first_drafts
        self._wait_steps = rules.retry_steps  # until the next retry
        self._retry_step = 0  # the step from which it may speculate
        self._last_step: int | None = None  # of its last attempt
        self._is_retry = False
        self._clear()

    def _clear(self) -> None:
        """Forget what was observed; only the gate's bound and its waits remain."""
        self._attempts: deque[tuple[int, int]] = deque(maxlen=self._rules.window)
        self._accepted = [0.0] * self._rules.max_drafts  # by position
        self._judged = [0.0] * self._rules.max_drafts
        self._epoch = self._everyone.epoch
        self._estimate()

    def max_drafts(self, step: int) -> int:
        """The gate: how many drafts at most in `step`. An old record is cleared by the way."""
        if step < self._retry_step:
            return 0
        is_old = self._last_step is not None and step - self._last_step >= self._wait_steps
        if is_old or self._epoch != self._everyone.epoch:
            self._last_step = step
            self._clear()
        return self._depth

    def observe(self, num_drafts: int, num_accepted: int, step: int) -> None:
        """Record an attempt and apply the gates."""
        num_judged = min(num_accepted + 1, num_drafts)
        for position in range(num_drafts):
            self._accepted[position] *= self.DECAY
            self._judged[position] *= self.DECAY
        for position in range(num_judged):
            self._accepted[position] += position < num_accepted
            self._judged[position] += 1.0
        self._everyone.observe(num_judged, num_accepted)
        self._attempts.append((num_judged, num_accepted))
        self._last_step = step
        self._estimate()
        if len(self._attempts) == self._rules.window:
            self._apply_gates(step)

    def _apply_gates(self, step: int) -> None:
        rules = self._rules
        acceptance = sum(a for _, a in self._attempts) / sum(j for j, _ in self._attempts)
        if acceptance < (rules.back_above if self._is_retry else rules.off_below):
            self._retry_step = step + 1 + self._wait_steps
            self._wait_steps = min(2 * self._wait_steps, rules.max_retry_steps)
            self._depth = rules.min_drafts
            self._is_retry = True
            self._last_step = None
            self._clear()
            return
        if acceptance >= rules.back_above:
            self._wait_steps = rules.retry_steps
        self._is_retry = False
        if acceptance > rules.more_above:
            self._depth = min(rules.max_drafts, self._depth + 1)
        elif acceptance < rules.fewer_below and self._depth > rules.min_drafts:
            self._depth -= 1
            self._attempts.clear()

    def _estimate(self) -> None:
        """`survival`: the probability, by position, that a draft and all before it are accepted."""
        weight = self.WEIGHT
        start = self._everyone.rate
        own = (sum(self._accepted) + weight * start) / (sum(self._judged) + weight)
        survival, product = [], 1.0
        for accepted, judged in zip(self._accepted, self._judged, strict=True):
            product *= (accepted + weight * own) / (judged + weight)
            survival.append(product)
        self.survival = survival


class EngineSwitch:
    """Turns speculation off while steps with drafts earn less than plain ones, and on again.

    A step earns the time in which plain steps would have sampled as many tokens.
    """

    DECAY = 0.97  # of both sums, a step
    BIAS_DECAY = 0.95  # of the model's error on plain steps, a step

    def __init__(self, rules: SpeculationRules) -> None:
        self._rules = rules
        self._bias = 1.0  # measured over predicted seconds of plain steps
        self._earned_s = self._spent_s = 0.0
        self._num_steps = 0  # with drafts, since it was turned on
        self._wait_steps = rules.engine_retry_steps
        self._retry_step = 0
        self._idle_since = 0
        self.num_retries = 0

    @property
    def gain(self) -> float | None:
        """Measured tokens per second over those of plain steps; None before a step with drafts."""
        return self._earned_s / self._spent_s if self._spent_s else None

    def is_on(self, step: int) -> bool:
        return step >= self._retry_step

    def observe(self, drafts: StepDrafts, num_tokens: int, seconds: float, step: int) -> None:
        """Judge the step. Once off, or without a draft that pays for as long, it starts again."""
        if not drafts.has_drafts:
            self._bias += (1 - self.BIAS_DECAY) * (seconds / drafts.plain_s - self._bias)
            return
        self._idle_since = step
        plain_s = drafts.plain_s * self._bias * num_tokens / len(drafts.num_drafts)
        self._earned_s = self._earned_s * self.DECAY + plain_s
        self._spent_s = self._spent_s * self.DECAY + seconds
        self._num_steps += 1
        if self._num_steps < self._rules.trial_steps:
            return
        if self._earned_s < self._spent_s:
            self._retry_step = step + 1 + self._wait_steps
        elif self._num_steps >= self._rules.engine_retry_steps:
            self._wait_steps = self._rules.engine_retry_steps

    def is_retry_due(self, step: int) -> bool:
        """Whether it was off or idle for its whole wait: then what it knows is old."""
        start = max(self._retry_step - 1, self._idle_since + self._wait_steps)
        return step > 0 and step >= start

    def retry(self, step: int) -> None:
        """Start anew, with twice the wait if this fails too."""
        self._earned_s = self._spent_s = 0.0
        self._num_steps = 0
        self._idle_since = step
        self._wait_steps = min(2 * self._wait_steps, self._rules.max_engine_retry_steps)
        self.num_retries += 1


class SpeculationController:
    """The gates of all requests, the budget of each step and the switch, for one worker."""

    def __init__(self, rules: SpeculationRules = DEFAULT_RULES) -> None:
        self._rules = rules
        self._everyone = AcceptanceRate()
        self._records: dict[Hashable, RequestRecord] = {}
        self._switch = EngineSwitch(rules)
        self._step = 0  # steps observed
        self._judged = [0] * rules.max_drafts  # by position, since the start
        self._accepted = [0] * rules.max_drafts
        self._num_drafts = 0

    def max_drafts(self, key: Hashable, temperature: float, limit: int | None = None) -> int:
        """How many drafts to ask the drafter for, by the gates; 0 = none.

        `limit` is the request's own bound; None = that of the rules.
        """
        if temperature > self._rules.max_temperature or not self._switch.is_on(self._step):
            return 0
        record = self._records.get(key)
        if record is None:
            record = self._records[key] = RequestRecord(self._rules, self._everyone)
        gate = record.max_drafts(self._step)
        return gate if limit is None else min(gate, limit)

    def plan(self, offer: StepOffer, costs: StepCosts) -> StepDrafts:
        """How many drafts of each row the step verifies; changes nothing."""
        survivals = [
            self._records[key].survival[:most] if most else []
            for key, most in zip(offer.keys, offer.max_drafts, strict=True)
        ]
        return choose_drafts(survivals, offer, costs, self._rules)

    def observe(self, key: Hashable, num_drafts: int, num_accepted: int) -> None:
        """Record a verified row: of its `num_drafts` >= 1, so many were accepted."""
        assert 0 <= num_accepted <= num_drafts, f"{num_accepted} of {num_drafts} accepted"
        num_judged = min(num_accepted + 1, num_drafts)
        for position in range(num_judged):
            self._judged[position] += 1
            self._accepted[position] += position < num_accepted
        self._num_drafts += num_drafts
        record = self._records.get(key)
        if record is not None:  # else it ended meanwhile
            record.observe(num_drafts, num_accepted, self._step)

    def observe_step(self, drafts: StepDrafts, num_tokens: int, seconds: float | None) -> None:
        """Record a step of these rows: the tokens they sampled, and its seconds on the device.

        `seconds` includes the drafter's passes; None = not measured, or shared with another step.
        """
        if seconds is not None and drafts.num_drafts:
            self._switch.observe(drafts, num_tokens, seconds, self._step)
        self._step += 1
        if self._switch.is_retry_due(self._step):
            self._switch.retry(self._step)
            self._everyone.forget()

    def forget(self, key: Hashable) -> None:
        """Drop the request's record; an unknown key is ignored."""
        self._records.pop(key, None)
