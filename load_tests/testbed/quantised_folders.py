"""Writes quantised model folders from an unquantised one, in every published layout that is read.

Written from the formats' descriptions, in float64 with NumPy, and independent of the reader: every
number is computed here and so is what it stands for. Rounding is to the nearest, without
calibration: accuracy is that of the formats, not of the best published weights.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

Array = NDArray[Any]
_MAX_FP8 = 448.0
_BF16 = torch.bfloat16
ONE_OF_EACH = 0x11111111  # a word of eight ones
_FOUR_ONES = 0x01010101
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # bits 4 i of a word hold this output of eight
_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_MIXTRAL_LINEARS = ("w1", "w2", "w3")
_LATENT_LINEARS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
_ALL_LINEARS = _LINEARS + _MIXTRAL_LINEARS + _LATENT_LINEARS


@dataclass(frozen=True, slots=True)
class Published:
    """A quantised linear map: suffix -> tensor, and the matrix it stands for, float64."""

    tensors: dict[str, torch.Tensor]
    matrix: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A layout with its settings, `quantization_config` included."""

    config: dict[str, object]
    # (matrix, a generator, the order of inputs or None) -> what is published
    publish: Callable[[Array, np.random.Generator], Published]
    # Sizes must be multiples of this.
    multiple: int = 1
    section: str = field(default="quantization_config")


# ---- numbers -------------------------------------------------------------------------------------


def e4m3_values() -> Array:
    """What the 256 bytes stand for in e4m3 without infinities (OFP8): the last of a sign is NaN."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    values = np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    values[(codes & 127) == 127] = np.nan
    return np.where(codes < 128, values, -values)


_POSITIVE = e4m3_values()[:127]  # ascending


def to_e4m3(numbers: Array) -> Array:
    """The bytes of the nearest e4m3 numbers, ties to even; uint8."""
    size = np.minimum(np.abs(numbers), _MAX_FP8)
    above = np.clip(np.searchsorted(_POSITIVE, size), 1, 126)
    to_low, to_high = size - _POSITIVE[above - 1], _POSITIVE[above] - size
    is_low = (to_low < to_high) | ((to_low == to_high) & (above % 2 == 1))
    return (np.where(is_low, above - 1, above) | np.where(numbers < 0, 128, 0)).astype(np.uint8)


def _fp8_tensor(codes: Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(codes)).view(torch.float8_e4m3fn)


def _stored(values: Array, dtype: torch.dtype) -> tuple[torch.Tensor, Array]:
    """The tensor that holds `values`, and what they are once they are rounded to it."""
    tensor = torch.from_numpy(np.ascontiguousarray(values)).to(dtype)
    return tensor, tensor.double().numpy()


def pack_words(numbers: Array, axis: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Numbers in words along `axis`: eight of 0 to 15, or four of 0 to 255 where `order` has four.

    The lowest bits hold number `order[0]`, and so on.
    """
    per_word = len(order)
    moved = np.moveaxis(numbers.astype(np.uint32), axis, -1)
    grouped = moved.reshape(*moved.shape[:-1], -1, per_word)
    words = np.zeros(grouped.shape[:-1], dtype=np.uint32)
    for place, index in enumerate(order):
        words |= grouped[..., index] << np.uint32(32 // per_word * place)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32))


def _spread(values: Array, groups: Array) -> Array:
    """[out, groups] -> [out, in]."""
    return values[:, groups]


# ---- FP8 -----------------------------------------------------------------------------------------


def _fp8(
    tile: tuple[int | None, int | None],
    *,
    scale_name: str = "weight_scale",
    dtype: torch.dtype = torch.float32,
    tensor_shape: tuple[int, ...] = (),  # of the scale of a whole tensor
    has_input_scale: bool = False,
) -> Callable[[Array, np.random.Generator], Published]:
    def publish(matrix: Array, _: np.random.Generator) -> Published:
        num_rows, num_columns = matrix.shape
        rows, columns = tile[0] or num_rows, tile[1] or num_columns
        height, width = -(-num_rows // rows), -(-num_columns // columns)
        padded = np.zeros((height * rows, width * columns))
        padded[:num_rows, :num_columns] = np.abs(matrix)
        largest = padded.reshape(height, rows, width, columns).max(axis=(1, 3))
        scale, used = _stored(largest / _MAX_FP8, dtype)
        spread = used.repeat(rows, axis=0)[:num_rows].repeat(columns, axis=1)[:, :num_columns]
        codes = to_e4m3(matrix / spread)
        if tile == (None, None):
            scale = scale.reshape(tensor_shape)
        tensors = {"weight": _fp8_tensor(codes), scale_name: scale}
        if has_input_scale:
            tensors["input_scale"] = torch.tensor(0.25)
        return Published(tensors, e4m3_values()[codes] * spread)

    return publish


def _mxfp8(matrix: Array, _: np.random.Generator) -> Published:
    """Scales by OCP's MX specification: the largest number's power of two becomes e4m3's, 256."""
    groups = matrix.reshape(len(matrix), -1, 32)
    largest = np.maximum(np.abs(groups).max(axis=2), 2.0**-110)
    exponent = np.floor(np.log2(largest)) - 8
    spread = (2.0**exponent)[:, :, None]
    codes = to_e4m3(groups / spread)
    numbers = (e4m3_values()[codes] * spread).reshape(matrix.shape)
    scale = torch.from_numpy((exponent + 127).astype(np.uint8))
    return Published(
        {"weight": _fp8_tensor(codes.reshape(matrix.shape)), "weight_scale": scale}, numbers
    )


# ---- 4 bits --------------------------------------------------------------------------------------


def _int4(
    matrix: Array, groups: Array, *, is_symmetric: bool, dtype: torch.dtype
) -> tuple[Array, Array, torch.Tensor, Array]:
    """Numbers, zero points, scales and the matrix they stand for."""
    num_groups = int(groups.max()) + 1
    members = [matrix[:, groups == group] for group in range(num_groups)]
    low = np.stack([m.min(axis=1) for m in members], axis=1)
    high = np.stack([m.max(axis=1) for m in members], axis=1)
    if is_symmetric:
        scale, used = _stored(np.maximum(np.abs(low), np.abs(high)) / 7.5, dtype)
        zeros = np.full(used.shape, 8.0)
    else:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
        scale, used = _stored((high - low) / 15, dtype)
        zeros = np.clip(np.round(-low / used), 0, 15)
    spread, middle = _spread(used, groups), _spread(zeros, groups)
    numbers = np.clip(np.round(matrix / spread) + middle, 0, 15)
    return numbers, zeros, scale, (numbers - middle) * spread


def _groups(num_columns: int, size: int | None, random: np.random.Generator | None) -> Array:
    """The group of each input: in order, or in the order in which GPTQ took the inputs."""
    groups = np.arange(num_columns) // (size or num_columns)
    return groups if random is None else groups[random.permutation(num_columns)]


def _compressed_int4(
    size: int | None, *, is_symmetric: bool, dtype: torch.dtype, has_order: bool = False
) -> Callable[[Array, np.random.Generator], Published]:
    def publish(matrix: Array, random: np.random.Generator) -> Published:
        groups = _groups(matrix.shape[1], size, random if has_order else None)
        numbers, zeros, scale, stands_for = _int4(
            matrix, groups, is_symmetric=is_symmetric, dtype=dtype
        )
        tensors = {
            "weight_packed": pack_words(numbers, 1),
            "weight_scale": scale,
            "weight_shape": torch.tensor(matrix.shape),
        }
        if not is_symmetric:
            tensors["weight_zero_point"] = pack_words(zeros, 0)
        if has_order:
            tensors["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
        return Published(tensors, stands_for)

    return publish


def _compressed_tensor(matrix: Array, _: np.random.Generator) -> Published:
    """One scale for all of the matrix."""
    scale, used = _stored(np.abs(matrix).max().reshape(1) / 7.5, _BF16)
    numbers = np.clip(np.round(matrix / used) + 8, 0, 15)
    tensors = {"weight_packed": pack_words(numbers, 1), "weight_scale": scale}
    return Published(tensors, (numbers - 8) * used)


def _awq(size: int) -> Callable[[Array, np.random.Generator], Published]:
    def publish(matrix: Array, _: np.random.Generator) -> Published:
        groups = _groups(matrix.shape[1], size, None)
        numbers, zeros, scale, stands_for = _int4(
            matrix, groups, is_symmetric=False, dtype=torch.float16
        )
        tensors = {
            "qweight": pack_words(numbers.T, 1, _AWQ_ORDER),
            "qzeros": pack_words(zeros.T, 1, _AWQ_ORDER),
            "scales": scale.T.contiguous(),
        }
        return Published(tensors, stands_for)

    return publish


def _gptq(
    size: int | None, *, is_symmetric: bool, zero_offset: int, has_order: bool = False
) -> Callable[[Array, np.random.Generator], Published]:
    def publish(matrix: Array, random: np.random.Generator) -> Published:
        groups = _groups(matrix.shape[1], size, random if has_order else None)
        numbers, zeros, scale, stands_for = _int4(
            matrix, groups, is_symmetric=is_symmetric, dtype=torch.float16
        )
        tensors = {
            "qweight": pack_words(numbers.T, 0),
            "qzeros": pack_words(zeros.T, 1) - zero_offset * ONE_OF_EACH,
            "scales": scale.T.contiguous(),
            "g_idx": torch.from_numpy(groups.astype(np.int32)),
        }
        return Published(tensors, stands_for)

    return publish


# ---- 8 bits --------------------------------------------------------------------------------------

_FOUR = tuple(range(4))


def _int8(size: int | None) -> Callable[[Array, np.random.Generator], Published]:
    """Scales of outputs, or of groups of inputs; numbers of -128 to 127, not packed."""

    def publish(matrix: Array, _: np.random.Generator) -> Published:
        numbers, scale, stands_for = _symmetric_int8(matrix, size)
        weight = torch.from_numpy(numbers.astype(np.int8))
        return Published({"weight": weight, "weight_scale": scale}, stands_for)

    return publish


def _int8_tensor(matrix: Array, _: np.random.Generator) -> Published:
    """One scale for all of the matrix."""
    scale, used = _stored(np.abs(matrix).max().reshape(1) / 127, _BF16)
    numbers = np.clip(np.round(matrix / used), -128, 127)
    weight = torch.from_numpy(numbers.astype(np.int8))
    return Published({"weight": weight, "weight_scale": scale}, numbers * used)


def _symmetric_int8(matrix: Array, size: int | None) -> tuple[Array, torch.Tensor, Array]:
    """Numbers, scales and the matrix they stand for."""
    groups = _groups(matrix.shape[1], size, None)
    largest = np.abs(matrix).reshape(len(matrix), int(groups.max()) + 1, -1).max(axis=2)
    scale, used = _stored(largest / 127, _BF16)
    spread = _spread(used, groups)
    numbers = np.clip(np.round(matrix / spread), -128, 127)
    return numbers, scale, numbers * spread


def _packed_int8(size: int | None) -> Callable[[Array, np.random.Generator], Published]:
    def publish(matrix: Array, _: np.random.Generator) -> Published:
        numbers, scale, stands_for = _symmetric_int8(matrix, size)
        tensors = {
            "weight_packed": pack_words(numbers + 128, 1, _FOUR),
            "weight_scale": scale,
            "weight_shape": torch.tensor(matrix.shape),
        }
        return Published(tensors, stands_for)

    return publish


def _gptq_int8(size: int) -> Callable[[Array, np.random.Generator], Published]:
    """In an order of inputs, with zero points; the first of GPTQ's formats."""

    def publish(matrix: Array, random: np.random.Generator) -> Published:
        groups = _groups(matrix.shape[1], size, random)
        members = [matrix[:, groups == group] for group in range(int(groups.max()) + 1)]
        low = np.stack([np.minimum(m.min(axis=1), 0) for m in members], axis=1)
        high = np.stack([np.maximum(m.max(axis=1), 0) for m in members], axis=1)
        scale, used = _stored((high - low) / 255, torch.float16)
        zeros = np.clip(np.round(-low / used), 0, 255)
        spread, middle = _spread(used, groups), _spread(zeros, groups)
        numbers = np.clip(np.round(matrix / spread) + middle, 0, 255)
        tensors = {
            "qweight": pack_words(numbers.T, 0, _FOUR),
            "qzeros": pack_words(zeros.T, 1, _FOUR) - _FOUR_ONES,
            "scales": scale.T.contiguous(),
            "g_idx": torch.from_numpy(groups.astype(np.int32)),
        }
        return Published(tensors, (numbers - middle) * spread)

    return publish


# ---- 4 bits of float -----------------------------------------------------------------------------

_E2M1 = np.array((0, 0.5, 1, 1.5, 2, 3, 4, 6))  # bits 0 to 7; bit 3 is the sign
_MAX_E2M1 = 6.0


def to_e2m1(numbers: Array) -> Array:
    """The nearest e2m1 numbers, ties to even; uint8 of 0 to 15."""
    size = np.minimum(np.abs(numbers), _MAX_E2M1)[..., None]
    distance = np.abs(size - _E2M1)
    is_nearest = distance == distance.min(axis=-1, keepdims=True)
    odd = np.arange(8) % 2
    nearest = np.where(is_nearest, odd, 2).argmin(axis=-1)
    codes: Array = (nearest | np.where(numbers < 0, 8, 0)).astype(np.uint8)
    return codes


def _mxfp4(matrix: Array, _: np.random.Generator) -> Published:
    """Scales by OCP's MX specification: the largest number's power of two becomes e2m1's, 4."""
    groups = matrix.reshape(len(matrix), -1, 32)
    largest = np.abs(groups).max(axis=2)
    exponent = np.clip(np.floor(np.log2(np.maximum(largest, 2.0**-120))) - 2, -127, 127)
    spread = (2.0**exponent)[:, :, None]
    tensors, numbers = _pairs_of_e2m1(groups / spread)
    tensors["weight_scale"] = torch.from_numpy((exponent + 127).astype(np.uint8))
    return Published(tensors, (numbers * spread).reshape(matrix.shape))


def _nvfp4(*, is_modelopt: bool) -> Callable[[Array, np.random.Generator], Published]:
    def publish(matrix: Array, _: np.random.Generator) -> Published:
        groups = matrix.reshape(len(matrix), -1, 16)
        largest = np.abs(groups).max(axis=2)
        divisor, divides = _stored(np.array([_MAX_FP8 * _MAX_E2M1 / largest.max()]), torch.float32)
        factor, multiplies = _stored(1 / divides, torch.float32)
        codes = to_e4m3(largest / _MAX_E2M1 * divides)
        # What is read: a number that is rounded to fp32 once, whichever of the two is published.
        spread = (e4m3_values()[codes] * multiplies)[:, :, None]
        tensors, numbers = _pairs_of_e2m1(groups / np.where(spread > 0, spread, 1))
        tensors["weight_scale"] = _fp8_tensor(codes)
        if is_modelopt:
            tensors["weight"] = tensors.pop("weight_packed")
            tensors |= {"weight_scale_2": factor[0], "input_scale": torch.tensor(0.25)}
        else:
            tensors |= {"weight_global_scale": divisor, "input_global_scale": torch.ones(1)}
        return Published(tensors, (numbers * spread).reshape(matrix.shape))

    return publish


def _pairs_of_e2m1(groups: Array) -> tuple[dict[str, torch.Tensor], Array]:
    """What is published of the rounded numbers, and they: [out, groups, numbers]."""
    codes = to_e2m1(groups)
    flat = codes.reshape(len(codes), -1)
    packed = torch.from_numpy(flat[:, ::2] | flat[:, 1::2] << np.uint8(4))
    values = np.concatenate((_E2M1, -_E2M1))
    return {"weight_packed": packed}, values[codes]


# ---- the forms -----------------------------------------------------------------------------------

_FP8_INPUTS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


def _compressed_config(
    layout: str, weights: dict[str, object], inputs: dict[str, object] | None = None
) -> dict[str, object]:
    group: dict[str, object] = {"targets": ["Linear"], "weights": {"dynamic": False, **weights}}
    group |= {"input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _fp8_weights(strategy: str, **more: object) -> dict[str, object]:
    return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **more}


def _int4_weights(size: int | None, *, is_symmetric: bool, **more: object) -> dict[str, object]:
    strategy = "channel" if size is None else "group"
    weights = {"num_bits": 4, "type": "int", "symmetric": is_symmetric, "strategy": strategy}
    return weights | {"group_size": size, **more}


def _fp4_weights(size: int) -> dict[str, object]:
    return {"num_bits": 4, "type": "float", "symmetric": True, "group_size": size}


_AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
_GPTQ_CONFIG = {"quant_method": "gptq", "bits": 4}

FORMS: dict[str, Form] = {
    "fp8-block": Form(
        config={
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"],
        },
        publish=_fp8((128, 128), scale_name="weight_scale_inv"),
    ),
    "fp8-tensor": Form(
        config={"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": None},
        publish=_fp8((None, None), has_input_scale=True),
    ),
    "ct-fp8-channel": Form(
        config=_compressed_config("float-quantized", _fp8_weights("channel"), _FP8_INPUTS),
        publish=_fp8((1, None), dtype=_BF16),
    ),
    "ct-fp8-tensor": Form(  # as early versions wrote it
        config=_compressed_config("naive-quantized", _fp8_weights("tensor"), _FP8_INPUTS)
        | {"quantization_status": "frozen"},
        publish=_fp8((None, None), dtype=_BF16, tensor_shape=(1,)),
        section="compression_config",
    ),
    "ct-fp8-block": Form(
        config=_compressed_config(
            "float-quantized", _fp8_weights("block", block_structure=[64, 32])
        ),
        publish=_fp8((64, 32)),
    ),
    "ct-fp8-group": Form(
        config=_compressed_config(
            "float-quantized", _fp8_weights("group", group_size=32), _FP8_INPUTS
        ),
        publish=_fp8((1, 32), dtype=_BF16),
    ),
    "ct-mxfp8": Form(
        config=_compressed_config(
            "mxfp8-quantized", _fp8_weights("group", group_size=32), _FP8_INPUTS
        ),
        publish=_mxfp8,
        multiple=32,
    ),
    "ct-int4-32": Form(
        config=_compressed_config("pack-quantized", _int4_weights(32, is_symmetric=True)),
        publish=_compressed_int4(32, is_symmetric=True, dtype=_BF16),
        multiple=32,
    ),
    "ct-int4-128-asymmetric": Form(
        config=_compressed_config("pack-quantized", _int4_weights(128, is_symmetric=False)),
        publish=_compressed_int4(128, is_symmetric=False, dtype=_BF16),
        multiple=128,
    ),
    "ct-int4-channel": Form(
        config=_compressed_config("pack-quantized", _int4_weights(None, is_symmetric=False)),
        publish=_compressed_int4(None, is_symmetric=False, dtype=torch.float32),
        multiple=16,
    ),
    "ct-int4-tensor": Form(
        config=_compressed_config(
            "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "tensor"}
        ),
        publish=_compressed_tensor,
        multiple=16,
    ),
    "ct-int4-order": Form(
        config=_compressed_config(
            "pack-quantized", _int4_weights(64, is_symmetric=True, actorder="group")
        ),
        publish=_compressed_int4(64, is_symmetric=True, dtype=_BF16, has_order=True),
        multiple=64,
    ),
    "awq": Form(config=_AWQ_CONFIG | {"group_size": 64}, publish=_awq(64), multiple=64),
    "gptq": Form(
        config=_GPTQ_CONFIG | {"group_size": 128, "desc_act": False, "sym": True},
        publish=_gptq(128, is_symmetric=True, zero_offset=1),
        multiple=128,
    ),
    "gptq-asymmetric": Form(
        config=_GPTQ_CONFIG | {"group_size": 32, "desc_act": False, "sym": False},
        publish=_gptq(32, is_symmetric=False, zero_offset=1),
        multiple=32,
    ),
    "gptq-v2-order": Form(
        config=_GPTQ_CONFIG
        | {"group_size": 64, "desc_act": True, "sym": False, "checkpoint_format": "gptq_v2"},
        publish=_gptq(64, is_symmetric=False, zero_offset=0, has_order=True),
        multiple=64,
    ),
    "gptq-channel": Form(
        config=_GPTQ_CONFIG | {"group_size": -1, "desc_act": False, "sym": True},
        publish=_gptq(None, is_symmetric=True, zero_offset=1),
        multiple=16,
    ),
    "ct-mxfp4": Form(
        config=_compressed_config("mxfp4-pack-quantized", _fp4_weights(32)),
        publish=_mxfp4,
        multiple=32,
    ),
    "ct-nvfp4": Form(
        config=_compressed_config("nvfp4-pack-quantized", _fp4_weights(16), _fp4_weights(16)),
        publish=_nvfp4(is_modelopt=False),
        multiple=16,
    ),
    "modelopt-nvfp4": Form(
        config={
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "ignore": ["lm_head", "model.layers.*.input_layernorm*", "model.layers.*.mlp.gate"],
        },
        publish=_nvfp4(is_modelopt=True),
        multiple=16,
    ),
    "modelopt-fp8": Form(
        config={"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        publish=_fp8((None, None), has_input_scale=True),
    ),
}


_INT8_INPUTS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
# Read as matrices: see `Quantization.is_made_matrix`.
DECODED_FORMS: dict[str, Form] = {
    "ct-int8-channel": Form(
        config=_compressed_config(
            "int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, _INT8_INPUTS
        ),
        publish=_int8(None),
    ),
    "ct-int8-group": Form(
        config=_compressed_config(
            "int-quantized", {"num_bits": 8, "type": "int", "group_size": 32}, _INT8_INPUTS
        ),
        publish=_int8(32),
        multiple=32,
    ),
    "ct-int8-tensor": Form(
        config=_compressed_config("int-quantized", {"num_bits": 8, "type": "int"}, _INT8_INPUTS),
        publish=_int8_tensor,
    ),
    "ct-packed-int8": Form(
        config=_compressed_config(
            "pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}
        ),
        publish=_packed_int8(None),
        multiple=8,
    ),
    "gptq-int8": Form(
        config=_GPTQ_CONFIG | {"bits": 8, "group_size": 32, "desc_act": True, "sym": False},
        publish=_gptq_int8(32),
        multiple=32,
    ),
}


def write_quantised(
    source: Path, name: str, target: Path, *, seed: int = 0, stands_for: Path | None = None
) -> Path:
    """Write `source`, one file of safetensors, in the form `name` to the new folder `target`.

    stands_for: also write there, unquantised and in fp32, what the quantised numbers stand for.
    """
    form = (FORMS | DECODED_FORMS)[name]
    published: dict[str, torch.Tensor] = {}
    dense: dict[str, torch.Tensor] = {}
    for tensor_name, tensor in load_file(source / "model.safetensors").items():
        module, _, suffix = tensor_name.rpartition(".")
        dense[tensor_name] = tensor.float()
        if suffix != "weight" or module.rpartition(".")[2] not in _ALL_LINEARS:
            published[tensor_name] = tensor
            continue
        # Parts that are computed together take their inputs in one order: one seed a layer, and
        # one an expert.
        numbers = [int(part) for part in module.split(".") if part.isdigit()]
        random = np.random.default_rng([seed, *numbers, tensor.shape[1]])
        made = form.publish(tensor.double().numpy(), random)
        published |= {f"{module}.{name}": t.contiguous() for name, t in made.tensors.items()}
        dense[tensor_name] = torch.from_numpy(made.matrix).float()
    config = json.loads((source / "config.json").read_text())
    _write(source, target, published, config | {form.section: form.config})
    if stands_for is not None:
        _write(source, stands_for, dense, config | {"dtype": "float32"})
    return target


def _write(
    source: Path, target: Path, tensors: dict[str, torch.Tensor], config: dict[str, object]
) -> None:
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            shutil.copy(path, target / path.name)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config))
