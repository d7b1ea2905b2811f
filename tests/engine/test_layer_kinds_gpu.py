"""gpt-oss, Gemma 2 and 3 on a GPU: exact in fp32, near that in bf16, one answer in every mode."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.registry import build_model
from engine.request import SamplingParams
from kernels.attention.names import AttentionName, AttentionNames
from tests.engine.models.closeness import assert_same_logits
from tests.engine.runner.step_driver import StepDriver
from tests.harness.in_process import GREEDY, answer, start_engine
from tests.harness.tiny_models import FAMILIES, VOCAB_SIZE, reference_logits, save_model

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
REFERENCE = AttentionNames(prefill="reference", decode="reference")
BASE = {"model__device": "cuda", "cache__num_blocks": 600, "scheduler__max_num_seqs": 24}
# Sizes of no tile, heads that the Triton kernels have, windows shorter and longer than a tile.
LARGER: dict[str, dict[str, Any]] = {
    "GptOssForCausalLM": {
        "hidden_size": 288,
        "num_hidden_layers": 3,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 64,
        # All are active: two that are as good would be chosen by rounding.
        "num_local_experts": 6,
        "num_experts_per_tok": 6,
        "intermediate_size": 160,
        "sliding_window": 128,
    },
    "Gemma2ForCausalLM": {
        "hidden_size": 272,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "query_pre_attn_scalar": 168,
        "intermediate_size": 528,
        "sliding_window": 100,
    },
    "Gemma3ForCausalLM": {
        "hidden_size": 272,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "query_pre_attn_scalar": 168,
        "intermediate_size": 528,  # deterministic products take multiples of 16
        "sliding_window": 100,
    },
}


@pytest.fixture(scope="module", params=sorted(LARGER))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("kinds")
    settings = {**LARGER[request.param], "max_position_embeddings": 1024}
    if request.param == "GptOssForCausalLM":  # positions count from the original context
        yarn: Any = FAMILIES[request.param]["rope_parameters"]
        settings["rope_parameters"] = {**yarn, "original_max_position_embeddings": 256}
    save_model(made, request.param, seed=5, dtype=torch.bfloat16, **settings)
    return made


def _tokens(count: int) -> list[int]:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


def test_fp32_on_a_gpu_gives_the_reference_logits_of_layers_of_two_kinds(folder: Path) -> None:
    token_ids = _tokens(700)
    theirs = reference_logits(folder, token_ids)
    model = build_model(folder, dtype=torch.float32, device=CUDA)
    driver = StepDriver(model, seed=1, attention=REFERENCE, num_blocks=400)
    for chunk in (700, 300, 130):
        driver.admit(0, token_ids)
        ours = driver.logits_in_chunks(0, chunk)
        assert_same_logits(ours.cpu(), theirs, label=f"chunks of {chunk}")
        driver.release(0)


@pytest.mark.parametrize("name", ["auto", "triton"])
def test_bfloat16_on_a_gpu_is_as_near_as_the_reference_backend(
    folder: Path, name: AttentionName
) -> None:
    """Rounding alone separates them: the same weights with torch's attention, to the same truth."""
    token_ids = _tokens(400)
    truth = reference_logits(folder, token_ids)
    model = build_model(folder, dtype=torch.bfloat16, device=CUDA)
    errors = []
    for names in (REFERENCE, AttentionNames(prefill=name, decode=name)):
        driver = StepDriver(model, seed=1, attention=names, num_blocks=400, block_size=16)
        driver.admit(0, token_ids)
        ours = driver.logits_in_chunks(0, 90).float().cpu()
        errors.append(float((ours - truth).pow(2).mean().sqrt()))
    assert errors[1] <= 1.2 * errors[0], errors


def _work(seed: int, count: int = 20) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    work = []
    for number in range(count):
        length = rng.choice((1, 2, 17, 64, 130, 400))
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
        drawn = SamplingParams(max_tokens=20, temperature=0.9, seed=number)
        work.append((prompt, rng.choice((GREEDY, drawn))))
    return work


def test_graphs_and_overlap_change_no_token_of_layers_of_two_kinds(folder: Path) -> None:
    work = _work(1)
    outcomes = []
    for graphs, overlap in ((False, False), (True, True)):
        engine = start_engine(
            **BASE,
            model__path=str(folder),
            model__deterministic=True,
            execution__cuda_graphs=graphs,
            scheduler__overlap=overlap,
            scheduler__max_num_batched_tokens=192,
        )
        outcomes.append([found.tokens for found in answer(engine, work)])
        assert engine.compilations.names == []
    assert all(outcomes[0])
    assert outcomes[1] == outcomes[0]


def test_layers_of_two_kinds_compile_nothing_once_the_engine_is_ready(folder: Path) -> None:
    engine = start_engine(**BASE, model__path=str(folder), scheduler__max_num_batched_tokens=2300)
    for seed in (2, 3):
        answer(engine, _work(seed))
    for length in (1, 5, 9, 65, 129, 257, 700, 1000):
        answer(engine, [([5] * length, GREEDY)])
    assert engine.compilations.names == []
