"""Mixtures of experts: transformers' logits on the same folder, both layouts of files, errors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from engine.errors import ConfigError
from engine.layers.moe import Mixture
from engine.models.llama import CausalLM
from engine.models.mixture import build_mixture
from engine.models.quantization.published_tensors import weight_bytes
from engine.models.registry import build_model
from engine.models.spec import load_spec
from engine.models.weights import load_weights, random_weights
from engine.ranks.rank import Rank
from engine.request import SamplingParams
from engine.runner.auto import Footprint
from kernels.reference import TorchOps
from tests.engine.models.closeness import (
    assert_no_further_than,
    assert_same_logits,
    errors_in_bfloat16,
)
from tests.engine.models.family_checks import check_chunks, check_prefix_hit_and_preemption
from tests.engine.runner.step_driver import StepDriver
from tests.harness.in_process import answer, start_engine
from tests.harness.seeds import fresh_seed
from tests.harness.tiny_models import (
    DEEPSEEKS,
    MIXTURES,
    edit_config,
    random_tokens,
    reference_logits,
    save_model,
)
from tests.harness.weight_counts import num_parameters, published_shapes

CPU = torch.device("cpu")
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", {}),
    "mixtral_window": ("MixtralForCausalLM", {"sliding_window": 5, "num_experts_per_tok": 1}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {}),
    "qwen2_moe_normalised": (
        "Qwen2MoeForCausalLM",
        {"norm_topk_prob": True, "qkv_bias": False, "tie_word_embeddings": True},
    ),
    "qwen2_moe_windows": (
        "Qwen2MoeForCausalLM",
        {
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 2,
            "num_hidden_layers": 3,
            "mlp_only_layers": [0],
        },
    ),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {}),
    "qwen3_moe_plain": (
        "Qwen3MoeForCausalLM",
        {"norm_topk_prob": False, "use_sliding_window": True, "sliding_window": 7},
    ),
    "qwen3_moe_every_other": (
        "Qwen3MoeForCausalLM",
        {"num_hidden_layers": 3, "decoder_sparse_step": 2, "attention_bias": True},
    ),
    "qwen3_moe_all_experts": ("Qwen3MoeForCausalLM", {"num_experts_per_tok": 7}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", {}),
    "deepseek_v2_groups": (
        "DeepseekV2ForCausalLM",
        {
            "q_lora_rank": 28,
            "topk_method": "group_limited_greedy",
            "n_routed_experts": 9,
            "n_group": 3,
            "topk_group": 2,
            "attention_bias": True,
            "rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 0.8},
            "first_k_dense_replace": 0,
        },
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {}),
    "deepseek_v3_yarn": (
        "DeepseekV3ForCausalLM",
        {
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
            "num_key_value_heads": None,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek_v3_halves": (
        "DeepseekV3ForCausalLM",
        {
            "q_lora_rank": None,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
        },
    ),
    "glm4_moe": ("Glm4MoeForCausalLM", {"first_k_dense_replace": 1}),
    "glm4_moe_normed": (
        "Glm4MoeForCausalLM",
        {"use_qk_norm": True, "partial_rotary_factor": 0.25, "attention_bias": False},
    ),
    "glm4_moe_yarn": (
        "Glm4MoeForCausalLM",
        {"rope_parameters": YARN | {"attention_factor": 1.7, "partial_rotary_factor": 0.5}},
    ),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", {}),
    "glm4_moe_lite_listed": (
        "Glm4MoeLiteForCausalLM",
        {
            "num_hidden_layers": 4,
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
            "attention_bias": True,
        },
    ),
}


def _build(folder: Path) -> CausalLM:
    return build_model(folder, dtype=torch.float32, device=CPU)


@pytest.fixture
def seed() -> int:
    return fresh_seed()


# ---- logits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_chunk_size_gives_the_reference_logits_of_a_mixture(
    variant: str, tmp_path: Path, seed: int
) -> None:
    architecture, settings = VARIANTS[variant]
    save_model(tmp_path, architecture, seed=seed, **settings)
    check_chunks(tmp_path, seed, (1, 2, 5, 18, 19))


@pytest.mark.parametrize(
    "variant", ["mixtral", "qwen2_moe", "qwen3_moe_every_other", "deepseek_v2_groups"]
)
def test_rows_of_one_step_choose_their_own_experts(variant: str, tmp_path: Path, seed: int) -> None:
    architecture, settings = VARIANTS[variant]
    save_model(tmp_path, architecture, seed=seed, **settings)
    driver = StepDriver(_build(tmp_path), seed=seed, num_blocks=400)
    lengths = [1, 7, 29, 40]
    for row, length in enumerate(lengths):
        driver.admit(row, random_tokens(length, seed + row))
    ours = driver.logits(dict(enumerate(lengths)))
    for row, lines in ours.items():
        theirs = reference_logits(tmp_path, driver.tokens[row])
        assert_same_logits(lines, theirs, label=f"row {row}")


@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"])
def test_blocks_of_another_row_and_a_preemption_change_no_logits(
    architecture: str, tmp_path: Path, seed: int
) -> None:
    save_model(tmp_path, architecture, seed=seed)
    check_prefix_hit_and_preemption(tmp_path, seed)


@pytest.mark.parametrize("architecture", sorted(MIXTURES | DEEPSEEKS))
def test_a_mixture_in_bfloat16_is_no_further_from_fp32_than_transformers(
    architecture: str, tmp_path: Path, seed: int
) -> None:
    # All experts are active: a rounded router may choose other experts than fp32, and then no
    # distance says anything.
    num_experts = MIXTURES.get(architecture, {}).get("num_experts", 5)
    settings: dict[str, Any] = {}
    if architecture in DEEPSEEKS:
        settings = {"n_routed_experts": num_experts, "n_group": 1, "topk_group": 1}
    save_model(
        tmp_path,
        architecture,
        seed=seed,
        dtype=torch.bfloat16,
        num_experts_per_tok=num_experts,
        **settings,
    )
    ours, theirs = errors_in_bfloat16(tmp_path, seed)
    assert_no_further_than(theirs, ours)


# ---- the whole engine ----------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", sorted(MIXTURES | DEEPSEEKS))
def test_an_engine_answers_as_transformers_chunked_preempted_and_from_its_cache(
    architecture: str, tmp_path: Path, seed: int
) -> None:
    save_model(tmp_path, architecture, seed=seed)
    engine = start_engine(
        model__path=str(tmp_path), cache__num_blocks=20, cache__block_size=4, laps__queue="laps",
        laps__laps_length_threshold=8, scheduler__max_num_batched_tokens=8,
        scheduler__max_num_seqs=4,
    )  # fmt: skip
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    prompts = [random_tokens(21, seed), random_tokens(5, seed + 1), random_tokens(30, seed + 2)]
    prompts.append(prompts[0][:17] + random_tokens(4, seed + 3))
    answers = answer(engine, [(prompt, params) for prompt in prompts])
    assert engine.core.scheduler.statistics().num_preemptions > 0
    for prompt, found in zip(prompts, answers, strict=True):
        assert found.tokens == _best_after(tmp_path, prompt, found.tokens)
    (again,) = answer(engine, [(prompts[2], params)])
    (first,) = answer(engine, [(prompts[2], params)])
    assert (first.records[0].num_cached_tokens or 0) >= 28
    assert answers[2].tokens == again.tokens == first.tokens


def _best_after(folder: Path, prompt: list[int], tokens: list[int]) -> list[int]:
    """The best token after the prompt and each beginning of `tokens`, as transformers has it."""
    logits = reference_logits(folder, prompt + tokens[:-1])
    best: list[int] = logits[len(prompt) - 1 :].argmax(dim=-1).tolist()
    return best


@pytest.mark.parametrize("architecture", sorted(MIXTURES | DEEPSEEKS))
def test_an_engine_scores_prompts_and_labels_as_transformers(
    architecture: str, tmp_path: Path, seed: int
) -> None:
    save_model(tmp_path, architecture, seed=seed)
    engine = start_engine(
        model__path=str(tmp_path), cache__num_blocks=40, cache__block_size=4,
        scheduler__max_num_batched_tokens=8, scheduler__max_num_seqs=4,
    )  # fmt: skip
    prompts, labels = [random_tokens(19, seed), random_tokens(23, seed + 1)], (3, 77, 130)
    told, labelled = answer(
        engine,
        [
            (prompts[0], SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=2)),
            (prompts[1], SamplingParams(max_tokens=0, temperature=0.0, label_token_ids=labels)),
        ],
    )
    scores, of_labels = told.records[0].prompt, labelled.records[0].prompt
    assert scores is not None
    assert of_labels is not None
    theirs = reference_logits(tmp_path, prompts[0]).double().log_softmax(dim=-1)
    found = [value for piece in scores.pieces for value in piece.chosen]
    expected = [theirs[i, token].item() for i, token in enumerate(prompts[0][1:])]
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)
    theirs = reference_logits(tmp_path, prompts[1])[-1].double().log_softmax(dim=-1)
    assert of_labels.labels == pytest.approx(theirs[list(labels)].tolist(), rel=1e-4, abs=1e-4)


# ---- files ---------------------------------------------------------------------------------------


def _save_fused(model: PreTrainedModel, folder: Path, **settings: Any) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    model.save_pretrained(folder, save_original_format=False, **settings)


@pytest.mark.parametrize("shards", ["5GB", "30KB"])
@pytest.mark.parametrize("architecture", sorted(MIXTURES | DEEPSEEKS))
def test_both_layouts_of_experts_hold_the_same_model(
    architecture: str, shards: str, tmp_path: Path, seed: int
) -> None:
    model = save_model(tmp_path, architecture, seed=seed, max_shard_size=shards)
    if shards != "5GB":
        assert len(list(tmp_path.glob("*.safetensors"))) > 2
    published = load_weights(tmp_path, load_spec(tmp_path), dtype=torch.float32, device=CPU)
    _save_fused(model, tmp_path, max_shard_size=shards)
    names = {name for path in tmp_path.glob("*.safetensors") for name in load_file(path)}
    assert "model.layers.1.mlp.experts.gate_up_proj" in names
    fused = load_weights(tmp_path, load_spec(tmp_path), dtype=torch.float32, device=CPU)
    assert published.layers[1].router is not None
    for ours, others in zip(published.layers, fused.layers, strict=True):
        if ours.router is None:
            assert others.router is None
            continue
        assert others.router is not None
        assert torch.equal(ours.router.data, others.router.data)
        assert torch.equal(ours.gate_up.data, others.gate_up.data)
        assert torch.equal(ours.down.data, others.down.data)
    token_ids = random_tokens(9, seed)
    driver = StepDriver(_build(tmp_path), seed=seed)
    driver.admit(0, token_ids)
    assert_same_logits(driver.logits({0: 9})[0], reference_logits(tmp_path, token_ids))


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("architecture", sorted(MIXTURES))
def test_ranks_hold_their_part_of_every_expert(
    architecture: str, is_fused: bool, tmp_path: Path, seed: int
) -> None:
    model = save_model(tmp_path, architecture, seed=seed)
    if is_fused:
        _save_fused(model, tmp_path)
    spec = load_spec(tmp_path)
    (whole,) = load_weights(tmp_path, spec, dtype=torch.float32, device=CPU).layers[1:]
    for index in range(2):
        rank = Rank(index, 2)
        (part,) = load_weights(tmp_path, spec, dtype=torch.float32, device=CPU, rank=rank).layers[
            1:
        ]
        gate, up = whole.gate_up.data.chunk(2, dim=1)
        halves = [t.chunk(2, dim=1)[index] for t in (gate, up)]
        assert torch.equal(part.gate_up.data, torch.cat(halves, dim=1))
        assert torch.equal(part.down.data, whole.down.data.chunk(2, dim=2)[index])
        assert part.router is not None
        assert whole.router is not None
        assert torch.equal(part.router.data, whole.router.data)
        if whole.shared_down is not None:
            assert part.shared_down is not None
            assert (part.shared_gate is None) == (whole.shared_gate is None)
            shared = whole.shared_down.data.chunk(2, dim=1)[index]
            assert torch.equal(part.shared_down.data, shared)


@pytest.mark.parametrize("architecture", sorted(MIXTURES))
def test_the_outputs_of_ranks_add_up_to_that_of_one(
    architecture: str, tmp_path: Path, seed: int
) -> None:
    save_model(tmp_path, architecture, seed=seed)
    spec = load_spec(tmp_path)
    assert spec.mixture is not None
    x = torch.randn(11, 64)
    outputs = []
    for rank in (Rank(0, 1), Rank(0, 2), Rank(1, 2)):
        loaded = load_weights(tmp_path, spec, dtype=torch.float32, device=CPU, rank=rank)
        layer = build_mixture(spec.mixture, loaded.layers[0], TorchOps(), is_deterministic=False)
        outputs.append(layer(x))
    torch.testing.assert_close(outputs[1] + outputs[2], outputs[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_are_counted_as_transformers_counts_them(variant: str, tmp_path: Path) -> None:
    architecture, settings = VARIANTS[variant]
    model = save_model(tmp_path, architecture, **settings)
    spec = load_spec(tmp_path)
    # A bias of routes is a buffer in transformers.
    buffers = sum(b.numel() for name, b in model.named_buffers() if name.endswith("_bias"))
    assert num_parameters(spec) == model.num_parameters() + buffers
    made = random_weights(spec, dtype=torch.float32, device=CPU)
    mixtures = [made.layers[i] for i in (spec.mixture.layers if spec.mixture else ())]
    assert mixtures
    for layer in mixtures:
        assert layer.router is not None
        assert layer.router.data.std() > 1e-4
        assert layer.gate_up.data.ndim == layer.down.data.ndim == 3
    layout = spec.kv_layout(block_size=16, dtype="float32")
    held_bytes = weight_bytes(spec, element_bytes=4, keeps_quantised=True)
    footprint = Footprint.of(spec, layout, held_bytes, 4)
    assert footprint.weights_bytes == 4 * (model.num_parameters() + buffers)


def test_a_step_of_a_mixture_takes_memory_for_every_route(tmp_path: Path) -> None:
    save_model(tmp_path, "Qwen3MoeForCausalLM")
    spec = load_spec(tmp_path)
    layout = spec.kv_layout(block_size=16, dtype="float32")
    few = Footprint.of(spec, layout, 1, 4).step_token_bytes
    edit_config(tmp_path, num_experts_per_tok=7)
    assert Footprint.of(load_spec(tmp_path), layout, 1, 4).step_token_bytes > few


def test_an_expert_that_is_missing_stops_the_start(tmp_path: Path) -> None:
    save_model(tmp_path, "MixtralForCausalLM")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    lost = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    del tensors[lost]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=rf"1 tensors are missing.*'{lost}'.*\[64, 88\]"):
        _build(tmp_path)


def test_an_expert_too_many_stops_the_start(tmp_path: Path) -> None:
    save_model(tmp_path, "Qwen3MoeForCausalLM")
    edit_config(tmp_path, num_local_experts=6)
    with pytest.raises(ConfigError, match=r"unexpected tensor .*experts\.6\.|has shape \[7, 64\]"):
        _build(tmp_path)


def test_a_fused_tensor_of_another_shape_stops_the_start(tmp_path: Path) -> None:
    _save_fused(save_model(tmp_path, "Qwen3MoeForCausalLM"), tmp_path)
    edit_config(tmp_path, moe_intermediate_size=20)
    with pytest.raises(ConfigError, match=r"experts\.\w+_proj' has shape \[7, "):
        _build(tmp_path)


def test_experts_in_both_layouts_at_once_stop_the_start(tmp_path: Path) -> None:
    model = save_model(tmp_path, "Qwen3MoeForCausalLM")
    path = tmp_path / "model.safetensors"
    published = load_file(path)
    _save_fused(model, tmp_path)
    name = "model.layers.0.mlp.experts.2.up_proj.weight"
    save_file(load_file(path) | {name: published[name]}, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="stands in another file as well"):
        _build(tmp_path)


# ---- config.json ---------------------------------------------------------------------------------

QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rope_theta": 1e6,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def _write(folder: Path, **changes: object) -> Path:
    (folder / "config.json").write_text(json.dumps({**QWEN3_30B, **changes}))
    return folder


def test_a_published_configuration_is_read(tmp_path: Path) -> None:
    spec = load_spec(_write(tmp_path))
    assert spec.mixture is not None
    assert (spec.mixture.num_experts, spec.mixture.num_active) == (128, 8)
    assert spec.mixture.layers == tuple(range(48))
    assert spec.mixture.normalises
    assert num_parameters(spec) == 30_532_122_624  # as its model card has it: 30.5 billion
    assert published_shapes(spec)["model.layers.47.mlp.experts.127.up_proj.weight"] == (768, 2048)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_experts_per_tok": 129}, ["num_experts_per_tok", "129 of 128"]),
        ({"mlp_only_layers": [48]}, ["mlp_only_layers", "layer 48 of 48"]),
        ({"mlp_only_layers": [-1]}, ["mlp_only_layers", "integers"]),
        ({"mlp_only_layers": list(range(48))}, ["mlp_only_layers", "no layer with experts"]),
        ({"decoder_sparse_step": 0}, ["decoder_sparse_step", "at least 1"]),
        ({"num_local_experts": 64}, ["num_experts", "128", "64"]),
        ({"moe_intermediate_size": None}, ["moe_intermediate_size", "missing"]),
        ({"architectures": ["Qwen2MoeForCausalLM"]}, ["shared_expert_intermediate_size"]),
        ({"architectures": ["JambaForCausalLM"]}, ["JambaForCausalLM", "MixtralForCausalLM"]),
    ],
)
def test_what_a_mixture_cannot_be_is_refused(
    changes: dict[str, object], named: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_spec(_write(tmp_path, **changes))
    for part in named:
        assert part in refused.value.message


def test_mixtral_has_defaults_of_its_own(tmp_path: Path) -> None:
    _write(tmp_path, architectures=["MixtralForCausalLM"])
    edit_config(tmp_path, remove=("rope_theta", "num_experts_per_tok", "num_key_value_heads"))
    spec = load_spec(tmp_path)
    assert (spec.rms_norm_eps, spec.rope.theta, spec.num_kv_heads) == (1e-5, 1e6, 8)
    assert spec.mixture is not None
    assert (spec.mixture.num_experts, spec.mixture.num_active) == (8, 2)


# ---- padding -------------------------------------------------------------------------------------


def test_padding_has_no_expert_and_changes_no_token(tmp_path: Path, seed: int) -> None:
    save_model(tmp_path, "Qwen2MoeForCausalLM", seed=seed)
    mlp = _build(tmp_path).layers[0].mlp
    assert isinstance(mlp, Mixture)
    x = torch.randn(9, 64)
    slots = torch.tensor([4, 5, -1, 7, -1, 0, 1, 2, -1], dtype=torch.int32)
    with torch.inference_mode():
        routes, whole = mlp.router(x, slots), mlp(x)
        padded = mlp(x, 0, slots)
    is_token = slots >= 0
    assert torch.equal(routes.ids.amax(dim=1) >= 0, is_token)
    assert torch.equal(routes.ids[~is_token], torch.full((3, 3), -1, dtype=torch.int32))
    torch.testing.assert_close(padded[is_token], whole[is_token])


def test_the_layers_of_a_step_know_which_of_its_tokens_are_padding(tmp_path: Path) -> None:
    """In the last layer too, as long as all tokens are computed there."""
    save_model(tmp_path, "Qwen3MoeForCausalLM")
    model = _build(tmp_path)
    seen: list[torch.Tensor | None] = []
    for layer in model.layers:
        mlp = layer.mlp
        assert isinstance(mlp, Mixture)
        router = mlp.router

        def spy(x: torch.Tensor, slots: torch.Tensor | None, router: Any = router) -> Any:
            seen.append(slots)
            return router(x, slots)

        mlp.router = spy
    driver = StepDriver(model, seed=0)
    driver.admit(0, [3, 4, 5])
    driver.logits({0: 3})
    assert [slots is not None for slots in seen] == [True, True]
    seen.clear()
    driver.admit(1, [3, 4, 5])
    driver.sample({1: 3})  # its last token alone in the last layer
    assert [slots is not None for slots in seen] == [True, False]
