"""Writes one linear map in many formats, each packed by the format's own library.

    pip install compressed-tensors==0.20.0 auto-round==0.16.1 bitsandbytes==0.50.2
    pip install nvidia-modelopt==0.47.0 amd-quark==0.13
    python -m tests.engine.models.writers tests/engine/models/packed_by_writers.safetensors

Tests read that file (`test_packed_by_writers.py`) and need none of these libraries. A tensor is
named after its format and its suffix, and the file's metadata has each format's configuration.
"""

import importlib
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

NUM_OUTPUTS, NUM_INPUTS = 32, 128
_GROUP = 32
Packed = tuple[str, dict[str, Any], Mapping[str, Tensor]]  # format, configuration, tensors


def source() -> Tensor:
    """[outputs, inputs] fp32 between -1 and 1, which looks random and never changes."""
    places = torch.arange(NUM_OUTPUTS * NUM_INPUTS, dtype=torch.float64)
    return torch.sin(0.37 * places**2).float().view(NUM_OUTPUTS, NUM_INPUTS)


def _largest(per: int | None) -> Tensor:
    """Of `per` inputs, or of all of an output: [outputs, groups]."""
    return source().abs().view(NUM_OUTPUTS, -1, per or NUM_INPUTS).amax(2)


_IN_GROUPS = {"strategy": "group", "group_size": _GROUP}
_TOKENS = {"num_bits": 8, "strategy": "token", "dynamic": True}


def _compressed(
    name: str,
    packing: str,
    weights: dict[str, Any],
    tensors: dict[str, Tensor],
    inputs: dict[str, Any] | None = None,
) -> Packed:
    """tensors: the scales of the source, and what else the library takes."""
    library = importlib.import_module("compressed_tensors.quantization")
    compressors = importlib.import_module("compressed_tensors.compressors")
    scheme = library.QuantizationScheme(
        targets=["Linear"],
        weights=library.QuantizationArgs(**weights),
        input_activations=None if inputs is None else library.QuantizationArgs(**inputs),
    )
    config = library.QuantizationConfig(
        config_groups={"group_0": scheme},
        format=packing,
        ignore=["lm_head"],
        quantization_status="compressed",
    )
    compressor = compressors.BaseCompressor.get_value_from_registry(packing)
    packed = compressor.compress({"weight": source(), **tensors}, scheme)
    return name, json.loads(json.dumps(config.to_dict(), default=str)), packed


def _compressed_integers() -> Iterator[Packed]:
    for strategy, scales in (
        ("channel", _largest(None)),
        ("tensor", source().abs().max().view(1)),
    ):
        weights, scaled = {"num_bits": 8, "strategy": strategy}, {"weight_scale": scales / 127}
        yield _compressed(f"int8 {strategy}", "int-quantized", weights, scaled, _TOKENS)
    weights, scaled = {"num_bits": 8} | _IN_GROUPS, {"weight_scale": _largest(_GROUP) / 127}
    yield _compressed("int8 group", "int-quantized", weights, scaled, _TOKENS)
    for bits in (4, 8):
        half = 2 ** (bits - 1)
        for strategy, per in (("channel", None), ("group", _GROUP)):
            name = f"packed {bits} {strategy}"
            weights = {"num_bits": bits, "strategy": strategy, "group_size": per}
            scales = _largest(per) / (half - 1)
            yield _compressed(name, "pack-quantized", weights, {"weight_scale": scales})
            # The range is made half as wide again, on one side.
            zeros = torch.arange(scales.numel()).view(scales.shape) % (half // 2) - half // 4
            shifted = {"weight_scale": 1.5 * scales, "weight_zero_point": zeros.to(torch.int8)}
            weights = weights | {"symmetric": False}
            yield _compressed(f"{name} shifted", "pack-quantized", weights, shifted)


def _compressed_floats() -> Iterator[Packed]:
    eight, four = ({"num_bits": bits, "type": "float"} for bits in (8, 4))
    scaled = {"weight_scale": _largest(None) / 448}
    weights, tokens = eight | {"strategy": "channel"}, _TOKENS | {"type": "float"}
    yield _compressed("fp8 channel", "float-quantized", weights, scaled, tokens)
    exponents = torch.exp2(torch.ceil(torch.log2(_largest(32) / 448))).bfloat16()
    weights = eight | {"scale_dtype": "torch.uint8"} | _IN_GROUPS
    yield _compressed("mxfp8", "mxfp8-quantized", weights, {"weight_scale": exponents})
    scaled = {"weight_scale": torch.exp2(torch.ceil(torch.log2(_largest(32) / 6)))}
    yield _compressed("mxfp4", "mxfp4-pack-quantized", four | _IN_GROUPS, scaled)
    divisor = 6 * 448 / source().abs().max()
    scales = (_largest(16) / 6 * divisor).to(torch.float8_e4m3fn).float()
    weights = four | {"strategy": "tensor_group", "group_size": 16}
    scaled = {"weight_scale": scales, "weight_global_scale": divisor.view(1)}
    yield _compressed("nvfp4", "nvfp4-pack-quantized", weights, scaled)


def _auto_round() -> Iterator[Packed]:
    def map_of(weight: Tensor) -> torch.nn.Linear:
        linear = torch.nn.Linear(NUM_INPUTS, NUM_OUTPUTS, bias=False)
        linear.weight.data = weight
        return linear

    def zeros_and_scales(bits: int, *, is_symmetric: bool) -> tuple[int | Tensor, Tensor]:
        groups = source().view(NUM_OUTPUTS, -1, _GROUP)
        if is_symmetric:
            return 2 ** (bits - 1), (_largest(_GROUP) / (2 ** (bits - 1) - 1)).half().float()
        lowest, highest = groups.amin(2), groups.amax(2)
        scales = ((highest - lowest) / (2**bits - 1)).half().float()
        return torch.round(-lowest / scales), scales

    for module, packing in (
        ("qlinear_torch", "auto_round"),
        ("qlinear_torch_zp", "auto_round:auto_gptq"),
    ):
        library = importlib.import_module(f"auto_round_extension.torch.{module}")
        for bits in (4, 8):
            for is_symmetric in (True, False):
                zeros, scales = zeros_and_scales(bits, is_symmetric=is_symmetric)
                packed = library.QuantLinear(bits, _GROUP, NUM_INPUTS, NUM_OUTPUTS, False)
                packed.device = "cpu"
                packed.pack(map_of(source()), scales, zeros, None, device="cpu")
                config = _auto_round_config(bits, packing, is_symmetric=is_symmetric)
                name = f"{packing} {bits}" + " symmetric" * is_symmetric
                yield name, config, _three_of(packed)
    library = importlib.import_module("auto_round.export.export_to_awq.utils")
    zeros, scales = zeros_and_scales(4, is_symmetric=False)
    assert isinstance(zeros, Tensor), "it is asymmetric"
    turned = scales.T.contiguous(), zeros.T.contiguous()
    packed = library.WQLinear_GEMM.from_linear(map_of(source()), 4, _GROUP, False, *turned)
    config = _auto_round_config(4, "auto_round:auto_awq", is_symmetric=False)
    yield "auto_round:auto_awq", config, _three_of(packed)


def _auto_round_config(bits: int, packing: str, *, is_symmetric: bool) -> dict[str, Any]:
    return {
        "quant_method": "auto-round",
        "bits": bits,
        "group_size": _GROUP,
        "sym": is_symmetric,
        "data_type": "int",
        "packing_format": packing,
    }


def _three_of(packed: Any) -> dict[str, Tensor]:
    return {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales")}


def _bits_and_bytes() -> Iterator[Packed]:
    library = importlib.import_module("bitsandbytes.functional")
    for kind in ("nf4", "fp4"):
        for is_nested in (False, True):
            packed, state = library.quantize_4bit(
                source().bfloat16(), quant_type=kind, compress_statistics=is_nested
            )
            config = importlib.import_module("transformers").BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type=kind,
                bnb_4bit_use_double_quant=is_nested,
            )
            described = {f"weight.{name}": t for name, t in state.as_dict(packed=True).items()}
            name = f"bitsandbytes {kind}" + " nested" * is_nested
            yield name, config.to_dict(), {"weight": packed, **described}


def _modelopt() -> Iterator[Packed]:
    library = importlib.import_module("modelopt.torch.quantization.qtensor")
    scales = library.MXFP8QTensor.get_weights_scaling_factor(source())
    numbers = library.MXFP8QTensor.quantize_with_scale(source(), scales)
    config = {"quant_method": "modelopt", "ignore": ["lm_head"]}
    tensors = {"weight": numbers, "weight_scale": scales}
    yield "modelopt mxfp8", config | {"quant_algo": "MXFP8"}, tensors
    factor = source().abs().max() / (6 * 448)
    packed, scales, _ = library.NVFP4QTensor.quantize(
        source(), 16, None, factor, try_tensorrt=False
    )
    tensors = {"weight": packed._quantized_data, "weight_scale": scales, "weight_scale_2": factor}
    yield "modelopt nvfp4", config | {"quant_algo": "NVFP4"}, tensors


def _quark() -> Iterator[Packed]:
    library = importlib.import_module("quark.torch.utils.pack")
    exponents = torch.floor(torch.log2(_largest(32))) - 2
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    scaled = source() / torch.exp2(exponents).repeat_interleave(32, dim=1)
    nearest = sizes[(scaled.abs()[..., None] - sizes).abs().argmin(-1)] * scaled.sign()
    weight = {
        "dtype": "fp4",
        "qscheme": "per_group",
        "group_size": 32,
        "scale_format": "e8m0",
        "is_dynamic": False,
    }
    config = {
        "quant_method": "quark",
        "export": {"weight_format": "real_quantized", "pack_method": "reorder"},
        "global_quant_config": {"weight": weight},
        "exclude": ["lm_head"],
    }
    packed = library.create_pack_method("per_group", "fp4").pack(nearest, True)
    scales = (exponents + 127).to(torch.uint8)
    yield "quark mxfp4", config, {"weight": packed, "weight_scale": scales}


def main(path: str) -> None:
    tensors, configs = {}, {}
    writers = _auto_round, _bits_and_bytes, _modelopt, _quark
    for write in (_compressed_integers, _compressed_floats, *writers):
        for name, config, packed in write():
            configs[name] = json.dumps(config)
            for suffix, tensor in packed.items():
                tensors[f"{name}.{suffix}"] = tensor.detach().contiguous().clone()
    save_file(tensors, path, metadata=configs)


if __name__ == "__main__":
    main(sys.argv[1])
