"""One worker on a virtual clock: real queues and step rooms, no blocks and no tensors.

    plan moment   the scheduler would plan: settle what ended, choose chunks, or let decodes run
    step          between plan and end nothing changes; steps of decodes alone come as one run

With overlap a step is planned when the one in front of it starts, so an arrival in between joins
the step after next; with the length-aware queue, shortly before that one ends. Times of tokens are
known when their step is planned, and told at once. Instead of blocks there are tokens of KV: a
request reserves its final length, so nobody is preempted. `real_worker` runs the whole scheduler in
its place; both give the same times.
"""

import math
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from configs.resolved import ResolvedLaps
from engine.core import LEAD_S
from engine.cost_model import PRIOR, StepCosts, StepWork
from engine.request import Request
from engine.scheduling.budget import StepBudget
from engine.scheduling.prompt_scheduling import PromptScheduling, QueuedWork
from load_tests.simulation.decode_run import DecodeRun, build_run
from load_tests.simulation.prefix_cache import PrefixCache


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What one worker is."""

    laps: ResolvedLaps = field(default_factory=ResolvedLaps)
    costs: StepCosts = PRIOR
    keeps_decodes: bool = False  # unified: a prompt's request decodes where it was computed
    overlap: bool = True
    max_num_batched_tokens: int = 8192
    max_rows: int = 256
    max_kv_tokens: int = 700_000  # an 8B model in 16 bits on one H200
    host_s: float = 0.0  # from a plan to the start of its step, on an idle device
    graph_token_sizes: tuple[int, ...] = ()  # sizes that chunks are cut to, as captured in graphs
    short_share: float = 0.0  # kept of rows and KV for short requests; of the whole scheduler alone
    predicts: bool = True  # whether it tells its load: nobody may want to know

    @property
    def known_costs(self) -> StepCosts:
        """As a worker has them that has fitted them: its queue then classifies by cost."""
        return msgspec.structs.replace(self.costs, num_samples=max(1, self.costs.num_samples))

    def plan_s(self, start_s: float, end_s: float) -> float:
        """When the step after one from `start_s` to `end_s` is planned."""
        if not self.overlap:
            return end_s
        return max(start_s, end_s - LEAD_S) if self.laps.queue == "laps" else start_s

    def with_queue(self, queue: str) -> "WorkerSpec":
        """The same with a queue by name. Raises msgspec.ValidationError for an unknown name."""
        values = msgspec.to_builtins(self.laps)
        values |= {"queue": queue}
        return replace(self, laps=msgspec.convert(values, ResolvedLaps))


@dataclass(frozen=True, slots=True)
class Load:
    """What a worker tells of its queue."""

    num_tokens: int  # to be computed
    num_waiting: int
    queued: QueuedWork


@dataclass(slots=True)
class Outcome:
    """What a plan moment settled; a time may lie one step ahead."""

    first_tokens: list[tuple[Request, float]] = field(default_factory=list)
    finished: list[tuple[Request, float]] = field(default_factory=list)  # last token here
    load: Load | None = None  # of when a step ended, before the plan; None = no step ended


class Worker(Protocol):
    """What the cluster drives."""

    @property
    def next_plan_s(self) -> float:
        """When `plan` is due; inf = not before something arrives."""
        ...

    def add(self, request: Request, now_s: float) -> None:
        """A prompt arrives."""
        ...

    def plan(self, now_s: float) -> Outcome:
        """Do what is due at `next_plan_s`."""
        ...

    def load(self) -> Load: ...


class _Rows:
    """Requests that decode, their keys together, and when the next one ends."""

    def __init__(self) -> None:
        self._last: dict[Request, int] = {}  # request -> number of the step that is its last
        self._first: dict[Request, int] = {}  # request -> steps before its first
        self._num_steps = 0
        self._next_last = 0  # the least of `_last`
        self.num_keys = 0  # of all, in the next step

    def __len__(self) -> int:
        return len(self._last)

    def add(self, request: Request) -> None:
        """Its first token is known; the others are computed here, one a step."""
        self._first[request] = self._num_steps
        self._last[request] = last = self._num_steps + request.params.max_tokens - 1
        self._next_last = last if len(self._last) == 1 else min(last, self._next_last)
        self.num_keys += request.num_prompt_tokens + 1

    @property
    def num_steps_left(self) -> int:
        """Until the first of them ends; at least one."""
        return self._next_last - self._num_steps

    def advance(self, num_steps: int) -> list[Request]:
        """So many steps were computed; returns those that are over."""
        self._num_steps += num_steps
        self.num_keys += num_steps * len(self._last)
        if not self._last or self._num_steps < self._next_last:
            return []
        ended = [r for r, last in self._last.items() if last == self._num_steps]
        for request in ended:
            del self._last[request], self._first[request]
            self.num_keys -= request.num_prompt_tokens + request.params.max_tokens
        self._next_last = min(self._last.values(), default=0)
        return ended

    def current(self) -> list[Request]:
        """All of them, with their progress up to date."""
        for request, first in self._first.items():
            num_decoded = self._num_steps - first
            request.num_computed_tokens = request.num_prompt_tokens + num_decoded
        return list(self._last)


class LightWorker:
    """The scheduler's decisions by its own parts, without its books."""

    def __init__(self, spec: WorkerSpec, cache: PrefixCache | None = None) -> None:
        """`cache` None: no prompt shares anything."""
        self._spec = spec
        self._cache = cache
        self._scheduling = PromptScheduling(
            spec.laps,
            count_uncached=self._count_uncached,
            graph_token_sizes=spec.graph_token_sizes,
        )
        self._scheduling.model.costs = spec.known_costs
        self._queue = self._scheduling.queue
        self._prompts: dict[Request, None] = {}  # running, in the order of admission
        self._rows = _Rows()
        self._joining: deque[Request] = deque()  # KV has come, no room yet
        self._leaving: deque[tuple[float, Request]] = deque()  # (end of its last step, request)
        self._run: DecodeRun | None = None
        self._step_ends: deque[float] = deque()  # of steps planned and not yet reported
        self._free_s = -math.inf  # when the device will have done all that is planned
        self._num_rows = 0  # taken, those that are leaving included
        self._num_kv_tokens = 0  # reserved
        self._is_idle = True  # nothing is due before something arrives
        self.next_plan_s = math.inf

    # ---- what arrives ---------------------------------------------------------------------------

    def add(self, request: Request, now_s: float) -> None:
        """A prompt arrives."""
        assert self._final_tokens(request) <= self._spec.max_kv_tokens, f"{request.key} never fits"
        self._scheduling.arrived(request)
        self._wake(now_s)

    def join(self, request: Request, now_s: float) -> None:
        """A request arrives whose prompt was computed elsewhere."""
        assert self._final_tokens(request) <= self._spec.max_kv_tokens, f"{request.key} never fits"
        self._joining.append(request)
        self._wake(now_s)

    def _wake(self, now_s: float) -> None:
        """Plan as soon as the loop would look at what has arrived."""
        run = self._run
        if self._is_idle:
            self._is_idle = False
            self.next_plan_s = now_s
        elif run is not None:
            boundary = max(1, run.first_boundary_at(now_s))
            is_planned = now_s > self._plan_s(run, boundary)
            run.cut(boundary + 1 if is_planned else boundary)
            self._schedule_run(run)

    # ---- one plan moment ------------------------------------------------------------------------

    def plan(self, now_s: float) -> Outcome:
        """Settle what ended, then plan the next step or run."""
        outcome = Outcome()
        self._is_idle = False
        self._close_run(outcome)
        if self._settle(now_s) and self._spec.predicts:
            outcome.load = self.load()
        self._seat_joining()
        has_room = self._num_rows < self._spec.max_rows
        deferred_until_s = None
        if not (self._prompts or self._num_rows or self._free_s > now_s):
            deferred_until_s = self._scheduling.must_defer_until_s(now_s)
        chunks: list[tuple[Request, int]] = []
        room = None
        if deferred_until_s is None and (self._prompts or (has_room and len(self._queue) > 0)):
            room = self._open_room(now_s, has_room)
            chunks = self._choose(room)
        if room is not None and chunks:
            self._compute(room, chunks, now_s, outcome)
        elif len(self._rows) > 0:
            self._begin_run(now_s)
        else:
            self._rest(now_s, deferred_until_s)
        return outcome

    def load(self) -> Load:
        """Walks the queue."""
        running_tokens = sum([r.num_uncomputed_tokens for r in self._prompts]) + len(self._rows)
        queued = self._scheduling.queued_work(self._prompts)
        return Load(self._queue.num_tokens + running_tokens, len(self._queue), queued)

    @property
    def num_running(self) -> int:
        """Requests with a row, and those whose KV waits for one."""
        return self._num_rows + len(self._joining)

    # ---- prompts --------------------------------------------------------------------------------

    def _open_room(self, now_s: float, has_room: bool) -> StepBudget:
        decodes = self._rows.current()
        max_tokens = self._spec.max_num_batched_tokens - len(decodes)
        num_keys = sum([request.num_computed_tokens + 1 for request in decodes])
        decoding = StepWork(num_decode_rows=len(decodes), num_decode_keys=num_keys)
        return self._scheduling.open_budget(now_s, max_tokens, decoding, can_admit=has_room)

    def _choose(self, room: StepBudget) -> list[tuple[Request, int]]:
        chunks = []
        for candidate in self._queue.candidates(list(self._prompts), room):
            request, _ = candidate
            if request not in self._prompts and not self._admit(request, room):
                continue
            chunks.append((request, room.grant(candidate)))
        return chunks

    def _admit(self, request: Request, room: StepBudget) -> bool:
        if not self._has_room(request):
            room.refuse(request)
            return False
        self._queue.remove(request.key)
        self._seat(request)
        self._prompts[request] = None
        num_cached = request.num_prompt_tokens - self._count_uncached(request)
        request.num_computed_tokens = request.num_cached_tokens = num_cached
        return True

    def _compute(
        self,
        room: StepBudget,
        chunks: list[tuple[Request, int]],
        now_s: float,
        outcome: Outcome,
    ) -> None:
        """A step with prompts: everybody in it moves on, and its end is known."""
        start_s = max(now_s + self._spec.host_s, self._free_s)
        self._free_s = end_s = start_s + self._spec.costs.step_seconds(room.work)
        self._step_ends.append(end_s)
        self._end_decodes(self._rows.advance(1), end_s, outcome)
        for request, num_tokens in chunks:
            request.num_computed_tokens += num_tokens
            if request.num_computed_tokens < request.num_prompt_tokens:
                continue
            del self._prompts[request]
            outcome.first_tokens.append((request, end_s))
            if self._cache is not None:
                self._cache.insert(request)
            if self._spec.keeps_decodes and request.params.max_tokens > 1:
                self._rows.add(request)
            else:
                self._end_decodes([request], end_s, outcome)
        self.next_plan_s = self._spec.plan_s(start_s, end_s)

    # ---- decodes --------------------------------------------------------------------------------

    def _begin_run(self, now_s: float) -> None:
        """Decodes alone, until one of them ends or something arrives."""
        is_full = len(self._queue) > 0 or len(self._joining) > 0
        num_steps = 1 if is_full and self._leaving else self._rows.num_steps_left
        host_s = self._spec.host_s
        self._run = run = build_run(
            self._spec.costs,
            start_s=max(now_s + host_s, self._free_s) if self._spec.overlap else now_s,
            host_s=0.0 if self._spec.overlap else host_s,
            num_rows=len(self._rows),
            num_keys=self._rows.num_keys,
            num_steps=num_steps,
        )
        self._schedule_run(run)

    def _schedule_run(self, run: DecodeRun) -> None:
        self.next_plan_s = self._plan_s(run, run.num_steps)

    def _plan_s(self, run: DecodeRun, boundary: int) -> float:
        """When what follows the first so many steps of a run is planned."""
        return self._spec.plan_s(run.boundary_s(boundary - 1), run.boundary_s(boundary))

    def _close_run(self, outcome: Outcome) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        self._free_s = run.end_s
        self._step_ends.append(run.end_s)
        self._end_decodes(self._rows.advance(run.num_steps), run.end_s, outcome)

    def _end_decodes(self, requests: list[Request], end_s: float, outcome: Outcome) -> None:
        """These have no step here after the one that ends at `end_s`."""
        for request in requests:
            self._leaving.append((end_s, request))
            outcome.finished.append((request, end_s))

    # ---- rows and room --------------------------------------------------------------------------

    def _settle(self, now_s: float) -> bool:
        """Free what the commits until now freed; whether there was one."""
        while self._leaving and self._leaving[0][0] <= now_s:
            _, request = self._leaving.popleft()
            self._num_rows -= 1
            self._num_kv_tokens -= self._final_tokens(request)
        has_ended = False
        while self._step_ends and self._step_ends[0] <= now_s:
            self._step_ends.popleft()
            has_ended = True
        return has_ended

    def _seat_joining(self) -> None:
        while self._joining and self._has_room(self._joining[0]):
            request = self._joining.popleft()
            self._seat(request)
            self._rows.add(request)

    def _seat(self, request: Request) -> None:
        self._num_rows += 1
        self._num_kv_tokens += self._final_tokens(request)

    def _has_room(self, request: Request) -> bool:
        num_free = self._spec.max_kv_tokens - self._num_kv_tokens
        return self._num_rows < self._spec.max_rows and self._final_tokens(request) <= num_free

    def _final_tokens(self, request: Request) -> int:
        """Where it only leaves its first token, its prompt is all that it holds."""
        if not self._spec.keeps_decodes:
            return request.num_prompt_tokens
        return request.num_prompt_tokens + request.params.max_tokens

    def _rest(self, now_s: float, deferred_until_s: float | None) -> None:
        """Nothing to plan: wait for the step in flight, the window, or an arrival."""
        self._is_idle = self._free_s <= now_s
        if not self._is_idle:
            self.next_plan_s = self._free_s
        else:
            self.next_plan_s = math.inf if deferred_until_s is None else deferred_until_s

    def _count_uncached(self, request: Request) -> int:
        if self._cache is None:
            return request.num_prompt_tokens
        return request.num_prompt_tokens - self._cache.hit_tokens(request)
