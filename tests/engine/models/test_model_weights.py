"""Weights files: what is read, what is tolerated, and what stops the start, by name."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ConfigError
from engine.models.registry import BUILDERS, build_model
from engine.models.spec import SUPPORTED_ARCHITECTURES
from tests.engine.execution.step_driver import StepDriver
from tests.engine.models.closeness import assert_same_logits
from tests.engine.models.tiny_models import reference_logits, save_model

Tensors = dict[str, torch.Tensor]


def _build(folder: Path) -> None:
    build_model(folder, dtype=torch.float32, device=torch.device("cpu"))


def _rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(tmp_path)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_model(tmp_path, max_shard_size="40KB")
    return tmp_path


def test_every_supported_architecture_has_a_builder() -> None:
    assert set(BUILDERS) == set(SUPPORTED_ARCHITECTURES)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            ["missing", "model.layers.1.mlp.up_proj.weight", "[88, 64]"],
        ),
        (lambda t: t.pop("lm_head.weight"), ["missing", "lm_head.weight", "[131, 64]"]),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}),
            ["model.safetensors", "unexpected", "model.layers.0.self_attn.q_proj.bias"],
        ),
        (
            lambda t: t.update({"model.layers.2.input_layernorm.weight": torch.ones(64)}),
            ["model.safetensors", "unexpected", "model.layers.2.input_layernorm.weight"],
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(63)}),
            ["model.safetensors", "model.norm.weight", "[63]", "[64]"],
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}),
            ["model.safetensors", "model.norm.weight", "I8", "BF16"],
        ),
    ],
)
def test_a_tensor_that_does_not_fit_stops_the_start(
    change: Callable[[Tensors], object], named: list[str], folder: Path
) -> None:
    _rewrite(folder, change)
    with pytest.raises(ConfigError) as refused:
        _build(folder)
    for part in named:
        assert part in refused.value.message


def test_known_leftovers_are_tolerated(tmp_path: Path) -> None:
    save_model(tmp_path, tie_word_embeddings=True)
    theirs = reference_logits(tmp_path, [5, 4, 3])

    def add_leftovers(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["lm_head.weight"] = torch.full((131, 64), torch.nan)  # tied: never looked at

    _rewrite(tmp_path, add_leftovers)
    model = build_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    driver = StepDriver(model, seed=0)
    driver.admit(0, [5, 4, 3])
    assert_same_logits(driver.logits({0: 3})[0], theirs)


def test_a_folder_without_safetensors_says_what_is_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json.*only safetensors"):
        _build(folder)


@pytest.mark.parametrize("keep_bytes", [4, 100, 5000])
def test_a_truncated_file_is_named(keep_bytes: int, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep_bytes])
    with pytest.raises(ConfigError, match=r"model\.safetensors: not a readable safetensors file"):
        _build(folder)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ConfigError, match=shard.name):
        _build(sharded)


def test_a_shard_without_its_tensor_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    tensors = load_file(shard)
    lost = sorted(tensors)[0]
    del tensors[lost]
    save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(ConfigError) as refused:
        _build(sharded)
    assert shard.name in refused.value.message
    assert lost in refused.value.message


@pytest.mark.parametrize(
    ("weight_map", "problem"),
    [
        (None, "weight_map is missing"),
        ({"model.norm.weight": 3}, "must be a string"),
        ({"model.norm.weight": "../elsewhere.safetensors"}, "outside the folder"),
    ],
)
def test_a_wrong_index_is_refused(weight_map: object, problem: str, sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match=problem):
        _build(sharded)


def test_a_longer_context_than_the_model_allows_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="allows 256 tokens, max_model_len is 257"):
        build_model(folder, dtype=torch.float32, device=torch.device("cpu"), max_model_len=257)
