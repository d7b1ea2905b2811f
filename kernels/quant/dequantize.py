"""Device functions that turn stored numbers into the dtype of a product, exactly.

e4m3 has a sign, four bits of exponent (bias 7) and three of mantissa. Put into the upper bits of a
float16 (bias 15) they stand for 2^-8 of the number, of a bfloat16 (bias 127) for 2^-120 of it, for
subnormal numbers too. GPUs that know e4m3 (8.9 and later) convert to float16 by one instruction,
but to bfloat16 by several slow ones.

e2m1 has a sign, two bits of exponent (bias 1) and one of mantissa: put into the upper bits of a
float16 they stand for 2^-14 of the number, of a bfloat16 for 2^-126. e8m0 is the exponent of a
float32.

A number q of four bits in the lowest bits of the mantissa of 128 (bfloat16) or 1024 (float16),
whose last place is one, is 128 + q or 1024 + q: subtracting 128 + z or 1024 + z leaves q - z
without a conversion of an integer.
"""

import triton
import triton.language as tl

_NAN_E4M3 = tl.constexpr(0x7F)


# Two bytes become a pair of bfloat16: before each come eight copies of its sign, so that one shift
# and one mask put sign and number to their places, and a product with 2^120 (0x7b80) corrects the
# exponent. Adding -0 keeps the sign of a zero.
WIDEN_E4M3 = """
{
.reg .b32 bits, factor, zero;
mov.b32 factor, 0x7b807b80;
mov.b32 zero, 0x80008000;
cvt.u32.u16 bits, $1;
prmt.b32 bits, bits, 0, 0x9180;
shl.b32 bits, bits, 4;
and.b32 bits, bits, 0x87f087f0;
fma.rn.bf16x2 $0, bits, factor, zero;
}
"""
_WIDEN_E4M3 = tl.constexpr(WIDEN_E4M3)
# The same, and NaN of e4m3's NaN, which is 480 above: times 1.125 * 2^119 (0x7b10) that is infinite
# and 448 is not, and infinite times 0 is NaN, all else 0 with the sign of the number.
WIDEN_E4M3_OR_NAN = WIDEN_E4M3.replace(
    "fma.rn.bf16x2 $0, bits, factor, zero;",
    """fma.rn.bf16x2 bits, bits, factor, zero;
mov.b32 factor, 0x7b107b10;
fma.rn.bf16x2 factor, bits, factor, zero;
mov.b32 zero, 0;
fma.rn.bf16x2 $0, factor, zero, bits;""",
)
_WIDEN_E4M3_OR_NAN = tl.constexpr(WIDEN_E4M3_OR_NAN)


@triton.jit
def decode_e4m3(  # noqa: ANN201
    codes, dtype: tl.constexpr, KNOWS_E4M3: tl.constexpr, USES_PTX: tl.constexpr,
    HAS_NAN: tl.constexpr = False,
):  # fmt: skip
    """codes: uint8 tile; returns the numbers in `dtype`, which has at least e4m3's range.

    HAS_NAN: a code may be NaN, and stays so; else it may become 480.
    """
    if dtype == tl.bfloat16 and USES_PTX:
        numbers = tl.inline_asm_elementwise(
            _WIDEN_E4M3_OR_NAN if HAS_NAN else _WIDEN_E4M3,
            "=r,h",
            [codes],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    elif KNOWS_E4M3:
        numbers = codes.to(tl.float8e4nv, bitcast=True).to(dtype)
    else:
        wide = codes.to(tl.uint16)
        half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        numbers = (half.to(tl.float16, bitcast=True) * 256.0).to(dtype)
        if HAS_NAN:
            numbers = tl.where((codes & _NAN_E4M3) == _NAN_E4M3, float("nan"), numbers)
    return numbers


@triton.jit
def encode_e4m3(x, KNOWS_E4M3: tl.constexpr):  # noqa: ANN201
    """x: fp32 tile; returns uint8: the nearest e4m3 number, ties to even, at most 448 in size.

    NaN of what is not finite. Torch twin: `kernels.kv.scales.to_e4m3` with a scale of 1.
    """
    is_finite = tl.abs(x) < float("inf")
    x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    if KNOWS_E4M3:
        codes = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.uint32, bitcast=True)
        size = bits & 0x7FFFFFFF
        # Half of the last of three places is added, less one where that place is even already.
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
        # The last place of 2^14 in fp32 is that of subnormal numbers, 2^-9.
        subnormal = (tl.abs(x) + 16384.0).to(tl.uint32, bitcast=True) & 0xF
        codes = tl.where(size >= (121 << 23), normal, subnormal) | ((bits >> 24) & 0x80)
    return tl.where(is_finite, codes.to(tl.uint8), _NAN_E4M3).to(tl.uint8)


# Four bytes become four of their low and four of their high numbers.
NIBBLES = """
{
.reg .b32 high;
and.b32 $0, $2, 0x0f0f0f0f;
shr.b32 high, $2, 4;
and.b32 $1, high, 0x0f0f0f0f;
}
"""
_NIBBLES = tl.constexpr(NIBBLES)


@triton.jit
def nibbles_e4m3(packed, USES_PTX: tl.constexpr):  # noqa: ANN201
    """packed: uint8 tile; returns its low and its high numbers in bytes: as e4m3, times 2^-9."""
    if USES_PTX:
        low, high = tl.inline_asm_elementwise(
            _NIBBLES, "=r,=r,r", [packed], dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4
        )
    else:
        low, high = packed & 15, packed >> 4
    return low, high


# Two bytes become two pairs of bfloat16: (a & b) | c of the low, then of the high bits of each.
RAISE_INT4 = """
{
.reg .b32 pair;
cvt.u32.u16 pair, $2;
prmt.b32 pair, pair, 0, 0x4140;
lop3.b32 $0, pair, 0x000f000f, 0x43004300, 0xea;
shr.b32 pair, pair, 4;
lop3.b32 $1, pair, 0x000f000f, 0x43004300, 0xea;
}
"""
_RAISE_INT4 = tl.constexpr(RAISE_INT4)


@triton.jit
def take_apart(packed, dtype: tl.constexpr, USES_PTX: tl.constexpr):  # noqa: ANN201
    """packed: uint8 tile; returns its low and its high numbers, raised as the docstring says.

    In a dtype of 32 bits they are not raised.
    """
    if dtype == tl.bfloat16 and USES_PTX:
        low, high = tl.inline_asm_elementwise(
            _RAISE_INT4,
            "=r,=r,h",
            [packed],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    elif dtype == tl.bfloat16:
        low = ((packed & 15).to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)
        high = ((packed >> 4).to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)
    elif dtype == tl.float16:
        low = ((packed & 15).to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)
        high = ((packed >> 4).to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)
    else:
        low = (packed & 15).to(dtype)
        high = (packed >> 4).to(dtype)
    return low, high


# Four bytes become eight fp32: 1 + q / 256 of their low numbers, 1 + q / 16 of their high ones.
WIDEN_INT4 = """
{
.reg .b32 bits, one;
mov.b32 one, 0x3f800000;
shl.b32 bits, $8, 15;
lop3.b32 $0, bits, 0x00078000, one, 0xea;
lop3.b32 $4, bits, 0x00780000, one, 0xea;
shl.b32 bits, $8, 7;
lop3.b32 $1, bits, 0x00078000, one, 0xea;
lop3.b32 $5, bits, 0x00780000, one, 0xea;
shr.b32 bits, $8, 1;
lop3.b32 $2, bits, 0x00078000, one, 0xea;
lop3.b32 $6, bits, 0x00780000, one, 0xea;
shr.b32 bits, $8, 9;
lop3.b32 $3, bits, 0x00078000, one, 0xea;
lop3.b32 $7, bits, 0x00780000, one, 0xea;
}
"""
_WIDEN_INT4 = tl.constexpr(WIDEN_INT4)


@triton.jit
def widen_int4(packed, USES_PTX: tl.constexpr):  # noqa: ANN201
    """packed: uint8 tile; returns fp32: 1 + q / 256 of its low, 1 + q / 16 of its high numbers."""
    if USES_PTX:
        low, high = tl.inline_asm_elementwise(
            _WIDEN_INT4,
            "=r,=r,=r,=r,=r,=r,=r,=r,r",
            [packed],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=4,
        )
    else:
        bits = packed.to(tl.int32) << 15
        low = ((bits & 0x00078000) | 0x3F800000).to(tl.float32, bitcast=True)
        high = ((bits & 0x00780000) | 0x3F800000).to(tl.float32, bitcast=True)
    return low, high


# As above. A product with 2^12 + 2^6 has four bits twice, for the sign and for the others; factors
# then correct the exponents.
_E2M1 = """
{
.reg .b32 pair, bits, zero, fixed;
mov.b32 zero, 0x80008000;
mov.b32 fixed, 0x7e807e80;
cvt.u32.u16 pair, $2;
prmt.b32 pair, pair, 0, 0x4140;
and.b32 bits, pair, 0x000f000f;
mul.lo.u32 bits, bits, 0x1040;
and.b32 bits, bits, 0x81c081c0;
fma.rn.bf16x2 $0, bits, LOW, zero;
and.b32 bits, pair, 0x00f000f0;
mul.lo.u32 bits, bits, 0x0104;
and.b32 bits, bits, 0x81c081c0;
fma.rn.bf16x2 $1, bits, HIGH, zero;
}
"""
WIDEN_E2M1 = _E2M1.replace("LOW", "fixed").replace("HIGH", "fixed")  # 2^126
SCALE_E2M1 = _E2M1.replace("LOW", "$3").replace("HIGH", "$4")
_SCALE_E2M1 = tl.constexpr(SCALE_E2M1)
_WIDEN_E2M1 = tl.constexpr(WIDEN_E2M1)


@triton.jit
def widen_e2m1(numbers, dtype: tl.constexpr) -> tl.tensor:
    """numbers: integers of 0 to 15; what they stand for, in `dtype`."""
    wide = numbers.to(tl.uint16)
    half = ((wide & 8) << 12) | ((wide & 7) << 9)
    return (half.to(tl.float16, bitcast=True) * 16384.0).to(dtype)


@triton.jit
def decode_e2m1(packed, dtype: tl.constexpr, USES_PTX: tl.constexpr):  # noqa: ANN201
    """packed: uint8 tile; returns its low and its high numbers in `dtype`."""
    if dtype == tl.bfloat16 and USES_PTX:
        low, high = tl.inline_asm_elementwise(
            _WIDEN_E2M1,
            "=r,=r,h",
            [packed],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        low = widen_e2m1(packed & 15, dtype)
        high = widen_e2m1(packed >> 4, dtype)
    return low, high


@triton.jit
def e8m0_factors(codes) -> tl.tensor:
    """codes: uint8, at most 128; returns the bits of 2^126 times what they stand for, bfloat16."""
    return (codes.to(tl.uint16) + 126) << 7


@triton.jit
def scale_e2m1(packed, low_factors, high_factors):  # noqa: ANN201
    """As `decode_e2m1` in bfloat16 by PTX, times scales, exactly.

    factors: integers of `e8m0_factors`, of shapes that spread to that of `packed`.
    """
    low_factors = low_factors.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    high_factors = high_factors.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.inline_asm_elementwise(
        _SCALE_E2M1,
        "=r,=r,h,r,r",
        [packed, low_factors, high_factors],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def decode_e8m0(codes) -> tl.tensor:
    """codes: uint8 tile; returns powers of two, fp32: 2^(code - 127)."""
    bits = codes.to(tl.int32)
    return tl.where(bits == 0, 1 << 22, bits << 23).to(tl.float32, bitcast=True)


@triton.jit
def subtract_zeros(raised, zeros) -> tl.tensor:
    """raised: from `take_apart`; zeros: int32, broadcast to it; returns the numbers less zeros."""
    dtype: tl.constexpr = raised.dtype
    if dtype == tl.bfloat16:
        lowered = raised - (zeros + 128).to(dtype)
    elif dtype == tl.float16:
        lowered = raised - (zeros + 1024).to(dtype)
    else:
        lowered = raised - zeros.to(dtype)
    return lowered
