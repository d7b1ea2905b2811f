"""Which kind of channel a sender opens, what it falls back to, and when it tries again."""

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from actors.kv_transfer.channel_choice import (
    FAILURE_WINDOW_S,
    MAX_FAILURES,
    MAX_REST_S,
    ChannelChoice,
    channel_order,
    piece_bytes_of,
)
from actors.kv_transfer.contracts import Peer, SendChannel, UnfitError
from actors.kv_transfer.peer_links import PeerLinks
from configs.schema import HandoffConfig
from engine.clock import ManualClock
from engine.errors import ConfigError, HandoffError
from engine.kv.layout import KvDtype, KvLayout
from engine.messages import ChannelKind, PairReply, PairRequest, decode, encode
from tests.engine.kv.handoff_world import RECEIVER, SENDER
from tests.harness.handoff_network import FakeChannel, Faults, Wire
from tests.harness.virtual_time import run_virtual


@dataclass
class World:
    """A sender on a GPU, and what its peer and its own end answer."""

    config: HandoffConfig = field(default_factory=HandoffConfig)
    clock: ManualClock = field(default_factory=ManualClock)
    unfit_here: set[ChannelKind] = field(default_factory=set)
    unfit_there: set[ChannelKind] = field(default_factory=set)
    failing: set[ChannelKind] = field(default_factory=set)
    asked: list[ChannelKind] = field(default_factory=list)
    receiver: Any = RECEIVER

    def __post_init__(self) -> None:
        self.links = PeerLinks(
            SENDER,
            self.config,
            channels=self,
            find_peer=self._find,
            clock=self.clock,
            is_on_gpu=True,
            offer=lambda kind: kind.encode(),
        )

    async def use(self) -> ChannelKind:
        link = self.links.link("decode-0")
        async with link.use(await self.links.peer("decode-0")) as channel:
            return channel.kind

    async def _find(self, name: str) -> Peer:
        return self  # type: ignore[return-value]

    async def open_pair(self, request: PairRequest) -> PairReply:
        request = decode(encode(request), PairRequest)
        assert request.offer == request.channel.encode()
        self.asked.append(request.channel)
        if request.channel in self.unfit_there:
            return PairReply(reason="the sender is on another host", is_unfit=True)
        if request.channel in self.failing:
            return PairReply(reason="the rendezvous is away")
        return PairReply(receiver=self.receiver)

    async def open_send(self, request: PairRequest) -> SendChannel:
        if request.channel in self.unfit_here:
            raise UnfitError("it moves 0.01 GB/s")
        return FakeChannel(Wire(), request, Faults())

    async def open_receive(self, request: PairRequest) -> Any:
        raise AssertionError("the peer opens its own end")


def run(world_of: Any, scenario: Any) -> None:
    async def main() -> None:
        world: World = world_of()
        await scenario(world)
        await world.links.close()

    clock = ManualClock()
    run_virtual(clock, main())


def test_auto_takes_the_best_that_opens_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(world: World) -> None:
        with caplog.at_level(logging.INFO, logger="actors.kv_transfer.peer_links"):
            assert await world.use() == "gloo_pair"
            assert await world.use() == "gloo_pair"
        assert world.asked == ["cuda_ipc", "nccl_pair", "gloo_pair"]
        assert world.links.num_fallbacks == 1
        [record] = caplog.records
        assert "another host" in record.message
        assert "0.01 GB/s" in record.message

    run(lambda: World(unfit_there={"cuda_ipc"}, unfit_here={"nccl_pair"}), scenario)


def test_where_nothing_is_wrong_the_favourite_is_no_fallback() -> None:
    async def scenario(world: World) -> None:
        assert await world.use() == "cuda_ipc"
        assert world.links.num_fallbacks == 0

    run(World, scenario)


def test_an_unfit_kind_is_asked_for_again_only_after_a_channel_broke() -> None:
    async def scenario(world: World) -> None:
        assert await world.use() == "nccl_pair"
        world.clock.advance(10 * FAILURE_WINDOW_S)
        assert await world.use() == "nccl_pair"
        assert world.asked == ["cuda_ipc", "nccl_pair"]
        world.unfit_there.clear()  # the peer restarts on this host
        link = world.links.link("decode-0")
        with pytest.raises(HandoffError):
            async with link.use(await world.links.peer("decode-0")):
                raise HandoffError("broke")
        assert await world.use() == "cuda_ipc"

    run(lambda: World(unfit_there={"cuda_ipc"}), scenario)


def test_a_kind_that_does_not_open_is_tried_again_then_rests() -> None:
    async def scenario(world: World) -> None:
        for _ in range(MAX_FAILURES + 2):
            assert await world.use() == "nccl_pair"
        assert world.asked.count("cuda_ipc") == MAX_FAILURES
        world.failing.clear()
        world.clock.advance(FAILURE_WINDOW_S + 1)
        assert await world.use() == "cuda_ipc"

    run(lambda: World(failing={"cuda_ipc"}), scenario)


@pytest.mark.parametrize("ends_well", [True, False])
def test_a_better_kind_is_tried_again_though_transfers_follow_each_other(ends_well: bool) -> None:
    """They are slower over a worse kind, so there may always be one."""

    async def scenario(world: World) -> None:
        link, peer = world.links.link("decode-0"), await world.links.peer("decode-0")
        for _ in range(MAX_FAILURES):
            assert await world.use() == "nccl_pair"
        running = link.use(peer)
        assert (await running.__aenter__()).kind == "nccl_pair"
        later = [asyncio.ensure_future(world.use()) for _ in range(2)]
        assert await asyncio.gather(*later) == ["nccl_pair"] * 2
        world.failing.clear()
        world.clock.advance(FAILURE_WINDOW_S)
        later = [asyncio.ensure_future(world.use()) for _ in range(2)]
        await asyncio.sleep(1.0)
        assert not any(use.done() for use in later)
        failure = None if ends_well else HandoffError("broke")
        await running.__aexit__(failure and HandoffError, failure, None)
        assert await asyncio.gather(*later) == ["cuda_ipc"] * 2

    run(lambda: World(failing={"cuda_ipc"}), scenario)


def test_a_kind_that_never_opens_is_tried_ever_more_rarely_and_then_again_as_before() -> None:
    """Each try may take as long as a transfer's deadline, and every handoff waits for it."""

    async def scenario(world: World) -> None:
        async def num_tried(seconds: float) -> int:
            before, until_s = world.asked.count("cuda_ipc"), world.clock.now_s() + seconds
            while world.clock.now_s() < until_s:
                await world.use()
                world.clock.advance(1.0)
            return world.asked.count("cuda_ipc") - before

        assert await num_tried(3600.0) == MAX_FAILURES + 6
        assert await num_tried(4 * MAX_REST_S) == 4
        world.failing.clear()
        assert await num_tried(MAX_REST_S) == 1
        assert await world.use() == "cuda_ipc"
        world.failing.add("cuda_ipc")
        link = world.links.link("decode-0")
        world.clock.advance(FAILURE_WINDOW_S)
        with pytest.raises(HandoffError):
            async with link.use(await world.links.peer("decode-0")):
                raise HandoffError("broke")
        assert await num_tried(FAILURE_WINDOW_S) == MAX_FAILURES - 1
        assert await num_tried(2 * FAILURE_WINDOW_S) == 1

    run(lambda: World(failing={"cuda_ipc"}), scenario)


def test_a_configured_kind_falls_back_to_the_object_store_only() -> None:
    async def scenario(world: World) -> None:
        assert await world.use() == "object_store"
        assert world.asked == ["cuda_ipc", "object_store"]

    run(lambda: World(config=HandoffConfig(channel="cuda_ipc"), unfit_there={"cuda_ipc"}), scenario)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_peer_with_another_dtype_or_model_is_no_peer(dtype: KvDtype) -> None:
    layout = KvLayout.with_heads(
        num_layers=2, block_size=RECEIVER.layout.block_size, num_kv_heads=1, head_dim=4, dtype=dtype
    )
    scaled = msgspec.structs.replace(RECEIVER.layout, scales="of other heads")
    others = (
        msgspec.structs.replace(RECEIVER, layout=scaled),
        msgspec.structs.replace(RECEIVER, layout=layout),
        msgspec.structs.replace(RECEIVER, model="another"),
    )

    async def scenario(world: World) -> None:
        for receiver in others:
            world.receiver = receiver
            with pytest.raises(Exception, match="another model or another KV layout"):
                await world.use()
        assert world.asked == ["cuda_ipc"] * 3

    run(World, scenario)


class TestOrder:
    def test_it_depends_on_where_the_store_is(self) -> None:
        auto = HandoffConfig()
        assert channel_order(auto, is_on_gpu=False) == ("gloo_pair", "object_store")
        assert channel_order(auto, is_on_gpu=True)[0] == "cuda_ipc"
        only = HandoffConfig(channel="object_store")
        assert channel_order(only, is_on_gpu=True) == ("object_store",)

    @pytest.mark.parametrize("kind", ["cuda_ipc", "nccl_pair"])
    def test_a_kind_for_gpus_without_one_ends_the_start(self, kind: Any) -> None:
        with pytest.raises(ConfigError, match="gloo_pair or object_store"):
            channel_order(HandoffConfig(channel=kind), is_on_gpu=False)

    def test_the_last_of_the_order_never_rests(self) -> None:
        choice = ChannelChoice(("gloo_pair", "object_store"), ManualClock())
        for kind in choice.candidates():
            for _ in range(MAX_FAILURES):
                choice.count_failure(kind)
        assert choice.candidates() == ["object_store"]

    def test_pieces_between_gpus_have_a_size_of_their_own(self) -> None:
        config = HandoffConfig(piece_bytes=3, device_piece_bytes=7, pulled_piece_bytes=9)
        kinds: tuple[ChannelKind, ...] = ("cuda_ipc", "nccl_pair", "gloo_pair", "object_store")
        assert [piece_bytes_of(config, kind) for kind in kinds] == [9, 7, 3, 3]
