"""CUDA graphs of two batches and of two streams: the tokens and bits of one batch in one stream."""

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.layers.context import SINGLE_RANK, Comm
from engine.models.llama import CausalLM
from engine.models.registry import build_model
from engine.runner.executor_options import ExecutorOptions
from engine.runner.graph_sizes import ragged_sizes
from engine.runner.graphs import CudaRecorder
from engine.runner.overlap.rule import OverlapRule
from kernels.attention.names import AttentionName, AttentionNames
from tests.engine.runner.graph_story import LogitSampler, decode_ahead
from tests.engine.runner.overlap.test_two_batches_gpu import (
    LATENT,
    MAX_ERROR,
    SPLIT,
    LateSums,
    _save,
)
from tests.engine.runner.step_driver import StepDriver
from tests.harness.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.gpu


def _model(folder: Path, *, is_deterministic: bool) -> CausalLM:
    return build_model(
        folder,
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
        is_deterministic=is_deterministic,
    )


def _driver(
    model: CausalLM,
    attention: AttentionName,
    *,
    is_deterministic: bool = False,
    rule: OverlapRule | None = None,
    max_dual_stream: int = 0,
    comm: Comm = SINGLE_RANK,
) -> StepDriver:
    """With captured decodes; rule: of which some are two batches.

    max_dual_stream: tokens of a step whose shared experts are in the second stream.
    """
    driver = StepDriver(
        model,
        seed=4,
        block_size=16,
        num_blocks=600,
        max_rows=24,
        attention=AttentionNames(prefill=attention, decode=attention),
        fixed_tile=is_deterministic,
        sampler=LogitSampler(model, 24),
        options=ExecutorOptions(second_stream_tokens=max_dual_stream),
        comm=comm,
    )
    if rule is not None:
        driver.executor.overlap_two_batches(rule, threshold=0.48)
    recorder = CudaRecorder()
    driver.executor.capture_graphs(recorder, lambda _: None, prompts=None)
    if rule is not None:
        driver.executor.capture_split_decodes(recorder, lambda _: None, min_rows=2)
    return driver


def _decodes(driver: StepDriver, seed: int) -> list[Tensor]:
    """Logits of the first decode steps of 23, 9 and 2 rows of very different histories."""
    draw = random.Random(seed)
    found: list[Tensor] = []
    for num_rows in (23, 9, 2):
        for row in list(driver.tokens):
            driver.release(row)
        for row in range(num_rows):
            prompt = [draw.randrange(VOCAB_SIZE) for _ in range(draw.choice((1, 4, 40, 300)))]
            driver.admit(row, prompt)
        driver.sample({row: len(driver.tokens[row]) for row in range(num_rows)})
        driver.sample(dict.fromkeys(range(num_rows), 1))
        sampler = driver.executor._rows.sampler
        assert isinstance(sampler, LogitSampler)
        found += [sampler.logits[row] for row in range(num_rows)]
    return found


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2MoeForCausalLM", LATENT])
def test_captured_halves_sample_what_whole_graphs_do(architecture: str, tmp_path: Path) -> None:
    """In deterministic mode; sums that end late show a wait that a graph lacks."""
    model = _model(_save(tmp_path, architecture), is_deterministic=True)
    whole = decode_ahead(_driver(model, "triton", is_deterministic=True), random.Random(5))
    for comm in (SINGLE_RANK, LateSums()):
        driver = _driver(model, "triton", is_deterministic=True, rule=SPLIT, comm=comm)
        assert decode_ahead(driver, random.Random(5)) == whole
        told = driver.executor.statistics().two_batches
        assert told is not None
        assert told.num_replayed > 10


@pytest.mark.parametrize("attention", ["triton", "flash_attn", "flashinfer"])
def test_every_backend_captures_both_halves(attention: AttentionName, tmp_path: Path) -> None:
    model = _model(_save(tmp_path, "Qwen3MoeForCausalLM"), is_deterministic=False)
    rule = OverlapRule(min_prompt_tokens=None, min_decode_rows=2)
    whole = _decodes(_driver(model, attention), 3)
    driver = _driver(model, attention, rule=rule)
    for one, other in zip(_decodes(driver, 3), whole, strict=True):
        assert (one - other).norm() <= MAX_ERROR * other.norm()
    told = driver.executor.statistics().two_batches
    assert told is not None
    assert told.num_replayed == 3


@pytest.mark.parametrize("architecture", ["Qwen2MoeForCausalLM", LATENT])
def test_a_shared_expert_in_a_stream_of_its_own_changes_no_bit(
    architecture: str, tmp_path: Path
) -> None:
    """The kernels are the same, so the bits are: a missing wait need not show at once."""
    model = _model(_save(tmp_path, architecture), is_deterministic=False)
    alone = _driver(model, "triton")
    dual = _driver(model, "triton", max_dual_stream=1024)
    for seed in range(5):
        assert all(map(torch.equal, _decodes(dual, seed), _decodes(alone, seed)))


def test_prompt_graphs_of_few_tokens_have_the_second_stream_too(tmp_path: Path) -> None:
    model = _model(_save(tmp_path, "Qwen2MoeForCausalLM"), is_deterministic=False)
    told = []
    for max_dual_stream in (0, 128):
        driver = StepDriver(
            model,
            seed=4,
            block_size=16,
            num_blocks=600,
            attention=AttentionNames(prefill="triton", decode="triton"),
            sampler=LogitSampler(model, 8),
            options=ExecutorOptions(second_stream_tokens=max_dual_stream),
        )
        sizes = ragged_sizes(8, 512)
        driver.executor.capture_graphs(CudaRecorder(), lambda _: None, prompts=sizes)
        for row, length in enumerate((60, 3, 200)):
            driver.admit(row, [(7 * place + row) % VOCAB_SIZE for place in range(length)])
        lines = []
        for num_new in ({0: 30, 1: 3}, {0: 30, 2: 190}, {0: 1, 1: 1, 2: 10}):
            driver.sample(num_new)
            sampler = driver.executor._rows.sampler
            assert isinstance(sampler, LogitSampler)
            lines += sampler.logits.values()
        told.append(lines)
        steps = driver.executor.statistics().prompt_steps
        assert steps is not None
        assert steps.num_replayed == 3
    assert all(map(torch.equal, *told))
