"""Configurations as they stand on the hub: each is read, or refused with a line that says why.

Each is put into a tiny folder whose numbers are laid out as that publisher lays them out; what is
loaded has to be what the numbers stand for, which the writer computed in float64.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ConfigError
from engine.layers.linear import LinearWeight
from engine.layers.moe import expert_matrices
from engine.layers.quantized_weight import dequantize
from engine.models.quantization.published_tensors import weight_bytes
from engine.models.registry import build_model
from engine.models.spec import load_spec
from engine.models.weight_files import check_weights
from engine.models.weights import LayerWeights, ModelWeights, load_weights, random_weights
from engine.ranks.rank import Rank
from load_tests.testbed.quantised_folders import DECODED_FORMS
from tests.engine.models.closeness import assert_same_logits
from tests.engine.models.hub_configs import HUB, REFUSED, Hub, arguments, compressed_config
from tests.engine.runner.step_driver import StepDriver
from tests.harness.quantised_folders import write_folders
from tests.harness.tiny_models import edit_config, reference_logits

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
EXPERTS = SIZES | {"moe_intermediate_size": 128}


def _folder(tmp_path: Path, hub: Hub) -> tuple[Path, Path]:
    """The folder, and one with what its numbers stand for."""
    sizes = EXPERTS if "Moe" in hub.architecture else SIZES
    quantised, stands_for = write_folders(tmp_path, hub.form, hub.architecture, sizes)
    path = quantised / "model.safetensors"
    tensors, whole = load_file(path), load_file(stands_for / "model.safetensors")
    for part in hub.dense:
        for name in [name for name in tensors if part in name]:
            del tensors[name]
        tensors |= {name: tensor for name, tensor in whole.items() if part in name}
    for change in hub.changes:
        change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    if hub.beside:
        edit_config(quantised, remove=("quantization_config",))
        (quantised / "hf_quant_config.json").write_text(json.dumps(hub.beside))
    else:
        edit_config(quantised, quantization_config=hub.config)
    return quantised, stands_for


def _load(folder: Path, **how: Any) -> ModelWeights:
    return load_weights(folder, load_spec(folder), dtype=torch.float32, device=CPU, **how)


def _matrix(weight: LinearWeight) -> torch.Tensor:
    if weight.data.dim() > 2:
        experts = expert_matrices(weight)
        return torch.stack([experts[index] for index in range(experts.shape[0])])
    return weight.data if weight.scales is None else dequantize(weight.data, weight.scales)


def _linears(layer: LayerWeights) -> list[LinearWeight]:
    return [layer.qkv, layer.output, layer.gate_up, layer.down]


def _assert_same_weights(ours: ModelWeights, theirs: ModelWeights) -> None:
    for layer, expected in zip(ours.layers, theirs.layers, strict=True):
        for weight, dense in zip(_linears(layer), _linears(expected), strict=True):
            assert torch.equal(_matrix(weight), dense.data)


@pytest.mark.parametrize("name", HUB)
def test_a_configuration_of_the_hub_is_read(name: str, tmp_path: Path) -> None:
    folder, stands_for = _folder(tmp_path, HUB[name])
    spec = load_spec(folder)
    assert spec.quantization is not None
    ours = _load(folder)
    _assert_same_weights(ours, _load(stands_for))
    is_made_matrix = spec.quantization.is_made_matrix
    assert (ours.layers[1].down.scales is None) == is_made_matrix


def test_groups_of_mxfp8_are_no_groups_of_inputs(tmp_path: Path) -> None:
    """Kernels round inputs in groups of 128, or a row at a time, so here not at all."""
    folder, _ = _folder(tmp_path, HUB["Qwen3-8B-MXFP8"])
    quantization = load_spec(folder).quantization
    assert quantization is not None
    assert not quantization.quantizes_activations


def test_ranks_share_scales_that_have_no_last_dimension(tmp_path: Path) -> None:
    folder, stands_for = _folder(tmp_path, HUB["FP8 an output, by ModelOpt"])
    for index in range(2):
        rank = Rank(index, 2)
        _assert_same_weights(_load(folder, rank=rank), _load(stands_for, rank=rank))


# ---- decoded when loaded -------------------------------------------------------------------------


@pytest.mark.parametrize("form", DECODED_FORMS)
def test_numbers_that_no_kernel_reads_are_made_matrices(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On every device, for ranks too, and with the bytes that are counted before."""
    sizes = SIZES | {"intermediate_size": 512, "attention_bias": True}
    folder, stands_for = write_folders(tmp_path, form, "LlamaForCausalLM", sizes)
    ours, theirs = _load(folder), _load(stands_for)
    assert "made matrices in torch.float32, with the memory" in caplog.text
    _assert_same_weights(ours, theirs)
    for index in range(2):
        rank = Rank(index, 2)
        _assert_same_weights(_load(folder, rank=rank), _load(stands_for, rank=rank))
    spec, dense = load_spec(folder), load_spec(stands_for)
    for keeps in (True, False):
        assert weight_bytes(spec, element_bytes=2, keeps_quantised=keeps) == weight_bytes(
            dense, element_bytes=2, keeps_quantised=keeps
        )
    drawn = random_weights(spec, dtype=torch.float32, device=CPU).layers[1].down
    assert drawn.scales is None
    assert 2e-4 < drawn.data.abs().max() < 1.1e-3


def test_a_map_that_describes_itself_otherwise_is_refused(tmp_path: Path) -> None:
    for index, (word, other, named) in enumerate(
        (
            (b'"blocksize": 64', b'"blocksize": 32', "blocks of 32"),
            (b"[128, 256]", b"[256, 128]", r"down_proj: a quant_state of \[256, 128\]"),
            (b'"shape"', b'"shapes"', "quant_state is not readable"),
        )
    ):
        sizes = SIZES | {"num_hidden_layers": 1}
        folder, _ = write_folders(tmp_path / str(index), "nf4", "LlamaForCausalLM", sizes)
        path = folder / "model.safetensors"
        tensors = load_file(path)
        name = "model.layers.0.mlp.down_proj.weight.quant_state.bitsandbytes__nf4"
        text = bytes(tensors[name].tolist()).replace(word, other)
        tensors[name] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        save_file(tensors, path, metadata={"format": "pt"})
        with pytest.raises(ConfigError, match=named):
            _load(folder)


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_logits_of_what_was_decoded_are_those_of_transformers(
    architecture: str, tmp_path: Path
) -> None:
    form = "gptq-int8" if architecture == "Qwen3ForCausalLM" else "ct-int8-channel"
    quantised, stands_for = write_folders(tmp_path, form, architecture, EXPERTS)
    tokens = torch.randint(131, (19,)).tolist()
    driver = StepDriver(build_model(quantised, dtype=torch.float32, device=CPU), seed=0)
    driver.admit(0, tokens)
    assert_same_logits(driver.logits_in_chunks(0, 11), reference_logits(stands_for, tokens))


# ---- a text model within a larger one ------------------------------------------------------------


@pytest.mark.parametrize("is_original", [True, False], ids=["published", "renamed"])
@pytest.mark.parametrize("entry", ["{}.layers.0.mlp.down_proj", r"re:{}[.]layers[.]0[.]mlp.*down"])
def test_modules_may_have_their_names_in_a_larger_model(
    entry: str, is_original: bool, tmp_path: Path
) -> None:
    """As Gemma 3 with vision is quantised; transformers 5 has its text behind `model`."""
    hub = Hub(form="ct-int4-32", architecture="Gemma3ForCausalLM", config={})
    folder, stands_for = _folder(tmp_path, hub)
    prefix = "language_model.model" if is_original else "model.language_model"
    path, whole = folder / "model.safetensors", load_file(stands_for / "model.safetensors")
    tensors = load_file(path)
    for name in [name for name in tensors if "layers.0.mlp.down" in name]:
        del tensors[name]
    tensors |= {name: t for name, t in whole.items() if "layers.0.mlp.down" in name}
    renamed = {prefix + name.removeprefix("model"): t for name, t in tensors.items()}
    renamed["vision_tower.encoder.layers.0.self_attn.k_proj.weight"] = torch.ones(2, 2)
    save_file(renamed, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    text = {key: value for key, value in config.items() if key != "architectures"}
    section = compressed_config("pack-quantized", arguments(4, "int", "group", group_size=32))
    section["ignore"] = ["language_model.lm_head", "re:vision_tower.*", entry.format(prefix)]
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    outer |= {"text_config": text, "quantization_config": section}
    (folder / "config.json").write_text(json.dumps(outer))
    ours = _load(folder)
    assert ours.layers[0].down.scales is None
    assert ours.layers[1].down.scales is not None
    _assert_same_weights(ours, _load(stands_for))


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_with_a_way_out(name: str, tmp_path: Path) -> None:
    config, named = REFUSED[name]
    folder, _ = _folder(tmp_path, Hub(form="ct-fp8-channel", config=config))
    with pytest.raises(ConfigError) as refused:
        check_weights(folder, load_spec(folder))
    for part in ["config.json", *named]:
        assert part in refused.value.message
