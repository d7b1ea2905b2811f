"""Device functions that turn stored numbers into the dtype of a product, exactly.

e4m3 has a sign, four bits of exponent (bias 7) and three of mantissa. Put into the upper bits of a
float16 (bias 15) they stand for 2^-8 of the number, for subnormal numbers too; on GPUs that know
e4m3 (8.9 and later) one instruction converts two.

A number q of four bits in the lowest bits of the mantissa of 128 (bfloat16) or 1024 (float16),
whose last place is one, is 128 + q or 1024 + q: subtracting 128 + z or 1024 + z leaves q - z
without a conversion of an integer.
"""

from functools import cache

import torch
import triton
import triton.language as tl

_E4M3_CAPABILITY = (8, 9)


@cache
def knows_e4m3(device: torch.device) -> bool:
    """Whether the GPU converts e4m3 by itself; the interpreter does not."""
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return False
    return torch.cuda.get_device_capability(device) >= _E4M3_CAPABILITY


@triton.jit
def decode_e4m3(codes, dtype: tl.constexpr, KNOWS_E4M3: tl.constexpr) -> tl.tensor:
    """codes: uint8 tile; returns the numbers in `dtype`, which has at least e4m3's range."""
    if KNOWS_E4M3:
        numbers = codes.to(tl.float8e4nv, bitcast=True).to(dtype)
    else:
        wide = codes.to(tl.uint16)
        half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        numbers = (half.to(tl.float16, bitcast=True) * 256.0).to(dtype)
    return numbers


@triton.jit
def decode_int4(numbers, zeros, dtype: tl.constexpr) -> tl.tensor:
    """numbers: uint8 tile of 0 to 15; zeros: int32, broadcast to it; returns numbers - zeros."""
    if dtype == tl.bfloat16:
        raised = (numbers.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)
        exact = raised - (zeros + 128).to(tl.bfloat16)
    elif dtype == tl.float16:
        raised = (numbers.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)
        exact = raised - (zeros + 1024).to(tl.float16)
    else:
        exact = (numbers.to(tl.int32) - zeros).to(dtype)
    return exact
