"""Brings a quantised weight to the form that kernels read, and refuses what none of them can read.

For linear maps (`quantized_cuda.py`) and experts (`moe_cuda.py`); imported on a CUDA device only.
"""

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.layers.linear import LinearWeight, WeightFormat
from engine.layers.quantized_weight import Scales
from kernels.quant.fp8_linear import Fp8Operand, supports_fp8
from kernels.quant.int4_linear import FourBitOperand, join_zeros, supports_int4
from kernels.quant.steps import MAX_SMALL, Codes

_NAN_E4M3, _NAN_E8M0 = 0x7F, 0xFF  # without the sign, which e8m0 has not
_CHECKED_AT_ONCE = 2**26  # numbers


def check_dtype(scales: Scales) -> None:
    """Raises ConfigError for inputs that quantised weights are not multiplied with."""
    if scales.dtype not in (torch.bfloat16, torch.float16):
        raise ConfigError(
            "model.dtype: on a GPU quantised weights are multiplied with bfloat16 or float16,"
            f" not with {scales.dtype}"
        )


def check_e4m3(numbers: Tensor) -> None:
    """Raises ConfigError if one is NaN: kernels that decode e4m3 by arithmetic make 480 of it."""
    for some in torch.split(numbers.view(torch.uint8).flatten(), _CHECKED_AT_ONCE):
        if int((some & _NAN_E4M3).max()) == _NAN_E4M3:
            raise _not_a_number()


def _not_a_number() -> ConfigError:
    return ConfigError(
        "model.path: a quantised weight or its scales hold NaN: its files are damaged, or were"
        " quantised without a limit; download or quantise the model anew"
    )


def fp8_operand(weight: LinearWeight, scales: Scales) -> Fp8Operand:
    """Raises ConfigError for tiles that no kernel reads, and for NaN."""
    if not supports_fp8(weight.data, scales.columns):
        raise unreadable(weight, f"tiles of {scales.columns} inputs")
    check_e4m3(weight.data)
    return Fp8Operand(
        codes=weight.data,
        scales=scales.values,
        tile_rows=scales.rows,
        tile_columns=scales.columns,
        bias=weight.bias,
    )


def four_bit_operand(weight: LinearWeight, scales: Scales) -> FourBitOperand:
    """scales: `compacted`. Raises ConfigError for groups that no kernel reads, and for NaN."""
    if not supports_int4(weight.data, scales.half):
        raise unreadable(weight, f"groups of {scales.columns} inputs")
    codes, values = four_bit_codes(scales)
    return FourBitOperand(
        packed=weight.data,
        scales=values,
        codes=codes,
        half=scales.half,
        group=scales.columns,
        factors=scales.factors,
        bias=weight.bias,
    )


def four_bit_codes(scales: Scales) -> tuple[Codes, Tensor]:
    """How 4-bit weights are coded, and their scales as kernels take them.

    scales: `compacted`. Raises ConfigError for scales that leave no room for zero points, or NaN.
    """
    if scales.is_e2m1:
        values = scales.values.view(torch.uint8)
        if scales.factors is not None:
            check_e4m3(values)
            return Codes.NVFP4, values
        if bool((values == _NAN_E8M0).any()):
            raise _not_a_number()
        is_small = bool((values <= MAX_SMALL).all())
        return (Codes.MXFP4_SMALL if is_small else Codes.MXFP4), values
    words = join_zeros(scales.values, scales.zeros)
    if words is None:
        raise ConfigError(
            "4-bit weights with zero points have scales in float32; on a GPU they must be in"
            " bfloat16 or float16"
        )
    return (Codes.INT4 if scales.zeros is None else Codes.INT4_ZEROS), words


def unreadable(weight: LinearWeight, groups: str) -> ConfigError:
    """The error for a weight that no kernel reads."""
    num_rows, width = weight.data.shape[-2:]
    columns = width if weight.format is WeightFormat.FP8 else 2 * width
    return ConfigError(
        f"a {weight.format.name} weight of {num_rows} outputs and {columns} inputs in {groups} is"
        " not computed on a GPU: sizes must be multiples of 16, with 4 bits a rank's inputs of 32;"
        " groups must be multiples of 16"
    )
