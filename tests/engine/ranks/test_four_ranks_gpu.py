"""Deterministic mode over four ranks on one GPU, whose sums go through host memory."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.layers.context import Comm
from engine.models.registry import build_model
from tests.engine.runner.determinism_trials import fixed_driver, hash_ways
from tests.harness.rank_processes import STAGED, RankProcesses
from tests.harness.tiny_models import save_model

pytestmark = pytest.mark.gpu

NUM_TRIALS = 12


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with RankProcesses(4, tmp_path_factory.mktemp("ranks"), STAGED) as started:
        yield started


def _hashes(comm: Comm, folder: Path) -> set[str]:
    given: Any = {"dtype": torch.bfloat16, "device": torch.device("cuda"), "is_deterministic": True}
    model = build_model(folder, rank=comm.rank, **given)
    return hash_ways(partial(fixed_driver, model, comm=comm), NUM_TRIALS)


@pytest.mark.parametrize("num_kv_heads", [4, 2], ids=["a KV head each", "held twice"])
def test_a_request_has_one_hash_on_all_ranks(
    ranks: RankProcesses, num_kv_heads: int, tmp_path: Path
) -> None:
    save_model(
        tmp_path,
        "Qwen3ForCausalLM",
        seed=6,
        hidden_size=512,
        intermediate_size=1216,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=num_kv_heads,
        head_dim=128,
        dtype=torch.bfloat16,
    )
    first, *others = ranks.run(_hashes, tmp_path)
    assert len(first) == 1
    assert others == [first] * 3
