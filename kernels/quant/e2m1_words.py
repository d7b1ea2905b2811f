"""Numbers of e2m1 in words of eight, so ordered that few instructions decode them to bfloat16.

A group of 32 columns is four words. Word t holds columns 4t to 4t + 3 and 16 + 4t to 16 + 4t + 3:
what one thread of a matrix unit takes of a row, if eight bits a number are loaded. A half of a word
holds four numbers; number 2p of the eight is in the low half and 2p + 1 in the high one, s is a
sign and e, f, m the other bits:

    bit  15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
          s                    e  f  m                      p = 0
                   s                    e  f  m             p = 1
                            s                    e  f  m    p = 2
             s  m     e  f                                  p = 3

So a shift and a mask put a pair to where bfloat16 has sign, exponent and mantissa, and only the
last pair takes more. They stand for 2^-126 of the numbers then, and a product with 2^126 times
their scale corrects that: 15 instructions for eight numbers. Scales are at most 2, for 2^127 is the
largest power of two in bfloat16. The order is that of OpenAI's triton_kernels for Hopper.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP = 32  # columns
WORDS = 4  # of a group
_BIAS = 126
_COLUMNS = tl.constexpr(GROUP)


def _places(number: int) -> list[int]:
    """Bits of a word for each of 16 codes, if they are number `number` of it."""
    pair, half = divmod(number, 2)
    # The places of m, f, e and s, from the lowest bit of a code to the highest.
    bits = (13, 10, 11, 14) if pair == 3 else tuple(bit - 3 * pair for bit in (6, 7, 8, 15))
    return [
        sum((code >> i & 1) << (bit + 16 * half) for i, bit in enumerate(bits))
        for code in range(16)
    ]


def pack_words(numbers: Tensor) -> Tensor:
    """numbers: [..., K] uint8 of 0 to 15, K in groups; returns int32 [..., K / 32, 4]."""
    tables = torch.tensor([_places(i) for i in range(8)]).to(torch.uint32).view(torch.int32)
    tables = tables.to(numbers.device)
    eights = numbers.unflatten(-1, (-1, 2, WORDS, 4)).transpose(-3, -2).flatten(-2)
    words = torch.zeros(eights.shape[:-1], dtype=torch.int32, device=numbers.device)
    for i in range(8):
        words |= tables[i][eights[..., i].int()]
    return words


def pack_scales(codes: Tensor) -> Tensor:
    """codes: [..., groups] e8m0 as uint8, at most 2^1; returns int32 [..., groups / 2].

    The bits of 2^126 times the scale as bfloat16, of the first of two groups in the low half.
    """
    factors = codes.to(torch.int32) + _BIAS << 7
    return factors[..., ::2] | factors[..., 1::2] << 16


DECODE_WORD = """
{
.reg .b32 bits, more, zero;
mov.b32 zero, 0x80008000;
and.b32 bits, $8, 0x81c081c0;
fma.rn.bf16x2 bits, bits, $9, zero;
mov.b32 {$0, $1}, bits;
shl.b32 bits, $8, 3;
and.b32 bits, bits, 0x81c081c0;
fma.rn.bf16x2 bits, bits, $9, zero;
mov.b32 {$2, $3}, bits;
shl.b32 bits, $8, 6;
and.b32 bits, bits, 0x81c081c0;
fma.rn.bf16x2 bits, bits, $9, zero;
mov.b32 {$4, $5}, bits;
shl.b32 bits, $8, 1;
and.b32 bits, bits, 0x80008000;
shr.b32 more, $8, 3;
lop3.b32 bits, more, 0x01800180, bits, 0xea;
shr.b32 more, $8, 7;
lop3.b32 bits, more, 0x00400040, bits, 0xea;
fma.rn.bf16x2 bits, bits, $9, zero;
mov.b32 {$6, $7}, bits;
}
"""
_DECODE = tl.constexpr(DECODE_WORD)


@triton.jit
def _value(halves, scale, dtype: tl.constexpr) -> tl.tensor:
    """halves: the bits of a bfloat16 in the low half of integers; the number times `scale`."""
    bits = ((halves & 0x8000) | ((halves & 0x1C0) << 3)).to(tl.uint16)
    return (bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0 * scale).to(dtype)


@triton.jit
def _last(halves) -> tl.tensor:
    """The last number of the low half of integers, as `_value` takes it."""
    return (halves << 1 & 0x8000) | (halves >> 3 & 0x180) | (halves >> 7 & 0x40)


@triton.jit
def _eight(words, factors, dtype: tl.constexpr, USES_PTX: tl.constexpr):
    """The eight numbers of each word, in their order."""
    if USES_PTX:
        tl.static_assert(dtype == tl.bfloat16, "the GPU's instructions decode to bfloat16")
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _DECODE,
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
            [words, factors * 0x10001],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=1,
        )
    else:
        scale = (factors << 16).to(tl.float32, bitcast=True) * (2.0**-126)
        high = words >> 16
        a, b = _value(words, scale, dtype), _value(high, scale, dtype)
        c, d = _value(words << 3, scale, dtype), _value(high << 3, scale, dtype)
        e, f = _value(words << 6, scale, dtype), _value(high << 6, scale, dtype)
        g, h = _value(_last(words), scale, dtype), _value(_last(high), scale, dtype)
    return a, b, c, d, e, f, g, h


@triton.jit
def decode_words(
    words, factors, dtype: tl.constexpr, ROWS: tl.constexpr, USES_PTX: tl.constexpr
) -> tl.tensor:
    """[ROWS, 32] in `dtype`, by PTX bfloat16 alone: what a group's words stand for.

    words: int32 [ROWS, 4]; factors: int32 [ROWS], halves of `pack_scales`.
    """
    a, b, c, d, e, f, g, h = _eight(words, factors[:, None], dtype, USES_PTX)
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    # [row, word, half of the group, 2, 2]
    numbers = tl.permute(tl.join(even, odd), (0, 2, 1, 3, 4))
    return tl.reshape(numbers, (ROWS, _COLUMNS))
