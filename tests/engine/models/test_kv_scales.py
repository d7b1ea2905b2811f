"""Scales of K and V in the forms in which they are published, and the errors for others."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.errors import ConfigError
from engine.models.kv_scales import (
    digest_of_scales,
    load_kv_scales,
    scales_of_rank,
    write_kv_scales,
)
from engine.models.registry import build_model
from engine.models.spec import load_spec
from engine.ranks.rank import Rank
from tests.harness.tiny_models import edit_config, save_model

K, V = ((0.5, 0.25), (0.75, 3.0))  # by layer
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def _load(folder: Path, file: Path | None = None) -> Tensor:
    return load_kv_scales(folder, load_spec(folder), file=file, is_random=False)


def _add(folder: Path, tensors: dict[str, Tensor]) -> None:
    path = folder / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, metadata={"format": "pt"})


def _by_layer(k_name: str, v_name: str, shape: tuple[int, ...] = (1,)) -> dict[str, Tensor]:
    return {
        f"model.layers.{layer}.self_attn.{name}": torch.full(shape, values[layer])
        for name, values in ((k_name, K), (v_name, V))
        for layer in range(2)
    }


EXPECTED = torch.tensor([[[k, k], [v, v]] for k, v in zip(K, V, strict=True)])


@pytest.mark.parametrize(
    ("k_name", "v_name"),
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("qkv_proj.k_scale", "qkv_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,), (2, 1, 1)])
def test_every_published_form_is_read(
    k_name: str, v_name: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    save_model(tmp_path)
    _add(tmp_path, _by_layer(k_name, v_name, shape))
    assert torch.equal(_load(tmp_path), EXPECTED)


def test_one_scale_of_both_planes(tmp_path: Path) -> None:
    save_model(tmp_path)
    names = (f"model.layers.{layer}.self_attn.kv_scale" for layer in range(2))
    _add(tmp_path, {name: torch.tensor(k) for name, k in zip(names, K, strict=True)})
    assert torch.equal(_load(tmp_path), EXPECTED[:, :1].expand(-1, 2, -1))


def test_scales_of_latents_and_rotated_keys(tmp_path: Path) -> None:
    """A published k_scale is of both, and v_scale of nothing; a file has one for each."""
    save_model(tmp_path / "latent", "DeepseekV3ForCausalLM")
    save_model(tmp_path / "heads")
    scales = torch.rand(2, 2, 1) + 0.01
    write_kv_scales(tmp_path / "own.safetensors", scales, is_latent=True)
    assert torch.equal(_load(tmp_path / "latent", tmp_path / "own.safetensors"), scales)
    with pytest.raises(ConfigError, match="latent_scale' is of latent attention, which the model"):
        _load(tmp_path / "heads", tmp_path / "own.safetensors")
    save_file(_by_layer("k_scale", "v_scale"), tmp_path / "published.safetensors")
    found = _load(tmp_path / "latent", tmp_path / "published.safetensors")
    assert torch.equal(found, EXPECTED[:, :1, :1].expand(-1, 2, -1))
    save_file(_by_layer("latent_scale", "v_scale"), tmp_path / "half.safetensors")
    with pytest.raises(ConfigError, match=r"missing.*layers\.0\.self_attn\.rotated_key_scale"):
        _load(tmp_path / "latent", tmp_path / "half.safetensors")


def test_a_model_of_which_only_k_and_v_are_quantised_loads(tmp_path: Path) -> None:
    """As llm-compressor writes it: no group of weights, and scales beside all others."""
    save_model(tmp_path)
    _add(tmp_path, _by_layer("k_scale", "v_scale"))
    section = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME}
    edit_config(tmp_path, quantization_config=section)
    assert load_spec(tmp_path).quantization is None
    build_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    assert torch.equal(_load(tmp_path), EXPECTED)


def test_a_scheme_may_be_a_word(tmp_path: Path) -> None:
    """As AutoFP8 writes it."""
    save_model(tmp_path)
    _add(tmp_path, _by_layer("k_scale", "v_scale"))
    section = {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"}
    edit_config(tmp_path, quantization_config=section)
    assert torch.equal(_load(tmp_path), EXPECTED)


@pytest.mark.parametrize("is_beside", [False, True])
def test_a_word_for_another_format_is_an_error(is_beside: bool, tmp_path: Path) -> None:
    """As ModelOpt writes it: scales of K and V in NVFP4 have the names of those in FP8."""
    save_model(tmp_path)
    _add(tmp_path, _by_layer("k_proj.k_scale", "v_proj.v_scale"))
    if is_beside:
        section = {"quant_algo": None, "kv_cache_quant_algo": "NVFP4"}
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": section}))
    else:
        section = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_scheme": "NVFP4"}
        edit_config(tmp_path, quantization_config=section)
    assert load_spec(tmp_path).quantization is None
    with pytest.raises(ConfigError, match="'NVFP4' is not static e4m3"):
        _load(tmp_path)


def test_a_file_of_its_own_comes_first_and_has_a_scale_a_head(tmp_path: Path) -> None:
    save_model(tmp_path)
    _add(tmp_path, _by_layer("k_scale", "v_scale"))
    scales = torch.rand(2, 2, 2) + 0.01
    write_kv_scales(tmp_path / "own.safetensors", scales)
    found = _load(tmp_path, tmp_path / "own.safetensors")
    assert torch.equal(found, scales)
    assert digest_of_scales(found) == digest_of_scales(scales)
    assert digest_of_scales(found) != digest_of_scales(EXPECTED)
    assert torch.equal(scales_of_rank(scales, Rank(1, 2)), scales[:, :, 1:])
    assert torch.equal(scales_of_rank(scales, Rank(1, 4)), scales[:, :, :1])


def test_without_scales_all_are_one_and_a_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_model(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(_load(tmp_path), torch.ones(2, 2, 2))
    (record,) = caplog.records
    assert "the model has no scales of K and V: all are 1" in record.getMessage()
    assert "engine.kv_calibration" in record.getMessage()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model.layers.1.self_attn.v_scale": None}, "1 scales of K and V are missing.*1.*v_scale"),
        ({"model.layers.0.self_attn.k_scale": torch.zeros(1)}, "scales are positive"),
        ({"model.layers.0.self_attn.k_scale": torch.tensor(torch.nan)}, "scales are positive"),
        ({"model.layers.0.self_attn.k_scale": torch.ones(3)}, "3 numbers; expected one, or one"),
        ({"model.layers.2.self_attn.k_scale": torch.ones(1)}, "a layer that the model does not"),
    ],
)
def test_scales_that_do_not_fit_are_an_error(
    changed: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    save_model(tmp_path)
    tensors = _by_layer("k_scale", "v_scale") | changed
    _add(tmp_path, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    with pytest.raises(ConfigError, match=message):
        _load(tmp_path)


@pytest.mark.parametrize("scheme", [{"type": "int"}, {"dynamic": True}, {"num_bits": 4}])
def test_scales_of_another_format_are_an_error(scheme: dict[str, object], tmp_path: Path) -> None:
    save_model(tmp_path)
    _add(tmp_path, _by_layer("k_scale", "v_scale"))
    section = {"quant_method": "compressed-tensors", "kv_cache_scheme": {**SCHEME, **scheme}}
    edit_config(tmp_path, quantization_config=section)
    with pytest.raises(ConfigError, match=r"kv_cache_scheme.type .* is not static e4m3"):
        _load(tmp_path)
