"""Gemma 3's text model: transformers' logits on the same folder, in every kind of step; errors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Gemma3ForConditionalGeneration
from transformers.models.gemma3 import Gemma3Config, Gemma3TextConfig

from engine.errors import ConfigError
from engine.layers.rope_spec import LinearScaling, RopeSpec
from engine.models.llama import CausalLM
from engine.models.registry import build_model
from engine.models.spec import load_spec
from engine.models.weight_files import check_weights
from engine.models.weights import random_weights
from tests.engine.models.closeness import (
    assert_no_further_than,
    assert_same_logits,
    errors_in_bfloat16,
)
from tests.engine.models.family_checks import (
    check_answers,
    check_chunks,
    check_prefix_hit_and_preemption,
)
from tests.engine.runner.step_driver import StepDriver
from tests.harness.seeds import fresh_seed
from tests.harness.tiny_models import (
    FAMILIES,
    edit_config,
    random_tokens,
    reference_logits,
    save_model,
)
from tests.harness.weight_counts import num_parameters

CPU = torch.device("cpu")
NAME = "Gemma3ForCausalLM"
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "untied": {"tie_word_embeddings": False, "attention_bias": True, "num_key_value_heads": 1},
    "one_rope": {
        "query_pre_attn_scalar": 16,
        "layer_types": ["full_attention", "full_attention", "sliding_attention"],
        "rope_parameters": None,
    },
}


def _build(folder: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    return build_model(folder, dtype=dtype, device=CPU)


@pytest.fixture
def seed() -> int:
    return fresh_seed()


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_chunk_size_gives_the_reference_logits_of_gemma3(
    variant: str, tmp_path: Path, seed: int
) -> None:
    save_model(tmp_path, NAME, seed=seed, **VARIANTS[variant])
    check_chunks(tmp_path, seed, (1, 2, 5, 18, 19))


def test_gemma3_after_a_prefix_hit_and_a_preemption_in_mixed_steps(
    tmp_path: Path, seed: int
) -> None:
    save_model(tmp_path, NAME, seed=seed)
    check_prefix_hit_and_preemption(tmp_path, seed)


def test_gemma3_in_bfloat16_is_no_further_from_fp32_than_transformers(
    tmp_path: Path, seed: int
) -> None:
    save_model(tmp_path, NAME, seed=seed, dtype=torch.bfloat16)
    ours, theirs = errors_in_bfloat16(tmp_path, seed)
    assert_no_further_than(theirs, ours)


def test_an_engine_answers_as_transformers_does_for_gemma3(tmp_path: Path, seed: int) -> None:
    save_model(tmp_path, NAME, seed=seed)
    prompts = [random_tokens(21, seed), random_tokens(30, seed + 2)]
    prompts.append(prompts[0][:17] + random_tokens(4, seed + 3))
    check_answers(tmp_path, prompts, 5)


def test_parameters_of_gemma3_are_those_of_transformers(tmp_path: Path) -> None:
    model = save_model(tmp_path, NAME)
    spec = load_spec(tmp_path)
    assert num_parameters(spec) == model.num_parameters()
    made = random_weights(spec, dtype=torch.float32, device=CPU)
    assert not made.layers[0].input_norm.any(), "norms multiply by 1"


def _save_with_vision(
    folder: Path, seed: int, *, is_original: bool
) -> Gemma3ForConditionalGeneration:
    text = {**FAMILIES[NAME], "vocab_size": 131, "hidden_size": 64, "intermediate_size": 88}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = Gemma3Config(
        text_config={**text, **heads, "max_position_embeddings": 256},
        vision_config={**sizes, "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=130,
        boi_token_index=128,
        eoi_token_index=129,
    )
    torch.manual_seed(seed)
    model = Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if "norm" in name else 0.1))
    model.save_pretrained(folder, save_original_format=is_original)
    return model


@pytest.mark.parametrize("is_original", [True, False], ids=["published", "renamed"])
def test_the_text_part_of_a_folder_with_vision_is_served(
    is_original: bool, tmp_path: Path, seed: int
) -> None:
    model = _save_with_vision(tmp_path, seed, is_original=is_original)
    names = {
        name.removeprefix("" if is_original else "model.").partition(".")[0]
        for name in load_file(tmp_path / "model.safetensors")
    }
    assert names == {"language_model", "vision_tower", "multi_modal_projector"}
    token_ids = [token % 128 for token in random_tokens(21, seed)]
    with torch.inference_mode():
        theirs = model(torch.tensor([token_ids])).logits[0]
    driver = StepDriver(_build(tmp_path), seed=seed)
    driver.admit(0, token_ids)
    assert_same_logits(driver.logits_in_chunks(0, 8), theirs)
    head = "language_model.lm_head.weight" if is_original else "lm_head.weight"
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[head] = torch.ones(131, 64)  # some writers leave a tied one in
    save_file(tensors, tmp_path / "model.safetensors")
    check_weights(tmp_path, load_spec(tmp_path))
    edit_config(tmp_path, remove=("text_config",))
    with pytest.raises(ConfigError, match="text_config is missing"):
        load_spec(tmp_path)


def test_a_text_config_that_says_little_means_the_published_sizes(tmp_path: Path) -> None:
    """As the published 4B folder has it."""
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = load_spec(tmp_path)
    theirs = Gemma3TextConfig(**config["text_config"])
    for key in ("hidden_size", "vocab_size", "num_kv_heads", "head_dim", "num_layers", "num_heads"):
        hf = {"num_kv_heads": "num_key_value_heads", "num_layers": "num_hidden_layers"}
        hf["num_heads"] = "num_attention_heads"
        assert getattr(spec, key) == getattr(theirs, hf.get(key, key)), key
    kinds = [window is None for window in spec.layer_windows]
    assert kinds == [kind == "full_attention" for kind in theirs.layer_types]
    assert spec.rope == RopeSpec(theta=1e6, scaling=LinearScaling(factor=8.0))
    assert spec.local_rope == RopeSpec(theta=1e4)
    assert (spec.dtype, spec.eos_token_ids, spec.max_model_len) == ("bfloat16", (1, 106), 131_072)


# ---- config.json ---------------------------------------------------------------------------------


def test_the_published_keys_of_gemma3_are_read(tmp_path: Path) -> None:
    """The spelling of the published 1B and 4B folders: a pattern, two bases, one scaling."""
    save_model(tmp_path, NAME, num_hidden_layers=3)
    edit_config(
        tmp_path,
        remove=("rope_parameters", "layer_types", "tie_word_embeddings"),
        sliding_window_pattern=3,
        rope_theta=700.0,
        rope_local_base_freq=50.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    spec = load_spec(tmp_path)
    assert spec.layer_windows == (6, 6, None)
    assert spec.rope == RopeSpec(theta=700.0, scaling=LinearScaling(factor=8.0))
    assert spec.local_rope == RopeSpec(theta=50.0)
    assert spec.max_model_len == 256, "the published length is the extended one"
    assert spec.has_tied_embeddings
    token_ids = random_tokens(25, 3)
    driver = StepDriver(_build(tmp_path), seed=1)
    driver.admit(0, token_ids)
    assert_same_logits(driver.logits_in_chunks(0, 11), reference_logits(tmp_path, token_ids))


@pytest.mark.parametrize("has_sections", [False, True])
def test_bases_stand_in_the_sections_of_gemma3_or_beside_them(
    has_sections: bool, tmp_path: Path
) -> None:
    beside = {"rope_theta": 700.0, "rope_local_base_freq": 50.0}
    linear = {"rope_type": "linear", "factor": 2.0}
    default = {"rope_type": "default"}
    sections = {"full_attention": linear, "sliding_attention": default}
    ropes = {"rope_parameters": sections} if has_sections else {"rope_scaling": linear}
    save_model(tmp_path, NAME)
    edit_config(tmp_path, remove=("rope_parameters",), **beside)
    edit_config(tmp_path, **ropes)
    theirs = AutoConfig.from_pretrained(tmp_path).rope_parameters
    spec = load_spec(tmp_path)
    assert spec.rope == RopeSpec(theta=700.0, scaling=LinearScaling(factor=2.0))
    assert spec.local_rope == RopeSpec(theta=50.0)
    found = [theirs[kind]["rope_theta"] for kind in sections]
    assert found == [700.0, 50.0]
    inside = {**linear, "rope_theta": 300.0}
    if has_sections:
        edit_config(tmp_path, rope_parameters={**sections, "full_attention": inside})
    else:
        edit_config(tmp_path, rope_scaling=inside)
    assert load_spec(tmp_path).rope.theta == 300.0
    theirs = AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert theirs["full_attention"]["rope_theta"] == 300.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention true"),
        ({"hidden_activation": "relu"}, "'relu' is not supported for Gemma"),
        ({"rope_parameters": {"full_attention": {}}}, "full_attention is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "beside rope_parameters"),
        (
            {"rope_parameters": {"full_attention": {**YARN, "truncate": False}}},
            "rope_parameters.full_attention.truncate false",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1.0"),
        ({"sliding_window": None}, "sliding_window null"),
    ],
)
def test_settings_of_gemma3_that_are_not_computed_are_refused(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    save_model(tmp_path, NAME)
    edit_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        load_spec(tmp_path)
