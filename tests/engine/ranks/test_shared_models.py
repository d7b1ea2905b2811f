"""Two and four ranks compute, to the bit, what one computes: every layer type, real step plans."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.errors import ConfigError
from engine.layers.context import SINGLE_RANK, Comm
from engine.models.registry import build_model
from engine.plan import StepResult
from engine.ranks.rank import Rank
from engine.request import SamplingParams
from engine.sampling.embeddings import Embeddings
from tests.engine.models.closeness import assert_same_logits
from tests.engine.ranks.exact_models import FAULTS, build_exact, planted, save_whole_numbers
from tests.engine.runner.step_driver import GREEDY, StepDriver
from tests.harness.rank_processes import RankProcesses
from tests.harness.tiny_models import reference_logits, save_embedding_model, save_model

DRAWN = SamplingParams(max_tokens=64, temperature=1.2, top_p=0.9, seed=5, ignore_eos=True)
SCORED = msgspec.structs.replace(GREEDY, prompt_logprobs=3, logprobs=2)


@dataclass(frozen=True)
class Case:
    num_ranks: int
    architecture: str = "LlamaForCausalLM"
    settings: dict[str, Any] = field(default_factory=dict)


CASES = {
    "grouped queries": Case(2),
    "fewer KV heads than ranks, QK-norm, tied": Case(
        2, "Qwen3ForCausalLM", {"num_key_value_heads": 1, "tie_word_embeddings": True}
    ),
    "biases everywhere": Case(2, settings={"attention_bias": True, "mlp_bias": True}),
    "biases of q, k, v and windows of some layers": Case(
        2,
        "Qwen2ForCausalLM",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    "windows of all layers": Case(2, "MistralForCausalLM", {"sliding_window": 6}),
    "four ranks, two KV heads": Case(
        4,
        "Qwen3ForCausalLM",
        {"num_attention_heads": 8, "num_key_value_heads": 2, "attention_bias": True},
    ),
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with RankProcesses(2, tmp_path_factory.mktemp("two")) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with RankProcesses(4, tmp_path_factory.mktemp("four")) as ranks:
        yield ranks


def _save(case: Case, folder: Path) -> Path:
    save_model(folder, case.architecture, **case.settings)
    save_whole_numbers(folder, seed=3)
    return folder


def _story(comm: Comm, folder: Path, fault: str | None = None) -> list[Tensor | StepResult]:
    """Chunks, decode steps and both ways through the last layer; the same steps on every rank."""
    with planted(fault), patch("engine.runner.executor._MIN_TOKENS_TO_SKIP_QUERIES", 9):
        model, attention = build_exact(folder, comm.rank)
        driver = StepDriver(model, seed=1, phased=attention, comm=comm)
        found: list[Tensor | StepResult] = []
        driver.admit(0, [5, 130, 7, 66, 9, 65, 0, 33, 98], params=GREEDY)
        driver.admit(1, list(range(20, 60)), params=DRAWN)
        driver.admit(2, list(range(100, 113)), params=SCORED)
        found += driver.logits({0: 4, 1: 6}).values()
        steps = [{0: 5, 2: 8, 1: 20}, {1: 1, 0: 1, 2: 5}, {0: 1, 1: 13, 2: 1}]
        steps += [{2: 1, 1: 1, 0: 1}] * 4
        for num_new in steps:  # the first is long enough for the last layer without its queries
            found.append(_untimed(driver.sample(num_new)))
        driver.release(0)
        driver.admit(0, [4, 3, 2])
        found += driver.logits({0: 3}).values()
        return found


def _untimed(result: StepResult) -> StepResult:
    return msgspec.structs.replace(result, duration_s=None)


def _are_equal(ours: list[Tensor | StepResult], theirs: list[Tensor | StepResult]) -> bool:
    return len(ours) == len(theirs) and all(
        torch.equal(one, other)
        if isinstance(one, Tensor) and isinstance(other, Tensor)
        else one == other
        for one, other in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("name", CASES)
def test_ranks_compute_the_bits_of_one_rank(
    name: str, two: RankProcesses, four: RankProcesses, tmp_path: Path
) -> None:
    case = CASES[name]
    folder = _save(case, tmp_path)
    alone = _story(SINGLE_RANK, folder)
    tokens = [result.tokens for result in alone if isinstance(result, StepResult)]
    assert len({str(sampled) for sampled in tokens}) > 3, "a model that says one thing shows little"
    for found in (two if case.num_ranks == 2 else four).run(_story, folder):
        assert _are_equal(found, alone)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_shard_shows(fault: str, four: RankProcesses, tmp_path: Path) -> None:
    folder = _save(CASES["four ranks, two KV heads"], tmp_path)
    alone = _story(SINGLE_RANK, folder)
    for found in four.run(_story, folder, fault):
        assert not _are_equal(found, alone)


def _embed(comm: Comm, folder: Path) -> list[bytes]:
    model, attention = build_exact(folder, comm.rank)
    sampler = Embeddings(is_normalised=False)
    driver = StepDriver(model, seed=1, phased=attention, comm=comm, sampler=sampler)
    asks = SamplingParams(max_tokens=0, wants_embedding=True)
    for row, length in enumerate((3, 11)):
        driver.admit(row, range(20 * row, 20 * row + length), params=asks)
    driver.sample({1: 4})
    result = driver.sample({0: 3, 1: 7})
    return [result.embeddings[0], result.embeddings[1]]


def test_embeddings_are_those_of_one_rank(two: RankProcesses, tmp_path: Path) -> None:
    save_embedding_model(tmp_path)
    save_whole_numbers(tmp_path, seed=4)
    alone = _embed(SINGLE_RANK, tmp_path)
    assert alone[0] != alone[1]
    assert two.run(_embed, tmp_path) == [alone] * 2


def _all_logits(comm: Comm, folder: Path, token_ids: list[int]) -> Tensor:
    device = torch.device("cpu")
    model = build_model(folder, dtype=torch.float32, device=device, rank=comm.rank)
    driver = StepDriver(model, seed=2, comm=comm)
    driver.admit(0, token_ids)
    return driver.logits_in_chunks(0, 7)


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "LlamaForCausalLM"])
def test_logits_are_those_of_transformers(
    architecture: str, two: RankProcesses, tmp_path: Path
) -> None:
    save_model(tmp_path, architecture, seed=5, num_key_value_heads=1, attention_bias=True)
    token_ids = torch.randint(131, (23,)).tolist()
    theirs = reference_logits(tmp_path, token_ids)
    ours, others = two.run(_all_logits, tmp_path, token_ids)
    assert_same_logits(ours, theirs)
    assert torch.equal(ours, others)


def _is_finite(comm: Comm, folder: Path) -> list[bool]:
    model, attention = build_exact(folder, comm.rank)
    driver = StepDriver(model, seed=6, phased=attention, comm=comm)
    driver.admit(0, list(range(12)))
    driver.admit(1, [3, 4])
    return driver.sample({0: 5, 1: 2}).is_finite


def test_a_break_in_one_ranks_head_is_known_to_all(two: RankProcesses, tmp_path: Path) -> None:
    """In a chunk without logits; only the second rank's keys are broken."""
    save_model(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.self_attn.k_proj.weight"][-1] = torch.inf
    save_file(tensors, path, metadata={"format": "pt"})
    assert two.run(_is_finite, tmp_path) == [[False, False]] * 2


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (
            {"hidden_size": 96, "num_attention_heads": 6},
            "4 ranks cannot share 6 .*query heads .6 attention heads",
        ),
        (
            {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 3},
            "4 ranks cannot share 3 .*KV heads .12 attention heads and 3 KV heads",
        ),
        ({"intermediate_size": 90}, "4 ranks cannot share 90 .*intermediate units"),
    ],
)
def test_a_model_that_ranks_cannot_share_is_refused(
    settings: dict[str, int], named: str, tmp_path: Path
) -> None:
    save_model(tmp_path, **settings)
    with pytest.raises(ConfigError, match=rf"workers\.tensor_parallel_size: {named}"):
        build_exact(tmp_path, Rank(1, 4))
