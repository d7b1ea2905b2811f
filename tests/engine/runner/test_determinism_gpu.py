"""Deterministic mode: one request's logits are the same bits however it is computed."""

import hashlib
import random
from typing import Any

import pytest
import torch

from engine.models.llama import CausalLM
from engine.models.registry import build_model
from tests.engine.runner.step_driver import StepDriver
from tests.harness.tiny_models import LATENT_ON_GPU, VOCAB_SIZE, save_model

pytestmark = pytest.mark.gpu

NUM_TRIALS = 50
LENGTH = 150


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


def _digest(logits: torch.Tensor) -> str:
    return hashlib.blake2b(logits.cpu().numpy().tobytes()).hexdigest()


def _trial(model: CausalLM, prompt: list[int], seed: int) -> str:
    """All logits of `prompt`, in random chunks, beside random neighbours; a hash of their bits."""
    rng = random.Random(seed)
    driver = StepDriver(model, seed=seed, block_size=16, num_blocks=160, fixed_tile=True)
    driver.admit(0, prompt)
    neighbours = list(range(1, rng.randrange(1, 8)))
    for row in neighbours:
        driver.admit(row, [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 250))])
    lines = []
    while (left := LENGTH - driver.num_computed[0]) > 0:
        largest = rng.choice((1, 1, 2, 30, LENGTH))
        num_new = {0: rng.randrange(1, min(left, largest) + 1)}
        for row in neighbours:
            row_left = len(driver.tokens[row]) - driver.num_computed[row]
            if row_left and rng.random() < 0.7:
                num_new[row] = rng.randrange(1, min(row_left, rng.choice((1, 40, 250))) + 1)
        rows = list(num_new)
        rng.shuffle(rows)
        lines.append(driver.logits({row: num_new[row] for row in rows})[0])
    return _digest(torch.cat(lines))


def test_fifty_ways_to_compute_a_request_have_one_hash(model: CausalLM) -> None:
    rng = random.Random(99)
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(LENGTH)]
    alone = StepDriver(model, seed=0, block_size=16, num_blocks=160, fixed_tile=True)
    alone.admit(0, prompt)
    hashes = {_digest(alone.logits({0: LENGTH})[0])}
    hashes |= {_trial(model, prompt, seed) for seed in range(1, NUM_TRIALS + 1)}
    assert len(hashes) == 1


def test_a_prefix_computed_by_another_request_changes_no_bit(model: CausalLM) -> None:
    rng = random.Random(98)
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(LENGTH)]
    driver = StepDriver(model, seed=1, block_size=16, num_blocks=160, fixed_tile=True)
    driver.admit(0, prompt)
    whole = driver.logits({0: LENGTH})[0]
    driver.admit(1, prompt, shared_blocks=driver.blocks[0][:4], num_computed=64)
    after_hit = driver.logits({1: LENGTH - 64})[1]
    assert torch.equal(after_hit, whole[64:])
