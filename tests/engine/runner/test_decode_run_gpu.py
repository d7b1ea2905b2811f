"""Captured decodes that go on from one another, against steps launched kernel by kernel."""

import random

import pytest
import torch

from engine.models.llama import CausalLM
from engine.models.registry import build_model
from engine.runner.graphs import CudaRecorder
from kernels.attention.names import AttentionNames
from tests.engine.runner.graph_story import decode_ahead
from tests.engine.runner.step_driver import StepDriver
from tests.harness.seeds import fresh_seed
from tests.harness.tiny_models import save_model

pytestmark = pytest.mark.gpu

TRITON = AttentionNames(prefill="triton", decode="triton")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    """With the same bits in any batch, so that tokens can be compared."""
    folder = tmp_path_factory.mktemp("model")
    save_model(
        folder,
        "Qwen3ForCausalLM",
        seed=9,
        hidden_size=512,
        intermediate_size=720,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=256,
        dtype=torch.bfloat16,
    )
    return build_model(
        folder, dtype=torch.bfloat16, device=torch.device("cuda"), is_deterministic=True
    )


def _driver(model: CausalLM, *, replays: bool) -> StepDriver:
    driver = StepDriver(model, seed=4, block_size=16, attention=TRITON, fixed_tile=True)
    if replays:
        driver.executor.capture_graphs(CudaRecorder(), lambda _: None, prompts=None)
    return driver


def test_replayed_decodes_of_any_sampling_give_the_tokens_of_the_ordinary_path(
    model: CausalLM,
) -> None:
    for _ in range(5):
        seed = fresh_seed()
        outcomes = [
            decode_ahead(_driver(model, replays=replays), random.Random(seed))
            for replays in (False, True)
        ]
        assert all(token_ids for step in outcomes[0] for token_ids in step)
        assert outcomes[0] == outcomes[1]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_launching_a_decode_that_goes_on_waits_for_nothing(model: CausalLM) -> None:
    driver = _driver(model, replays=True)
    for row in range(5):
        driver.admit(row, [5 + row, 6, 7])
    driver.sample(dict.fromkeys(range(5), 3))
    driver.sample(dict.fromkeys(range(5), 1))
    pending = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            pending.append(
                driver.executor.launch(driver.plan(dict.fromkeys(range(5), 1), samples=True))
            )
            for known in driver.tokens.values():
                known.append(-1)  # counted as known; its id is not
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for step in pending:
        assert all(step.wait().is_finite)
