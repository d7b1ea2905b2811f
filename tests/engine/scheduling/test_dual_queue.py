"""Short prompts first, long ones in chunks that age: each rule of the queue by itself."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from configs.schema import LapsConfig
from engine.cost_model import PRIOR, CostModel, StepWork
from engine.request import Request
from engine.scheduling.laps import DualQueue
from tests.engine.scheduling.toy_worker import ToyWorker, make_request

FITTED = msgspec.structs.replace(PRIOR, num_samples=1)
MAX_LONG_WAIT_S = 1.0


@dataclass
class World:
    """A toy worker with a `DualQueue`, whose cache the test writes."""

    queue: DualQueue
    worker: ToyWorker
    cached: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, num_tokens: int, **details: Any) -> Request:
        request = make_request(name, num_tokens, **details)
        self.queue.add(request)
        return request

    @property
    def waiting(self) -> list[str]:
        return [request.key.request_id for request in self.queue]


def make_world(
    *, model: CostModel | None = None, cached: dict[str, int] | None = None, **options: Any
) -> World:
    """`options` of the worker, or of the config if they belong there."""
    names = set(LapsConfig.__struct_fields__)
    config = LapsConfig(
        max_long_wait_s=MAX_LONG_WAIT_S, **{k: v for k, v in options.items() if k in names}
    )
    found = {} if cached is None else cached
    queue = DualQueue(
        config,
        model=model or CostModel(),
        count_uncached=lambda r: r.num_known_tokens - found.get(r.key.request_id, 0),
        due_of=lambda request: request.first_token_due_s,
    )
    rest = {k: v for k, v in options.items() if k not in names}
    return World(queue, ToyWorker(queue, cached=found, **rest), found)


# ---- classes -------------------------------------------------------------------------------------


def test_before_the_model_is_fitted_the_threshold_counts_uncached_tokens() -> None:
    world = make_world(cached={"turn": 4000})
    requests = [world.add("at", 256), world.add("above", 257), world.add("turn", 4256)]
    classes = [world.queue.length_class(request.key) for request in requests]
    assert classes == ["short", "long", "short"]


def test_a_prompt_that_is_cached_whole_computes_its_newest_token() -> None:
    world = make_world()
    world.cached["whole"] = 300
    world.add("whole", 300)
    statistics = world.queue.statistics("short")
    assert statistics.num_waiting == 1
    assert statistics.work == StepWork.of_prompts([(1, 299)])


def test_a_fitted_model_charges_for_the_cached_history() -> None:
    world = make_world(model=CostModel(FITTED), cached={"turn": 20_000, "small turn": 20_000})
    requests = [world.add("at", 256), world.add("turn", 20_250), world.add("small turn", 20_020)]
    classes = [world.queue.length_class(request.key) for request in requests]
    assert classes == ["short", "long", "short"]


def test_a_prompt_that_was_cached_since_joins_the_short_ones() -> None:
    world = make_world()
    for name in ("first long", "second long"):
        world.add(name, 1000)
    world.add("short", 10)
    assert world.waiting == ["short", "first long", "second long"]
    world.cached["second long"] = 990
    assert world.worker.step() == {"second long": 10, "short": 10}  # by arrival, then by adding
    assert world.worker.step() == {"first long": 512}


def test_a_prompt_that_was_cached_since_is_found_behind_long_ones() -> None:
    world = make_world()
    for number in range(20):
        world.add(f"long {number}", 2048)
    world.add("shared", 2048)
    world.worker.step()
    world.cached["shared"] = 2040
    steps = [world.worker.step() for _ in range(8)]
    assert {"shared": 8} in steps  # without a second count it waits for all of the others


def test_who_is_about_to_be_offered_is_counted_again() -> None:
    world = make_world(mix="exclusive", cached={"evicted": 990})
    world.add("evicted", 1000)
    world.add("shared", 2000)
    assert world.waiting == ["evicted", "shared"]
    world.cached.update({"evicted": 0, "shared": 1990})
    assert world.worker.step() == {"shared": 10}  # it is the short one now
    assert world.worker.step() == {"evicted": 512}


def test_a_class_is_kept_while_the_prompt_runs() -> None:
    world = make_world(mix="exclusive")
    long = world.add("long", 600)
    assert world.worker.step() == {"long": 512}
    assert world.queue.length_class(long.key) == "long"
    world.add("short", 10)
    assert world.worker.step() == {"short": 10}  # not with the 88 tokens that are left
    assert world.worker.step() == {"long": 88}
    world.worker.step()
    assert world.queue.length_class(long.key) is None


# ---- order ---------------------------------------------------------------------------------------


def test_order_is_priority_then_due_time_or_arrival() -> None:
    world = make_world()
    world.add("later", 10, arrival_s=4.0)
    world.add("due at 3", 10, arrival_s=2.5, due_s=3.0)
    world.add("due at 9", 10, arrival_s=0.0, due_s=9.0)
    world.add("urgent", 10, arrival_s=5.0, priority=-1)
    world.add("first twin", 10, arrival_s=3.5)
    world.add("second twin", 10, arrival_s=3.5)
    assert world.waiting == [
        "urgent", "due at 3", "first twin", "second twin", "later", "due at 9"
    ]  # fmt: skip


def test_a_class_default_makes_a_due_time() -> None:
    world = make_world(short_ttft_deadline_s=0.4)
    world.add("default", 10, arrival_s=1.0)
    world.add("asked", 10, arrival_s=1.1, due_s=1.2)
    assert world.waiting == ["asked", "default"]
    statistics = world.queue.statistics("short")
    assert (statistics.num_waiting, statistics.oldest_arrival_s) == (2, 1.0)
    assert statistics.first_due_s == 1.2
    assert statistics.work.num_prompt_tokens == 20
    assert world.queue.statistics("long").first_due_s is None


def test_a_more_urgent_long_prompt_overtakes_at_a_chunk_boundary() -> None:
    world = make_world(max_tokens=400)
    world.add("long", 1000)
    assert world.worker.step() == {"long": 400}
    world.add("urgent", 500, priority=-1, arrival_s=0.5)
    assert [world.worker.step(0.5) for _ in range(4)] == [
        {"urgent": 400},
        {"urgent": 100},
        {"long": 400},
        {"long": 200},
    ]


# ---- what a step holds ---------------------------------------------------------------------------


def test_exclusive_never_mixes_the_classes() -> None:
    world = make_world(mix="exclusive", max_tokens=600)
    world.add("long", 1000)
    world.add("short", 10)
    world.add("brief", 250)
    assert world.worker.step() == {"short": 10, "brief": 250}
    assert world.worker.step() == {"long": 600}
    assert world.worker.step() == {"long": 400}


def test_fill_gives_long_prompts_the_room_that_short_ones_left() -> None:
    world = make_world(mix="fill", max_tokens=600)
    world.add("long", 1000)
    world.add("next long", 300)
    world.add("short", 10)
    assert world.worker.step() == {"short": 10, "long": 590}
    assert world.worker.step() == {"long": 410, "next long": 190}


def test_a_chunk_beside_short_prompts_keeps_its_own_time() -> None:
    world = make_world(
        model=CostModel(FITTED),
        mix="fill",
        max_tokens=8192,
        max_step_s=0.04,
        max_step_ms=40.0,
        max_mixed_step_ms=12.0,
    )
    world.add("short", 50)
    world.add("long", 8000)
    mixed = world.worker.step()
    assert mixed["short"] == 50
    assert 0 < mixed["long"] < world.worker.step()["long"]
    alone_s, mixed_s = (
        FITTED.step_seconds(StepWork.of_prompts([(n, 0) for n in step.values()]))
        for step in (world.worker.steps[1], mixed)
    )
    assert mixed_s <= 0.012 < alone_s <= 0.04


def test_a_step_may_take_a_tenth_of_the_queued_long_work_up_to_a_limit() -> None:
    def first_step_s(num_long: int) -> float:
        world = make_world(
            model=CostModel(FITTED),
            mix="exclusive",
            max_tokens=8192,
            max_step_ms=40.0,
            max_busy_step_ms=80.0,
        )
        for i in range(num_long):
            world.add(f"long {i}", 4000)
        return FITTED.step_seconds(
            StepWork.of_prompts([(n, 0) for n in world.worker.step().values()])
        )

    assert 0.035 < first_step_s(1) <= 0.04  # a tenth of its work is less
    six_s = FITTED.step_seconds(StepWork.of_prompts([(4000, 0)] * 6))
    assert 0.05 < first_step_s(6) <= six_s / 10 < 0.08
    assert 0.07 < first_step_s(60) <= 0.08


def test_a_long_chunk_keeps_the_step_short() -> None:
    world = make_world(max_tokens=8192, max_step_s=0.040, costs=PRIOR, min_chunk_tokens=64)
    world.add("long", 6000)
    chunks: list[int] = []
    while len(world.queue) > 0 or world.worker.running:
        chunks += world.worker.step().values()
    assert sum(chunks) == 6000
    assert len(chunks) >= 4
    num_cached = sum(chunks[:-2])
    assert (
        PRIOR.seconds(chunks[-2], num_cached) <= 0.040 < PRIOR.seconds(chunks[-2] + 1, num_cached)
    )


def test_decodes_that_fill_the_step_do_not_stop_prompts() -> None:
    world = make_world(max_tokens=512, max_step_s=1e-6, min_chunk_tokens=64)
    world.add("long", 300)
    assert [world.worker.step() for _ in range(3)] == [{"long": 64}] * 3


# ---- refusals ------------------------------------------------------------------------------------


def test_nobody_of_the_class_overtakes_who_was_refused() -> None:
    world = make_world(mix="fill", max_tokens=300)
    for i in range(3):
        world.add(f"short {i}", 10, arrival_s=float(i))
        world.add(f"long {i}", 400, arrival_s=float(i))
    step = world.worker.step(refused=["short 1"])
    assert step == {"short 0": 10, "long 0": 290}
    step = world.worker.step(refused=["short 1", "long 1"])
    assert step == {"long 0": 110}  # it runs; long 2 waits behind long 1


def test_a_refused_short_prompt_lets_a_long_one_run_which_may_free_what_it_needs() -> None:
    world = make_world(mix="exclusive")
    world.add("long", 1500)
    world.worker.step()
    world.add("short", 10)
    assert world.worker.step(refused=["short"]) == {"long": 512}
    assert world.worker.step() == {"short": 10}


def test_who_is_refused_in_a_step_is_not_offered_again_in_it() -> None:
    world = make_world(mix="exclusive")
    world.add("aged", 1000)
    world.add("short", 10, arrival_s=5.0)
    assert world.worker.step(5.0, refused=["aged", "short"]) == {}
    assert world.waiting == ["short", "aged"]


# ---- ageing --------------------------------------------------------------------------------------


def test_an_aged_long_prompt_gets_one_chunk_and_then_short_ones_go_on() -> None:
    world = make_world(mix="exclusive", max_tokens=100)
    world.add("long", 1000)
    steps = []
    for i in range(30):
        now_s = 0.1 * i
        world.add(f"short {i}", 60, arrival_s=now_s)
        world.add(f"brief {i}", 60, arrival_s=now_s)  # more than a step holds
        steps.append("long" in world.worker.step(now_s))
    assert [i for i, is_long in enumerate(steps) if is_long] == [10, 20]


def test_in_fill_the_aged_chunk_shrinks_to_leave_room() -> None:
    world = make_world(mix="fill", max_tokens=300)
    world.add("long", 1000)
    world.add("short", 100, arrival_s=2.0)
    assert world.worker.step(2.0) == {"long": 200, "short": 100}
    for i in range(4):
        world.add(f"short {i}", 150, arrival_s=4.0)
    assert world.worker.step(4.0) == {"short 0": 150, "short 1": 150}  # a long one went first
    assert world.worker.step(4.0) == {"long": 150, "short 2": 150}  # but not below a half


def test_who_waited_longest_is_the_aged_one_whatever_the_order_of_the_class() -> None:
    world = make_world(mix="exclusive", max_tokens=100)
    world.add("urgent", 1000, priority=-1, arrival_s=1.0)
    world.add("old", 1000, arrival_s=0.5)
    steps = []
    for i in range(4):
        world.add(f"short {i}", 100, arrival_s=3.0)
        steps.append(list(world.worker.step(3.0)))
    assert steps == [["old"], ["short 0"], ["urgent"], ["short 1"]]


def test_two_long_chunks_in_a_row_only_while_no_short_prompt_waits() -> None:
    world = make_world(mix="exclusive", max_tokens=100)
    for i in range(6):
        world.add(f"long {i}", 300)
    assert list(world.worker.step(9.0)) == ["long 0"]
    world.add("short", 10, arrival_s=9.0)
    assert list(world.worker.step(9.0)) == ["short"]
    assert list(world.worker.step(9.0)) == ["long 0"]
    assert list(world.worker.step(9.0)) == ["long 0"]


def test_a_key_waits_only_once_and_a_stranger_is_not_found() -> None:
    world = make_world()
    request = world.add("a", 10)
    with pytest.raises(AssertionError, match="already waiting"):
        world.queue.add(request)
    assert world.queue.remove(make_request("b", 10).key) is None
    assert world.queue.remove(request.key) is request
    assert (len(world.queue), world.queue.num_tokens, request.key in world.queue) == (0, 0, False)
