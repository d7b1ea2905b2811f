"""DeepSeek-V2 and V3: what config.json means, what is refused, and the plane of a token."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ConfigError
from engine.kv.store import KvStore
from engine.layers.moe import Mixture
from engine.models.registry import build_model
from engine.models.spec import load_spec
from engine.models.weights import load_weights
from engine.ranks.rank import Rank
from tests.engine.models.closeness import assert_same_logits
from tests.engine.runner.step_driver import StepDriver
from tests.harness.tiny_models import edit_config, reference_logits, save_model
from tests.harness.weight_counts import num_parameters

CPU = torch.device("cpu")
V2, V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
GLM = "Glm4MoeLiteForCausalLM"
# Of DeepSeek-V3 as published, what matters here.
PUBLISHED_V3 = {
    "architectures": [V3],
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
# DeepSeek-V2-Lite, as far as it differs.
V2_LITE = PUBLISHED_V3 | {
    "architectures": [V2],
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}


def _write(folder: Path, config: dict[str, Any], **changes: object) -> Path:
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def _assert_refused(folder: Path, named: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load_spec(folder)
    for part in named:
        assert part in refused.value.message


# ---- config.json ---------------------------------------------------------------------------------


def test_the_published_models_keep_one_plane_a_token(tmp_path: Path) -> None:
    large = load_spec(_write(tmp_path, PUBLISHED_V3))
    small = load_spec(_write(tmp_path, V2_LITE))
    # Bytes of a token over all layers: 61 or 27 vectors of 576 numbers.
    for spec, num_layers in ((large, 61), (small, 27)):
        layout = spec.kv_layout(block_size=16, dtype="bfloat16")
        assert layout.block_bytes == 16 * num_layers * 1152
        assert layout.block_shape == (num_layers, 1, 16, 1, 576)
        halved = spec.kv_layout(block_size=16, dtype="fp8_e4m3", scales="some")
        assert (2 * halved.block_bytes, halved.numbers) == (layout.block_bytes, "fp8_e4m3 some")
        assert spec.max_model_len == 163840
    assert large.latent is not None
    assert small.latent is not None
    # YaRN's factor for all dimensions counts twice: once for queries, once for keys.
    assert large.latent.scale == pytest.approx(192**-0.5 * 1.3688879454113936**2)
    assert small.latent.scale == pytest.approx(192**-0.5 * 1.2608037774058553**2)
    assert large.mixture is not None
    assert small.mixture is not None
    assert (len(large.mixture.layers), len(small.mixture.layers)) == (58, 26)
    assert (large.mixture.num_groups, large.mixture.num_chosen_groups) == (8, 4)
    assert (small.mixture.is_plain, small.mixture.shared_size) == (True, 2816)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_key_value_heads": 16}, ["num_key_value_heads", "16 of 128"]),
        ({"topk_method": "greedy"}, ["topk_method", "noaux_tc"]),
        ({"scoring_func": "softmax"}, ["scoring_func", "sigmoid"]),
        ({"moe_layer_freq": 2}, ["moe_layer_freq"]),
        ({"topk_group": 9}, ["topk_group", "9 of 8"]),
        ({"n_group": 3, "topk_group": 2}, ["n_group", "256 experts"]),
        ({"n_group": 128, "topk_group": 3}, ["n_group", "3 are chosen"]),
        ({"mlp_bias": True}, ["mlp_bias"]),
        ({"qk_rope_head_dim": 63}, ["qk_rope_head_dim", "odd"]),
        ({"q_lora_rank": None, "attention_bias": True}, ["attention_bias", "q_lora_rank"]),
        (
            {"rope_scaling": {"type": "yarn", "mscale_all_dim": 1.0}},
            ["rope_scaling", "factor", "mscale_all_dim"],
        ),
        ({"architectures": [V2], "scoring_func": "softmax"}, ["norm_topk_prob"]),
    ],
)
def test_what_is_not_supported_is_refused(
    changes: dict[str, object], named: list[str], tmp_path: Path
) -> None:
    _assert_refused(_write(tmp_path, PUBLISHED_V3, **changes), named)


@pytest.mark.parametrize("key", ["rope_interleave", "norm_topk_prob"])
def test_null_is_false_where_transformers_reads_it_so(key: str, tmp_path: Path) -> None:
    save_model(tmp_path, V3)
    edit_config(tmp_path, **{key: None})
    token_ids = list(range(3, 20))
    driver = StepDriver(build_model(tmp_path, dtype=torch.float32, device=CPU), seed=0)
    driver.admit(0, token_ids)
    theirs = reference_logits(tmp_path, token_ids)
    assert_same_logits(driver.logits_in_chunks(0, 7), theirs)


def test_ranks_share_heads_and_keep_whole_latents(tmp_path: Path) -> None:
    spec = load_spec(_write(tmp_path, V2_LITE))
    part = spec.of_rank(Rank(3, 8))
    assert (part.num_heads, part.latent) == (2, spec.latent)
    layout = {"block_size": 16, "dtype": "bfloat16"}
    assert part.kv_layout(**layout) == spec.kv_layout(**layout)
    with pytest.raises(ConfigError, match=r"3 ranks cannot share 16 query heads"):
        spec.of_rank(Rank(0, 3))


def test_a_model_may_be_dense_or_without_shared_experts(tmp_path: Path) -> None:
    save_model(tmp_path, V3, first_k_dense_replace=2)
    assert load_spec(tmp_path).mixture is None
    token_ids = list(range(3, 20))
    theirs = reference_logits(tmp_path, token_ids)
    driver = StepDriver(build_model(tmp_path, dtype=torch.float32, device=CPU), seed=0)
    driver.admit(0, token_ids)
    assert_same_logits(driver.logits_in_chunks(0, 7), theirs)
    edit_config(tmp_path, first_k_dense_replace=1, n_shared_experts=0)
    mixture = load_spec(tmp_path).mixture
    assert mixture is not None
    assert mixture.shared_size is None


# GLM-4.7-Flash as published, what matters here.
PUBLISHED_GLM = {
    "architectures": [GLM],
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 256,
    "vocab_size": 154880,
}


def test_glm_is_a_deepseek_with_wider_heads(tmp_path: Path) -> None:
    spec = load_spec(_write(tmp_path, PUBLISHED_GLM))
    assert spec.mixture is not None
    assert spec.latent is not None
    assert (spec.mixture.layers, spec.num_guessing_layers) == (tuple(range(1, 47)), 1)
    assert (spec.head_dim, spec.rms_norm_eps, spec.rope.theta) == (256, 1e-5, 1e6)
    assert (
        num_parameters(spec) == 29_943_390_976 + 46 * 64
    )  # transformers' parameters, biases of routes
    left_out = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    left_out += ("moe_intermediate_size", "n_group", "n_routed_experts", "n_shared_experts")
    left_out += ("num_experts_per_tok", "routed_scaling_factor", "topk_group", "rms_norm_eps")
    edit_config(tmp_path, remove=tuple(key for key in left_out if key in PUBLISHED_GLM))
    assert load_spec(tmp_path) == spec, "what may be left out is as published"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"first_k_dense_replace": 2}, ["first_k_dense_replace", "mlp_layer_types"]),
        ({"mlp_layer_types": ["dense", "sparse"]}, ["mlp_layer_types", "47 layers"]),
        ({"mlp_layer_types": ["dense"] * 46 + ["rare"]}, ["mlp_layer_types", "dense or sparse"]),
        ({"topk_method": "greedy"}, ["topk_method", "noaux_tc"]),
    ],
)
def test_layers_of_glm_that_are_unclear_are_refused(
    changes: dict[str, object], named: list[str], tmp_path: Path
) -> None:
    _assert_refused(_write(tmp_path, PUBLISHED_GLM, **changes), named)


def test_glm_4_5_rotates_half_of_each_head(tmp_path: Path) -> None:
    published = {
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 96,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 46,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "torch_dtype": "bfloat16",
        "use_qk_norm": False,
        "vocab_size": 151552,
    }
    spec = load_spec(_write(tmp_path, published))
    assert (spec.rope.rotated_share, spec.rope.theta) == (0.5, 1e6)
    assert (spec.has_qkv_bias, spec.has_output_bias, spec.has_qk_norm) == (True, False, False)
    assert num_parameters(spec) == 106_852_245_504 + 45 * 128  # and biases of routes
    edit_config(tmp_path, partial_rotary_factor=1.5)
    with pytest.raises(ConfigError, match=r"partial_rotary_factor is \[1.5\]"):
        load_spec(tmp_path)
    edit_config(tmp_path, partial_rotary_factor=0.5, rope_parameters={"partial_rotary_factor": 1.0})
    with pytest.raises(ConfigError, match="one number"):
        load_spec(tmp_path)
    edit_config(tmp_path, remove=("rope_parameters",), partial_rotary_factor=5 / 128)
    with pytest.raises(ConfigError, match="leaves 5 of 128 numbers"):
        load_spec(tmp_path)


# ---- files ---------------------------------------------------------------------------------------


def test_layers_that_guess_further_tokens_are_left_out(tmp_path: Path) -> None:
    save_model(tmp_path, V3)
    token_ids = list(range(3, 20))
    theirs = reference_logits(tmp_path, token_ids)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    extra = {
        name.replace("layers.1.", "layers.2."): tensor.clone()
        for name, tensor in tensors.items()
        if ".layers.1." in name
    }
    extra["model.layers.2.eh_proj.weight"] = torch.ones(64, 128)
    save_file(tensors | extra, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"unexpected tensor 'model\.layers\.2\."):
        build_model(tmp_path, dtype=torch.float32, device=CPU)
    edit_config(tmp_path, num_nextn_predict_layers=1)
    driver = StepDriver(build_model(tmp_path, dtype=torch.float32, device=CPU), seed=0)
    driver.admit(0, token_ids)
    assert_same_logits(driver.logits({0: 17})[0], theirs)


def test_the_bias_of_routes_is_never_rounded(tmp_path: Path) -> None:
    model = save_model(tmp_path, V3)
    found = load_weights(tmp_path, load_spec(tmp_path), dtype=torch.bfloat16, device=CPU).layers[1]
    assert found.route_bias is not None
    assert found.route_bias.dtype == torch.float32
    theirs = dict(model.named_buffers())["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert torch.equal(found.route_bias, theirs)
    built = build_model(tmp_path, dtype=torch.bfloat16, device=CPU).layers[1].mlp
    assert isinstance(built, Mixture)


# ---- the store -----------------------------------------------------------------------------------


def test_blocks_of_one_plane_move_bit_by_bit(tmp_path: Path) -> None:
    save_model(tmp_path, V2)
    layout = load_spec(tmp_path).kv_layout(block_size=3, dtype="bfloat16")
    stores = [KvStore(layout, num_blocks=7, device=CPU) for _ in range(2)]
    ours, others = stores
    ours.tensor.copy_(torch.randn(ours.tensor.shape))
    data = ours.gather([6, 0, 2])
    others.scatter([1, 5, 3], data.view(-1).view(torch.uint8))
    assert others.digest([1, 5, 3]) == ours.digest([6, 0, 2]) == ours.digest_staged(data)
    assert torch.equal(others.tensor[[1, 5, 3]], ours.tensor[[6, 0, 2]])
    # One bit of one token of one layer is noticed.
    others.tensor.view(torch.int16)[5, 1, 0, 2, 0, 47] ^= 1
    assert others.digest([5]) != ours.digest([0])
