"""The host tier of a worker of several ranks: each moves its part of a block, one check binds."""

import random
import secrets
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.clock import ManualClock
from engine.engine import Engine
from engine.errors import WorkerError
from engine.kv.cache import check_blocks
from engine.kv.host.movers import BlockMover, build_mover
from engine.kv.host.shared_file import FOLDER, PREFIX, name_for
from engine.kv.layout import KvLayout
from engine.kv.store import KvStore
from engine.layers.context import Comm
from engine.ranks.block_parts import BlockParts, LedMover, PartMover, RankPart
from engine.ranks.rank_tasks import Begin
from engine.ranks.step_counts import StepCounts
from engine.request import SamplingParams
from tests.harness.asked_ranks import AskedRanks
from tests.harness.in_process import answer, start_engine
from tests.harness.led_ranks import LedRanks
from tests.harness.rank_processes import RankProcesses
from tests.harness.seeds import fresh_random
from tests.harness.tiny_models import save_model

SIZES = {"cache__num_blocks": 30, "model__max_model_len": 240, "scheduler__max_num_seqs": 3}
NUM_HEADS = 4
NUM_BLOCKS = 12


# ---- whole engines -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with RankProcesses(2, tmp_path_factory.mktemp("ranks")) as started:
        yield started


def _build(comm: Comm, key: bytes, settings: Mapping[str, object]) -> Engine:
    # On this clock no time passes, so that no load is given up on a busy machine.
    given = {"cache__host_gib": 0.03, **SIZES, **settings}
    return start_engine(comm, key, ManualClock(), **given)


def _flip_a_bit(engine: Engine, rng: random.Random) -> None:
    """Of any rank's part."""
    assert engine.host_tier is not None
    arena = engine.host_tier._arena
    found = arena.find([rng.choice(arena.hashes())])
    arena.blocks[found[0].slot, rng.randrange(arena.block_bytes)] ^= 1 << rng.randrange(8)


def _check(engine: Engine) -> None:
    check_blocks(engine.cache, engine.core.scheduler.owners())
    assert engine.host_tier is not None
    engine.host_tier.check_conservation()


OWN: dict[str, object] = {
    "workers__expert_parallel": True,
    "workers__enable_dp_attention": True,
    "cache__num_blocks": 16,  # of each rank
}


@pytest.mark.parametrize(
    ("architecture", "num_parts", "overlap", "more"),
    [
        (None, 2, True, {}),
        ("DeepseekV3ForCausalLM", 1, False, {}),
        ("DeepseekV3ForCausalLM", 1, True, OWN),
    ],
    ids=["parts", "latents", "blocks of their own"],
)
def test_ranks_answer_from_their_parts_as_one_without_a_cache(
    architecture: str | None,
    num_parts: int,
    overlap: bool,
    more: dict[str, object],
    ranks: RankProcesses,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Conversations over a cache that is much too small, steps in flight, and wrong bits."""
    settings: dict[str, object] = {"scheduler__overlap": overlap}
    if architecture is not None:
        save_model(tmp_path, architecture, seed=11)
        settings["model__path"] = str(tmp_path)
    alone = start_engine(cache__enable_prefix_caching=False, **SIZES, **settings)
    rng, key = fresh_random(), secrets.token_bytes(32)
    vocabulary = min(3000, alone.spec.vocab_size)
    conversations = [
        [rng.randrange(3, vocabulary) for _ in range(rng.randrange(90, 150))] for _ in range(6)
    ]
    with LedRanks(ranks, _build, key, settings | more) as led:
        engine = _build(ranks.comm, key, settings | more)
        led.lead_engine(engine)
        assert engine.host_tier is not None
        assert engine.host_tier._arena.block_bytes == num_parts * engine.layout.block_bytes
        monkeypatch.setattr(engine.host_tier, "load_seconds", lambda blocks: 0.0)
        for turn in range(3):
            params = [
                SamplingParams(max_tokens=5, temperature=0.8 * (i % 2), seed=turn, ignore_eos=True)
                for i in range(2)
            ]
            if turn == 2:
                _flip_a_bit(engine, rng)
            for first in range(0, 6, 2):
                pair = conversations[first : first + 2]
                asked = list(zip(pair, params, strict=True))
                ours = [found.tokens for found in answer(engine, asked)]
                assert ours == [found.tokens for found in answer(alone, asked)], f"turn {turn}"
                for conversation, tokens in zip(pair, ours, strict=True):
                    conversation += tokens
                    conversation += [rng.randrange(3, vocabulary) for _ in range(9)]
                _check(engine)
        load = engine.load().host_tier
        assert load is not None
        assert load.num_loaded > 0
        assert load.num_corrupt <= 1
        engine.close()
    assert not (FOLDER / f"{PREFIX}{name_for(key)}").exists()


# ---- movers --------------------------------------------------------------------------------------


class Ranks:
    """Stores of ranks of one worker in this process, with equal content where heads are equal."""

    def __init__(self, num_ranks: int, num_heads: int = NUM_HEADS) -> None:
        shape = {"num_layers": 2, "block_size": 3, "head_dim": 4}
        self.whole = KvLayout.with_heads(**shape, num_kv_heads=num_heads, dtype="float32")
        self.parts = BlockParts(self.whole, num_ranks)
        self.content = torch.randn(NUM_BLOCKS, *self.whole.block_shape)
        self.stores = []
        num_own = self.parts.of_ranks[0].num_heads
        layout = KvLayout.with_heads(**shape, num_kv_heads=num_own, dtype="float32")
        for part in self.parts.of_ranks:
            store = KvStore(layout, num_blocks=NUM_BLOCKS, device=torch.device("cpu"))
            store.tensor.copy_(self.content[..., part.heads, :])
            store.hold_part(part)
            self.stores.append(store)
        room = NUM_BLOCKS, self.parts.num_parts * layout.block_bytes
        self.arena = torch.zeros(room, dtype=torch.uint8).numpy()

    def mover(self, rank: int) -> BlockMover:
        store = self.stores[rank]
        rows = self.arena.reshape(-1, store.layout.block_bytes)
        return PartMover(build_mover(store, rows), self.parts.place_of(rank), self.parts.num_parts)

    def others(self) -> list[Begin]:
        given = range(1, len(self.stores))
        return [RankPart(self.mover(r), keeps=r in self.parts.keepers).begin for r in given]

    def digests(self, block_ids: list[int]) -> list[int]:
        """Of whole blocks."""
        one = KvStore(self.whole, num_blocks=NUM_BLOCKS, device=torch.device("cpu"))
        return one.digest_staged(self.content[block_ids])


def _led(asked: AskedRanks, ranks: Ranks) -> LedMover:
    return LedMover(ranks.mover(0), ranks.parts, asked.rank_tasks, StepCounts())


@pytest.mark.parametrize(
    ("num_ranks", "num_heads", "num_parts", "keepers"),
    [(2, 4, 2, [0, 1]), (4, 2, 2, [0, 2]), (3, 1, 1, [0])],
)
def test_a_block_is_whole_in_the_arena_and_its_digest_is_that_of_one_rank(
    num_ranks: int, num_heads: int, num_parts: int, keepers: list[int]
) -> None:
    ranks = Ranks(num_ranks, num_heads)
    assert (ranks.parts.num_parts, ranks.parts.keepers) == (num_parts, keepers)
    with AskedRanks(ranks.others(), kinds=("host save", "host load")) as asked:
        mover = _led(asked, ranks)
        wait = mover.save([7, 2, 5], [0, 4, 9])
        assert wait() == ranks.digests([7, 2, 5])
        assert ranks.arena[[0, 4, 9]].any(axis=1).all()
        for store in ranks.stores:
            store.zero(range(NUM_BLOCKS))
        assert mover.begin_load()([9, 0], [1, 3]) == ranks.digests([5, 7])
    for part, store in zip(ranks.parts.of_ranks, ranks.stores, strict=True):
        assert torch.equal(store.tensor[[1, 3]], ranks.content[[5, 7]][..., part.heads, :])
        assert store.digests.of([1, 3]) == store.digest([1, 3])


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_a_wrong_bit_on_any_rank_makes_another_digest(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ranks that have the same heads, too."""
    ranks = Ranks(4, 2)
    store = ranks.stores[rank]
    digest = store.digest

    def flipped(block_ids: list[int]) -> list[int]:
        store.tensor.view(-1).view(torch.uint8).view(NUM_BLOCKS, -1)[block_ids[-1], 3] ^= 4
        return digest(block_ids)

    with AskedRanks(ranks.others(), kinds=("host save", "host load")) as asked:
        mover = _led(asked, ranks)
        expected = mover.save([7, 2], [0, 4])()
        monkeypatch.setattr(store, "digest", flipped)
        found = mover.begin_load()([0, 4], [1, 3])
    assert (found[0] == expected[0], found[1] == expected[1]) == (True, False)


def test_a_load_is_over_when_every_rank_has_ended_it_or_the_gang_has() -> None:
    """A rank stands still: the load does not end before its death, and then it has failed."""
    ranks, begun, may_end = Ranks(2), threading.Event(), threading.Event()

    def stands_still(_: bytes) -> Any:
        def rest() -> bytes:
            begun.set()
            may_end.wait(60)
            return b""

        return rest

    with AskedRanks([stands_still], kinds=("host save", "host load")) as asked:
        copy, errors = _led(asked, ranks).begin_load(), list[BaseException]()

        def load() -> None:
            with pytest.raises(WorkerError, match="rank 1") as raised:
                copy([0], [1])
            errors.append(raised.value)

        loading = threading.Thread(target=load)
        loading.start()
        assert begun.wait(60)
        assert loading.is_alive()
        asked.end(1)
        loading.join(60)
        assert len(errors) == 1
        may_end.set()


def test_a_rank_that_cannot_save_fails_the_save_alone() -> None:
    ranks = Ranks(2)

    def refuses(_: bytes) -> Any:
        raise OSError("no such memory")

    with AskedRanks([refuses], kinds=("host save", "host load")) as asked:
        wait = _led(asked, ranks).save([1], [2])
        with pytest.raises(WorkerError, match="rank 1: OSError: no such memory"):
            wait()
        assert asked.ends == []
