"""Fan-out of steps to ingresses: one message each, acknowledgements, bounds, who is given up."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from actors.worker.token_streams import TOTALS_EVERY_S, TokenStreams
from configs.schema import LifetimesConfig
from engine.clock import ManualClock
from engine.messages import (
    ExpertTotals,
    FailureRecord,
    HandoffTotals,
    LoadReport,
    StepMessage,
    TokenRecord,
    decode,
)
from engine.request import RequestKey

LOAD = LoadReport(queued_tokens=1, num_waiting=2, num_running=3, num_free_blocks=4, num_blocks=5)
NEVER_S = 1e6


def _token(name: str, index: int) -> TokenRecord:
    return TokenRecord(key=RequestKey(name), index=index, token_id=index)


class Wire:
    """Token streams, and what they gave up."""

    def __init__(self, *, load_report_every_s: float = NEVER_S, max_tokens: int = 8) -> None:
        self.clock = ManualClock(100.0)
        self.silent: list[str] = []
        self.overflown: list[RequestKey] = []
        self.streams = TokenStreams(
            worker="w",
            incarnation="i",
            config=LifetimesConfig(
                ingress_silence_s=10.0,
                load_report_every_s=load_report_every_s,
                max_unacknowledged_tokens=max_tokens,
            ),
            clock=self.clock,
            load=lambda: LOAD,
            on_silent=self.silent.append,
            on_overflow=lambda _, key: self.overflown.append(key),
        )

    def publish(self, ingress_id: str, *records: TokenRecord) -> None:
        self.streams.publish([(ingress_id, record) for record in records], [])

    async def connect(self, ingress_id: str) -> AsyncIterator[bytes]:
        """A reader past its first message, which only says who we are."""
        reader = self.streams.read(ingress_id)
        await anext(reader)
        return reader

    @property
    def num_unacknowledged(self) -> int:
        return self.streams.statistics().num_unacknowledged_tokens


async def _next(reader: AsyncIterator[bytes]) -> StepMessage:
    return decode(await anext(reader), StepMessage)


async def _turns() -> None:
    """Let every task run that can."""
    for _ in range(10):
        await asyncio.sleep(0)


def _run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):  # a hang is a failure, not a wait
            await scenario()

    asyncio.run(bounded())


# ---- messages ------------------------------------------------------------------------------------


def test_the_first_message_goes_out_at_once_and_says_who_speaks() -> None:
    async def scenario() -> None:
        message = await _next(Wire().streams.read("a"))
        assert message == StepMessage(worker="w", incarnation="i", step_seq=0, load=LOAD)

    _run(scenario)


def test_one_step_makes_one_message_per_ingress() -> None:
    async def scenario() -> None:
        wire = Wire()
        readers = {name: await wire.connect(name) for name in "ab"}
        failure = FailureRecord(key=RequestKey("a2"), reason="no", retryable=False)
        wire.streams.publish(
            [("a", _token("a0", 0)), ("b", _token("b0", 0)), ("a", _token("a1", 4))],
            [("a", failure)],
        )
        to_a, to_b = await _next(readers["a"]), await _next(readers["b"])
        assert to_a.tokens == [_token("a0", 0), _token("a1", 4)]
        assert to_a.failures == [failure]
        assert (to_b.tokens, to_b.failures) == ([_token("b0", 0)], [])
        assert (to_a.step_seq, to_b.step_seq) == (1, 1)
        waiting = asyncio.create_task(_next(readers["a"]))
        await _turns()
        assert not waiting.done()
        waiting.cancel()

    _run(scenario)


def test_steps_that_a_slow_reader_missed_come_in_one_message() -> None:
    async def scenario() -> None:
        wire = Wire()
        reader = await wire.connect("a")
        for index in range(5):
            wire.publish("a", _token("x", index))
        message = await _next(reader)
        assert [record.index for record in message.tokens] == list(range(5))

    _run(scenario)


def test_tokens_published_before_anyone_reads_are_kept() -> None:
    async def scenario() -> None:
        wire = Wire()
        wire.publish("a", _token("x", 0))
        message = await _next(wire.streams.read("a"))
        assert (message.step_seq, message.tokens) == (0, [_token("x", 0)])

    _run(scenario)


def test_message_numbers_have_no_gap() -> None:
    async def scenario() -> None:
        wire = Wire()
        reader = await wire.connect("a")
        for index in range(4):
            wire.publish("a", _token("x", index))
            assert (await _next(reader)).step_seq == index + 1

    _run(scenario)


def test_an_idle_stream_reports_its_load() -> None:
    async def scenario() -> None:
        reader = Wire(load_report_every_s=1e-6).streams.read("a")
        messages = [await _next(reader) for _ in range(3)]
        assert [message.step_seq for message in messages] == [0, 1, 2]
        assert all(message.load == LOAD and not message.tokens for message in messages)

    _run(scenario)


# ---- acknowledgement -----------------------------------------------------------------------------


def test_an_acknowledgement_covers_every_message_up_to_it() -> None:
    async def scenario() -> None:
        wire = Wire()
        reader = await wire.connect("a")
        for index in range(3):
            wire.publish("a", _token("x", index), _token("y", index))
            await _next(reader)
        assert wire.num_unacknowledged == 6
        wire.streams.acknowledge("a", -1)
        assert wire.num_unacknowledged == 6
        wire.streams.acknowledge("a", 2)
        assert wire.num_unacknowledged == 2
        wire.streams.acknowledge("a", 1)  # late and of no effect
        assert wire.num_unacknowledged == 2
        wire.streams.acknowledge("a", 3)
        assert wire.num_unacknowledged == 0

    _run(scenario)


def test_tokens_not_sent_yet_cannot_be_acknowledged() -> None:
    async def scenario() -> None:
        wire = Wire()
        await wire.connect("a")
        wire.publish("a", _token("x", 0))
        wire.streams.acknowledge("a", 99)
        assert wire.num_unacknowledged == 1

    _run(scenario)


def test_an_acknowledgement_from_a_stranger_is_ignored() -> None:
    wire = Wire()
    wire.streams.acknowledge("nobody", 3)
    assert wire.streams.statistics().num_streams == 0


@pytest.mark.parametrize("is_read", [True, False])
def test_a_request_whose_tokens_pile_up_is_cancelled_alone(is_read: bool) -> None:
    async def scenario() -> None:
        wire = Wire(max_tokens=8)
        reader = await wire.connect("a")
        for index in range(7):
            wire.publish("a", _token("slow", index), _token("also", index))
            if is_read:
                await _next(reader)
        assert wire.overflown == []
        wire.publish("a", _token("slow", 7))
        assert wire.overflown == [RequestKey("slow")]
        wire.publish("a", _token("slow", 8))  # a step that was on its way
        assert wire.overflown == [RequestKey("slow")]
        assert wire.silent == []

    _run(scenario)


def test_a_request_that_is_acknowledged_in_time_runs_for_ever() -> None:
    async def scenario() -> None:
        wire = Wire(max_tokens=3)
        reader = await wire.connect("a")
        for index in range(50):
            wire.publish("a", _token("x", index))
            message = await _next(reader)
            wire.streams.acknowledge("a", message.step_seq)
        assert wire.overflown == []
        assert wire.num_unacknowledged == 0

    _run(scenario)


# ---- silence and replacement ---------------------------------------------------------------------


def test_a_silent_ingress_is_dropped_and_its_reader_ends() -> None:
    async def scenario() -> None:
        wire = Wire()
        reader = await wire.connect("a")
        waiting = asyncio.create_task(_drain(reader))
        await wire.connect("b")
        await _turns()
        wire.clock.advance(9.0)
        wire.streams.acknowledge("b", -1)
        wire.clock.advance(1.5)
        wire.streams.expire_silent()
        assert wire.silent == ["a"]
        assert await waiting == []
        assert wire.streams.statistics().num_streams == 1
        assert not wire.streams.has_reader("a")
        wire.streams.expire_silent()
        assert wire.silent == ["a"]

    _run(scenario)


async def _drain(reader: AsyncIterator[bytes]) -> list[TokenRecord]:
    return [record async for data in reader for record in decode(data, StepMessage).tokens]


def test_an_ingress_is_not_silent_at_the_limit() -> None:
    async def scenario() -> None:
        wire = Wire()
        await wire.connect("a")
        wire.clock.advance(10.0)
        wire.streams.expire_silent()
        assert wire.silent == []

    _run(scenario)


def test_an_ingress_that_never_reads_is_dropped_too() -> None:
    wire = Wire()
    wire.publish("a", _token("x", 0))
    wire.clock.advance(11.0)
    wire.streams.expire_silent()
    assert wire.silent == ["a"]
    assert wire.num_unacknowledged == 0


def test_a_dropped_ingress_starts_anew_when_it_comes_back() -> None:
    async def scenario() -> None:
        wire = Wire()
        reader = await wire.connect("a")
        wire.publish("a", _token("x", 0))
        await _next(reader)
        wire.clock.advance(11.0)
        wire.streams.expire_silent()
        message = await _next(wire.streams.read("a"))
        assert (message.step_seq, message.tokens) == (0, [])

    _run(scenario)


def test_a_second_reader_replaces_the_first_which_ends() -> None:
    async def scenario() -> None:
        wire = Wire()
        first = asyncio.create_task(_drain(await wire.connect("a")))
        await _turns()
        second = wire.streams.read("a")
        assert (await _next(second)).step_seq == 1
        wire.publish("a", _token("x", 0))
        assert await first == []
        message = await _next(second)
        assert (message.step_seq, message.tokens) == (2, [_token("x", 0)])

    _run(scenario)


def test_a_reader_that_is_replaced_takes_no_news_with_it() -> None:
    # It cleared the event that had been set for its successor, who then waited for a load report.
    async def scenario() -> None:
        wire = Wire()
        first = asyncio.create_task(_drain(await wire.connect("a")))
        await _turns()
        second = wire.streams.read("a")
        await anext(second)
        wire.publish("a", _token("x", 0))
        await _turns()  # now the first reader wakes and ends
        assert first.done()
        waiting = asyncio.create_task(_next(second))
        await _turns()
        assert waiting.done()
        assert waiting.result().tokens == [_token("x", 0)]

    _run(scenario)


def test_clients_are_awaited_while_the_model_loads_and_as_long_as_a_silent_one_after() -> None:
    wire = Wire()
    wire.clock.advance(1e6)
    assert wire.streams.is_awaited
    wire.streams.open()
    wire.clock.advance(9.9)
    assert wire.streams.is_awaited
    wire.clock.advance(0.2)
    assert not wire.streams.is_awaited


def test_readers_are_found_by_prefix() -> None:
    async def scenario() -> None:
        wire = Wire()
        await wire.connect("ingress-1")
        assert wire.streams.has_reader("ingress-")
        assert not wire.streams.has_reader("allocator")

    _run(scenario)


def test_totals_go_to_every_client_once_a_second() -> None:
    experts = ExpertTotals(layers=(0,), counts=((3, 1),), expert_imbalance=(1.5,))
    handoffs = HandoffTotals(num_done=1, num_bytes=2, num_found_blocks=0, num_failures=0)

    async def scenario() -> None:
        wire = Wire(load_report_every_s=0.001)
        readers = [await wire.connect("a"), await wire.connect("b")]
        wire.streams.report_experts(lambda: experts)
        wire.streams.report_handoffs(lambda: handoffs)
        for reader in readers:
            early = await _next(reader)
            assert (early.experts, early.handoffs) == (None, None)
        wire.clock.advance(TOTALS_EVERY_S)
        for reader in readers:
            due, after = await _next(reader), await _next(reader)
            assert (due.experts, due.handoffs) == (experts, handoffs)
            assert (after.experts, after.handoffs) == (None, None)

    _run(scenario)
