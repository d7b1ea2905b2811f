"""Tokens of one attempt, from two workers, in index order."""

import asyncio
import random

import pytest

from actors.ingress.mailbox import AttemptFailed, Mailbox
from engine.errors import CapacityError, EngineError, RequestError
from engine.messages import FailureRecord, TokenRecord
from engine.request import RequestKey

KEY = RequestKey("a")


def _record(index: int) -> TokenRecord:
    return TokenRecord(key=KEY, index=index, token_id=100 + index)


def _mailbox(next_index: int = 0) -> Mailbox:
    return Mailbox(prefill_worker="p", decode_worker="d", next_index=next_index)


async def _get(mailbox: Mailbox, num_records: int) -> list[int]:
    found: list[int] = []
    while len(found) < num_records:
        found += [record.index for record in await mailbox.wait_tokens()]
    return found


async def _turns() -> None:
    """Let every task run that can."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_tokens_of_two_workers_come_out_in_index_order() -> None:
    async def scenario() -> None:
        mailbox = _mailbox()
        mailbox.put("d", _record(2))
        mailbox.put("d", _record(1))
        reader = asyncio.create_task(_get(mailbox, 3))
        await _turns()
        assert not reader.done()
        mailbox.put("p", _record(0))
        assert await reader == [0, 1, 2]

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", range(5))
def test_any_order_with_duplicates_comes_out_once_and_in_order(seed: int) -> None:
    async def scenario() -> None:
        mailbox = _mailbox(next_index=3)
        deliveries = [
            index for index in range(20) for _ in range(random.Random(seed).choice([1, 2]))
        ]
        random.Random(seed).shuffle(deliveries)
        for index in deliveries:
            mailbox.put("p" if index == 3 else "d", _record(index))
        assert await _get(mailbox, 17) == list(range(3, 20))
        reader = asyncio.create_task(mailbox.wait_tokens())
        await _turns()
        assert not reader.done()
        reader.cancel()

    asyncio.run(scenario())


def test_tokens_that_wait_together_are_read_together() -> None:
    async def scenario() -> None:
        mailbox = _mailbox()
        for index in (0, 1, 3):
            mailbox.put("d", _record(index))
        assert [record.index for record in await mailbox.wait_tokens()] == [0, 1]
        mailbox.put("d", _record(2))
        assert [record.index for record in await mailbox.wait_tokens()] == [2, 3]

    asyncio.run(scenario())


def test_what_the_client_has_from_an_earlier_attempt_is_dropped() -> None:
    async def scenario() -> None:
        mailbox = _mailbox(next_index=5)
        for index in (0, 4, 5):
            mailbox.put("d", _record(index))
        assert await _get(mailbox, 1) == [5]

    asyncio.run(scenario())


def test_a_failure_is_raised_after_the_tokens_that_arrived_before_it() -> None:
    async def scenario() -> None:
        mailbox = _mailbox()
        mailbox.put("p", _record(0))
        mailbox.fail(FailureRecord(key=KEY, reason="no", retryable=False, code="non_finite_logits"))
        assert await _get(mailbox, 1) == [0]
        for _ in range(2):  # and it stays so
            with pytest.raises(AttemptFailed) as caught:
                await mailbox.wait_tokens()
            assert (caught.value.reason, caught.value.is_retryable) == ("no", False)
            assert caught.value.code == "non_finite_logits"

    asyncio.run(scenario())


def test_a_failure_wakes_the_reader_and_the_first_one_counts() -> None:
    async def scenario() -> None:
        mailbox = _mailbox()
        reader = asyncio.create_task(mailbox.wait_tokens())
        await _turns()
        mailbox.fail(FailureRecord(key=KEY, reason="first", retryable=True))
        mailbox.lose("d")
        with pytest.raises(AttemptFailed, match="first"):
            await reader

    asyncio.run(scenario())


@pytest.mark.parametrize("worker", ["p", "d"])
def test_losing_either_worker_before_the_decode_worker_spoke_ends_the_attempt(worker: str) -> None:
    async def scenario() -> None:
        mailbox = _mailbox()
        mailbox.put("p", _record(0))
        mailbox.lose(worker)
        assert await _get(mailbox, 1) == [0]
        with pytest.raises(AttemptFailed) as caught:
            await mailbox.wait_tokens()
        assert (caught.value.is_retryable, caught.value.code) == (True, "worker_lost")

    asyncio.run(scenario())


def test_losing_the_prefill_worker_after_the_decode_worker_spoke_matters_no_more() -> None:
    async def scenario() -> None:
        mailbox = _mailbox()
        mailbox.put("p", _record(0))
        mailbox.put("d", _record(1))
        mailbox.lose("p")
        mailbox.put("d", _record(2))
        assert await _get(mailbox, 3) == [0, 1, 2]
        mailbox.lose("d")
        with pytest.raises(AttemptFailed, match="d was lost"):
            await mailbox.wait_tokens()

    asyncio.run(scenario())


def test_a_decode_worker_that_spoke_out_of_turn_does_not_make_up_for_the_first_token() -> None:
    # Its token 1 waits for token 0, which only the prefill worker has: that loss must end it.
    async def scenario() -> None:
        mailbox = _mailbox()
        mailbox.put("d", _record(1))
        mailbox.lose("p")
        reader = asyncio.create_task(mailbox.wait_tokens())
        await _turns()
        assert reader.done()
        with pytest.raises(AttemptFailed, match="p was lost"):
            await reader

    asyncio.run(scenario())


def test_losing_a_stranger_is_no_loss() -> None:
    async def scenario() -> None:
        mailbox = Mailbox(prefill_worker="u", decode_worker=None, next_index=0)
        assert mailbox.workers == {"u"}
        mailbox.lose("d")
        mailbox.put("u", _record(0))
        assert await _get(mailbox, 1) == [0]
        mailbox.lose("u")
        with pytest.raises(AttemptFailed, match="u was lost"):
            await mailbox.wait_tokens()

    asyncio.run(scenario())


def test_a_refusal_ends_the_attempt_and_says_why() -> None:
    async def run(refusal: EngineError) -> Exception:
        mailbox = Mailbox(prefill_worker="p", decode_worker=None, next_index=0)
        reader = asyncio.create_task(mailbox.wait_tokens())
        await _turns()
        mailbox.refuse(refusal)
        with pytest.raises((AttemptFailed, RequestError)) as caught:
            await reader
        return caught.value

    full = CapacityError("full")
    failure = asyncio.run(run(full))
    assert isinstance(failure, AttemptFailed)
    assert (failure.code, failure.is_retryable, failure.__cause__) == ("submit_failed", True, full)
    never = RequestError("too long")
    assert asyncio.run(run(never)) is never


@pytest.mark.parametrize("is_queued", [True, False])
def test_a_worker_that_is_lost_held_the_request_if_it_had_said_so(is_queued: bool) -> None:
    async def run() -> str:
        mailbox = Mailbox(prefill_worker="p", decode_worker=None, next_index=0)
        if is_queued:
            mailbox.submitted()
        mailbox.lose("p")
        with pytest.raises(AttemptFailed, match="p was lost") as caught:
            await mailbox.wait_tokens()
        return caught.value.code

    assert asyncio.run(run()) == ("holder_lost" if is_queued else "worker_lost")
