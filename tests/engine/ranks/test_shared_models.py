"""Two and four ranks compute, to the bit, what one computes: every layer type, real step plans."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.errors import ConfigError
from engine.layers.context import SINGLE_RANK
from engine.layers.schedules import (
    DECODE,
    DUAL_STREAM,
    EXCHANGE_PROMPTS,
    SHARE_PROMPTS,
    bind,
)
from engine.models.registry import AS_PUBLISHED, WeightSource
from engine.plan import StepResult
from engine.ranks.rank import Rank
from kernels.sampling.rows import greedy
from load_tests.testbed.quantised_folders import write_quantised
from tests.engine.models.closeness import assert_same_logits
from tests.engine.ranks.exact_models import (
    EXCHANGE_FAULTS,
    EXPERT_FAULTS,
    FAULTS,
    GATHER_FAULT,
    build_exact,
    save_whole_numbers,
)
from tests.engine.ranks.rank_stories import (
    EXCHANGED,
    EXPERT_PARALLEL,
    GATHERED,
    NUM_TRIED_STEPS,
    best_of_shared,
    embed,
    finite_rows,
    logits_of,
    tell,
    try_overlap,
)
from tests.harness.gpt_oss_folders import save_gpt_oss_mxfp4
from tests.harness.rank_processes import RankProcesses
from tests.harness.tiny_models import reference_logits, save_embedding_model, save_model


@dataclass(frozen=True)
class Case:
    num_ranks: int
    architecture: str = "LlamaForCausalLM"
    settings: dict[str, Any] = field(default_factory=dict)
    source: WeightSource = AS_PUBLISHED
    is_sequence_parallel: bool = False


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
    "experts": Case(2, "MixtralForCausalLM"),
    "experts and a shared one, a dense layer": Case(
        2, "Qwen2MoeForCausalLM", {"mlp_only_layers": [0]}
    ),
    "experts, and a size of no dense layer": Case(
        2, "Qwen3MoeForCausalLM", {"intermediate_size": 87, "num_key_value_heads": 1}
    ),
    "latents": Case(2, "DeepseekV2ForCausalLM"),
    "heads rotated in part": Case(
        2, "Glm4MoeForCausalLM", {"use_qk_norm": True, "first_k_dense_replace": 1}
    ),
    "latents, a list of dense layers": Case(
        2,
        "Glm4MoeLiteForCausalLM",
        {"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "dense"]},
        EXPERT_PARALLEL,
    ),
    "latents of four ranks, queries from a vector, biases": Case(
        4, "DeepseekV3ForCausalLM", {"attention_bias": True}
    ),
    "whole experts": Case(2, "MixtralForCausalLM", {"num_local_experts": 6}, EXPERT_PARALLEL),
    "whole experts and a shared one, a dense layer": Case(
        2, "Qwen2MoeForCausalLM", {"mlp_only_layers": [0]}, EXPERT_PARALLEL
    ),
    "one expert a rank, units that ranks could not share": Case(
        4,
        "Qwen3MoeForCausalLM",
        {"num_experts": 4, "moe_intermediate_size": 39},
        EXPERT_PARALLEL,
    ),
    "whole experts in groups, latents": Case(4, "DeepseekV3ForCausalLM", {}, EXPERT_PARALLEL),
    "tokens that travel to experts, a dense layer, a shared expert": Case(
        2,
        "Qwen2MoeForCausalLM",
        {"num_hidden_layers": 4, "mlp_only_layers": [1]},
        EXCHANGED,
    ),
    "tokens that travel among four ranks, latents": Case(
        4,
        "DeepseekV3ForCausalLM",
        {"num_hidden_layers": 3, "n_shared_experts": 2},
        EXCHANGED,
    ),
    "tokens gathered for experts, a dense layer, a shared expert": Case(
        2,
        "Qwen2MoeForCausalLM",
        {"num_hidden_layers": 4, "mlp_only_layers": [1]},
        GATHERED,
    ),
    "tokens gathered by four ranks, latents": Case(
        4,
        "DeepseekV3ForCausalLM",
        {"num_hidden_layers": 3, "n_shared_experts": 2},
        GATHERED,
    ),
    "sequence-parallel, QK-norm, biases": Case(
        2,
        "Qwen3ForCausalLM",
        {"num_hidden_layers": 3, "attention_bias": True},
        is_sequence_parallel=True,
    ),
    "sequence-parallel over four ranks": Case(4, is_sequence_parallel=True),
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


Alone = Callable[[str], tuple[Path, list[Tensor | StepResult]]]


@pytest.fixture(scope="module")
def alone_of(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """Of a case by its name: the model's folder, and what one rank computes of it, once."""

    @cache
    def compute(name: str) -> tuple[Path, list[Tensor | StepResult]]:
        folder = _save(CASES[name], tmp_path_factory.mktemp("case"))
        return folder, tell(SINGLE_RANK, folder)

    return compute


def _save(case: Case, folder: Path) -> Path:
    save_model(folder, case.architecture, **case.settings)
    save_whole_numbers(folder, seed=3)
    return folder


def _are_equal(ours: list[Tensor | StepResult], theirs: list[Tensor | StepResult]) -> bool:
    return len(ours) == len(theirs) and all(
        torch.equal(one, other)
        if isinstance(one, Tensor) and isinstance(other, Tensor)
        else one == other
        for one, other in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("name", CASES)
def test_ranks_compute_the_bits_of_one_rank(
    name: str, two: RankProcesses, four: RankProcesses, alone_of: Alone
) -> None:
    case = CASES[name]
    folder, alone = alone_of(name)
    tokens = [result.tokens for result in alone if isinstance(result, StepResult)]
    assert len({str(sampled) for sampled in tokens}) > 3, "a model that says one thing shows little"
    ranks = two if case.num_ranks == 2 else four
    shares = case.source, True, case.is_sequence_parallel
    for found in ranks.run(tell, folder, None, False, False, *shares):
        assert _are_equal(found, alone)


@pytest.mark.parametrize(
    "name",
    [
        "sequence-parallel, QK-norm, biases",
        "experts and a shared one, a dense layer",
        "whole experts and a shared one, a dense layer",
        "tokens that travel to experts, a dense layer, a shared expert",
        "tokens gathered for experts, a dense layer, a shared expert",
        pytest.param("latents", marks=pytest.mark.nightly),
    ],
)
def test_ranks_that_split_their_steps_have_the_bits_of_one_rank(
    name: str, two: RankProcesses, alone_of: Alone
) -> None:
    folder, alone = alone_of(name)
    shares = CASES[name].source, False, CASES[name].is_sequence_parallel
    for found in two.run(tell, folder, None, False, True, *shares):
        assert _are_equal(found, alone)


@pytest.mark.parametrize(
    "name",
    [
        "fewer KV heads than ranks, QK-norm, tied",
        "sequence-parallel, QK-norm, biases",
        "tokens gathered for experts, a dense layer, a shared expert",
    ],
)
def test_captured_steps_of_ranks_have_the_bits_of_one_rank(
    name: str, two: RankProcesses, alone_of: Alone
) -> None:
    folder, alone = alone_of(name)
    shares = CASES[name].source, False, CASES[name].is_sequence_parallel
    for found in two.run(tell, folder, None, True, False, *shares):
        assert _are_equal(found, alone)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_shard_shows(fault: str, four: RankProcesses, alone_of: Alone) -> None:
    folder, alone = alone_of("four ranks, two KV heads")
    for found in four.run(tell, folder, fault):
        assert not _are_equal(found, alone)


@pytest.mark.parametrize("fault", EXPERT_FAULTS)
def test_experts_of_a_wrong_rank_show(fault: str, two: RankProcesses, alone_of: Alone) -> None:
    name = "whole experts and a shared one, a dense layer"
    folder, alone = alone_of(name)
    for found in two.run(tell, folder, fault, False, False, CASES[name].source):
        assert not _are_equal(found, alone)


@pytest.mark.parametrize("fault", EXCHANGE_FAULTS)
def test_tokens_that_travel_wrongly_show(fault: str, two: RankProcesses, alone_of: Alone) -> None:
    name = "tokens that travel to experts, a dense layer, a shared expert"
    folder, alone = alone_of(name)
    for found in two.run(tell, folder, fault, False, False, CASES[name].source):
        assert not _are_equal(found, alone)


def test_rows_of_another_rank_show_in_a_dense_model(two: RankProcesses, alone_of: Alone) -> None:
    folder, alone = alone_of("sequence-parallel, QK-norm, biases")
    fault = "another rank's rows"
    for found in two.run(tell, folder, fault, False, False, AS_PUBLISHED, False, True):
        assert not _are_equal(found, alone)


def test_tokens_that_are_gathered_wrongly_show(two: RankProcesses, alone_of: Alone) -> None:
    name = "tokens gathered for experts, a dense layer, a shared expert"
    folder, alone = alone_of(name)
    for found in two.run(tell, folder, GATHER_FAULT, False, False, CASES[name].source):
        assert not _are_equal(found, alone)


@pytest.mark.parametrize("source", [EXCHANGED, GATHERED])
def test_layers_whose_tokens_travel_follow_every_schedule(
    source: WeightSource, tmp_path: Path
) -> None:
    folder = _save(CASES["tokens that travel to experts, a dense layer, a shared expert"], tmp_path)
    model, _ = build_exact(folder, Rank(1, 2), source=source)
    assert model.can_capture_exchange == (source is GATHERED)
    for schedule in (EXCHANGE_PROMPTS, DECODE, SHARE_PROMPTS, DUAL_STREAM):
        stages = bind(model.exchange_operations[:-1], schedule)
        names = [op.name for stage in stages for op in stage]
        assert names.count("combine_b") == 3
    bind(model.exchange_operations, SHARE_PROMPTS)


def test_embeddings_are_those_of_one_rank(two: RankProcesses, tmp_path: Path) -> None:
    save_embedding_model(tmp_path)
    save_whole_numbers(tmp_path, seed=4)
    alone = embed(SINGLE_RANK, tmp_path)
    assert alone[0] != alone[1]
    assert two.run(embed, tmp_path) == [alone] * 2


@pytest.mark.parametrize(
    "architecture",
    [
        "Qwen3ForCausalLM",
        "LlamaForCausalLM",
        "Qwen2MoeForCausalLM",
        "GptOssForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
    ],
)
def test_logits_are_those_of_transformers(
    architecture: str, two: RankProcesses, tmp_path: Path
) -> None:
    settings = {} if "Moe" in architecture else {"attention_bias": True}
    save_model(tmp_path, architecture, seed=5, num_key_value_heads=1, **settings)
    token_ids = torch.randint(131, (23,)).tolist()
    theirs = reference_logits(tmp_path, token_ids)
    ours, *others = two.run(logits_of, tmp_path, token_ids)
    assert_same_logits(ours, theirs)
    for again in others + two.run(logits_of, tmp_path, token_ids, AS_PUBLISHED, True):
        assert torch.equal(ours, again)


@pytest.mark.parametrize(
    ("architecture", "source"),
    [
        ("DeepseekV2ForCausalLM", AS_PUBLISHED),
        ("GptOssForCausalLM", EXPERT_PARALLEL),
        ("DeepseekV3ForCausalLM", EXCHANGED),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                ("DeepseekV3ForCausalLM", EXPERT_PARALLEL),
                ("Qwen2MoeForCausalLM", EXPERT_PARALLEL),
                ("Qwen2MoeForCausalLM", EXCHANGED),
                ("GptOssForCausalLM", EXCHANGED),
            )
        ),
    ],
)
def test_logits_of_four_ranks_are_those_of_transformers(
    architecture: str, source: WeightSource, four: RankProcesses, tmp_path: Path
) -> None:
    experts = "num_local_experts" if architecture.startswith("Gpt") else "num_experts"
    settings = {} if architecture.startswith("Deep") else {experts: 8, "num_key_value_heads": 1}
    save_model(tmp_path, architecture, seed=7, **settings)
    token_ids = torch.randint(131, (23,)).tolist()
    theirs = reference_logits(tmp_path, token_ids)
    ours, *others = four.run(logits_of, tmp_path, token_ids, source)
    assert_same_logits(ours, theirs)
    for again in others + four.run(logits_of, tmp_path, token_ids, source):
        assert torch.equal(ours, again)


@pytest.mark.filterwarnings("default")  # transformers' own
def test_whole_experts_in_mxfp4_are_those_of_transformers(
    four: RankProcesses, tmp_path: Path
) -> None:
    """Units of which four ranks could not have whole blocks."""
    save_gpt_oss_mxfp4(tmp_path, 9, num_local_experts=8, num_key_value_heads=1)
    token_ids = torch.randint(131, (23,)).tolist()
    theirs = reference_logits(tmp_path, token_ids)
    for ours in four.run(logits_of, tmp_path, token_ids, EXPERT_PARALLEL):
        assert_same_logits(ours, theirs)


@pytest.mark.parametrize(
    "form",
    [
        "fp8-block",
        "ct-int4-32",
        *(pytest.param(form, marks=pytest.mark.nightly) for form in ("awq", "ct-nvfp4")),
    ],
)
def test_whole_quantised_experts_are_those_of_transformers(
    form: str, two: RankProcesses, tmp_path: Path
) -> None:
    """Experts of 128 units, of which no rank can have a part in tiles of 128."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "head_dim": 64, "num_experts": 6}
    sizes |= {"num_key_value_heads": 4, "num_hidden_layers": 1}
    save_model(tmp_path / "dense", "Qwen3MoeForCausalLM", seed=8, **sizes)
    stands_for = tmp_path / "stands_for"
    write_quantised(tmp_path / "dense", form, tmp_path / "quantised", stands_for=stands_for)
    token_ids = torch.randint(131, (23,)).tolist()
    theirs = reference_logits(stands_for, token_ids)
    for ours in two.run(logits_of, tmp_path / "quantised", token_ids, EXPERT_PARALLEL):
        assert_same_logits(ours, theirs)


@pytest.mark.parametrize(
    ("form", "architecture"),
    [
        ("fp8-block", "Qwen3ForCausalLM"),
        ("ct-fp8-channel", "Qwen3ForCausalLM"),
        ("ct-fp8-tensor", "Qwen3ForCausalLM"),
        ("ct-int4-32", "Qwen3ForCausalLM"),
        ("fp8-block", "MixtralForCausalLM"),
        ("ct-nvfp4", "MixtralForCausalLM"),
    ],
)
def test_logits_of_quantised_shares_are_those_of_transformers(
    form: str, architecture: str, two: RankProcesses, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_key_value_heads": 4}
    save_model(tmp_path / "dense", architecture, seed=6, **sizes)
    stands_for = tmp_path / "stands_for"
    write_quantised(tmp_path / "dense", form, tmp_path / "quantised", stands_for=stands_for)
    token_ids = torch.randint(131, (23,)).tolist()
    theirs = reference_logits(stands_for, token_ids)
    for ours in two.run(logits_of, tmp_path / "quantised", token_ids):
        assert_same_logits(ours, theirs)


def test_a_break_in_one_ranks_head_is_known_to_all(two: RankProcesses, tmp_path: Path) -> None:
    """In a chunk without logits; only the second rank's keys are broken."""
    save_model(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.self_attn.k_proj.weight"][-1] = torch.inf
    save_file(tensors, path, metadata={"format": "pt"})
    assert two.run(finite_rows, tmp_path) == [[False, False]] * 2


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
        ({"intermediate_size": 90}, "4 ranks cannot share 90 intermediate units"),
        (
            {"architecture": "Qwen3MoeForCausalLM", "moe_intermediate_size": 30},
            "4 ranks cannot share 30 intermediate units of an expert",
        ),
        (
            {"architecture": "Qwen2MoeForCausalLM", "shared_expert_intermediate_size": 42},
            "4 ranks cannot share 42 intermediate units of the shared expert",
        ),
    ],
)
def test_a_model_that_ranks_cannot_share_is_refused(
    settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    save_model(tmp_path, **settings)
    with pytest.raises(ConfigError, match=rf"workers\.tensor_parallel_size: {named}"):
        build_exact(tmp_path, Rank(1, 4))


@pytest.mark.parametrize(
    ("architecture", "named"),
    [
        ("Qwen3MoeForCausalLM", r"tensor_parallel_size: 4 ranks cannot share 7 experts equally"),
        ("Qwen3ForCausalLM", r"has no experts; set workers\.expert_parallel to false"),
    ],
)
def test_experts_that_ranks_cannot_share_out_are_refused(
    architecture: str, named: str, tmp_path: Path
) -> None:
    save_model(tmp_path, architecture, num_key_value_heads=1)
    with pytest.raises(ConfigError, match=named):
        build_exact(tmp_path, Rank(1, 4), source=EXPERT_PARALLEL)


@pytest.mark.parametrize("vocab_size", [3, 5, 41])
def test_ranks_agree_on_the_best_tokens_without_the_logits_of_others(
    four: RankProcesses, vocab_size: int
) -> None:
    """Of 3 and 5 tokens one rank has none; many logits are equal; padding would be the best."""
    weight = torch.randint(-2, 3, (vocab_size, 4)).float()
    hidden = torch.randint(-2, 3, (50, 4)).float()
    hidden[7] = torch.nan
    expected = hidden @ weight.T
    best = greedy(expected)
    assert best.is_finite.tolist() == [row != 7 for row in range(50)]
    for logits, found in four.run(best_of_shared, weight, hidden):
        assert torch.equal(logits.nan_to_num(9.0), expected.nan_to_num(9.0))
        assert torch.equal(found.token_ids, best.token_ids)
        assert torch.equal(found.is_finite, best.is_finite)


@pytest.mark.parametrize("captures", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_ranks_try_the_same_steps_as_two_batches_and_find_the_same(
    captures: bool, two: RankProcesses, tmp_path: Path
) -> None:
    first, second = two.run(try_overlap, _save(Case(2), tmp_path), captures)
    assert first == second
    lag, prompt_tokens, decode_rows, _, told = first
    assert lag in range(4)
    # 64 tokens in eighths; what replays a graph of 32 tokens is not tried.
    assert prompt_tokens == (64 if captures else 8)
    assert decode_rows == 4
    assert told.num_two_chunk > 0
    assert told.num_split_prompts == (1 if captures else 4) * (1 + NUM_TRIED_STEPS)
    # 4 and 8 rows, one lag or two, and two steps whose communication is timed.
    num_decodes = [n * (1 + NUM_TRIED_STEPS) for n in (3, 4)]
    replayed, eager = told.num_replayed, told.num_split_decodes - 2
    assert (replayed if captures else eager) in num_decodes
    assert (eager if captures else replayed) == 0
