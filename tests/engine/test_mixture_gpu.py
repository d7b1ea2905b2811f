"""Mixtures of experts on a GPU, in the whole engine: exact in fp32, one answer in every mode."""

import random
from pathlib import Path

import pytest
import torch

from engine.models.registry import build_model
from engine.request import SamplingParams
from kernels.attention.names import AttentionNames
from tests.engine.models.closeness import assert_same_logits
from tests.engine.runner.step_driver import StepDriver
from tests.harness.in_process import GREEDY, answer, start_engine
from tests.harness.tiny_models import MIXTURES, VOCAB_SIZE, reference_logits, save_model

pytestmark = pytest.mark.gpu

REFERENCE = AttentionNames(prefill="reference", decode="reference")
BASE = {"model__device": "cuda", "cache__num_blocks": 600, "scheduler__max_num_seqs": 24}
# Large enough for every kernel, small enough for seconds; sizes of no tile.
LARGER = {
    "hidden_size": 272,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}


@pytest.mark.parametrize("architecture", sorted(MIXTURES))
def test_fp32_on_a_gpu_gives_the_reference_logits_of_a_mixture(
    architecture: str, tmp_path: Path
) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    save_model(tmp_path, architecture, seed=seed, max_position_embeddings=1024)
    rng = random.Random(seed)
    token_ids = [rng.randrange(VOCAB_SIZE) for _ in range(700)]
    theirs = reference_logits(tmp_path, token_ids)
    model = build_model(tmp_path, dtype=torch.float32, device=torch.device("cuda"))
    driver = StepDriver(model, seed=seed, attention=REFERENCE, num_blocks=400)
    for chunk in (700, 300, 130, 40):
        driver.admit(0, token_ids)
        ours = driver.logits_in_chunks(0, chunk)
        assert_same_logits(ours.cpu(), theirs, label=f"chunks of {chunk}")
        driver.release(0)
    driver.admit(0, token_ids[:60])
    few = torch.cat([driver.logits_in_chunks(0, 3)])
    assert_same_logits(few.cpu(), theirs[:60], label="chunks of 3")


@pytest.fixture(
    scope="module", params=["Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "Glm4MoeForCausalLM"]
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mixture")
    count = "n_routed_experts" if request.param == "Glm4MoeForCausalLM" else "num_experts"
    sizes = {count: 20, "num_experts_per_tok": 4, "moe_intermediate_size": 144}
    if request.param == "Qwen2MoeForCausalLM":
        sizes["shared_expert_intermediate_size"] = 48
    save_model(made, request.param, seed=5, dtype=torch.bfloat16, **LARGER, **sizes)
    return made


def work_of(seed: int, count: int = 30) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    work = []
    for number in range(count):
        length = rng.choice((1, 2, 5, 17, 64, 130, 400))
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
        drawn = SamplingParams(max_tokens=20, temperature=0.9, seed=number)
        work.append((prompt, rng.choice((GREEDY, drawn))))
    return work


def test_graphs_and_overlap_change_no_token_of_a_mixture(folder: Path) -> None:
    work = work_of(1)
    outcomes = []
    for graphs, overlap in ((False, False), (True, False), (True, True)):
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
    assert outcomes[2] == outcomes[0]


@pytest.mark.parametrize("graphs", [False, True])
def test_a_mixture_compiles_nothing_once_the_engine_is_ready(folder: Path, graphs: bool) -> None:
    engine = start_engine(
        **BASE,
        model__path=str(folder),
        execution__cuda_graphs=graphs,
        scheduler__max_num_batched_tokens=2300,
    )
    for seed in (2, 3):
        answer(engine, work_of(seed))
    for length in (1, 3, 5, 9, 31, 65, 129, 257, 513, 700, 1000):
        answer(engine, [([5] * length, GREEDY)])
    for count in (3, 5, 11, 24):
        answer(engine, [([7] * 470, GREEDY)] * count)
    assert engine.compilations.names == []


def test_a_replayed_step_of_few_rows_is_that_of_its_rows_alone(folder: Path) -> None:
    """23 rows in a graph of 24: padding neither changes them nor ends them."""
    engine = start_engine(**BASE, model__path=str(folder), model__deterministic=True)
    work = work_of(4, count=23)
    together = [found.tokens for found in answer(engine, work)]
    alone = [answer(engine, [one])[0].tokens for one in work]
    assert together == alone
