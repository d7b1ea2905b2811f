"""Every `PromptQueue` on random loads: budgets, conservation, order, and the bound of ageing."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import LapsConfig
from engine.cost_model import PRIOR, CostModel
from engine.request import Request, RequestKey
from engine.scheduling.laps import DualQueue
from engine.scheduling.waiting import PromptQueue, WaitingQueue, by_arrival, by_priority
from tests.engine.scheduling.toy_worker import Step, ToyWorker, make_request

THRESHOLD = 32
MAX_LONG_WAIT_S = 0.5
STEP_S = 0.125


@dataclass(frozen=True)
class Add:
    num_tokens: int
    num_cached: int
    priority: int


@dataclass(frozen=True)
class Abort:
    index: int  # of those that were added


@dataclass(frozen=True)
class Run:
    num_refused: int  # of those that wait, the first so many find no blocks


@dataclass(frozen=True)
class Evict:
    index: int


Operation = Add | Abort | Run | Evict
OPERATIONS = st.lists(
    st.builds(Add, st.integers(1, 120), st.integers(0, 119), st.integers(-1, 1))
    | st.builds(Abort, st.integers(0, 30))
    | st.builds(Run, st.sampled_from([0, 0, 0, 0, 1, 3]))
    | st.builds(Evict, st.integers(0, 30)),
    max_size=40,
)
OPTIONS = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 90),
        "min_chunk_tokens": st.sampled_from([1, 8, 64]),
        "max_step_s": st.none() | st.floats(0.004, 0.008),
    }
)


def _dual(worker: ToyWorker, mix: Literal["exclusive", "fill"]) -> DualQueue:
    config = LapsConfig(laps_length_threshold=THRESHOLD, mix=mix, max_long_wait_s=MAX_LONG_WAIT_S)
    return DualQueue(
        config,
        model=CostModel(),
        count_uncached=worker.count_uncached,
        due_of=lambda request: request.first_token_due_s,
    )


Maker = Callable[[ToyWorker], PromptQueue]
QUEUES: dict[str, Maker] = {
    "fcfs": lambda worker: WaitingQueue(by_arrival),
    "priority": lambda worker: WaitingQueue(by_priority),
    "exclusive": lambda worker: _dual(worker, "exclusive"),
    "fill": lambda worker: _dual(worker, "fill"),
}


def _worker(make: Maker, **options: float | None) -> ToyWorker:
    worker = ToyWorker(WaitingQueue(), **options)  # type: ignore[arg-type]
    worker.queue = make(worker)
    return worker


def _play(
    make: Maker,
    operations: list[Operation],
    options: dict[str, float | None],
    check_step: Callable[[PromptQueue, Step], None] = lambda queue, granted: None,
) -> ToyWorker:
    """Do all of it, check the queue after each, then run until nothing is left."""
    worker, now_s = _worker(make, **options), 0.0
    added: list[Request] = []
    for operation in operations:
        now_s += STEP_S
        match operation:
            case Add(num_tokens, num_cached, priority):
                name = str(len(added))
                worker.cached[name] = min(num_cached, num_tokens - 1)
                request = make_request(name, num_tokens, arrival_s=now_s, priority=priority)
                added.append(request)
                worker.queue.add(request)
            case Abort(index) if index < len(added):
                key = added[index].key
                if key in worker.queue or key in worker.running:
                    worker.abort(key)
            case Evict(index):
                worker.cached[str(index)] = 0
            case Run(num_refused):
                names = [request.key.request_id for request in worker.queue]
                check_step(worker.queue, worker.step(now_s, refused=names[:num_refused]))
            case _:
                pass  # an abort of a request that never was
        _check_queue(worker, [r for r in added if r.key in worker.queue])
    while len(worker.queue) > 0 or worker.running:
        now_s += STEP_S
        granted = worker.step(now_s)
        assert granted != {}, "nobody was granted a token of an empty step"
        check_step(worker.queue, granted)
    assert worker.queue.num_tokens == 0
    return worker


def _check_queue(worker: ToyWorker, waiting: list[Request]) -> None:
    queue = worker.queue
    assert len(queue) == len(waiting)
    assert {r.key for r in queue} == {r.key for r in waiting}
    assert queue.num_tokens == sum(r.num_known_tokens for r in waiting)
    assert all(r.key not in worker.running for r in queue)


@pytest.mark.parametrize("name", QUEUES)
@given(operations=OPERATIONS, options=OPTIONS)
@settings(max_examples=60, deadline=None)
def test_any_history_keeps_budgets_and_queues_and_ends(
    name: str, operations: list[Operation], options: dict[str, float | None]
) -> None:
    first = _play(QUEUES[name], operations, options)
    second = _play(QUEUES[name], operations, options)
    assert first.steps == second.steps  # same inputs, same decisions


@given(operations=OPERATIONS, options=OPTIONS)
@settings(max_examples=60, deadline=None)
def test_an_exclusive_step_holds_short_prompts_or_one_long_chunk(
    operations: list[Operation], options: dict[str, float | None]
) -> None:
    def check(queue: PromptQueue, granted: Step) -> None:
        assert isinstance(queue, DualQueue)
        classes = [queue.length_class(RequestKey(name)) for name in granted]
        assert classes == ["long"] or set(classes) <= {"short"}, (granted, classes)

    _play(QUEUES["exclusive"], operations, options, check)


@pytest.mark.parametrize("name", ["fcfs", "priority"])
@given(operations=OPERATIONS)
@settings(max_examples=40, deadline=None)
def test_without_priorities_prompts_begin_in_the_order_of_arrival(
    name: str, operations: list[Operation]
) -> None:
    plain = [Add(o.num_tokens, 0, 0) if isinstance(o, Add) else o for o in operations]
    worker = _play(QUEUES[name], plain, {"max_tokens": 50})
    begun = list(dict.fromkeys(name for step in worker.steps for name in step))
    assert begun == sorted(begun, key=int)


# ---- the bound of ageing -------------------------------------------------------------------------


MAX_TOKENS = 40


@dataclass
class LongWatch:
    """What each long prompt of a toy worker has left, and what may still come before its chunk."""

    left: dict[str, int]
    last_s: dict[str, float] = field(default_factory=dict)  # of those here: last chunk or arrival
    # Of those that have aged: long chunks and other steps that may still come first.
    bounds: dict[str, list[int]] = field(default_factory=dict)

    def look(self, now_s: float, *, num_ahead: Callable[[str], int]) -> None:
        """Note who has aged; `num_ahead` is how many chunks of others may come in order."""
        for name, since_s in self.last_s.items():
            if name not in self.bounds and now_s - since_s >= MAX_LONG_WAIT_S:
                num_older = sum(other_s <= since_s for other_s in self.last_s.values()) - 1
                num_long = num_older + num_ahead(name)
                self.bounds[name] = [num_long, num_long + 1]

    def ran(self, granted: Step, now_s: float) -> None:
        """Count a step that ran, and check who is still kept waiting."""
        is_long = next(iter(granted), "") in self.left
        for name in self.left.keys() & granted.keys():
            self.left[name] -= granted[name]
            self.last_s[name] = now_s
            self.bounds.pop(name, None)
            if self.left[name] == 0:
                del self.last_s[name]
        for name, bound in self.bounds.items():
            bound[0 if is_long else 1] -= len(granted) > 0
            assert min(bound) >= 0, f"{name} has aged, and {granted} goes before it"


@pytest.mark.parametrize("name", ["exclusive", "fill"])
@given(
    lengths=st.lists(st.integers(THRESHOLD + 1, 200), min_size=1, max_size=6),
    gaps_s=st.lists(st.floats(0.0, 1.0), min_size=6, max_size=6),
)
@settings(max_examples=30, deadline=None)
def test_while_short_prompts_never_run_out_only_who_waited_longer_goes_before_an_aged_one(
    name: str, lengths: list[int], gaps_s: list[float]
) -> None:
    worker = _worker(QUEUES[name], max_tokens=MAX_TOKENS)
    watch = LongWatch({f"long {i}": n for i, n in enumerate(lengths)})
    arrivals_s = {long: sum(gaps_s[: i + 1]) for i, long in enumerate(watch.left)}
    for step in range(400):
        now_s = STEP_S * step
        for i in range(2):  # more short tokens than a step can hold
            worker.queue.add(make_request(f"short {step}.{i}", THRESHOLD, arrival_s=now_s))
        for long, arrival_s in list(arrivals_s.items()):
            if arrival_s <= now_s:
                watch.last_s[long] = arrivals_s.pop(long)
                worker.queue.add(make_request(long, watch.left[long], arrival_s=arrival_s))
        watch.look(now_s, num_ahead=lambda long: 0)
        watch.ran(worker.step(now_s), now_s)
        if not any(watch.left.values()):
            return
    raise AssertionError(f"starved: {watch.left}")


@given(
    lengths=st.lists(st.integers(THRESHOLD + 1, 400), min_size=1, max_size=6),
    shorts=st.lists(st.integers(0, 3), min_size=40, max_size=80),
)
@settings(max_examples=60, deadline=None)
def test_with_short_prompts_now_and_then_the_chunks_of_those_ahead_may_come_too(
    lengths: list[int], shorts: list[int]
) -> None:
    worker = _worker(QUEUES["exclusive"], max_tokens=MAX_TOKENS)
    watch = LongWatch({f"long {i}": n for i, n in enumerate(lengths)})
    for long, num_tokens in watch.left.items():
        worker.queue.add(make_request(long, num_tokens))
        watch.last_s[long] = 0.0

    def num_ahead(name: str) -> int:
        ahead = list(watch.left.values())[: list(watch.left).index(name)]
        return sum(math.ceil(num_left / MAX_TOKENS) for num_left in ahead)

    for step, num_shorts in enumerate(shorts * 4):
        now_s = STEP_S * step
        for i in range(num_shorts):
            worker.queue.add(make_request(f"short {step}.{i}", THRESHOLD, arrival_s=now_s))
        watch.look(now_s, num_ahead=num_ahead)
        watch.ran(worker.step(now_s), now_s)


def test_a_worker_without_a_time_limit_needs_no_costs() -> None:
    worker = _worker(QUEUES["fcfs"], max_tokens=10_000)
    worker.queue.add(make_request("long", 9_000))
    assert worker.step() == {"long": 9_000}
    assert worker.costs is PRIOR
