"""The host tier over a GPU whose streams run late: what comes back, whoever is slow."""

import random
import secrets
from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine.kv.host.arena import HostArena
from engine.kv.host.movers import CudaMover
from engine.kv.host.staging import StagingRows
from engine.kv.host.tier import HostLoad, HostTier
from engine.kv.layout import KvLayout
from load_tests.testbed.virtual_time import VirtualLane, VirtualTime
from tests.engine.kv.arena_process import name_of
from tests.engine.kv.late_streams import LateDevice, LateEvent, LateStore, LateStream, Row
from tests.harness.seeds import fresh_random

LAYOUT = KvLayout.with_heads(
    num_layers=1, block_size=2, num_kv_heads=1, head_dim=4, dtype="float32"
)
NUM_BLOCKS, NUM_ARENA_BLOCKS, NUM_TURNS = 24, 40, 60


class World:
    """A device whose blocks are evicted, overwritten by steps, loaded and read by steps."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, rng: random.Random, num_staged: int
    ) -> None:
        self.rng = rng
        self.time = VirtualTime()
        self.device = LateDevice(self.time, rng)
        self.device.replace_cuda(monkeypatch)
        monkeypatch.setattr("engine.kv.host.movers._BURST_BYTES", 2 * LAYOUT.block_bytes)
        monkeypatch.setattr("engine.kv.host.tier._PIECE_BYTES", 2 * LAYOUT.block_bytes)
        self.store = LateStore(LAYOUT, NUM_BLOCKS, self.device)
        self.arena = HostArena(
            f"test-late-{secrets.token_hex(8)}",
            num_bytes=NUM_ARENA_BLOCKS * (LAYOUT.block_bytes + 56) + 2**21 + 4128,
            block_bytes=LAYOUT.block_bytes,
            fingerprint=bytes(16),
        )
        self.arena.note_hit()
        self.num_staged = num_staged
        mover = CudaMover(self.store, torch.from_numpy(self.arena.blocks), num_staged)
        self.rows = mover._rows
        self.tier = HostTier(
            self.arena,
            mover,
            clock=self.time,
            lane=lambda _: VirtualLane(self.time),
        )
        self.arrivals = self.device.new_stream()
        self.contents: dict[bytes, Row] = {}  # by name: what may ever be found under it
        self.idle = dict[int, bytes]()  # block -> its name
        self.free = list(range(NUM_BLOCKS))
        self.loads: list[tuple[HostLoad, list[int]]] = []  # under way, and into which blocks
        self.wrong: list[str] = []
        self.num_read = 0

    def step(self, block_ids: list[int]) -> None:
        """A step fills these blocks with something new; they are idle when it has ended."""
        self._fill(block_ids, self.device.steps)

    def arrive(self, block_ids: list[int]) -> None:
        """As `step`, by a handoff: it waits for all steps launched (`KvPieces.fence`)."""
        self.arrivals.wait_event(self.device.steps.record_event())
        self._fill(block_ids, self.arrivals)

    def _fill(self, block_ids: list[int], stream: LateStream) -> None:
        for block_id in block_ids:
            content = np.frombuffer(self.rng.randbytes(LAYOUT.block_bytes), np.uint8)
            name = name_of(len(self.contents))
            self.contents[name] = content
            with self.device.use(stream):
                self.device.queue_halves(self.store.bytes[block_id], content)

            def end(block_id: int = block_id, name: bytes = name) -> None:
                self.idle[block_id] = name

            stream.queue(end)

    def evict(self) -> None:
        """Blocks are evicted, and overwritten at once, by a step or by what arrives."""
        chosen = self.rng.sample(sorted(self.idle), min(len(self.idle), self.rng.randrange(8)))
        if chosen:
            self.tier.save([(block_id, self.idle.pop(block_id)) for block_id in chosen])
            kept = self.rng.randrange(len(chosen) + 1)
            self.free += chosen[kept:]
            self.rng.choice([self.step, self.arrive])(chosen[:kept])

    def load(self) -> bool:
        """Begin to load some blocks; whether there were any, and room for them."""
        names = self.rng.sample(self.arena.hashes(), min(self.arena.num_ready, 6))
        blocks = [block for name in names for block in self.tier.find([name])][: len(self.free)]
        if not blocks:
            return False
        block_ids, self.free = self.free[: len(blocks)], self.free[len(blocks) :]
        self.loads.append((self.tier.load(blocks, block_ids), block_ids))
        return True

    def end(self, load: HostLoad, block_ids: list[int]) -> None:
        """What has landed is read by a step, and idle afterwards; the rest is free."""
        for i, block_id in enumerate(block_ids):
            if i >= load.num_landed:
                self.free.append(block_id)
                continue
            assert self.store.digests.of([block_id]) == [load.blocks[i].digest]
            name = load.blocks[i].block_hash
            self.device.steps.queue(self._reading(block_id, name))

    def _reading(self, block_id: int, name: bytes) -> Callable[[], None]:
        def read() -> None:
            self.num_read += 1
            if not np.array_equal(self.store.bytes[block_id], self.contents[name]):
                self.wrong.append(f"block {block_id} is not what was stored")
            self.free.append(block_id)

        return read

    def run(self) -> None:
        self.step([self.free.pop() for _ in range(NUM_BLOCKS - 8)])
        for _ in range(NUM_TURNS):
            self.settle()
            self.evict()
            if self.load() and self.rng.random() < 0.2:
                self.loads[-1][0].cancel()
            if self.rng.random() < 0.3 and self.free:
                self.step([self.free.pop()])
            self.device.take_time(self.rng.choice([0.1, 5.0, 50.0]))
        self.finish()
        # A device may have been too slow for all of these turns: some blocks come back now.
        self.tier.save(list(self.idle.items()))
        self.free += self.idle
        self.idle.clear()
        self.finish()
        self.load()
        self.finish()

    def settle(self) -> None:
        self.tier.settle()
        over = [pair for pair in self.loads if pair[0].is_over]
        self.loads = [pair for pair in self.loads if not pair[0].is_over]
        for load, block_ids in over:
            self.end(load, block_ids)

    def finish(self) -> None:
        """Wait for all that was begun, and for the steps that read it."""
        while self.tier.is_active:
            self.settle()
            self.device.take_time()
        self.settle()
        self.device.steps.synchronize()
        self.arrivals.synchronize()

    def check(self) -> None:
        self.tier.check_conservation()
        counts = self.tier.statistics()
        assert not self.wrong, self.wrong
        assert counts.num_corrupt == 0, "what was stored is not what its digest says"
        assert self.num_read > 0
        assert sorted(self.rows.take(NUM_BLOCKS)) == list(range(self.num_staged))


@pytest.mark.parametrize("num_staged", [0, 3, 9])
def test_every_block_that_comes_back_is_what_was_evicted(
    num_staged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(4):  # one in two notices a wait that is left out
        world = World(monkeypatch, fresh_random(), num_staged)
        world.run()
        world.check()
        world.tier.close()


def _wait_for_nothing(stream: LateStream, event: LateEvent | None = None) -> LateEvent:
    """In place of `record_event`, where nobody else records the event: that of `begin_load`."""
    if event is not None:
        return record_event(stream, event)
    over = LateEvent(stream._device)
    over.is_over = True
    return over


record_event = LateStream.record_event
PLANTED: dict[str, tuple[type, str, object]] = {
    "steps do not wait for saves": (LateStream, "wait_event", lambda *_: None),
    "loads do not wait for saves": (LateStream, "record_event", _wait_for_nothing),
    "rows are never taken": (StagingRows, "take", lambda rows, n: list(range(min(n, 3)))),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_wait_that_is_left_out_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*PLANTED[name])
    for seed in range(20):
        world = World(monkeypatch, random.Random(seed), 3)
        try:
            world.run()
            world.check()
        except AssertionError:
            return
        finally:
            world.tier.close()
    pytest.fail("nothing was noticed in 20 runs")
