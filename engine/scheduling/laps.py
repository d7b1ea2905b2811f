"""Length-aware queue of one worker: short prompts first, long prompts in chunks that age.

A prompt is short if computing its uncached tokens, alone in a step and by the cost model, takes at
most as long as computing `laps_length_threshold` tokens without a history. Until the model is
fitted, it is short if it has at most that many uncached tokens. The class is kept while the request
runs: the last chunk of a long prompt is still long. While it waits, its uncached tokens are counted
again, as caches change: of a short one when it is offered; of the first long ones at each step, and
of a few of the others in turn.

Order inside a class: (priority, due time if there is one else arrival, arrival, order of adding).
Running short prompts come before waiting ones. `mix` decides what a step holds:

    exclusive   short prompts, or one long request's chunk when no short one can be granted tokens
    fill        short prompts, then chunks of long ones in the budget that is left

Decodes are part of either. A long request that computes in chunks competes again for every chunk.

Time limit of a step: `max_step_ms`. A step of long chunks alone may take a tenth of the time of the
queued long work, up to `max_busy_step_ms`: near saturation every chunk boundary costs capacity. In
`fill`, chunks are added to short prompts up to `max_mixed_step_ms`, because all requests of a step
wait for all of it.

Ageing: a long request *has aged* when it has got no chunk for `max_long_wait_s` (since its arrival
or since its last chunk). While short prompts wait, the aged request that has waited longest for a
chunk goes first, for one chunk. In `fill` that chunk shrinks, at most by half, so that short
prompts fit too. Two steps in a row never begin with a long chunk while a short prompt that can be
admitted waits.

Bound, as long as nothing is refused: when a long request has aged, let m others have waited longer
and let those ahead of it in its class have c chunks left. Before its next chunk come at most m + c
long chunks (m of aged requests; c in order, in steps without short prompts or in the budget that
these left) and m + c + 1 steps that begin with short prompts. If short prompts never run out,
`exclusive` has at most m long chunks and m + 1 such steps. A preempted request keeps its arrival
and may count among the m. What a refused one waits for is bounded by `short_reserve`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import chain, islice

from configs.resolved import ResolvedLaps
from engine.cost_model import NO_WORK, CostModel, StepWork
from engine.length_class import LengthClass, classify
from engine.request import Request, RequestKey
from engine.scheduling.budget import Candidate, StepBudget, rest_of_prompt
from engine.scheduling.waiting import SortKey, WaitingQueue

_MIN_STEP_FLOORS = 4  # the step limit is at least this many times the floor of a step's cost
_BUSY_SHARE = 0.1  # share of the queued long work that one step may take
_NUM_RECOUNTED = 4  # long requests behind the first that are counted again in a step


@dataclass(slots=True, kw_only=True)
class _Entry:
    """A waiting request, as it was when its uncached tokens were last counted."""

    serial: int  # order of adding; unchanged when the request changes its class
    length_class: LengthClass
    num_uncached_tokens: int


@dataclass(slots=True, kw_only=True)
class _Progress:
    """A running prompt that was granted a chunk by this queue."""

    length_class: LengthClass
    last_chunk_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassStatistics:
    """The waiting requests of one class."""

    num_waiting: int
    work: StepWork  # all of them in one step
    oldest_arrival_s: float | None  # None = no prompt waits
    first_due_s: float | None  # None = none of them has a due time


class DualQueue:
    """A `PromptQueue` of two classes.

    `count_uncached` returns how many tokens of a waiting request no cached block covers at present.
    `due_of` returns when its first token is due; None = the default of its class applies.
    """

    def __init__(
        self,
        config: ResolvedLaps,
        *,
        model: CostModel,
        count_uncached: Callable[[Request], int],
        due_of: Callable[[Request], float | None],
    ) -> None:
        self._config = config
        self._model = model
        self._count_uncached = count_uncached
        self._due_of = due_of
        self._waiting: dict[LengthClass, WaitingQueue] = {
            "short": WaitingQueue(self._short_sort_key),
            "long": WaitingQueue(self._long_sort_key),
        }
        self._entries: dict[RequestKey, _Entry] = {}
        self._progress: dict[RequestKey, _Progress] = {}
        self._long_in_turn = self._rounds_of_long()
        self._num_added = 0
        self._has_long_gone_first = False  # in the last step that computed prompt tokens

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Request]:
        """Short ones in order, then long ones."""
        return chain(self._waiting["short"], self._waiting["long"])

    @property
    def num_tokens(self) -> int:
        """Known tokens of all waiting requests: an upper bound on what they will compute."""
        return sum([queue.num_tokens for queue in self._waiting.values()])

    @property
    def max_step_s(self) -> float:
        """The configured limit, but at least `_MIN_STEP_FLOORS` times the floor of a step.

        Shorter steps would be mostly floor: that would cost capacity and lengthen the queues, and
        no short prompt would be served sooner.
        """
        return max(1e-3 * self._config.max_step_ms, _MIN_STEP_FLOORS * self._model.costs.floor_s)

    def add(self, request: Request) -> None:
        assert request.key not in self._entries, f"{request.key} is already waiting"
        num_uncached = self._uncached(request)
        length_class = self._class_of(num_uncached, request.num_known_tokens - num_uncached)
        self._entries[request.key] = _Entry(
            serial=self._num_added, length_class=length_class, num_uncached_tokens=num_uncached
        )
        self._num_added += 1
        self._waiting[length_class].add(request)

    def remove(self, key: RequestKey) -> Request | None:
        entry = self._entries.pop(key, None)
        return None if entry is None else self._waiting[entry.length_class].remove(key)

    def length_class(self, key: RequestKey) -> LengthClass | None:
        """Class of a request that waits or whose prompt is being computed; None for any other."""
        known = self._entries.get(key) or self._progress.get(key)
        return None if known is None else known.length_class

    def statistics(self, length_class: LengthClass) -> ClassStatistics:
        """Statistics of the class; takes time linear in its requests."""
        requests = list(self._waiting[length_class])
        dues = [self._due_s(request, length_class) for request in requests]
        return ClassStatistics(
            num_waiting=len(requests),
            work=self._work(requests),
            oldest_arrival_s=min([request.arrival_s for request in requests], default=None),
            first_due_s=min([due_s for due_s in dues if due_s is not None], default=None),
        )

    # ---- one step -------------------------------------------------------------------------------

    def candidates(self, running: Sequence[Request], budget: StepBudget) -> Iterator[Candidate]:
        """See `PromptQueue.candidates`, and the module's rules.

        Walks the long requests. Records whether a long chunk went first in this step.
        """
        short, long = self._split(running)
        self._reclassify_long()
        is_fill = self._config.mix == "fill"
        waiting_short = self._waiting_short() if budget.can_admit else iter(())
        waiting_long = self._waiting["long"] if budget.can_admit else ()
        has_short = bool(short) or (budget.can_admit and len(self._waiting["short"]) > 0)
        if has_short and not self._has_long_gone_first:
            yield from self._aged_candidates(chain(long, waiting_long), short, budget)
        if is_fill or budget.num_prompts == 0:
            yield from self._offer(chain(short, waiting_short), budget, "short")
        if is_fill or budget.num_prompts == 0:
            self._limit_long_chunks(chain(long, waiting_long), budget)
            ordered = merge(long, waiting_long, key=self._long_sort_key)
            yield from self._offer(ordered, budget, "long", max_prompts=None if is_fill else 1)

    def _limit_long_chunks(self, long: Iterable[Request], budget: StepBudget) -> None:
        """Set the time limit for chunks of `long`, where the configuration differs for them."""
        mixed_ms, busy_ms = self._config.max_mixed_step_ms, self._config.max_busy_step_ms
        if budget.num_prompts > 0 and mixed_ms is not None:
            budget.limit_time(min(self.max_step_s, 1e-3 * mixed_ms))
        elif budget.num_prompts == 0 and busy_ms is not None:
            queued_s = self._model.costs.step_seconds(self._work(long))
            budget.limit_time(max(self.max_step_s, min(1e-3 * busy_ms, _BUSY_SHARE * queued_s)))

    def _aged_candidates(
        self, long: Iterable[Request], short: list[Request], budget: StepBudget
    ) -> Iterator[Candidate]:
        """Yield one chunk for the aged long request that has waited longest for one, if any."""
        aged = [
            (since_s, request)
            for request in long
            if budget.now_s - (since_s := self._last_served_s(request))
            >= self._config.max_long_wait_s
        ]
        if not aged:
            return
        aged.sort(key=lambda pair: pair[0])
        reserved = NO_WORK
        if self._config.mix == "fill":  # more requests than tokens cannot change the result
            first_short = islice(self._waiting["short"], budget.num_tokens_left)
            reserved = self._work(chain(short, first_short))
        ordered = [request for _, request in aged]
        yield from self._offer(ordered, budget, "long", max_prompts=1, reserved=reserved)

    def _offer(
        self,
        candidates: Iterable[Request],
        budget: StepBudget,
        length_class: LengthClass,
        *,
        max_prompts: int | None = None,
        reserved: StepWork = NO_WORK,
    ) -> Iterator[Candidate]:
        """Yield candidates in order until `max_prompts` have a chunk.

        Chunks leave budget for `reserved`, but keep at least half of what would fit without it.
        """
        num_prompts = 0
        offers = budget.offer(candidates, work_of=self._rest, is_waiting=self._is_waiting)
        for request, max_tokens in offers:
            if reserved is not NO_WORK:
                rest = self._rest(request)
                max_tokens = max(budget.fit(*rest, reserved=reserved), budget.fit(*rest) // 2)
            yield request, max_tokens
            if budget.num_granted(request) == 0:
                continue
            if budget.num_prompts == 1:
                self._has_long_gone_first = length_class == "long"
            self._progress[request.key] = _Progress(
                length_class=length_class, last_chunk_s=budget.now_s
            )
            num_prompts += 1
            if num_prompts == max_prompts:
                return

    def _split(self, running: Sequence[Request]) -> tuple[list[Request], list[Request]]:
        """Running prompts by class, in order; drops the progress of those that stopped running."""
        progress = {r.key: self._progress.get(r.key) or self._enter(r) for r in running}
        self._progress = progress
        short = [r for r in running if progress[r.key].length_class == "short"]
        long = [r for r in running if progress[r.key].length_class == "long"]
        return (
            sorted(short, key=self._short_sort_key),
            sorted(long, key=self._long_sort_key),
        )

    def _enter(self, request: Request) -> _Progress:
        """Progress of a running prompt that was admitted without a chunk."""
        return _Progress(
            length_class=self._class_of(*rest_of_prompt(request)), last_chunk_s=request.arrival_s
        )

    def _waiting_short(self) -> Iterator[Request]:
        """Short requests in order; each is counted again, and moved if it has become long."""
        for request in self._waiting["short"]:
            if self._reclassify(request) == "short":
                yield request

    def _work(self, requests: Iterable[Request]) -> StepWork:
        """Work of computing the rest of these prompts in one step."""
        return StepWork.of_prompts(map(self._rest, requests))

    # ---- classes and order -----------------------------------------------------------------------

    def _class_of(self, num_uncached: int, num_cached: int) -> LengthClass:
        threshold = self._config.laps_length_threshold
        if not self._model.costs.is_fitted:
            return "short" if num_uncached <= threshold else "long"
        return classify(num_uncached, num_cached, threshold, self._model.costs)

    def _reclassify_long(self) -> None:
        """Move long requests that have become short, so that they are offered as short.

        Finds all of them at the head of the queue, and those behind others within some steps.
        """
        for request in islice(self._long_in_turn, _NUM_RECOUNTED):
            if request is not None:
                self._reclassify(request)
        for request in self._waiting["long"]:
            if self._reclassify(request) == "long":
                return

    def _rounds_of_long(self) -> Iterator[Request | None]:
        """The waiting long requests in order, again and again; None at the end of each round."""
        while True:
            yield from self._waiting["long"]
            yield None

    def _reclassify(self, request: Request) -> LengthClass:
        entry = self._entries[request.key]
        entry.num_uncached_tokens = num_uncached = self._uncached(request)
        length_class = self._class_of(num_uncached, request.num_known_tokens - num_uncached)
        if length_class != entry.length_class:
            self._waiting[entry.length_class].remove(request.key)
            entry.length_class = length_class
            self._waiting[length_class].add(request)
        return length_class

    def _uncached(self, request: Request) -> int:
        """Uncached tokens; at least one, because the newest token is always computed."""
        return max(1, min(self._count_uncached(request), request.num_known_tokens))

    def _rest(self, request: Request) -> tuple[int, int]:
        """New and cached tokens of what the request has to compute."""
        entry = self._entries.get(request.key)
        if entry is None:
            return rest_of_prompt(request)
        return entry.num_uncached_tokens, request.num_known_tokens - entry.num_uncached_tokens

    def _is_waiting(self, request: Request) -> bool:
        return request.key in self._entries

    def _last_served_s(self, request: Request) -> float:
        progress = self._progress.get(request.key)
        return request.arrival_s if progress is None else progress.last_chunk_s

    def _due_s(self, request: Request, length_class: LengthClass) -> float | None:
        due_s = self._due_of(request)
        if due_s is not None:
            return due_s
        config = self._config
        is_short = length_class == "short"
        default_s = config.short_ttft_deadline_s if is_short else config.long_ttft_deadline_s
        return None if default_s is None else request.arrival_s + default_s

    def _short_sort_key(self, request: Request) -> SortKey:
        return self._sort_key(request, self._due_s(request, "short"))

    def _long_sort_key(self, request: Request) -> SortKey:
        return self._sort_key(request, self._due_s(request, "long"))

    def _sort_key(self, request: Request, due_s: float | None) -> SortKey:
        order_s = request.arrival_s if due_s is None else due_s
        entry = self._entries.get(request.key)
        serial = -1 if entry is None else entry.serial  # of equals, running requests go first
        return request.spec.priority, order_s, request.arrival_s, serial
