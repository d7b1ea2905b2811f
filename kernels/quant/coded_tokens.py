"""Inputs of a product in e4m3, with a scale for each token and group of columns; torch alone.

Rounded, for many tokens (448 is e4m3's largest number; a scale is 1 where all are zero):

    s[t, g] = max over the group of |x| / 448        q = round(x / s)

In two pieces, for few tokens, so that FP8 matrix units multiply the inputs as they are:

    x = s * (q + r / 32)        q = x / s in four bits        r = round(32 * (x / s - q))

s is the power of two that brings the group's largest number to 128 or more, below 256. A bfloat16
has eight bits, q the first four of them and r the others: numbers of at least 2^-13 of the largest
are exact. Of smaller ones q, which would need more places than e4m3 has, is 0, and r is off by at
most 2^-18 of the largest. Where any number is not finite, no product is.

In two pieces of e5m2, for few tokens of which no largest number is known when they are written:

    x = 16 * (q + r / 8)            q = round(x / 16)             r = round(8 * (x / 16 - q))

e5m2 has three bits and float16's exponents, so nothing need be scaled: a number of 2^-9 to 917,504
is off by at most its 2^-7th part, a smaller one by 2^-16, a larger one may be infinite.

That is 0.25 % of a number's size on average, where bfloat16's rounding is 0.17 %.

Rounding is to the nearest, ties to even, of first pieces and in e5m2 away from zero. A group is
`group` columns, or a whole row. Scales are written with the tokens of a group adjacent, as products
read them. Kernels: token_groups.py, coded_norm.py, fp8_few.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_E4M3 = 448.0
SECOND_PIECE = 1 / 32  # of its last place; a power of two
WIDE_SCALE = 16.0  # of e5m2; a power of two
WIDE_SECOND = 1 / 8  # of the second piece in e5m2
LEAST_FIRST = 2.0**-6  # of first pieces: e4m3's least number with four bits


@dataclass(frozen=True, slots=True, kw_only=True)
class InputForm:
    """How the inputs of a product are coded."""

    pieces: int  # 1 = rounded, 2 = as they are
    group: int  # columns that share a scale; 0 = pieces of e5m2, without scales


WIDE = InputForm(pieces=2, group=0)  # pieces of e5m2


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedTokens:
    """Inputs [T, K] as products in FP8 take them."""

    codes: Tensor  # [pieces, T, K] e4m3 or e5m2
    scales: Tensor  # [ceil(K / group), T] fp32; of e5m2 [0, T]
    group: int  # 0 of e5m2

    @property
    def num_tokens(self) -> int:
        return self.codes.shape[1]

    @property
    def is_rounded(self) -> bool:
        return len(self.codes) == 1


def empty_coded(num_tokens: int, num_columns: int, form: InputForm, like: Tensor) -> CodedTokens:
    """Memory for coded inputs, on the device of `like`."""
    num_groups = -(-num_columns // form.group) if form.group else 0
    dtype = torch.float8_e4m3fn if form.group else torch.float8_e5m2
    return CodedTokens(
        codes=torch.empty((form.pieces, num_tokens, num_columns), dtype=dtype, device=like.device),
        scales=torch.empty((num_groups, num_tokens), dtype=torch.float32, device=like.device),
        group=form.group,
    )


def reference(x: Tensor, form: InputForm) -> CodedTokens:
    """x [T, K] as `form` says; K must be a multiple of its group."""
    if form.group == 0:
        return _in_e5m2(x.float())
    groups = x.float().reshape(x.shape[0], -1, form.group)
    largest = groups.abs().amax(dim=2)
    if form.pieces == 1:
        scales = torch.where(largest > 0, largest / MAX_E4M3, torch.ones_like(largest))
        scaled = (groups / scales[:, :, None]).clamp(-MAX_E4M3, MAX_E4M3)
        pieces = [scaled.to(torch.float8_e4m3fn)]
    else:
        _, exponents = torch.frexp(largest.clamp(min=2.0**-119))  # it is below 2^exponent
        scales = torch.exp2((exponents - 8).float())
        scaled = groups / scales[:, :, None]
        first = ((scaled.view(torch.int32) + 0x80000) & -0x100000).view(torch.float32)
        first = first.masked_fill(scaled.abs() < LEAST_FIRST, 0.0)
        pieces = [first, (scaled - first) / SECOND_PIECE]
        pieces = [piece.to(torch.float8_e4m3fn) for piece in pieces]
    codes = torch.stack([piece.reshape(x.shape) for piece in pieces])
    return CodedTokens(codes=codes, scales=scales.T.contiguous(), group=form.group)


def _in_e5m2(x: Tensor) -> CodedTokens:
    pieces, rest = [], x / WIDE_SCALE
    for _ in range(2):
        bits = rest.half().view(torch.int16)
        bits = torch.where(rest.isnan(), bits, bits + 0x80)
        pieces.append((bits >> 8).to(torch.int8).view(torch.float8_e5m2))
        rest = (rest - (bits & -256).view(torch.float16).float()) / WIDE_SECOND
    return CodedTokens(codes=torch.stack(pieces), scales=x.new_empty((0, len(x))), group=0)


def decoded(x: CodedTokens) -> Tensor:
    """What `x` stands for, [T, K] in float64; K must be a multiple of the group."""
    if x.group == 0:
        first, second = x.codes.float().double().unbind()
        return WIDE_SCALE * (first + WIDE_SECOND * second)
    first, *others = x.codes.float().double().unbind()
    for second in others:
        first = first + second * SECOND_PIECE
    return first * x.scales.double().T.repeat_interleave(x.group, dim=1)
