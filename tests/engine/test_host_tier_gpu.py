"""The host tier on a GPU: copies beside steps, every bit of them, and the same tokens after."""

import secrets
from collections.abc import Iterator

import pytest
import torch

from engine.clock import ManualClock
from engine.engine import Engine
from engine.kv.cache import check_blocks
from engine.kv.host.arena import HostArena
from engine.kv.host.movers import build_mover
from engine.kv.layout import KvLayout
from engine.kv.store import KvStore
from engine.request import SamplingParams
from tests.harness.in_process import answer, start_engine
from tests.harness.seeds import fresh_random

pytestmark = pytest.mark.gpu

LAYOUT = KvLayout.with_heads(
    num_layers=36, block_size=16, num_kv_heads=8, head_dim=128, dtype="bfloat16"
)
NUM_BLOCKS = 64
BASE = {
    "model__device": "cuda",
    "model__dtype": "bfloat16",
    "model__deterministic": True,
    "model__max_model_len": 1024,
    "scheduler__max_num_seqs": 3,
    "cache__num_blocks": 96,
}


@pytest.fixture
def arena() -> Iterator[HostArena]:
    name = f"test-gpu-{secrets.token_hex(8)}"
    size = NUM_BLOCKS * (LAYOUT.block_bytes + 64) + 2**22
    fingerprint = bytes(16)
    arena = HostArena(name, num_bytes=size, block_bytes=LAYOUT.block_bytes, fingerprint=fingerprint)
    yield arena
    arena.close()


@pytest.mark.parametrize("num_staged", [0, 9, 32])
def test_blocks_are_saved_before_the_next_step_overwrites_them(
    arena: HostArena, num_staged: int
) -> None:
    """Many times, with the copies always behind: work is queued faster than it is done."""
    store = KvStore(LAYOUT, num_blocks=NUM_BLOCKS, device=torch.device("cuda"))
    mover = build_mover(store, arena.blocks, num_staged)
    rng = fresh_random()
    for _ in range(20):
        store.tensor.normal_()
        block_ids = rng.sample(range(NUM_BLOCKS), 32)
        slots = rng.sample(range(arena.num_blocks), 32)
        before = store.gather(block_ids)
        torch.cuda.synchronize()
        wait = mover.save(block_ids, slots)
        store.zero(block_ids)  # as a step that was given the blocks, at once
        digests = wait()
        assert digests == store.digest_staged(before)
        saved = torch.from_numpy(arena.blocks[slots]).cuda().view(torch.bfloat16)
        assert torch.equal(saved.view(-1).view(torch.int16), before.view(-1).view(torch.int16))


def test_rows_are_staged_to_again_only_after_they_were_copied(arena: HostArena) -> None:
    """Saves one after the other, whose copies out of the device are waited for later."""
    store = KvStore(LAYOUT, num_blocks=NUM_BLOCKS, device=torch.device("cuda"))
    mover = build_mover(store, arena.blocks, 24)
    for _ in range(20):
        store.tensor.normal_()
        before = store.tensor.clone()
        torch.cuda.synchronize()
        waits = []
        for first in range(0, NUM_BLOCKS, 16):
            part = list(range(first, first + 16))
            waits.append(mover.save(part, part))
            store.zero(part)
        digests = [digest for wait in waits for digest in wait()]
        assert digests == store.digest_staged(before)
        saved = torch.from_numpy(arena.blocks[:NUM_BLOCKS]).view(-1)
        assert torch.equal(saved, before.view(-1).view(torch.uint8).cpu())


@pytest.mark.parametrize("num_staged", [0, 9, 64])
def test_loads_wait_until_the_blocks_that_they_overwrite_have_been_read(
    arena: HostArena, num_staged: int
) -> None:
    store = KvStore(LAYOUT, num_blocks=NUM_BLOCKS, device=torch.device("cuda"))
    mover = build_mover(store, arena.blocks, num_staged)
    for _ in range(20):
        store.tensor.normal_()
        before = store.tensor.clone()
        torch.cuda.synchronize()
        ids, half = list(range(NUM_BLOCKS)), NUM_BLOCKS // 2
        first = mover.save(ids[:half], ids[:half])
        second = mover.save(ids[half:], ids[half:])
        copy, digests = mover.begin_load(), first()
        assert copy(ids[:half], ids[half:]) == digests  # over what is being saved
        assert torch.equal(store.tensor[half:], before[:half])
        assert second() == store.digest_staged(before[half:].contiguous())


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Engine, Engine]]:
    """One without a cache, one with a small one and a host tier."""
    alone = start_engine(cache__enable_prefix_caching=False, **BASE)
    engine = start_engine(clock=ManualClock(), cache__host_gib=0.25, **BASE)
    assert engine.host_tier is not None
    monkeypatch.setattr(engine.host_tier, "load_seconds", lambda num_blocks: 0.0)
    yield alone, engine
    engine.close()


def test_conversations_that_come_back_get_the_same_tokens(engines: tuple[Engine, Engine]) -> None:
    alone, engine = engines
    rng = fresh_random()
    conversations = [
        [rng.randrange(3, 3000) for _ in range(rng.randrange(150, 500))] for _ in range(9)
    ]
    for turn in range(4):
        for first in range(0, 9, 3):
            part = conversations[first : first + 3]
            params = [
                SamplingParams(max_tokens=12, temperature=0.8 * (i % 2), seed=turn, ignore_eos=True)
                for i in range(3)
            ]
            work = list(zip(part, params, strict=True))
            ours = [found.tokens for found in answer(engine, work)]
            assert ours == [found.tokens for found in answer(alone, work)]
            for conversation, tokens in zip(part, ours, strict=True):
                conversation += tokens
                conversation += [rng.randrange(3, 3000) for _ in range(rng.randrange(1, 60))]
    load = engine.load().host_tier
    assert load is not None
    assert load.num_loaded > 0
    assert load.num_corrupt == 0
    check_blocks(engine.cache, engine.core.scheduler.owners())
