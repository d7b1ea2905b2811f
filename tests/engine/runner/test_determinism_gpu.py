"""Deterministic mode: one request's logits are the same bits however it is computed."""

from functools import partial
from typing import Any

import pytest
import torch

from engine.models.llama import CausalLM
from engine.models.registry import build_model
from tests.engine.runner.determinism_trials import LENGTH, fixed_driver, hash_ways, one_prompt
from tests.harness.tiny_models import LATENT_ON_GPU, save_model

pytestmark = pytest.mark.gpu

NUM_TRIALS = 50


@pytest.fixture(
    scope="module",
    params=["Qwen3ForCausalLM", "LlamaForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    folder = tmp_path_factory.mktemp("model")
    settings: dict[str, Any] = {
        "hidden_size": 512,
        "intermediate_size": 720,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64 if request.param == "LlamaForCausalLM" else 128,
        "dtype": torch.bfloat16,
    }
    save_model(folder, request.param, seed=6, **LATENT_ON_GPU.get(request.param, settings))
    return build_model(
        folder, dtype=torch.bfloat16, device=torch.device("cuda"), is_deterministic=True
    )


def test_fifty_ways_to_compute_a_request_have_one_hash(model: CausalLM) -> None:
    assert len(hash_ways(partial(fixed_driver, model), NUM_TRIALS)) == 1


def test_a_prefix_computed_by_another_request_changes_no_bit(model: CausalLM) -> None:
    prompt = one_prompt(98)
    driver = fixed_driver(model, 1)
    driver.admit(0, prompt)
    whole = driver.logits({0: LENGTH})[0]
    driver.admit(1, prompt, shared_blocks=driver.blocks[0][:4], num_computed=64)
    after_hit = driver.logits({1: LENGTH - 64})[1]
    assert torch.equal(after_hit, whole[64:])
