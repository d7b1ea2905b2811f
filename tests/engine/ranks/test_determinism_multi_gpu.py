"""Deterministic mode, a GPU a rank: one request's logits are the same bits however computed."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from engine.layers.context import Comm
from engine.models.llama import CausalLM
from engine.models.registry import build_model
from engine.runner.executor_options import ExecutorOptions
from tests.engine.runner.determinism_trials import fixed_driver, hash_ways
from tests.engine.runner.step_driver import StepDriver
from tests.harness.gpu_ranks import GPU_RANKS
from tests.harness.rank_processes import RankProcesses
from tests.harness.tiny_models import LATENT_ON_GPU, save_model

pytestmark = pytest.mark.multi_gpu

NUM_TRIALS = 50


@pytest.fixture(scope="module", params=GPU_RANKS)
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RankProcesses]:
    with RankProcesses(request.param, tmp_path_factory.mktemp("ranks"), "cuda") as started:
        yield started


def _hashes(comm: Comm, folder: Path) -> set[str]:
    model = build_model(
        folder,
        dtype=torch.bfloat16,
        device=torch.device("cuda", comm.rank.index),
        is_deterministic=True,
        rank=comm.rank,
    )
    return hash_ways(partial(_start, model, comm), NUM_TRIALS)


def _start(model: CausalLM, comm: Comm, seed: int) -> StepDriver:
    """In every second trial a dense model's ranks have shares of the rows between their sums."""
    is_shared = seed % 2 == 1 and model.spec.mixture is None
    options = ExecutorOptions(min_exchanged_tokens=2 if is_shared else None)
    return fixed_driver(model, seed, comm, options)


@pytest.mark.parametrize(
    "architecture", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"]
)
def test_fifty_ways_to_compute_a_request_have_one_hash_on_all_ranks(
    ranks: RankProcesses, architecture: str, tmp_path: Path
) -> None:
    # Which four ranks share in multiples of 16.
    inner = {"intermediate_size": 1216, "moe_intermediate_size": 128}
    settings = {
        "hidden_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "dtype": torch.bfloat16,
    }
    save_model(tmp_path, architecture, seed=6, **LATENT_ON_GPU.get(architecture, settings) | inner)
    first, *others = ranks.run(_hashes, tmp_path)
    assert len(first) == 1
    assert others == [first] * len(others)
