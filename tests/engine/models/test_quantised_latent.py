"""Quantised DeepSeek-V2 and V3: transformers' logits on the same numbers, memory, shares."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.llama_weights import layer_tensors
from engine.models.quantization.published_tensors import check_shares, weight_bytes
from engine.models.registry import build_model
from engine.models.spec import load_spec
from engine.models.weights import LayerWeights, load_weights
from engine.ranks.rank import Rank
from load_tests.testbed.quantised_folders import FORMS
from tests.engine.models.closeness import assert_same_logits
from tests.engine.models.test_deepseek import PUBLISHED_V3, V2, V3
from tests.engine.runner.step_driver import StepDriver
from tests.harness.quantised_folders import write_folders
from tests.harness.tiny_models import edit_config, reference_logits

CPU = torch.device("cpu")
# Multiples of 64, as groups of 64 need; tiles of 128 are cut short, and end within q and latent.
SIZES: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 48,
    "moe_intermediate_size": 64,
}
LINEARS = ("qkv", "output", "gate_up", "down")


def _folders(tmp_path: Path, form: str, architecture: str) -> tuple[Path, Path]:
    """A quantised folder, and one with what its numbers stand for."""
    sizes = SIZES | ({"q_lora_rank": 64} if architecture == V3 else {})
    return write_folders(tmp_path, form, architecture, sizes)


def _load(folder: Path, **how: Any) -> list[LayerWeights]:
    return load_weights(folder, load_spec(folder), dtype=torch.float32, device=CPU, **how).layers


@pytest.mark.parametrize(
    ("form", "architecture"),
    [
        ("fp8-block", V3),
        ("fp8-block", V2),
        ("ct-fp8-channel", V3),
        ("awq", V3),
        ("ct-int4-32", V2),
        ("gptq-v2-order", V3),
        ("ct-nvfp4", V3),
    ],
)
def test_logits_are_those_of_transformers_on_the_same_numbers(
    form: str, architecture: str, tmp_path: Path
) -> None:
    quantised, stands_for = _folders(tmp_path, form, architecture)
    tokens = torch.randint(131, (19,)).tolist()
    driver = StepDriver(build_model(quantised, dtype=torch.float32, device=CPU), seed=0)
    driver.admit(0, tokens)
    assert_same_logits(driver.logits_in_chunks(0, 11), reference_logits(stands_for, tokens))
    for layer in _load(quantised):
        others = [layer.kv_up, layer.q_up] if architecture == V3 else [layer.kv_up]
        for weight in (*(getattr(layer, name) for name in LINEARS), *others):
            assert weight.scales is not None, "it was not quantised"


def test_layers_that_guess_further_tokens_may_be_quantised_too(tmp_path: Path) -> None:
    quantised, stands_for = _folders(tmp_path, "fp8-block", V3)
    path = quantised / "model.safetensors"
    tensors = load_file(path)
    extra = {
        name.replace("layers.1.", "layers.2."): tensor.clone()
        for name, tensor in tensors.items()
        if ".layers.1." in name
    }
    save_file(tensors | extra, path, metadata={"format": "pt"})
    edit_config(quantised, num_nextn_predict_layers=1)
    tokens = torch.randint(131, (9,)).tolist()
    driver = StepDriver(build_model(quantised, dtype=torch.float32, device=CPU), seed=0)
    driver.admit(0, tokens)
    assert_same_logits(driver.logits({0: 9})[0], reference_logits(stands_for, tokens))


def test_what_makes_keys_and_values_is_held_as_a_matrix(tmp_path: Path) -> None:
    """And is not rounded while it is read, which would save nothing."""
    config = PUBLISHED_V3 | {"quantization_config": FORMS["fp8-block"].config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = load_spec(tmp_path)
    held = weight_bytes(spec, element_bytes=2, keeps_quantised=True)
    matrices = spec.num_layers * 128 * (128 + 128) * 512 * 2
    # 671 billion numbers; the embedding and the head, 1.85 billion, have two bytes, as these.
    assert held == pytest.approx(671e9 + 1.85e9 + matrices / 2, rel=2e-3)
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED_V3))
    online = load_spec(tmp_path, quantization="fp8")
    rounded = weight_bytes(online, element_bytes=2, keeps_quantised=True)
    assert rounded == pytest.approx(held, rel=2e-3)


@pytest.mark.parametrize("num_ranks", [1, 8, 16])
def test_ranks_share_the_published_model_in_fp8(num_ranks: int, tmp_path: Path) -> None:
    config = PUBLISHED_V3 | {"quantization_config": FORMS["fp8-block"].config}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    spec = load_spec(tmp_path)
    check_shares(spec, Rank(num_ranks - 1, num_ranks), is_on_gpu=True)
    heads = layer_tensors(spec, 3)["kv_up"].of_rank(Rank(num_ranks - 1, num_ranks))
    assert heads.shape == (128 // num_ranks * 256, 512)
