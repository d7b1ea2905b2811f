"""`engine.routing.placement.route` over arrays: the same decisions for a thousand workers.

Workers are columns, in the order of their names, so that ties end as they do there. A prompt is
predicted once for all workers without any of it in their cache, and once more for each of the few
that hold some. Equality, decision by decision, is a test; `route` stays the truth.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.length_class import LengthClass, classify
from engine.messages import Assign, Hold, Placement, Reject, RouteRequest
from engine.routing.placement import (
    RETRY_AFTER_S,
    PlacementRules,
    ShortQueue,
    WorkerSnapshot,
    shared_s,
)

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

LABEL_CODES: dict[LengthClass | None, int] = {None: 0, "short": 1, "long": 2}
LABELS: tuple[LengthClass | None, ...] = (None, "short", "long")


class Prefillers:
    """What placement knows of the workers that prefill; arrays [workers]."""

    def __init__(self, names: Sequence[str], *, is_unified: bool) -> None:
        """`names` in ascending order; all alive, idle and without a label."""
        assert list(names) == sorted(names), "names out of order: ties would end differently"
        num = len(names)
        self.names = list(names)
        self.is_unified = is_unified
        self.index = {name: i for i, name in enumerate(names)}
        self.is_alive: Flags = np.ones(num, dtype=np.bool_)
        self.queued_tokens: Integers = np.zeros(num, dtype=np.int64)
        self.queued_s: Floats = np.zeros(num)
        self.num_waiting: Integers = np.zeros(num, dtype=np.int64)
        self.has_short: Flags = np.zeros(num, dtype=np.bool_)  # short prompts go first there
        self.num_short: Integers = np.zeros(num, dtype=np.int64)
        self.short_s: Floats = np.zeros(num)
        self.labels: npt.NDArray[np.int8] = np.zeros(num, dtype=np.int8)  # see `LABEL_CODES`

    def set_labels(self, labels: Mapping[str, LengthClass]) -> None:
        """Take the pools over."""
        self.labels[:] = [LABEL_CODES[labels.get(name)] for name in self.names]

    def wait_s(self, length_class: LengthClass, max_step_s: float) -> Floats:
        """As `placement.wait_s`, of all workers [workers]; a new array."""
        if length_class == "long" or not self.has_short.any():
            return self.queued_s.copy()
        long_s = np.maximum(self.queued_s - self.short_s, 0.0)
        first_s = self.short_s + np.minimum(long_s, max_step_s)
        return np.where(self.has_short, first_s, self.queued_s)

    def wait_at(self, i: int, length_class: LengthClass, max_step_s: float) -> float:
        """The same of one worker."""
        queued_s, short_s = float(self.queued_s[i]), float(self.short_s[i])
        if length_class == "long" or not self.has_short[i]:
            return queued_s
        return short_s + min(max(queued_s - short_s, 0.0), max_step_s)

    def snapshot(self, i: int, hit_tokens: int = 0) -> WorkerSnapshot:
        """One worker as `route` and `rebalance` see it; its blocks are not known here."""
        short = None
        if self.has_short[i]:
            short = ShortQueue(num_waiting=int(self.num_short[i]), queued_s=float(self.short_s[i]))
        return WorkerSnapshot(
            name=self.names[i],
            role="unified" if self.is_unified else "prefill",
            is_alive=bool(self.is_alive[i]),
            queued_tokens=int(self.queued_tokens[i]),
            queued_s=float(self.queued_s[i]),
            num_waiting=int(self.num_waiting[i]),
            num_running=0,
            num_free_blocks=0,
            num_blocks=0,
            short=short,
            label=LABELS[self.labels[i]],
            hit_tokens=hit_tokens,
        )


class Decoders:
    """What placement knows of the workers that only decode; arrays [workers]."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names` in ascending order; all alive and empty."""
        assert list(names) == sorted(names), "names out of order: ties would end differently"
        num = len(names)
        self.names = list(names)
        self.index = {name: i for i, name in enumerate(names)}
        self.is_alive: Flags = np.ones(num, dtype=np.bool_)
        self.num_running: Integers = np.zeros(num, dtype=np.int64)
        self.num_free_blocks: Integers = np.zeros(num, dtype=np.int64)
        self.num_blocks: Integers = np.ones(num, dtype=np.int64)

    def choose(self, num_blocks: int, avoid: Sequence[str]) -> int | None:
        """One with room, then the least running, then the most room; None if all are dead."""
        usable = _prefer(self.is_alive, self.index, avoid)
        if not usable.any():
            return None
        with_room = usable & (self.num_free_blocks >= num_blocks)
        score = self.num_running - self.num_free_blocks / np.maximum(self.num_blocks, 1)
        among = with_room if with_room.any() else usable
        return int(np.argmin(np.where(among, score, np.inf)))

    def snapshot(self, i: int) -> WorkerSnapshot:
        """One worker as `route` sees it."""
        return WorkerSnapshot(
            name=self.names[i],
            role="decode",
            is_alive=bool(self.is_alive[i]),
            queued_tokens=0,
            queued_s=0.0,
            num_waiting=0,
            num_running=int(self.num_running[i]),
            num_free_blocks=int(self.num_free_blocks[i]),
            num_blocks=int(self.num_blocks[i]),
        )


@dataclass(frozen=True, slots=True)
class _Predicted:
    """The prompt where so much of it is cached."""

    length_class: LengthClass
    num_new_tokens: int
    work_s: float
    deadline_s: float | None


class FastPlacement:
    """`route` for one set of rules: what does not depend on the prompt is computed once."""

    def __init__(
        self, rules: PlacementRules, prefillers: Prefillers, decoders: Decoders | None
    ) -> None:
        """`decoders` None: the workers are unified."""
        assert (decoders is None) == prefillers.is_unified, "who decodes?"
        self._rules = rules
        self._prefillers = prefillers
        self._decoders = decoders
        self._max_step_s = rules.laps.max_step_ms / 1000

    def route(self, prompt: RouteRequest, hits: Mapping[int, int]) -> Placement:
        """Where the prompt goes; `hits` are tokens that workers, by column, hold of it."""
        fleet, laps = self._prefillers, self._rules.laps
        if not fleet.is_alive.any():
            return Hold(reason="no prefill worker is alive", retry_after_s=RETRY_AFTER_S)
        refusal = self._refusal(prompt)
        if refusal is not None:
            return refusal
        usable = _prefer(fleet.is_alive, fleet.index, prompt.avoid)
        cold = self.predict(prompt, 0)
        warm = {i: self.predict(prompt, num_tokens) for i, num_tokens in hits.items()}
        ttft_s = fleet.wait_s(cold.length_class, self._max_step_s) + cold.work_s
        is_home = self._homes(cold.length_class, cold.length_class)
        for i, predicted in warm.items():
            wait_s = fleet.wait_at(i, predicted.length_class, self._max_step_s)
            ttft_s[i] = wait_s + predicted.work_s
            is_home[i] = self._homes(predicted.length_class, cold.length_class)[i]
        ttft_s[~usable] = np.inf
        best = int(np.argmin(ttft_s))
        best_s = float(ttft_s[best])
        at_home = np.where(is_home & usable, ttft_s, np.inf)
        home = int(np.argmin(at_home))
        home_s = float(at_home[home])
        chosen, chosen_s = home, home_s
        reason = "least predicted time to the first token"
        if home_s == np.inf:
            chosen, chosen_s = best, best_s
            reason = "no worker that is alive is for such prompts"
        elif best_s + laps.spill_margin_s < home_s:
            chosen, chosen_s = best, best_s
            reason = f"spilled: {fleet.names[home]} would take {home_s:.3f} s"
        elif _in_time(best_s, warm.get(best, cold)) and not _in_time(home_s, warm.get(home, cold)):
            chosen, chosen_s = best, best_s
            reason = f"spilled: too late at {fleet.names[home]}, {home_s:.3f} s"
        return self._assign(prompt, chosen, warm.get(chosen, cold), chosen_s, reason)

    def assign_to(self, prompt: RouteRequest, i: int, hit_tokens: int) -> Placement:
        """The same record for a worker that another policy has chosen."""
        predicted = self.predict(prompt, hit_tokens)
        wait_s = self._prefillers.wait_at(i, predicted.length_class, self._max_step_s)
        return self._assign(prompt, i, predicted, wait_s + predicted.work_s, "")

    def predict(self, prompt: RouteRequest, hit_tokens: int) -> _Predicted:
        """As the private function of placement that makes a candidate."""
        laps, cost = self._rules.laps, self._rules.cost
        num_cached = min(hit_tokens, prompt.num_prompt_tokens - 1)
        num_new = prompt.num_prompt_tokens - num_cached
        length_class = classify(num_new, num_cached, laps.laps_alloc_threshold, cost)
        is_short = length_class == "short"
        default_s = laps.short_ttft_deadline_s if is_short else laps.long_ttft_deadline_s
        asked_s = prompt.ttft_deadline_s
        return _Predicted(
            length_class,
            num_new,
            cost.seconds(num_new, num_cached),
            default_s if asked_s is None else asked_s,
        )

    def _homes(self, length_class: LengthClass, cold_class: LengthClass) -> Flags:
        """Where such a prompt is at home [workers]."""
        labels = self._prefillers.labels
        is_home: Flags = labels == LABEL_CODES[None]
        if cold_class == "long":
            is_home |= labels == LABEL_CODES["long"]
        if length_class == "short":
            is_home |= labels == LABEL_CODES["short"]
        return is_home

    def _refusal(self, prompt: RouteRequest) -> Reject | None:
        limit = prompt.max_queued_tokens
        if limit is None:
            return None
        fleet = self._prefillers
        queued_tokens = int(fleet.queued_tokens[fleet.is_alive].sum())
        if not 0 < queued_tokens > limit - prompt.num_prompt_tokens:
            return None
        reason = f"{queued_tokens} tokens are queued; the limit is {limit}"
        return Reject(reason=reason, retry_after_s=RETRY_AFTER_S)

    def _assign(
        self, prompt: RouteRequest, i: int, predicted: _Predicted, ttft_s: float, reason: str
    ) -> Placement:
        decode_worker = None
        if self._decoders is not None:
            num_blocks = prompt.num_prompt_tokens // self._rules.block_size + 1
            chosen = self._decoders.choose(num_blocks, prompt.avoid)
            if chosen is None:
                return Hold(reason="no decode worker is alive", retry_after_s=RETRY_AFTER_S)
            decode_worker = self._decoders.names[chosen]
        return Assign(
            prefill_worker=self._prefillers.names[i],
            decode_worker=decode_worker,
            length_class=predicted.length_class,
            num_new_tokens=predicted.num_new_tokens,
            work_s=predicted.work_s,
            shared_s=shared_s(self._rules.cost),
            ttft_s=ttft_s,
            reason=reason,
        )


def _in_time(ttft_s: float, predicted: _Predicted) -> bool:
    return predicted.deadline_s is not None and ttft_s <= predicted.deadline_s


def _prefer(is_alive: Flags, index: Mapping[str, int], avoid: Sequence[str]) -> Flags:
    """Those alive and not in `avoid`; all alive ones when nothing else is left."""
    columns = [index[name] for name in avoid if name in index]
    if not columns:
        return is_alive
    usable = is_alive.copy()
    usable[columns] = False
    return usable if usable.any() else is_alive
