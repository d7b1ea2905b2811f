"""Latent attention on a GPU, in the whole engine: exact in fp32, one answer in every mode."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kv_calibration import largest_numbers, scales_for
from engine.models.registry import build_model
from engine.request import SamplingParams
from kernels.attention.names import AttentionNames
from load_tests.testbed.quantised_folders import write_quantised
from tests.engine.models.closeness import assert_same_logits
from tests.engine.runner.step_driver import StepDriver
from tests.harness.in_process import GREEDY, answer, start_engine
from tests.harness.tiny_models import (
    DEEPSEEKS,
    LATENT_ON_GPU,
    VOCAB_SIZE,
    reference_logits,
    save_model,
)

pytestmark = pytest.mark.gpu

REFERENCE = AttentionNames(prefill="reference", decode="reference")
TRITON = AttentionNames(prefill="triton", decode="triton")
BASE: dict[str, Any] = {
    "model__device": "cuda",
    "cache__num_blocks": 600,
    "scheduler__max_num_seqs": 24,
}
BY_KERNELS = {"model__attention__prefill": "triton", "model__attention__decode": "triton"}


@pytest.fixture(scope="module", params=sorted(LATENT_ON_GPU))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("latent")
    settings = LATENT_ON_GPU[request.param] | {"max_position_embeddings": 1024}
    save_model(made, request.param, seed=7, **settings)
    return made


def _tokens(count: int, rng: random.Random) -> list[int]:
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(count)]


def work_of(seed: int, count: int = 30) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    work = []
    for number in range(count):
        prompt = _tokens(rng.choice((1, 2, 5, 17, 64, 130, 400)), rng)
        drawn = SamplingParams(max_tokens=20, temperature=0.9, seed=number)
        work.append((prompt, rng.choice((GREEDY, drawn))))
    return work


@pytest.mark.parametrize("architecture", sorted(DEEPSEEKS))
def test_fp32_on_a_gpu_gives_the_reference_logits_of_latents(
    architecture: str, tmp_path: Path
) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    save_model(tmp_path, architecture, seed=seed, max_position_embeddings=1024)
    token_ids = _tokens(500, random.Random(seed))
    theirs = reference_logits(tmp_path, token_ids)
    model = build_model(tmp_path, dtype=torch.float32, device=torch.device("cuda"))
    driver = StepDriver(model, seed=seed, attention=REFERENCE, num_blocks=400)
    for chunk in (500, 130, 40):
        driver.admit(0, token_ids)
        ours = driver.logits_in_chunks(0, chunk)
        assert_same_logits(ours.cpu(), theirs, label=f"chunks of {chunk}")
        driver.release(0)


@pytest.mark.parametrize("in_fp8", [False, True])
def test_kernels_are_as_near_to_fp32_as_torch(folder: Path, in_fp8: bool) -> None:
    token_ids = _tokens(400, random.Random(1))
    truth = reference_logits(folder, token_ids)
    scales = scales_for(largest_numbers(folder, [token_ids], "cuda"), 2.0) if in_fp8 else None
    errors = []
    for names in (REFERENCE, TRITON):
        model = build_model(folder, dtype=torch.bfloat16, device=torch.device("cuda"))
        driver = StepDriver(
            model, seed=1, attention=names, block_size=16, num_blocks=60, kv_scales=scales
        )
        driver.admit(0, token_ids)
        whole = driver.logits_in_chunks(0, 150)
        driver.release(0)
        driver.admit(1, token_ids[:40])
        singles = driver.logits_in_chunks(1, 1)
        ours = torch.cat((whole, singles)).cpu().float()
        errors.append(float((ours - torch.cat((truth, truth[:40]))).abs().median()))
    assert errors[1] <= 1.3 * errors[0], errors


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("form", ["fp8-block", "ct-fp8-channel", "ct-nvfp4"])
def test_quantised_latents_are_near_what_the_numbers_stand_for(
    form: str, is_deterministic: bool, tmp_path: Path
) -> None:
    """All experts are active: a rounded router may choose others, and then no distance counts."""
    settings = LATENT_ON_GPU["DeepseekV3ForCausalLM"] | {"max_position_embeddings": 1024}
    settings |= {"num_experts_per_tok": 16, "n_group": 1, "topk_group": 1}
    settings |= {"intermediate_size": 736}  # kernels read 4 bits of inputs in multiples of 32
    save_model(tmp_path / "dense", "DeepseekV3ForCausalLM", seed=8, **settings)
    folder = write_quantised(tmp_path / "dense", form, tmp_path / "q", stands_for=tmp_path / "s")
    model = build_model(
        folder, dtype=torch.bfloat16, device=torch.device("cuda"), is_deterministic=is_deterministic
    )
    driver = StepDriver(
        model, seed=0, num_blocks=128, block_size=16, fixed_tile=is_deterministic, attention=TRITON
    )
    rng = random.Random(form)
    for num_tokens, chunks in ((20, (1, 3, 16)), (150, (90, 60)), (700, (700,))):
        token_ids = _tokens(num_tokens, rng)
        driver.admit(0, token_ids)
        ours = torch.cat([driver.logits({0: count})[0] for count in chunks]).float().cpu()
        driver.release(0)
        theirs = reference_logits(tmp_path / "s", token_ids)
        error = float((ours - theirs).norm() / theirs.norm())
        is_rounded = "fp8" in form and num_tokens > 64 and not is_deterministic
        assert error < (0.13 if is_rounded else 0.04), f"{num_tokens} tokens: off by {error}"


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
def test_graphs_and_overlap_change_no_token(folder: Path, kv_dtype: str) -> None:
    work = work_of(1)
    outcomes = []
    for graphs, overlap in ((False, False), (True, False), (True, True)):
        engine = start_engine(
            **BASE,
            model__path=str(folder),
            cache__kv_dtype=kv_dtype,
            model__deterministic=True,
            execution__cuda_graphs=graphs,
            scheduler__overlap=overlap,
            scheduler__max_num_batched_tokens=192,
        )
        outcomes.append([found.tokens for found in answer(engine, work)])
        assert engine.compilations.names == []
    assert all(outcomes[0])
    assert outcomes[1] == outcomes[0]
    assert outcomes[2] == outcomes[0]


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
def test_a_model_with_latents_compiles_nothing_once_the_engine_is_ready(
    folder: Path, kv_dtype: str
) -> None:
    engine = start_engine(
        **BASE,
        **BY_KERNELS,
        model__path=str(folder),
        cache__kv_dtype=kv_dtype,
        scheduler__max_num_batched_tokens=2300,
    )
    for seed in (2, 3):
        answer(engine, work_of(seed))
    for length in (1, 3, 65, 129, 700, 1000):
        answer(engine, [([5] * length, GREEDY)])
    assert engine.compilations.names == []
