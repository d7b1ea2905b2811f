"""Handoffs of the channel bench that come as the mixed load's prompts do."""

import asyncio
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from engine.errors import HandoffError
from load_tests.lab.bench_channels import QWEN3_8B, Arrived, Outcome, hand_over_at, render
from load_tests.mixed_load import MixedLoad
from load_tests.testbed.channel_ends import SendingProcess

NUM_BLOCKS = 40


class FakeProcess:
    """Takes every handoff at once, and says which blocks it was."""

    def __init__(self, digest_of_arrived: int) -> None:
        def digest(block_ids: Sequence[int]) -> list[int]:
            return [7] * len(block_ids)

        store = SimpleNamespace(layout=QWEN3_8B, num_blocks=NUM_BLOCKS, digest=digest)
        self.end = SimpleNamespace(store=store)
        self.handed_over: list[tuple[list[int], list[int]]] = []
        self._digest_of_arrived = digest_of_arrived

    async def hand_over(self, from_ids: list[int], to_ids: list[int]) -> float:
        self.handed_over.append((from_ids, to_ids))
        return 0.0

    async def call(self, verb: str, *arguments: Any) -> list[int]:
        assert verb == "digests"
        return [self._digest_of_arrived] * len(arguments[0])


def some_load() -> MixedLoad:
    return MixedLoad(rate=300.0, duration_s=0.1, seed=random.randrange(2**32), shrink=20)


def test_every_prompt_that_arrives_is_handed_over_with_its_size() -> None:
    load, process = some_load(), FakeProcess(7)
    arrived = asyncio.run(hand_over_at(cast("SendingProcess", process), load))
    sizes = [QWEN3_8B.num_blocks_for(arrival.num_tokens) for arrival in load.arrivals()]
    assert [(len(a), len(b)) for a, b in process.handed_over] == [(n, n) for n in sizes]
    assert arrived.num_handoffs == len(sizes)
    assert arrived.num_bytes == sum(sizes) * QWEN3_8B.block_bytes
    assert arrived.duration_s >= load.duration_s
    assert 0 <= arrived.p50_s <= arrived.p99_s <= arrived.slowest_s


def test_a_rate_of_wrong_bytes_is_no_rate() -> None:
    with pytest.raises(HandoffError, match="not the sender's"):
        asyncio.run(hand_over_at(cast("SendingProcess", FakeProcess(8)), some_load()))


def test_what_arrived_has_a_table_of_its_own_and_survives_json() -> None:
    arrived = Arrived(
        num_handoffs=31, num_bytes=5 * 10**9, duration_s=2.0, p50_s=0.001, p99_s=0.02, slowest_s=0.5
    )
    outcomes = [
        Outcome(channel="nccl_pair", open_s=1.0, arrived=arrived),
        Outcome(channel="cuda_ipc", error="closed"),
    ]
    assert msgspec.json.decode(msgspec.json.encode(outcomes), type=list[Outcome]) == outcomes
    table = render(outcomes)
    assert "31" in table
    assert "2.50" in table
    assert "500.0 ms" in table
