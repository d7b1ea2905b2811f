"""Configurations of published models, as tables: what is read of each, and what is refused.

From the models' own config.json files, and from what the packages that made them write.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

Tensors = dict[str, torch.Tensor]
LAYERS = range(2)  # of the tiny models


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


def arguments(bits: int, kind: str, strategy: str, **more: object) -> dict[str, object]:
    common = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True}
    return _UNSAID | common | {"dynamic": False, "observer": "minmax"} | more


def compressed_config(
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

_FP8_IN_TILES: dict[str, object] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}

HUB: dict[str, Hub] = {
    "Qwen3-8B-FP8": Hub(
        form="fp8-block",
        architecture="Qwen3ForCausalLM",
        config=_FP8_IN_TILES,
    ),
    "Qwen3-30B-A3B-Instruct-2507-FP8": Hub(
        form="fp8-block",
        architecture="Qwen3MoeForCausalLM",
        config=_FP8_IN_TILES
        | {
            "modules_to_not_convert": ["lm_head", *_EXPERTS_OF_QWEN]
            + [f"model.layers.{layer}.input_layernorm" for layer in LAYERS],
        },
    ),
    "DeepSeek-V3.1": Hub(
        form="fp8-block",
        config=_FP8_IN_TILES | {"scale_fmt": "ue8m0"},
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
        config=compressed_config(
            "float-quantized", arguments(8, "float", "tensor"), arguments(8, "float", "tensor")
        ),
    ),
    "Qwen3-8B-FP8-dynamic": Hub(
        form="ct-fp8-channel",
        architecture="Qwen3ForCausalLM",
        config=compressed_config(
            "float-quantized", arguments(8, "float", "channel"), arguments(8, "float", **_BY_TOKEN)
        ),
    ),
    "Qwen3-30B-A3B-FP8-dynamic": Hub(
        form="ct-fp8-channel",
        architecture="Qwen3MoeForCausalLM",
        config=compressed_config(
            "float-quantized",
            arguments(8, "float", "channel"),
            arguments(8, "float", **_BY_TOKEN),
            ignore=["lm_head", *_EXPERTS_OF_QWEN],
            **_NEW,
        ),
    ),
    "Qwen3-8B-FP8-block": Hub(
        form="fp8-block",
        config=compressed_config(
            "float-quantized",
            arguments(8, "float", "block", block_structure=[128, 128]),
            arguments(8, "float", "group", group_size=128, dynamic=True),
            **_NEW,
        ),
        changes=(_renamed("weight_scale_inv", "weight_scale"),),
    ),
    "block_structure as a text": Hub(
        form="fp8-block",
        config=compressed_config(
            "float-quantized", arguments(8, "float", "block", block_structure="128x128")
        ),
        changes=(_renamed("weight_scale_inv", "weight_scale"),),
    ),
    "Llama-3.1-8B-Instruct-FP8-attention": Hub(
        form="ct-fp8-channel",
        config=compressed_config(
            "float-quantized",
            {},
            config_groups={
                "attention": {
                    "targets": ["LlamaAttention"],
                    "weights": None,
                    "input_activations": arguments(8, "float", "tensor"),
                    "output_activations": None,
                },
                "linear": {
                    "targets": ["Linear"],
                    "weights": arguments(8, "float", "channel"),
                    "input_activations": arguments(8, "float", **_BY_TOKEN),
                    "output_activations": None,
                },
            },
            kv_cache_scheme=arguments(8, "float", "tensor"),
        ),
        changes=(_with_scales_of_kv("k_scale", "v_scale", "q_scale"),),
    ),
    "Meta-Llama-3.1-8B-Instruct-quantized.w8a8": Hub(
        form="ct-int8-channel",
        config=compressed_config(
            "int-quantized", arguments(8, "int", "channel"), arguments(8, "int", **_BY_TOKEN)
        ),
    ),
    "W8A8 with static inputs": Hub(
        form="ct-int8-tensor",
        config=compressed_config(
            "int-quantized",
            arguments(8, "int", "tensor"),
            arguments(8, "int", "tensor", symmetric=False),
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
        form="ct-packed-int8",
        config=compressed_config("pack-quantized", arguments(8, "int", "channel")),
    ),
    "Meta-Llama-3.1-8B-Instruct-quantized.w4a16": Hub(
        form="ct-int4-32",
        config=compressed_config(
            "pack-quantized", arguments(4, "int", "group", group_size=32, actorder="weight"), **_NEW
        ),
    ),
    "Qwen3-8B-AWQ-4bit, by llm-compressor": Hub(
        form="ct-int4-128-asymmetric",
        architecture="Qwen3ForCausalLM",
        config=compressed_config(
            "pack-quantized", arguments(4, "int", "group", group_size=128, symmetric=False), **_NEW
        ),
    ),
    "W4A8, by llm-compressor": Hub(
        form="ct-int4-32",
        config=compressed_config(
            "pack-quantized",
            arguments(4, "int", "group", group_size=32),
            arguments(8, "int", **_BY_TOKEN),
        ),
    ),
    "Kimi-K2-Thinking": Hub(
        form="ct-int4-32",
        architecture="Qwen3MoeForCausalLM",
        config=compressed_config(
            "pack-quantized",
            arguments(4, "int", "group", group_size=32),
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
        config=compressed_config(
            "nvfp4-pack-quantized",
            arguments(4, "float", "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn"),
            arguments(4, "float", "tensor_group", group_size=16, dynamic="local"),
            **_NEW,
        ),
    ),
    "Qwen3-8B-MXFP4A16": Hub(
        form="ct-mxfp4",
        config=compressed_config(
            "mxfp4-pack-quantized",
            arguments(4, "float", "group", group_size=32, scale_dtype="torch.uint8"),
        ),
    ),
    "Qwen3-8B-MXFP8": Hub(
        form="ct-mxfp8",
        config=compressed_config(
            "mxfp8-quantized",
            arguments(8, "float", "group", group_size=32, scale_dtype="torch.uint8"),
            arguments(8, "float", "group", group_size=32, dynamic=True),
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
    "ModelOpt's own file within config.json": Hub(
        form="modelopt-nvfp4",
        config={
            "quant_method": "modelopt",
            "quantization": {
                "quant_algo": "NVFP4",
                "kv_cache_quant_algo": "FP8",
                "group_size": 16,
                "exclude_modules": ["lm_head"],
            },
        },
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
    "Qwen3-14B-unsloth-bnb-4bit": Hub(
        form="nf4-nested",
        architecture="Qwen3ForCausalLM",
        config={
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_skip_modules": ["lm_head", "model.layers.0.mlp", "multi_modal_projector"],
            "llm_int8_threshold": 6.0,
            "load_in_4bit": True,
            "quant_method": "bitsandbytes",
        },
        dense=("layers.0.mlp",),
    ),
    "Llama-3.3-70B-Instruct-MXFP4": Hub(
        form="ct-mxfp4",
        config=_quark(_QUARK_FP4, _QUARK_FP4 | {"is_dynamic": True}),
        changes=(_renamed("weight_packed", "weight"),),
    ),
}


# ---- what is refused: the section, and what the error names --------------------------------------

_INSTEAD = "model.quantization: fp8"
_MIXED = {"quant_algo": "MIXED_PRECISION", "quant_method": "modelopt", "quantized_layers": {}}
_AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
REFUSED: dict[str, tuple[dict[str, object], list[str]]] = {
    "LLM.int8": (
        {"load_in_4bit": False, "load_in_8bit": True, "quant_method": "bitsandbytes"},
        ["load_in_4bit", "LLM.int8", _INSTEAD],
    ),
    "bitsandbytes in bfloat16": (
        {
            "bnb_4bit_quant_storage": "bfloat16",
            "bnb_4bit_quant_type": "nf4",
            "load_in_4bit": True,
            "quant_method": "bitsandbytes",
        },
        ["bnb_4bit_quant_storage", "bfloat16", "uint8"],
    ),
    "Qwen3-8B-FP8, by torchao": (
        {"quant_method": "torchao", "quant_type": {"default": {}}, "quant_type_version": 2},
        ["quant_method", "torchao", _INSTEAD],
    ),
    "hqq": ({"quant_method": "hqq", "quant_config": {}}, ["hqq", _INSTEAD]),
    "aqlm": ({"quant_method": "aqlm", "nbits_per_codebook": 16}, ["aqlm", _INSTEAD]),
    "exl3": ({"quant_method": "exl3", "bits": 4.0}, ["exl3", _INSTEAD]),
    "ModelOpt's of several schemes": (_MIXED, ["quant_algo", "MIXED_PRECISION", "NVFP4", _INSTEAD]),
    "ModelOpt's without an algorithm": (
        {"quant_method": "modelopt", "ignore": ["lm_head"]},
        ["quant_algo", "NVFP4", _INSTEAD],
    ),
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
    "AutoRound's of rotated inputs": (
        _AUTO_ROUND | {"rotation_config": {"hadamard_type": "quarot_hadamard"}},
        ["rotation_config", "not rotated", _INSTEAD],
    ),
    "AutoRound's of inputs rotated by SpinQuant": (
        _AUTO_ROUND | {"spinquant_config": {"r1": True}},
        ["spinquant_config", "not rotated", _INSTEAD],
    ),
    "AutoRound's FP8": (
        _AUTO_ROUND | {"packing_format": "auto_round:fp8_static"},
        ["packing_format", "fp8_static", "auto_round:auto_awq"],
    ),
    "W4A16 with 3 bits": (
        compressed_config("pack-quantized", arguments(3, "int", "group", group_size=128)),
        ["num_bits 3", "4, 8"],
    ),
    "W8A8 of floats and integers": (
        compressed_config(
            "int-quantized", arguments(8, "int", "channel"), arguments(8, "float", "token")
        ),
        ["input_activations", "int"],
    ),
    "asymmetric W8A8": (
        compressed_config("int-quantized", arguments(8, "int", "channel", symmetric=False)),
        ["symmetric", "int-quantized"],
    ),
    "attention alone": (
        compressed_config(
            "float-quantized", {}, config_groups={"a": {"targets": ["LlamaAttention"]}}
        ),
        ["config_groups", "no group of weights"],
    ),
}
