"""Configurations as they stand on the hub: each is read, or refused with a line that says why.

Each is put into a tiny folder whose numbers are laid out as that publisher lays them out; what is
loaded has to be what the numbers stand for, which the writer computed in float64.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ConfigError
from engine.layers.linear import LinearWeight
from engine.layers.moe import expert_matrices
from engine.layers.quantized_weight import dequantize
from engine.models.quantized_tensors import weight_bytes
from engine.models.registry import build_model
from engine.models.spec import load_spec
from engine.models.weight_files import check_weights
from engine.models.weights import LayerWeights, ModelWeights, load_weights, random_weights
from engine.ranks.rank import Rank
from load_tests.testbed.quantised_folders import DECODED_FORMS
from tests.engine.models.closeness import assert_same_logits
from tests.engine.runner.step_driver import StepDriver
from tests.harness.quantised_folders import write_folders
from tests.harness.tiny_models import edit_config, reference_logits

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
EXPERTS = SIZES | {"moe_intermediate_size": 128}
LAYERS = range(2)


def _renamed(old: str, new: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(f".{old}")]:
            tensors[name.removesuffix(old) + new] = tensors.pop(name)

    return change


def _reshaped(suffix: str, shape: tuple[int, ...]) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(f".{suffix}")]:
            tensors[name] = tensors[name].reshape(shape)

    return change


def _with_scales_of_kv(*names: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for layer in LAYERS:
            tensors |= {f"model.layers.{layer}.self_attn.{n}": torch.ones(1) for n in names}

    return change


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """What a publisher's config.json says, and how its tensors differ from the form's."""

    form: str
    config: dict[str, object]
    architecture: str = "LlamaForCausalLM"
    changes: tuple[Callable[[Tensors], None], ...] = ()
    dense: tuple[str, ...] = ()  # parts of names of modules that are not quantised
    beside: Mapping[str, object] = field(default_factory=dict)  # hf_quant_config.json


# ---- what compressed-tensors writes out in full --------------------------------------------------

_UNSAID = {"actorder": None, "block_structure": None, "group_size": None, "observer_kwargs": {}}


def _args(bits: int, kind: str, strategy: str, **more: object) -> dict[str, object]:
    common = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True}
    return _UNSAID | common | {"dynamic": False, "observer": "minmax"} | more


def _compressed(
    layout: str,
    weights: dict[str, object],
    inputs: dict[str, object] | None = None,
    **more: object,
) -> dict[str, object]:
    group = {"weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "config_groups": {"group_0": group | {"targets": ["Linear"]}},
        "format": layout,
        "global_compression_ratio": 1.239290831149584,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        **more,
    }


_BY_TOKEN = {"strategy": "token", "dynamic": True, "observer": None}
_NEW = {"sparsity_config": {}, "transform_config": {}, "version": "0.12.2"}
_EXPERTS_OF_QWEN = [f"model.layers.{layer}.mlp.gate" for layer in LAYERS]


# ---- what Quark writes ---------------------------------------------------------------------------

_QUARK_FP8 = {
    "block_size": None,
    "ch_axis": None,
    "dtype": "fp8_e4m3",
    "group_size": None,
    "is_dynamic": False,
    "observer_cls": "PerTensorMinMaxObserver",
    "qscheme": "per_tensor",
    "round_method": "half_even",
    "scale_type": "float",
    "symmetric": None,
}
_QUARK_FP4 = _QUARK_FP8 | {
    "ch_axis": -1,
    "dtype": "fp4",
    "group_size": 32,
    "observer_cls": "PerBlockMXObserver",
    "qscheme": "per_group",
    "scale_format": "e8m0",
}


def _quark(
    weight: dict[str, object], inputs: dict[str, object], kv: tuple[str, ...] = ()
) -> dict[str, object]:
    general = {"bias": None, "input_tensors": inputs, "output_tensors": None, "weight": weight}
    return {
        "algo_config": None,
        "exclude": ["lm_head"],
        "export": {
            "kv_cache_group": list(kv),
            "pack_method": "reorder",
            "weight_format": "real_quantized",
            "weight_merge_groups": None,
        },
        "global_quant_config": {**general, "target_device": None},
        "layer_quant_config": {name: {**general, "output_tensors": _QUARK_FP8} for name in kv},
        "layer_type_quant_config": {},
        "quant_method": "quark",
        "quant_mode": "eager_mode",
        "softmax_quant_spec": None,
        "version": "0.8",
    }


# ---- the hub -------------------------------------------------------------------------------------

HUB: dict[str, Hub] = {
    "Qwen3-8B-FP8": Hub(
        form="fp8-block",
        architecture="Qwen3ForCausalLM",
        config={
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
    ),
    "Qwen3-30B-A3B-Instruct-2507-FP8": Hub(
        form="fp8-block",
        architecture="Qwen3MoeForCausalLM",
        config={
            "activation_scheme": "dynamic",
            "modules_to_not_convert": ["lm_head", *_EXPERTS_OF_QWEN]
            + [f"model.layers.{layer}.input_layernorm" for layer in LAYERS],
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
    ),
    "DeepSeek-V3.1": Hub(
        form="fp8-block",
        config={
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
    ),
    "Ministral-FP8": Hub(
        form="fp8-tensor",
        architecture="MistralForCausalLM",
        config={
            "activation_scheme": "static",
            "dequantize": False,
            "modules_to_not_convert": ["model.vision_tower", "lm_head"],
            "quant_method": "fp8",
            "weight_block_size": None,
        },
        changes=(
            _renamed("weight_scale", "weight_scale_inv"),
            _renamed("input_scale", "activation_scale"),
        ),
    ),
    "Llama-3.1-405B-Instruct-FP8": Hub(
        form="ct-fp8-channel",
        config={
            "activation_scale_ub": 1200.0,
            "modules_to_not_convert": [
                f"model.layers.{layer}.self_attn.{x}_proj" for layer in LAYERS for x in "qkvo"
            ]
            + [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")],
            "quant_method": "fbgemm_fp8",
        },
        dense=("self_attn", "layers.0.mlp"),
    ),
    "Meta-Llama-3-8B-Instruct-FP8-KV": Hub(
        form="fp8-tensor",
        config={
            "activation_scheme": "static",
            "ignored_layers": ["lm_head"],
            "kv_cache_scheme": "static",
            "quant_method": "fp8",
        },
        changes=(_with_scales_of_kv("k_scale", "v_scale"),),
    ),
    "Meta-Llama-3.1-8B-Instruct-FP8": Hub(
        form="ct-fp8-tensor",
        config=_compressed(
            "float-quantized", _args(8, "float", "tensor"), _args(8, "float", "tensor")
        ),
    ),
    "Qwen3-8B-FP8-dynamic": Hub(
        form="ct-fp8-channel",
        architecture="Qwen3ForCausalLM",
        config=_compressed(
            "float-quantized", _args(8, "float", "channel"), _args(8, "float", **_BY_TOKEN)
        ),
    ),
    "Qwen3-30B-A3B-FP8-dynamic": Hub(
        form="ct-fp8-channel",
        architecture="Qwen3MoeForCausalLM",
        config=_compressed(
            "float-quantized",
            _args(8, "float", "channel"),
            _args(8, "float", **_BY_TOKEN),
            ignore=["lm_head", *_EXPERTS_OF_QWEN],
            **_NEW,
        ),
    ),
    "Qwen3-8B-FP8-block": Hub(
        form="fp8-block",
        config=_compressed(
            "float-quantized",
            _args(8, "float", "block", block_structure=[128, 128]),
            _args(8, "float", "group", group_size=128, dynamic=True),
            **_NEW,
        ),
        changes=(_renamed("weight_scale_inv", "weight_scale"),),
    ),
    "block_structure as a text": Hub(
        form="fp8-block",
        config=_compressed(
            "float-quantized", _args(8, "float", "block", block_structure="128x128")
        ),
        changes=(_renamed("weight_scale_inv", "weight_scale"),),
    ),
    "Llama-3.1-8B-Instruct-FP8-attention": Hub(
        form="ct-fp8-channel",
        config=_compressed(
            "float-quantized",
            {},
            config_groups={
                "attention": {
                    "targets": ["LlamaAttention"],
                    "weights": None,
                    "input_activations": _args(8, "float", "tensor"),
                    "output_activations": None,
                },
                "linear": {
                    "targets": ["Linear"],
                    "weights": _args(8, "float", "channel"),
                    "input_activations": _args(8, "float", **_BY_TOKEN),
                    "output_activations": None,
                },
            },
            kv_cache_scheme=_args(8, "float", "tensor"),
        ),
        changes=(_with_scales_of_kv("k_scale", "v_scale", "q_scale"),),
    ),
    "Meta-Llama-3.1-8B-Instruct-quantized.w8a8": Hub(
        form="ct-int8-channel",
        config=_compressed(
            "int-quantized", _args(8, "int", "channel"), _args(8, "int", **_BY_TOKEN)
        ),
    ),
    "W8A8 with static inputs": Hub(
        form="ct-int8-tensor",
        config=_compressed(
            "int-quantized",
            _args(8, "int", "tensor"),
            _args(8, "int", "tensor", symmetric=False),
        ),
        changes=(
            lambda tensors: tensors.update(
                {
                    name.replace("weight_scale", f"input_{what}"): torch.ones(1)
                    for name in list(tensors)
                    if name.endswith(".weight_scale")
                    for what in ("scale", "zero_point")
                }
            ),
        ),
    ),
    "Meta-Llama-3.1-8B-Instruct-quantized.w8a16": Hub(
        form="ct-packed-int8", config=_compressed("pack-quantized", _args(8, "int", "channel"))
    ),
    "Meta-Llama-3.1-8B-Instruct-quantized.w4a16": Hub(
        form="ct-int4-32",
        config=_compressed(
            "pack-quantized", _args(4, "int", "group", group_size=32, actorder="weight"), **_NEW
        ),
    ),
    "Qwen3-8B-AWQ-4bit, by llm-compressor": Hub(
        form="ct-int4-128-asymmetric",
        architecture="Qwen3ForCausalLM",
        config=_compressed(
            "pack-quantized", _args(4, "int", "group", group_size=128, symmetric=False), **_NEW
        ),
    ),
    "W4A8, by llm-compressor": Hub(
        form="ct-int4-32",
        config=_compressed(
            "pack-quantized",
            _args(4, "int", "group", group_size=32),
            _args(8, "int", **_BY_TOKEN),
        ),
    ),
    "Kimi-K2-Thinking": Hub(
        form="ct-int4-32",
        architecture="Qwen3MoeForCausalLM",
        config=_compressed(
            "pack-quantized",
            _args(4, "int", "group", group_size=32),
            ignore=[
                "lm_head",
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
            ],
        ),
        dense=("self_attn",),
    ),
    "Qwen3-8B-NVFP4": Hub(
        form="ct-nvfp4",
        architecture="Qwen3ForCausalLM",
        config=_compressed(
            "nvfp4-pack-quantized",
            _args(4, "float", "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn"),
            _args(4, "float", "tensor_group", group_size=16, dynamic="local"),
            **_NEW,
        ),
    ),
    "Qwen3-8B-MXFP4A16": Hub(
        form="ct-mxfp4",
        config=_compressed(
            "mxfp4-pack-quantized",
            _args(4, "float", "group", group_size=32, scale_dtype="torch.uint8"),
        ),
    ),
    "Qwen3-8B-MXFP8": Hub(
        form="ct-mxfp8",
        config=_compressed(
            "mxfp8-quantized",
            _args(8, "float", "group", group_size=32, scale_dtype="torch.uint8"),
            _args(8, "float", "group", group_size=32, dynamic=True),
            **_NEW,
        ),
    ),
    "Qwen2.5-7B-Instruct-AWQ": Hub(
        form="awq",
        architecture="Qwen2ForCausalLM",
        config={
            "bits": 4,
            "group_size": 64,
            "modules_to_not_convert": None,
            "quant_method": "awq",
            "version": "gemm",
            "zero_point": True,
        },
    ),
    "Qwen3-30B-A3B-AWQ, by GPTQModel": Hub(
        form="awq",
        architecture="Qwen3MoeForCausalLM",
        config={
            "bits": 4,
            "checkpoint_format": "gemm",
            "desc_act": False,
            "format": "gemm",
            "group_size": 64,
            "lm_head": False,
            "method": "awq",
            "modules_to_not_convert": ["model.layers.0."],
            "pack_dtype": "int32",
            "quant_method": "awq",
            "sym": True,
            "zero_point": True,
        },
        dense=("layers.0.",),
    ),
    "Qwen2.5-7B-Instruct-GPTQ-Int4": Hub(
        form="gptq",
        architecture="Qwen2ForCausalLM",
        config={
            "batch_size": 1,
            "bits": 4,
            "block_name_to_quantize": None,
            "damp_percent": 0.01,
            "dataset": None,
            "desc_act": False,
            "exllama_config": {"version": 1},
            "group_size": 128,
            "modules_in_block_to_quantize": None,
            "quant_method": "gptq",
            "sym": True,
            "true_sequential": True,
        },
    ),
    "Qwen2.5-7B-Instruct-GPTQ-Int8": Hub(
        form="gptq-int8",
        architecture="Qwen2ForCausalLM",
        config={
            "bits": 8,
            "damp_percent": 0.01,
            "desc_act": True,
            "group_size": 32,
            "model_file_base_name": "model",
            "model_name_or_path": None,
            "quant_method": "gptq",
            "static_groups": False,
            "sym": True,
            "true_sequential": True,
        },
    ),
    "by GPTQModel": Hub(
        form="gptq-v2-order",
        config={
            "bits": 4,
            "desc_act": True,
            "dynamic": {},
            "format": "gptq_v2",
            "group_size": 64,
            "lm_head": False,
            "meta": {"quantizer": ["gptqmodel:7.7.0"], "damp_percent": 0.05},
            "method": "gptq",
            "pack_dtype": "int32",
            "quant_method": "gptq",
            "sym": True,
        },
    ),
    "Qwen3-8B-int4-AutoRound": Hub(
        form="gptq",
        architecture="Qwen3ForCausalLM",
        config={
            "autoround_version": "0.5.1",
            "bits": 4,
            "block_name_to_quantize": "model.layers",
            "data_type": "int",
            "extra_config": {
                "model.layers.0.mlp.down_proj": {"bits": 16, "data_type": "float"},
                r"model\.layers\.1\.self_attn.*": {"bits": 16},
            },
            "group_size": 128,
            "iters": 1000,
            "packing_format": "auto_round:auto_gptq",
            "quant_method": "auto-round",
            "sym": True,
        },
        dense=("layers.0.mlp.down_proj", "layers.1.self_attn"),
    ),
    "an asymmetric one by AutoRound": Hub(
        form="gptq-v2-order",
        config={
            "bits": 4,
            "group_size": 64,
            "packing_format": "auto_round",
            "quant_method": "intel/auto-round",
            "sym": False,
        },
    ),
    "Qwen2.5-7B-Instruct-int4-AutoRound-awq": Hub(
        form="awq",
        config={
            "bits": 4,
            "group_size": 64,
            "packing_format": "auto_round:auto_awq",
            "quant_method": "auto-round",
            "sym": False,
            "to_quant_block_names": None,
        },
    ),
    "Llama-3.1-8B-Instruct-FP8, by ModelOpt": Hub(
        form="modelopt-fp8",
        config={},
        beside={
            "producer": {"name": "modelopt", "version": "0.15.1"},
            "quantization": {
                "quant_algo": "FP8",
                "kv_cache_quant_algo": "FP8",
                "exclude_modules": ["lm_head"],
            },
        },
        changes=(_with_scales_of_kv("k_proj.k_scale", "v_proj.v_scale"),),
    ),
    "Qwen3-30B-A3B-FP4, by ModelOpt": Hub(
        form="modelopt-nvfp4",
        architecture="Qwen3MoeForCausalLM",
        config={},
        beside={
            "producer": {"name": "modelopt", "version": "0.29.0"},
            "quantization": {
                "quant_algo": "NVFP4",
                "kv_cache_quant_algo": None,
                "group_size": 16,
                "exclude_modules": ["lm_head", *_EXPERTS_OF_QWEN],
            },
        },
    ),
    "Qwen3-8B-NVFP4, by ModelOpt": Hub(
        form="modelopt-nvfp4",
        architecture="Qwen3ForCausalLM",
        config={
            "config_groups": {
                "group_0": {
                    "input_activations": {
                        "dynamic": False,
                        "num_bits": 4,
                        "type": "float",
                        "group_size": 16,
                    },
                    "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
                    "targets": ["Linear"],
                }
            },
            "ignore": ["lm_head", "model.layers.*.self_attn", "model.layers.0.mlp*"],
            "quant_algo": "NVFP4",
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
            "producer": {"name": "modelopt", "version": "0.35.0"},
        },
        dense=("self_attn", "layers.0.mlp"),
    ),
    "FP8 an output, by ModelOpt": Hub(
        form="ct-fp8-channel",
        config={
            "ignore": ["lm_head"],
            "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN",
            "quant_method": "modelopt",
        },
        changes=(_reshaped("weight_scale", (-1,)),),
    ),
    "MXFP8, by ModelOpt": Hub(
        form="ct-mxfp8",
        config={"ignore": ["lm_head"], "quant_algo": "MXFP8", "quant_method": "modelopt"},
    ),
    "Llama-3.1-8B-Instruct-FP8-KV, by Quark": Hub(
        form="modelopt-fp8",
        config=_quark(_QUARK_FP8, _QUARK_FP8, ("*k_proj", "*v_proj")),
        changes=(_with_scales_of_kv("k_proj.output_scale", "v_proj.output_scale"),),
    ),
    "FP8 an output, by Quark": Hub(
        form="ct-fp8-channel",
        config=_quark(
            _QUARK_FP8 | {"qscheme": "per_channel", "ch_axis": 0},
            _QUARK_FP8 | {"qscheme": "per_channel", "ch_axis": 1, "is_dynamic": True},
        ),
        changes=(_reshaped("weight_scale", (-1,)),),
    ),
    "Llama-3.3-70B-Instruct-MXFP4": Hub(
        form="ct-mxfp4",
        config=_quark(_QUARK_FP4, _QUARK_FP4 | {"is_dynamic": True}),
        changes=(_renamed("weight_packed", "weight"),),
    ),
}


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


def test_ranks_share_scales_that_have_no_last_dimension(tmp_path: Path) -> None:
    folder, stands_for = _folder(tmp_path, HUB["FP8 an output, by ModelOpt"])
    for index in range(2):
        rank = Rank(index, 2)
        _assert_same_weights(_load(folder, rank=rank), _load(stands_for, rank=rank))


# ---- 8-bit integers ------------------------------------------------------------------------------


@pytest.mark.parametrize("form", DECODED_FORMS)
def test_integers_of_8_bits_are_made_matrices(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On every device, for ranks too, and with the bytes that are counted before."""
    sizes = SIZES | {"intermediate_size": 512, "attention_bias": True}
    folder, stands_for = write_folders(tmp_path, form, "LlamaForCausalLM", sizes)
    ours, theirs = _load(folder), _load(stands_for)
    assert "made matrices in torch.float32" in caplog.text
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


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_logits_of_8_bits_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
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
    section = _compressed("pack-quantized", _args(4, "int", "group", group_size=32))
    section["ignore"] = ["language_model.lm_head", "re:vision_tower.*", entry.format(prefix)]
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    outer |= {"text_config": text, "quantization_config": section}
    (folder / "config.json").write_text(json.dumps(outer))
    ours = _load(folder)
    assert ours.layers[0].down.scales is None
    assert ours.layers[1].down.scales is not None
    _assert_same_weights(ours, _load(stands_for))


# ---- what is refused -----------------------------------------------------------------------------

_INSTEAD = "model.quantization: fp8"
_MIXED = {"quant_algo": "MIXED_PRECISION", "quant_method": "modelopt", "quantized_layers": {}}
_AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
REFUSED: dict[str, tuple[dict[str, object], list[str]]] = {
    "Qwen3-14B-unsloth-bnb-4bit": (
        {
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "llm_int8_skip_modules": ["lm_head"],
            "load_in_4bit": True,
            "quant_method": "bitsandbytes",
        },
        ["quant_method", "bitsandbytes", _INSTEAD],
    ),
    "Qwen3-8B-FP8, by torchao": (
        {"quant_method": "torchao", "quant_type": {"default": {}}, "quant_type_version": 2},
        ["quant_method", "torchao", _INSTEAD],
    ),
    "hqq": ({"quant_method": "hqq", "quant_config": {}}, ["hqq", _INSTEAD]),
    "aqlm": ({"quant_method": "aqlm", "nbits_per_codebook": 16}, ["aqlm", _INSTEAD]),
    "exl3": ({"quant_method": "exl3", "bits": 4.0}, ["exl3", _INSTEAD]),
    "ModelOpt's of several schemes": (_MIXED, ["quant_algo", "MIXED_PRECISION", "NVFP4", _INSTEAD]),
    "ModelOpt's FP8_PB_WO": (
        {"quant_algo": "fp8_pb_wo", "quant_method": "modelopt"},
        ["quant_algo", "fp8_pb_wo", "MXFP8", _INSTEAD],
    ),
    "Quark's INT4": (
        _quark(_QUARK_FP8 | {"dtype": "uint4", "qscheme": "per_group"}, _QUARK_FP8),
        ["dtype", "'uint4' per_group", "fp8_e4m3", _INSTEAD],
    ),
    "Quark's of several schemes": (
        _quark(_QUARK_FP8, _QUARK_FP8)
        | {"layer_quant_config": {"*down_proj": {"weight": _QUARK_FP4}}},
        ["layer_quant_config.*down_proj", "one scheme"],
    ),
    "AutoRound's MXFP4": (
        _AUTO_ROUND | {"data_type": "mx_fp"},
        ["data_type", "mx_fp", "int"],
    ),
    "AutoRound's of several schemes": (
        _AUTO_ROUND | {"extra_config": {"model.layers.1.mlp.up_proj": {"bits": 8}}},
        ["extra_config", "up_proj", "one scheme"],
    ),
    "AutoRound's FP8": (
        _AUTO_ROUND | {"packing_format": "auto_round:fp8_static"},
        ["packing_format", "fp8_static", "auto_round:auto_awq"],
    ),
    "W4A16 with 3 bits": (
        _compressed("pack-quantized", _args(3, "int", "group", group_size=128)),
        ["num_bits 3", "4, 8"],
    ),
    "W8A8 of floats and integers": (
        _compressed("int-quantized", _args(8, "int", "channel"), _args(8, "float", "token")),
        ["input_activations", "int"],
    ),
    "asymmetric W8A8": (
        _compressed("int-quantized", _args(8, "int", "channel", symmetric=False)),
        ["symmetric", "int-quantized"],
    ),
    "attention alone": (
        _compressed("float-quantized", {}, config_groups={"a": {"targets": ["LlamaAttention"]}}),
        ["config_groups", "no group of weights"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_with_a_way_out(name: str, tmp_path: Path) -> None:
    config, named = REFUSED[name]
    folder, _ = _folder(tmp_path, Hub(form="ct-fp8-channel", config=config))
    with pytest.raises(ConfigError) as refused:
        check_weights(folder, load_spec(folder))
    for part in ["config.json", *named]:
        assert part in refused.value.message
