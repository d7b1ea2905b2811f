"""Digests that steps leave behind: those of what the store holds, whatever the steps were."""

import random

import pytest
import torch

from engine.kv.digests import BlockDigests
from engine.models.registry import build_model
from engine.runner.executor_options import ExecutorOptions
from engine.runner.graph_sizes import ragged_sizes
from engine.runner.graphs import CudaRecorder
from tests.engine.runner.step_driver import StepDriver
from tests.harness.tiny_models import save_model

MAX_ROWS = 5
VOCAB_SIZE = 90
MAX_PROMPT_TOKENS = 40
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> StepDriver:
    """On a GPU its steps replay graphs, where they are large enough."""
    is_gpu = request.param == "cuda"
    folder = tmp_path_factory.mktemp("model")
    shape = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2} if is_gpu else {}
    save_model(folder, "Qwen3ForCausalLM", seed=5, **shape)
    dtype = torch.bfloat16 if is_gpu else torch.float32
    model = build_model(folder, dtype=dtype, device=torch.device(request.param))
    driver = StepDriver(
        model,
        seed=random.randrange(2**32),
        block_size=16 if is_gpu else 4,
        max_rows=MAX_ROWS,
        options=ExecutorOptions(sends_blocks=True),
    )
    if is_gpu:
        driver.executor.capture_graphs(CudaRecorder(), print, prompts=ragged_sizes(MAX_ROWS, 64))
    return driver


def test_they_are_the_digests_of_all_blocks_that_hold_tokens(driver: StepDriver) -> None:
    """Chunks of any size, rows that come and go, decodes; each step launched ahead of the last."""
    rng, store = driver.random, driver.executor.kv_store
    pending = []
    for _ in range(60):
        for row in range(MAX_ROWS):
            if driver.num_computed.get(row, 0) > 0 and rng.random() < 0.1:
                driver.release(row)
            elif row not in driver.tokens and rng.random() < 0.7:
                length = rng.randint(1, MAX_PROMPT_TOKENS)
                driver.admit(row, [rng.randrange(VOCAB_SIZE) for _ in range(length)])
        num_new = {}
        for row, tokens in driver.tokens.items():
            num_left = len(tokens) - driver.num_computed[row]
            if num_left > 0 and rng.random() < 0.8:
                num_new[row] = rng.randint(1, num_left)
        if not num_new:
            continue
        pending.append(driver.executor.launch(driver.plan(num_new, samples=True)))
        if len(pending) == 2:
            pending.pop(0).wait()
    while pending:
        pending.pop(0).wait()
    held = [block for row in driver.num_computed for block in driver.blocks[row]]
    assert held
    assert store.digests.of(held) == store.digest(held)


def test_a_row_that_samples_goes_on_in_digested_blocks(driver: StepDriver) -> None:
    """Decode steps, too: a prompt of which all but one token is cached is one."""
    driver.admit(0, [3, 1, 4, 1, 5, 9, 2, 6])
    driver.admit(2, [2, 7])
    driver.sample({2: 2, 0: 8})
    for _ in range(21):
        driver.sample({0: 1, 2: 1})
    store = driver.executor.kv_store
    held = driver.blocks[0] + driver.blocks[2]
    assert store.digests.of(held) == store.digest(held)


def test_nobody_is_told_a_digest_that_nobody_made() -> None:
    digests = BlockDigests(4)
    digests.keep([2, 0, 2], [7, -5, 8])
    assert digests.of([0, 2]) == [-5, 8]
    with pytest.raises(AssertionError, match=r"\[2, 1\]"):
        digests.of([2, 1])
