"""Several replicas: limits hold over all of them, waiting prompts count, metrics add up."""

import asyncio
import math
import random
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from actors.ingress import replica_board, replica_exchange
from actors.ingress.admission import Admission
from actors.ingress.observation import Observation
from actors.ingress.queue_limit import QueueLimit
from actors.ingress.rate_limits import RateLimitError, RateLimits
from actors.ingress.replica_board import GONE_S, SILENCE_S, ReplicaBoard
from actors.ingress.replica_exchange import FRESH_S, OtherReplicas, ReplicaExchange
from actors.observability.merged_metrics import as_messages
from actors.observability.metrics import IngressMetrics
from actors.observability.recent_ttft import RecentTtft
from actors.rpc.handles import AllocatorHandle
from configs.schema import RateLimitConfig
from engine.clock import ManualClock
from engine.errors import CapacityError, WorkerError
from engine.messages import (
    Assign,
    ReplicaMetrics,
    ReplicaNews,
    ReplicaReport,
    decode,
    encode,
)
from tests.actors.ingress.edge_app import edge_app, no_allocator

PER_MINUTE = 600  # ten a second
MAX_GONE = 4  # in the place of the product's
LIMITS = RateLimitConfig(tokens_per_minute=PER_MINUTE)


@dataclass
class Allocator:
    """The allocator's board, reached as by a connection, and away when told so."""

    board: ReplicaBoard
    is_away: bool = False
    loses_answers: bool = False

    async def exchange(self, report: ReplicaReport) -> ReplicaNews:
        self._look()
        news = self.board.exchange(decode(encode(report), ReplicaReport))
        if self.loses_answers:
            raise WorkerError("gone")
        return decode(encode(news), ReplicaNews)

    async def exchange_metrics(self, metrics: ReplicaMetrics) -> list[ReplicaMetrics]:
        self._look()
        found = self.board.exchange_metrics(decode(encode(metrics), ReplicaMetrics))
        return decode(encode(found), list[ReplicaMetrics])

    def _look(self) -> None:
        if self.is_away:
            raise WorkerError("away")


@dataclass
class Replica:
    limits: RateLimits
    admission: Admission
    exchange: ReplicaExchange

    def hear(self) -> None:
        asyncio.run(self.exchange.exchange())

    def level(self, key: str) -> float:
        """What the replica would tell a client that asks for nothing."""
        grant = self.limits.grant(key, 0)
        grant.end(0)
        return float(grant.headers()["x-ratelimit-remaining-tokens"])


@dataclass
class Ingress:
    """Replicas around one board."""

    # Whole seconds, so that one that is three later is not a rounding error less.
    clock: ManualClock = field(default_factory=lambda: ManualClock(float(random.randrange(10**6))))
    limits: RateLimitConfig = LIMITS
    max_queued_tokens: int = 100

    def __post_init__(self) -> None:
        self.allocator = Allocator(self.new_board())

    def new_board(self) -> ReplicaBoard:
        return ReplicaBoard({"*": self.limits}, self.clock)

    def replica(self, name: str) -> Replica:
        others = OtherReplicas()
        limits = RateLimits({"*": self.limits}, self.clock)
        admission = Admission(list, QueueLimit(self.max_queued_tokens), others=others)

        async def find() -> AllocatorHandle:
            return cast("AllocatorHandle", self.allocator)

        exchange = ReplicaExchange(
            name,
            find_allocator=find,
            rate_limits=limits,
            num_waiting_tokens=lambda: admission.num_waiting_tokens,
            note_exchange=admission.note_exchange,
            others=others,
            address=name.encode(),
            clock=self.clock,
        )
        return Replica(limits, admission, exchange)


def drain(replica: Replica, key: str, num: int) -> int:
    """Asks for tokens, `num` at a time, until they are refused; returns how many were given."""
    given_tokens = 0
    while True:
        try:
            replica.limits.grant(key, num).end(num)
        except RateLimitError:
            return given_tokens
        given_tokens += num


def test_what_one_replica_gave_is_gone_at_the_others() -> None:
    ingress = Ingress()
    first, second = ingress.replica("a"), ingress.replica("b")
    first.hear()
    second.hear()
    assert drain(first, "k", 60) == PER_MINUTE
    first.hear()
    second.hear()
    assert drain(second, "k", 1) == 0
    assert drain(second, "another key", 60) == PER_MINUTE
    ingress.clock.advance(3)
    assert drain(second, "k", 1) == 30
    second.hear()
    first.hear()
    assert drain(first, "k", 1) == 0


def test_what_is_given_back_at_one_replica_is_there_at_the_others() -> None:
    ingress = Ingress()
    first, second = ingress.replica("a"), ingress.replica("b")
    grant = first.limits.grant("k", 500)
    for replica in (first, second):
        replica.hear()
    assert second.level("k") == 100
    grant.end(40)
    for replica in (first, second):
        replica.hear()
    assert second.level("k") == 560


def test_a_replica_that_comes_later_knows_what_is_left() -> None:
    ingress = Ingress()
    first = ingress.replica("a")
    assert drain(first, "k", 50) == PER_MINUTE
    first.hear()
    late = ingress.replica("b")
    late.hear()
    assert drain(late, "k", 1) == 0


def test_a_lost_answer_counts_nothing_twice() -> None:
    ingress = Ingress()
    first, second = ingress.replica("a"), ingress.replica("b")
    first.hear()
    first.limits.grant("k", 200).end(200)
    ingress.allocator.loses_answers = True
    first.hear()
    ingress.allocator.loses_answers = False
    first.hear()
    second.hear()
    assert (first.level("k"), second.level("k")) == (400, 400)


def test_an_allocator_that_restarts_learns_what_was_used() -> None:
    ingress = Ingress()
    first, second = ingress.replica("a"), ingress.replica("b")
    for replica in (first, second):
        replica.hear()  # as each does before its first request
    for replica in (first, second, first, second):
        replica.limits.grant("k", 100).end(100)
        replica.hear()
    first.hear()
    ingress.allocator.is_away = True
    second.limits.grant("k", 50).end(50)
    second.hear()  # in vain
    assert second.level("k") == 150
    ingress.allocator = Allocator(ingress.new_board())
    for replica in (first, second, second, first, first):  # an incomplete report is asked for again
        replica.hear()
    assert (first.level("k"), second.level("k")) == (150, 150)
    first.limits.grant("k", 30).end(30)
    first.hear()
    second.hear()
    assert second.level("k") == 120


@settings(max_examples=40)
@given(st.data())
def test_replicas_that_hear_each_other_give_out_one_minutes_worth(data: st.DataObject) -> None:
    """Every report in time: a full bucket and its refill, as of one replica alone."""
    ingress = Ingress(ManualClock())
    replicas = [ingress.replica(str(i)) for i in range(data.draw(st.integers(2, 4)))]
    elapsed_s, taken = 0.0, 0
    for _ in range(data.draw(st.integers(1, 40))):
        pause_s = data.draw(st.floats(0, 20))
        ingress.clock.advance(pause_s)
        elapsed_s += pause_s
        replica = data.draw(st.sampled_from(replicas))
        replica.hear()
        num = data.draw(st.integers(1, PER_MINUTE))
        try:
            replica.limits.grant("k", num).end(num)
            taken += num
        except RateLimitError:
            pass
        replica.hear()
        assert taken <= PER_MINUTE + elapsed_s * PER_MINUTE / 60 + 1e-3


@settings(max_examples=40)
@given(st.data())
def test_what_replicas_give_too_much_between_reports_is_owed(data: st.DataObject) -> None:
    """At worst a minute's worth for each other replica, once; it does not add up."""
    ingress = Ingress(ManualClock())
    replicas = [ingress.replica(str(i)) for i in range(data.draw(st.integers(2, 4)))]
    for replica in replicas:
        replica.hear()
    elapsed_s, taken = 0.0, 0
    for _ in range(data.draw(st.integers(1, 12))):
        for replica in replicas:
            taken += drain(replica, "k", data.draw(st.integers(50, PER_MINUTE)))
        for replica in replicas * 2:
            replica.hear()
        pause_s = data.draw(st.floats(0, SILENCE_S))
        ingress.clock.advance(pause_s)
        elapsed_s += pause_s
        for replica in replicas:
            replica.hear()
        owed = (len(replicas) - 1) * PER_MINUTE
        assert taken <= PER_MINUTE + owed + elapsed_s * PER_MINUTE / 60 * len(replicas) + 1e-3
    quiet_s = 60.0 * len(replicas) + elapsed_s * len(replicas)
    for _ in range(math.ceil(quiet_s / SILENCE_S)):
        ingress.clock.advance(SILENCE_S)
        for replica in replicas:
            replica.hear()
    assert all(replica.level("k") == PER_MINUTE for replica in replicas)


def test_prompts_that_wait_at_another_replica_count() -> None:
    ingress = Ingress()
    first, second = ingress.replica("a"), ingress.replica("b")
    with ExitStack() as stack:
        leave = stack.enter_context(first.admission.admitted(70))
        first.hear()
        second.hear()
        with second.admission.admitted(15):
            pass
        with pytest.raises(CapacityError), second.admission.admitted(31):
            pass
        leave()
    first.hear()
    second.hear()
    with second.admission.admitted(30):
        pass


def test_a_burst_over_all_replicas_is_not_admitted_once_for_each() -> None:
    ingress = Ingress()
    replicas = [ingress.replica(name) for name in "abcd"]
    for replica in replicas * 2:
        replica.hear()
    admitted: Counter[int] = Counter()
    with ExitStack() as stack:
        for turn in range(100):
            replica = replicas[turn % 4]
            try:
                stack.enter_context(replica.admission.admitted(5))
            except CapacityError:
                continue
            admitted[turn % 4] += 5
    # None of them heard of another meanwhile; each may have had a prompt in progress.
    assert 100 - 4 * 5 <= admitted.total() <= 100 + 4 * 5


def test_a_silent_replica_counts_no_longer() -> None:
    ingress = Ingress()
    first, second = ingress.replica("a"), ingress.replica("b")
    with first.admission.admitted(90):
        first.hear()
        second.hear()
        with pytest.raises(CapacityError), second.admission.admitted(20):
            pass
        ingress.clock.advance(SILENCE_S + 0.1)
        second.hear()
        with second.admission.admitted(90):
            pass


def has_all(replica: Replica, clock: ManualClock) -> bool:
    return clock.now_s() <= replica.exchange.others.complete_until_s


def test_a_silent_replica_may_live_for_a_minute() -> None:
    ingress = Ingress()
    first, second = ingress.replica("a"), ingress.replica("b")
    first.hear()
    second.hear()
    ingress.clock.advance(GONE_S - 0.1)
    second.hear()
    assert second.exchange.others.num_others == 0
    assert second.exchange.others.addresses == [b"a"]
    ingress.clock.advance(0.2)
    second.hear()
    assert second.exchange.others.addresses == []


def test_a_list_of_replicas_is_complete_if_it_is_young_and_the_allocator_is_not() -> None:
    ingress = Ingress()
    clock, replica = ingress.clock, ingress.replica("a")
    assert not has_all(replica, clock), "before the first exchange"
    replica.hear()
    assert not has_all(replica, clock), "others had no time to report"
    clock.advance(SILENCE_S)
    replica.hear()
    assert has_all(replica, clock)
    ingress.allocator.is_away = True
    clock.advance(FRESH_S - 0.01)
    replica.hear()
    assert has_all(replica, clock)
    clock.advance(0.02)
    assert not has_all(replica, clock)
    ingress.allocator = Allocator(ingress.new_board())
    replica.hear()
    assert not has_all(replica, clock), "as after any start of an allocator"


def test_without_the_allocator_a_replica_goes_on_by_what_it_knows() -> None:
    ingress = Ingress()
    ingress.allocator.is_away = True
    alone = ingress.replica("a")
    alone.hear()
    assert drain(alone, "k", 100) == PER_MINUTE


# ---- metrics -------------------------------------------------------------------------------------


@dataclass
class Measured:
    """A replica's metrics, and how it answers `GET /metrics`."""

    metrics: IngressMetrics
    observation: Observation
    exchange: ReplicaExchange

    def values(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        text = asyncio.run(self.observation.prometheus_text()).decode()
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        found = {(s.name, tuple(sorted(s.labels.items()))): s.value for s in samples}
        assert len(found) == len(samples), "no series twice"
        return found

    def total(self, name: str) -> float:
        return sum(value for (found, _), value in self.values().items() if found == name)


def measured(ingress: Ingress, name: str) -> Measured:
    app = edge_app()
    metrics = IngressMetrics("m", RecentTtft(ingress.clock))
    exchange = ingress.replica(name).exchange
    observation = Observation(metrics, app.edge.generations, no_allocator, exchange=exchange)
    return Measured(metrics, observation, exchange)


@pytest.fixture
def pair() -> tuple[Ingress, Measured, Measured]:
    ingress = Ingress()
    first, second = measured(ingress, "a"), measured(ingress, "b")
    for one in (first, second):
        asyncio.run(one.exchange.exchange())
    return ingress, first, second


def test_metrics_are_sums_over_the_replicas(pair: tuple[Ingress, Measured, Measured]) -> None:
    _, first, second = pair
    first.metrics.count_tokens(5)
    second.metrics.count_tokens(7)
    second.metrics.count_failed(418)  # a series that the other has not
    assign = Assign(prefill_worker="w", decode_worker=None, length_class="short")
    for one, seconds in ((first, 0.003), (second, 0.5), (second, 90.0)):
        one.metrics.latencies.observe_ttft(seconds)
        one.metrics.classes.count_placed(assign)
    second.values()
    values = first.values()
    assert first.total("vllm:generation_tokens_total") == 12
    assert first.total("laps_requests_failed_total") == 1
    assert first.total("laps_requests_total") == 3
    assert first.total("vllm:time_to_first_token_seconds_count") == 3
    assert first.total("vllm:time_to_first_token_seconds_sum") == pytest.approx(90.503)
    name = "vllm:time_to_first_token_seconds_bucket"
    buckets = {dict(labels)["le"]: v for (found, labels), v in values.items() if found == name}
    assert (buckets["0.005"], buckets["0.5"], buckets["40.0"], buckets["+Inf"]) == (1, 2, 2, 3)
    workers = edge_app().edge.generations.links.links()
    assert first.total("laps_worker_up") == len(workers), "each worker once"


def test_what_a_replica_counted_outlives_it_and_what_it_held_does_not(
    pair: tuple[Ingress, Measured, Measured],
) -> None:
    ingress, first, second = pair
    second.metrics.count_tokens(7)
    second.metrics.refresh([], 3, 2, None)
    asyncio.run(second.exchange.exchange_metrics(as_messages(second.metrics.own_families())))
    open_before = first.total("laps_open_attempts")
    ingress.clock.advance(SILENCE_S + 0.1)
    asyncio.run(first.exchange.exchange())
    assert first.total("vllm:generation_tokens_total") == 7
    assert first.total("laps_open_attempts") == open_before - 3
    ingress.allocator = Allocator(ingress.new_board())  # it has forgotten the one that is gone
    asyncio.run(first.exchange.exchange())
    assert first.total("vllm:generation_tokens_total") == 7
    ingress.allocator.is_away = True
    assert first.total("vllm:generation_tokens_total") == 7


def test_replicas_that_are_gone_are_forgotten_in_the_end(
    pair: tuple[Ingress, Measured, Measured], monkeypatch: pytest.MonkeyPatch
) -> None:
    ingress, first, _ = pair
    for module in (replica_board, replica_exchange):
        monkeypatch.setattr(module, "MAX_GONE", MAX_GONE)
    for i in range(MAX_GONE + 3):
        late = measured(ingress, f"late {i}")
        late.metrics.count_tokens(1)
        late.values()
    ingress.clock.advance(SILENCE_S + 0.1)
    asyncio.run(first.exchange.exchange())
    assert first.total("vllm:generation_tokens_total") == MAX_GONE
    assert len(first.exchange.others.metrics) == MAX_GONE
