"""Whole engines over a cache that is much too small: the same tokens, wherever their KV was."""

import random
import secrets
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.clock import ManualClock
from engine.engine import Engine
from engine.errors import ConfigError
from engine.kv.cache import check_blocks
from engine.kv.host.shared_file import FOLDER, PREFIX, name_for
from engine.request import SamplingParams
from tests.harness.in_process import answer, start_engine
from tests.harness.seeds import fresh_random

NUM_CONVERSATIONS = 7
SIZES = {"cache__num_blocks": 40, "model__max_model_len": 400, "scheduler__max_num_seqs": 3}
KEY = secrets.token_bytes(32)

Conversation = list[int]


@pytest.fixture(scope="module")
def alone() -> Engine:
    return start_engine(cache__enable_prefix_caching=False, **SIZES)


@pytest.fixture
def sharing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Engine]]:
    """Two workers of one machine, with an arena for all conversations."""
    given = {"cache__host_gib": 0.03, **SIZES}
    # On this clock no time passes, so that no load is given up on a busy machine.
    engines = [start_engine(block_key=KEY, clock=ManualClock(), **given) for _ in range(2)]
    for engine in engines:  # what pays depends on measured times
        monkeypatch.setattr(engine.host_tier, "load_seconds", lambda num_blocks: 0.0)
    assert engines[0].host_tier is not None
    engines[0].host_tier._arena.note_hit()  # else only a quarter is stored
    yield engines
    for engine in engines:
        engine.close()
    assert not (FOLDER / f"{PREFIX}{name_for(KEY)}").exists()


def _ask(engine: Engine, conversation: Conversation, seed: int) -> tuple[list[int], int]:
    """An answer, greedy or drawn, and the prompt tokens that were not computed for it."""
    params = SamplingParams(max_tokens=6, temperature=0.8 * (seed % 2), seed=seed, ignore_eos=True)
    (found,) = answer(engine, [(conversation, params)])
    return found.tokens, found.records[0].num_cached_tokens or 0


def _check(engine: Engine) -> None:
    """Nothing runs: all blocks are where they belong."""
    check_blocks(engine.cache, engine.core.scheduler.owners())
    assert engine.host_tier is not None
    engine.host_tier.check_conservation()


def _flip_a_bit(engine: Engine, rng: random.Random) -> None:
    assert engine.host_tier is not None
    arena = engine.host_tier._arena
    found = arena.find([rng.choice(arena.hashes())])
    arena.blocks[found[0].slot, rng.randrange(arena.block_bytes)] ^= 1 << rng.randrange(8)


def test_two_workers_answer_from_shared_blocks_as_one_without_a_cache(
    alone: Engine, sharing: list[Engine]
) -> None:
    rng = fresh_random()
    conversations = [
        [
            rng.randrange(3, 3000) for _ in range(rng.randrange(110, 180))
        ]  # more than the cache holds
        for _ in range(NUM_CONVERSATIONS)
    ]
    num_cached = 0
    for turn in range(3):
        for number, conversation in enumerate(conversations):
            seed = turn * NUM_CONVERSATIONS + number
            engine = sharing[(number + turn) % 2]
            if turn == 2:
                _flip_a_bit(engine, rng)
            tokens, num_found = _ask(engine, conversation, seed)
            assert tokens == _ask(alone, conversation, seed)[0], f"turn {turn} of {number}"
            num_cached += num_found
            conversation += tokens
            conversation += [rng.randrange(3, 3000) for _ in range(rng.randrange(1, 30))]
            _check(engine)
    loads = [load for engine in sharing if (load := engine.load().host_tier) is not None]
    assert all(load.num_loaded > 0 for load in loads)
    assert num_cached >= 16 * sum(load.num_loaded for load in loads)
    assert sum(load.num_corrupt for load in loads) <= NUM_CONVERSATIONS


def test_a_disk_tier_answers_after_a_restart_as_one_without_a_cache(
    alone: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = fresh_random()
    prompts = [[rng.randrange(3, 3000) for _ in range(150)] for _ in range(6)]
    expected = [_ask(alone, prompt, i) for i, prompt in enumerate(prompts)]
    disk = {"cache__disk_path": str(tmp_path / "kv"), "cache__disk_gib": 0.1}
    num_loaded = []
    for _ in range(2):
        engine = start_engine(
            block_key=KEY, clock=ManualClock(), cache__host_gib=0.03, **disk, **SIZES
        )
        monkeypatch.setattr(engine.host_tier, "load_seconds", lambda blocks: 0.0)
        for turn in range(2):
            for i, prompt in enumerate(prompts):
                assert _ask(engine, prompt, i)[0] == expected[i][0], f"turn {turn} of {i}"
                _check(engine)
        load = engine.load().host_tier
        assert load is not None
        assert load.disk is not None
        assert (load.num_corrupt, load.disk.num_void_files) == (0, 0)
        assert load.disk.num_asked <= load.num_asked
        assert load.disk.num_hit <= min(load.disk.num_asked, load.num_hit)
        assert (load.disk.num_hit > 0) == (load.disk.read_s > 0) == (load.disk.num_loaded > 0)
        num_loaded.append(load.disk.num_loaded)
        engine.close()
        assert not (FOLDER / f"{PREFIX}{name_for(KEY)}").exists()
    assert num_loaded[1] > 20, "of what the first one wrote"


def test_equal_prompts_of_other_salts_share_nothing_on_the_host(sharing: list[Engine]) -> None:
    engine = sharing[0]
    rng = np.random.default_rng(7)
    prompts = [rng.integers(3, 3000, size=120).tolist() for _ in range(8)]
    for prompt in prompts:  # the first ones are evicted
        _ask(engine, prompt, 0)
    hashes = engine.hasher.chain(prompts[0], "")
    assert engine.host_tier is not None
    assert len(engine.host_tier.look(hashes)) >= 5
    assert engine.host_tier.look(engine.hasher.chain(prompts[0], "a tenant")) == []


def test_a_machine_without_room_is_told_before_the_first_request() -> None:
    with pytest.raises(ConfigError, match=r"cache\.host_gib: /dev/shm has no room"):
        start_engine(cache__host_gib=2.0**30, **SIZES)


@pytest.mark.parametrize("part", ["build_host_tier.share_arena", "build.context_length"])
def test_a_build_that_fails_leaves_no_arena(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be that memory cannot be locked, or that the cache is too small for a context."""

    def refuse(*_: object) -> None:
        raise ConfigError("there is too little of it")

    monkeypatch.setattr(f"engine.{part}", refuse)
    with pytest.raises(ConfigError, match="there is too little of it"):
        start_engine(block_key=KEY, cache__host_gib=0.01, **SIZES)
    assert not (FOLDER / f"{PREFIX}{name_for(KEY)}").exists()
