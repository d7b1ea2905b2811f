"""From a worker's cache to what placement knows of it: reports, their reader, and the names."""

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from actors.ingress.system_view import block_hasher
from actors.routing.cache_report_reader import CacheReportReader
from actors.routing.worker_links import WorkerLink, WorkerLinks
from actors.rpc.handles import WorkerHandle
from actors.worker.cache_reports import CacheReports
from engine.cost_model import PRIOR
from engine.errors import WorkerError
from engine.kv.cache import BlockCache
from engine.kv.hashes import RequestHasher
from engine.kv.layout import KvLayout
from engine.messages import (
    CacheReport,
    LoadReport,
    TiersAfter,
    Topology,
    WorkerIdentity,
    WorkerStatus,
)
from engine.request import Request, RequestKey, RequestSpec, SamplingParams
from engine.routing.prefix_hits import PrefixHits

CHAIN = [bytes([i]) * 16 for i in range(6)]
LOAD = LoadReport(queued_tokens=0, num_waiting=0, num_running=0, num_free_blocks=9, num_blocks=9)


def _cache() -> BlockCache:
    return BlockCache(12, enable_prefix_caching=True, protected_share=0.5)


def _index(cache: BlockCache, hashes: list[bytes]) -> None:
    held = cache.acquire_prefix(hashes)
    held += cache.allocate(len(hashes) - len(held)) or []
    for index, block_id in enumerate(held):
        cache.index(block_id, hashes[index], hashes[index - 1] if index else None)
    cache.release(held)


def test_reports_follow_each_other_and_the_first_has_everything() -> None:
    cache, reports = _cache(), CacheReports("one")
    _index(cache, CHAIN[:2])
    first = reports.since(cache, None)
    assert first is not None
    assert (first.incarnation, first.is_resync, first.added) == ("one", True, CHAIN[:2])
    assert reports.since(cache, first.sequence) is None
    _index(cache, CHAIN[:3])
    second = reports.since(cache, first.sequence)
    assert second is not None
    assert (second.sequence, second.is_resync) == (first.sequence + 1, False)
    assert second.added == [CHAIN[2]]


def test_who_missed_a_report_gets_everything() -> None:
    cache, reports = _cache(), CacheReports("one")
    _index(cache, CHAIN[:2])
    first = reports.since(cache, None)
    _index(cache, CHAIN[:4])
    assert first is not None
    assert reports.since(cache, first.sequence) is not None  # and it is lost
    again = reports.since(cache, first.sequence)
    assert again is not None
    assert (again.is_resync, set(again.added)) == (True, set(CHAIN[:4]))


class _Handle:
    """A worker whose cache is asked; `fails` says when it does not answer."""

    def __init__(self, fails: Callable[[int], bool]) -> None:
        self.cache = _cache()
        self._reports = CacheReports("one")
        self._fails = fails
        self.num_asked = 0

    async def cache_report(self, after: int | None, tiers_after: TiersAfter) -> CacheReport:
        assert tiers_after == {}
        self.num_asked += 1
        blocks = self._reports.since(self.cache, after)
        if self._fails(self.num_asked):
            raise WorkerError("the answer is lost")
        return CacheReport(blocks=blocks, costs=PRIOR)


class _Links:
    def __init__(self, handle: _Handle, num_decoders: int = 1) -> None:
        self._num_decoders = num_decoders
        self.link = WorkerLink(name="p", role="prefill", handle=cast("WorkerHandle", handle))
        self.link.load, self.link.incarnation = LOAD, "one"

    def links(self) -> list[WorkerLink]:
        decoders = [
            WorkerLink(name=f"d{i}", role="decode", handle=self.link.handle, load=LOAD)
            for i in range(self._num_decoders)
        ]
        return [self.link, *decoders]


def test_the_reader_ends_up_with_what_is_cached_though_answers_are_lost() -> None:
    async def scenario() -> None:
        handle = _Handle(fails=lambda asked: asked % 2 == 0)
        hits = PrefixHits(block_size=16)
        applied = asyncio.Event()

        def learn(worker: str, cache_report: CacheReport) -> None:
            if cache_report.blocks is not None:
                hits.apply(worker, cache_report.blocks)
            applied.set()

        links = cast("WorkerLinks", _Links(handle))
        reader = CacheReportReader(
            links, hits.last_sequence, lambda _: {}, learn, period_s=0.001, idle_period_s=0.002
        )
        async with asyncio.timeout(20):
            for num_blocks in range(1, 7):
                _index(handle.cache, CHAIN[:num_blocks])
                while hits.hit_tokens(CHAIN).get("p") != 16 * num_blocks:
                    applied.clear()
                    await applied.wait()
        reader.check()
        assert hits.num_blocks() == {"p": 6}, "a decode worker alone is not asked"
        await reader.close()

    asyncio.run(scenario())


def test_several_decode_workers_are_asked_for_their_blocks_alone() -> None:
    async def scenario() -> None:
        handle = _Handle(fails=lambda _: False)
        _index(handle.cache, CHAIN[:3])
        learned: dict[str, CacheReport] = {}
        have_answered = asyncio.Event()

        def learn(worker: str, cache_report: CacheReport) -> None:
            learned.setdefault(worker, cache_report)
            if len(learned) == 3:
                have_answered.set()

        links = cast("WorkerLinks", _Links(handle, num_decoders=2))
        reader = CacheReportReader(
            links, lambda _: None, lambda _: {}, learn, period_s=0.001, idle_period_s=0.002
        )
        async with asyncio.timeout(20):
            await have_answered.wait()
        assert learned.keys() == {"p", "d0", "d1"}
        assert all(report.blocks is not None for report in learned.values())
        assert [learned[name].costs for name in ("p", "d0", "d1")] == [PRIOR, None, None]
        await reader.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_the_edge_names_blocks_as_a_worker_does(num_ahead: int) -> None:
    layout = KvLayout.with_heads(
        block_size=4, num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32"
    )
    if num_ahead:  # something reads vectors beside the next token
        layout = layout.with_features(6)
    identity = WorkerIdentity(
        name="p", incarnation="one", role="prefill", model="m", layout=layout, max_model_len=99,
        pid=1, block_key=b"k" * 32,
    )  # fmt: skip
    starting = WorkerStatus(identity=None, state="starting")
    ready = WorkerStatus(identity=identity, state="ready")
    topology = Topology(
        workers={"o": starting, "p": ready},
        roles={"o": "prefill", "p": "prefill"},
        batchers=[],
        allocator="a",
    )
    tokens = list(range(12))
    request = Request(
        spec=RequestSpec(params=SamplingParams(max_tokens=1), salt="mine"),
        key=RequestKey("r"),
        ingress_id="i",
        tokens=tokens,
        num_prompt_tokens=12,
        arrival_s=0.0,
    )
    RequestHasher(b"k" * 32, model="m", dtype="float32", block_size=4, num_ahead=num_ahead).extend(
        request
    )
    hasher = block_hasher(topology)
    assert hasher is not None
    assert hasher.chain(tokens, "mine") == request.block_hashes
    assert len(request.block_hashes) == 3 - num_ahead
    assert hasher.chain(tokens, "other") != request.block_hashes
    nobody = Topology(workers={"o": starting}, roles={"o": "prefill"}, batchers=[], allocator="a")
    assert block_hasher(nobody) is None
