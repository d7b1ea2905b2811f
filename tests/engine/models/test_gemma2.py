"""Gemma 2: transformers' logits on the same folder, with capped scores and logits; errors."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.models.llama import CausalLM
from engine.models.registry import build_model
from engine.models.spec import load_spec
from tests.engine.models.closeness import assert_same_logits
from tests.engine.models.family_checks import check_answers, check_chunks
from tests.engine.runner.step_driver import StepDriver
from tests.harness.seeds import fresh_seed
from tests.harness.tiny_models import edit_config, random_tokens, reference_logits, save_model
from tests.harness.weight_counts import num_parameters

CPU = torch.device("cpu")
NAME = "Gemma2ForCausalLM"
TOKEN_IDS = list(range(3, 24))
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"attention_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 1},
    "no_caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    "published_caps": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
}


def _build(folder: Path) -> CausalLM:
    return build_model(folder, dtype=torch.float32, device=CPU)


@pytest.fixture
def seed() -> int:
    return fresh_seed()


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_chunk_size_gives_the_reference_logits_of_gemma2(
    variant: str, tmp_path: Path, seed: int
) -> None:
    save_model(tmp_path, NAME, seed=seed, **VARIANTS[variant])
    check_chunks(tmp_path, seed, (1, 5, 19))


def test_a_cap_matters(tmp_path: Path, seed: int) -> None:
    """Else the other tests would pass without one."""
    save_model(tmp_path, NAME, seed=seed)
    capped = reference_logits(tmp_path, random_tokens(9, seed))
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        edit_config(tmp_path, **{key: None})
        changed = reference_logits(tmp_path, random_tokens(9, seed))
        assert (changed - capped).abs().max() > 1e-3
        capped = changed


@pytest.mark.parametrize("backend", ["reference", pytest.param("flex", marks=pytest.mark.nightly)])
def test_an_engine_answers_as_transformers_does_for_gemma2(
    backend: str, tmp_path: Path, seed: int
) -> None:
    save_model(tmp_path, NAME, seed=seed)
    backends = {"model__attention__prefill": backend, "model__attention__decode": backend}
    check_answers(tmp_path, [random_tokens(21, seed), random_tokens(11, seed + 2)], 3, **backends)


def test_the_spec_of_gemma2_has_what_is_published(tmp_path: Path) -> None:
    model = save_model(tmp_path, NAME, num_hidden_layers=4)
    assert num_parameters(load_spec(tmp_path)) == model.num_parameters()
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    edit_config(tmp_path, remove=("layer_types", "sliding_window", "query_pre_attn_scalar", *caps))
    spec = load_spec(tmp_path)
    assert spec.layer_windows == (4096, None, 4096, None)
    assert (spec.attention_softcap, spec.logit_softcap, spec.query_scale) == (50.0, 30.0, 1 / 16)
    edit_config(tmp_path, attn_logit_softcapping=None)
    assert load_spec(tmp_path).attention_softcap is None


def test_the_activation_is_that_of_the_key_that_transformers_reads(tmp_path: Path) -> None:
    """Published files have a second key, `hidden_act`, which no code of Gemma reads."""
    save_model(tmp_path, NAME)
    expected = reference_logits(tmp_path, TOKEN_IDS)
    edit_config(tmp_path, hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh")
    driver = StepDriver(_build(tmp_path), seed=0)
    driver.admit(0, TOKEN_IDS)
    assert_same_logits(driver.logits_in_chunks(0, 7), expected)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"attn_logit_softcapping": 0.0}, "attn_logit_softcapping"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping"),
        ({"hidden_activation": "relu"}, "'relu' is not supported for Gemma"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_what_gemma2_cannot_have_is_refused(
    settings: dict[str, object], reason: str, tmp_path: Path
) -> None:
    save_model(tmp_path, NAME)
    edit_config(tmp_path, **settings)
    with pytest.raises(ConfigError, match=reason):
        load_spec(tmp_path)
