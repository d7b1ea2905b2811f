"""Keeps, for every request, how deep it may speculate and how likely its drafts are accepted.

Columns over slots, one slot a request, so that a step of hundreds of rows takes a few array
operations. The rules are told in `engine.speculation.controller`. Knows no step and no cost.
"""

from collections.abc import Callable, Hashable, Sequence

import numpy as np
import numpy.typing as npt

from engine.speculation.rules import SpeculationRules

Vector = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

DECAY = 0.9  # of a request's own counts, an attempt: they hold about a window
WEIGHT = 3.0  # judged drafts that an estimate's start counts for
NUM_TRIES = 2  # attempts of a trial, at most
NEW_ATTEMPTS = 6  # with fewer a request is not given another chance at once
LEAST_TO_DIFFER = 4  # requests
NUM_SIGMAS = 3.0  # by which requests must differ more than by chance
NUM_REFUSALS = 4  # steps in a row in which none of its drafts paid, before it rests
_FIRST_CAPACITY = 16


class AcceptanceRate:
    """The acceptance of all requests together, from which a request's own estimate starts."""

    FIRST_RATE = 0.7  # hopeful, so that it is tried
    FIRST_WEIGHT = 4.0  # judged drafts
    DECAY = 0.995  # an attempt
    LEAST_KEPT = 0.95  # of all before a step: one with hundreds of attempts is noisy, too
    NUM_KNOWN = 8.0  # judged drafts after which the rate is known

    def __init__(self) -> None:
        self.may_explore = True  # whether new requests are tried
        self._accepted = self._judged = 0.0

    @property
    def rate(self) -> float:
        return (self._accepted + self.FIRST_RATE * self.FIRST_WEIGHT) / (
            self._judged + self.FIRST_WEIGHT
        )

    @property
    def is_known(self) -> bool:
        return self._judged >= self.NUM_KNOWN

    def observe(self, num_judged: Integers, num_accepted: Integers) -> None:
        """Of attempts [N], the oldest first."""
        kept = max(self.DECAY ** len(num_judged), self.LEAST_KEPT)
        self._accepted = self._accepted * kept + float(num_accepted.sum())
        self._judged = self._judged * kept + float(num_judged.sum())


class RequestGates:
    """The gates and estimates of all requests; arrays of slots are [N], without a slot twice."""

    def __init__(self, rules: SpeculationRules) -> None:
        self.everyone = AcceptanceRate()
        self._rules = rules
        self._slots: dict[Hashable, int] = {}
        self._free: list[int] = []
        self._next_trial_step = 0
        self._trial_wait_steps: float = rules.retry_steps  # until the next trials
        self.do_differ = False  # in what they accept, by more than chance
        self._positions = np.arange(rules.max_drafts)
        # [slots]
        self._depth: Integers = np.zeros(0, np.int64)
        self._wait_steps: Integers = np.zeros(0, np.int64)  # until the next retry
        self._retry_step: Integers = np.zeros(0, np.int64)  # from which it may speculate
        self._num_refusals: Integers = np.zeros(0, np.int64)  # since its last attempt
        self._is_retry = np.zeros(0, np.bool_)
        self._is_tried = np.zeros(0, np.bool_)  # even if drafts do not pay by its estimate
        self._trial_step: Integers = np.zeros(0, np.int64)  # in which that began
        self._num_attempts: Integers = np.zeros(0, np.int64)
        self._num_in_window: Integers = np.zeros(0, np.int64)
        # [slots, window]  of the last attempts
        self._window_judged: Integers = np.zeros((0, rules.window), np.int64)
        self._window_accepted: Integers = np.zeros((0, rules.window), np.int64)
        # [slots, max_drafts]  by position
        self._accepted: Vector = np.zeros((0, rules.max_drafts))
        self._judged: Vector = np.zeros((0, rules.max_drafts))
        self._survival: Vector = np.zeros((0, rules.max_drafts))

    def slots_of(self, keys: Sequence[Hashable]) -> Integers:
        """[N] of requests; one that is not known gets a slot."""
        find = self._slots.get
        found = [find(key, -1) for key in keys]
        if -1 in found:
            found = [self._add(key) if slot < 0 else slot for key, slot in zip(keys, found)]  # noqa: B905
        return np.array(found, dtype=np.int64)

    def known_slots(self, keys: Sequence[Hashable]) -> Integers:
        """[N] of requests; -1 = it is not known."""
        return np.array([self._slots.get(key, -1) for key in keys], dtype=np.int64)

    def forget(self, key: Hashable) -> None:
        """Free the request's slot; an unknown key is ignored."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._clear(np.array([slot]))
            self._free.append(slot)

    def max_drafts(self, slots: Integers, step: int, pays: Callable[[], bool]) -> Integers:
        """[N]  the gate: how many drafts at most in `step`.

        Of requests that nothing is known of, a few are tried; while nothing is known of any other
        either, the rest must wait for these. One for which no draft was found leaves its place. The
        rest are only asked where drafts pay, accepted as those of all others: whoever is asked may
        be held for it.
        """
        self._end_trials(step)
        is_open = step >= self._retry_step[slots]
        is_new = (self._num_attempts[slots] == 0) & ~self._is_tried[slots]
        if self.everyone.may_explore and is_new.any():
            begun = slots[is_open & is_new][: self._num_free_trials(step)]
            self._is_tried[begun] = True
            self._trial_step[begun] = step
            self._wait_for_next_trial(len(begun), step)
            is_new &= ~self._is_tried[slots]
        if not self.everyone.is_known:
            is_open &= ~is_new
        elif not self.do_differ and (is_open & is_new).any() and not pays():
            self._rest(slots[is_open & is_new], step)
            is_open &= ~is_new
        return np.where(is_open, self._depth[slots], 0)

    def _wait_for_next_trial(self, num_begun: int, step: int) -> None:
        """Fewer than `trial_rows` wait a shorter time, and lengthen the next one by less.

        More, of requests that differ, wait no longer than these.
        """
        share = min(1.0, num_begun / self._rules.trial_rows)
        wait_steps = self._trial_wait_steps
        self._next_trial_step = max(self._next_trial_step, step + round(share * wait_steps))
        self._trial_wait_steps = min(4**share * wait_steps, self._rules.max_retry_steps)

    def _end_trials(self, step: int) -> None:
        is_over = self._is_tried & (step >= self._trial_step + self._rules.retry_steps)
        is_over &= self._num_attempts == 0
        if is_over.any():
            self._rest(np.flatnonzero(is_over), step)

    def _num_free_trials(self, step: int) -> int:
        if self.do_differ:
            return len(self._depth)
        num_tried = int(self._is_tried.sum())
        if self.everyone.is_known and step < self._next_trial_step:
            return 0
        return max(0, self._rules.trial_rows - num_tried)

    def end_waiting(self) -> None:
        """Drafts pay without a trial, so later trials are as frequent as at first."""
        self._trial_wait_steps = self._rules.retry_steps

    def is_tried(self, slots: Integers) -> npt.NDArray[np.bool_]:
        """[N]  whether each is one of the few that are tried at a time."""
        return self._is_tried[slots]

    def survivals(self, slots: Integers, num_drafts: Integers) -> Vector:
        """[N, max_drafts]  probability, by position, that a draft and all before are accepted.

        0 beyond each request's `num_drafts` [N].
        """
        new = slots[self._num_attempts[slots] == 0]
        if len(new):
            self._estimate(new)
        return np.where(self._positions < num_drafts[:, None], self._survival[slots], 0.0)

    def refuse(self, slots: Integers, step: int) -> None:
        """None of their drafts paid in `step`. A request that rests is neither asked nor held."""
        self._num_refusals[slots] += 1
        is_tired = self._num_refusals[slots] >= NUM_REFUSALS
        tired = slots[is_tired | (self._num_attempts[slots] < NEW_ATTEMPTS)]
        if len(tired):
            self._rest(tired, step)

    def observe(
        self,
        slots: Integers,
        num_drafts: Integers,
        num_accepted: Integers,
        step: int,
        *,
        may_stop: bool,
    ) -> None:
        """Record an attempt of each and apply the gates; without `may_stop` none stops."""
        num_judged = np.minimum(num_accepted + 1, num_drafts)
        tried = np.where(self._positions < num_drafts[:, None], DECAY, 1.0)
        was_accepted = self._positions < num_accepted[:, None]
        self._accepted[slots] = self._accepted[slots] * tried + was_accepted
        was_judged = self._positions < num_judged[:, None]
        self._judged[slots] = self._judged[slots] * tried + was_judged
        self.everyone.observe(num_judged, num_accepted)
        place = self._num_attempts[slots] % self._rules.window
        self._window_judged[slots, place] = num_judged
        self._window_accepted[slots, place] = num_accepted
        self._num_attempts[slots] += 1
        self._num_in_window[slots] += 1
        self._find_whether_they_differ()
        self._num_refusals[slots] = 0
        self._is_tried[slots] &= self._num_attempts[slots] < NUM_TRIES
        full = slots[self._num_in_window[slots] >= self._rules.window]
        if len(full):
            self._apply_gates(full, step, may_stop)
        self._estimate(slots)

    def _find_whether_they_differ(self) -> None:
        """Compare what each accepted with the mean of all.

        The sum of squared differences over the sum of their variances is 1 on average by chance
        alone, also for attempts that end with their first rejected draft.
        """
        judged, accepted = self._judged.sum(1), self._accepted.sum(1)
        is_counted = judged >= 1
        self.do_differ = False
        if np.count_nonzero(is_counted) < LEAST_TO_DIFFER:
            return
        judged, accepted = judged[is_counted], accepted[is_counted]
        rate = float(np.clip(accepted.sum() / judged.sum(), 0.05, 0.95))
        squares = (accepted - rate * judged) ** 2
        ratio = squares.sum() / (rate * (1 - rate) * judged.sum())
        self.do_differ = bool(ratio > 1 + NUM_SIGMAS * np.sqrt(2 / len(judged)))

    def _apply_gates(self, slots: Integers, step: int, may_stop: bool) -> None:
        rules = self._rules
        share = self._window_accepted[slots].sum(1) / self._window_judged[slots].sum(1)
        if may_stop:
            least = np.where(self._is_retry[slots], rules.back_above, rules.off_below)
            stopped = slots[share < least]
            self._is_retry[stopped] = True
            self._depth[stopped] = np.minimum(rules.retry_drafts, self._depth[stopped])
            self._rest(stopped, step)
            slots, share = slots[share >= least], share[share >= least]
        back = slots[self._is_retry[slots]]
        self._is_retry[back], self._depth[back] = False, rules.first_drafts
        self._wait_steps[slots[share >= rules.back_above]] = rules.retry_steps
        deeper = slots[share > rules.more_above]
        self._depth[deeper] = np.minimum(rules.max_drafts, self._depth[deeper] + 1)
        worse = slots[(share < rules.fewer_below) & (self._depth[slots] > rules.first_drafts)]
        self._depth[worse] -= 1
        self._num_in_window[worse] = 0  # one step down for each full window

    def _rest(self, slots: Integers, step: int) -> None:
        """Wait, and then start again as requests that nothing is known of."""
        self._retry_step[slots] = step + 1 + self._wait_steps[slots]
        # A request that was not tried itself does not wait longer for the bad luck of others.
        was_tried = self._num_attempts[slots] > 0
        longer = np.where(was_tried, 2, 1) * self._wait_steps[slots]
        self._wait_steps[slots] = np.minimum(longer, self._rules.max_retry_steps)
        self._clear(slots)

    def _clear(self, slots: Integers) -> None:
        """Forget what was observed; only the gate's bound and its waits remain."""
        for column in (self._num_refusals, self._num_attempts, self._num_in_window):
            column[slots] = 0
        self._is_tried[slots] = False
        self._accepted[slots] = self._judged[slots] = 0.0

    def _estimate(self, slots: Integers) -> None:
        """Update `_survival`, which is 0 beyond the gate's bound."""
        accepted, judged = self._accepted[slots], self._judged[slots]
        start = self.everyone.rate
        own = (accepted.sum(1) + WEIGHT * start) / (judged.sum(1) + WEIGHT)
        each = (accepted + WEIGHT * own[:, None]) / (judged + WEIGHT)
        is_allowed = self._positions < self._depth[slots, None]
        self._survival[slots] = np.where(is_allowed, each.cumprod(1), 0.0)

    def _add(self, key: Hashable) -> int:
        if not self._free:
            self._grow()
        slot = self._slots[key] = self._free.pop()
        slots = np.array([slot])
        self._depth[slot] = self._rules.first_drafts
        self._wait_steps[slot] = self._rules.retry_steps
        self._retry_step[slot] = 0
        self._is_retry[slot] = False
        self._estimate(slots)
        return slot

    def _grow(self) -> None:
        """Twice as many slots."""
        before = len(self._depth)
        after = max(_FIRST_CAPACITY, 2 * before)
        for name, column in vars(self).items():
            if isinstance(column, np.ndarray) and name != "_positions":
                grown = np.zeros((after, *column.shape[1:]), column.dtype)
                grown[:before] = column
                setattr(self, name, grown)
        self._free = list(reversed(range(before, after)))
