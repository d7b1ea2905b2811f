"""Deterministic mode over four ranks: a row's sums do not depend on the rows beside it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.ranks.exact_models import save_whole_numbers
from tests.engine.ranks.order_stories import draw_parts, hash_rounded, sum_parts
from tests.harness.rank_processes import RankProcesses
from tests.harness.tiny_models import save_model

pytestmark = pytest.mark.slow

SIZE = 4
NUM_TRIALS = 3


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with RankProcesses(SIZE, tmp_path_factory.mktemp("ranks")) as started:
        yield started


def test_parts_are_added_in_rank_order(ranks: RankProcesses, tmp_path: Path) -> None:
    by_dtype = list(zip(*map(draw_parts, range(SIZE)), strict=True))
    for sums in ranks.run(sum_parts, str(tmp_path / "ordered"), True):
        for found, (first, *others) in zip(sums, by_dtype, strict=True):
            total = sum((part.float() for part in others), start=first.float())
            assert all(torch.equal(one, total.to(first.dtype)) for one in found)
    whole, halves, _ = ranks.run(sum_parts, str(tmp_path / "otherwise"), False)[0][0]
    assert not torch.equal(whole, halves), "in the order of the group's own choice"


@pytest.mark.nightly
def test_a_request_has_one_hash_however_it_is_computed(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    save_model(tmp_path, "Qwen3ForCausalLM", seed=3, num_key_value_heads=2, num_attention_heads=4)
    save_whole_numbers(tmp_path, seed=4)
    found = ranks.run(hash_rounded, tmp_path, str(tmp_path / "ordered"), True, NUM_TRIALS)
    assert len(set.union(*found)) == 1
    otherwise = ranks.run(hash_rounded, tmp_path, str(tmp_path / "otherwise"), False, NUM_TRIALS)
    assert len(otherwise[0]) > 1, "in the order of the group's own choice"
