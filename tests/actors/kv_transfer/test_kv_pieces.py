"""How blocks are copied from store to store, by either rule."""

from itertools import pairwise

import pytest
import torch

from actors.kv_transfer import kv_pieces
from actors.kv_transfer.kv_pieces import MAX_PULL_BYTES, copy_blocks, parts_of, runs_of
from engine.kv.layout import KvLayout
from tests.actors.kv_transfer.gpu_stand_in import random_blocks, random_store
from tests.harness.seeds import fresh_random

SMALL = KvLayout.with_heads(num_layers=1, block_size=2, num_kv_heads=1, head_dim=4, dtype="float16")


def test_neighbours_in_both_stores_are_one_run() -> None:
    assert runs_of([4, 5, 6, 9, 2, 3], [0, 1, 2, 3, 7, 9]) == [
        (4, 0, 3),
        (9, 3, 1),
        (2, 7, 1),
        (3, 9, 1),
    ]
    assert runs_of([], []) == []


def test_runs_cover_each_block_once_in_order() -> None:
    rng = fresh_random()
    for _ in range(50):
        number = rng.randint(1, 30)
        targets, sources = (rng.sample(range(40), number) for _ in range(2))
        targets[: number // 2] = sorted(targets[: number // 2])
        sources[: number // 2] = sorted(sources[: number // 2])
        pairs = [(t + i, s + i) for t, s, n in runs_of(targets, sources) for i in range(n)]
        assert pairs == list(zip(targets, sources, strict=True))


def test_parts_of_a_pull_are_every_block_in_order_from_even_starts() -> None:
    rng = fresh_random()
    for _ in range(200):
        number, block_bytes = rng.randint(1, 3000), rng.choice([7, 2**16, 2_359_296, 2**29])
        parts = parts_of(number, block_bytes)
        assert [block for part in parts for block in range(part.start, part.stop)] == [
            *range(number)
        ]
        assert all(part.start % 2 == 0 and part.start < part.stop for part in parts)
        sizes = [part.stop - part.start for part in parts]
        assert all(size <= max(2, MAX_PULL_BYTES // block_bytes) for size in sizes)
        assert all(after <= 2 * before for before, after in pairwise(sizes))


@pytest.mark.parametrize("min_copy_bytes", [1, 2**40], ids=["copies", "one gather"])
@pytest.mark.parametrize("gather_bytes", [1, 100, 2**30])
def test_the_named_blocks_arrive_and_no_other_is_touched(
    min_copy_bytes: int, gather_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_pieces, "MIN_COPY_BYTES", min_copy_bytes)
    monkeypatch.setattr(kv_pieces, "GATHER_BYTES", gather_bytes)
    rng = fresh_random()
    source, target = random_store(17, rng, SMALL), random_store(23, rng, SMALL)
    before = target.tensor.clone()
    number = rng.randint(1, 17)
    from_ids, to_ids = random_blocks(number, source, rng), random_blocks(number, target, rng)
    copy_blocks(target.tensor, to_ids, source.tensor, from_ids)
    assert torch.equal(target.tensor[to_ids], source.tensor[from_ids])
    others = [block for block in range(23) if block not in to_ids]
    assert torch.equal(target.tensor[others], before[others])


def test_no_blocks_are_no_copy() -> None:
    store = random_store(3, fresh_random())
    before = store.tensor.clone()
    copy_blocks(store.tensor, [], store.tensor, [])
    assert torch.equal(store.tensor, before)
