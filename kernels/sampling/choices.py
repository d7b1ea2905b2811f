"""How rows of logits are drawn, which token each gets, and the order of logits as integers."""

from dataclasses import dataclass

from torch import Tensor

HIGHEST = 2**31 - 1  # id, and the order of NaN; id ^ HIGHEST is HIGHEST - id
# The orders of -inf and inf as numbers, and a lower one than any logit has.
MINUS_INF_KEY, INF_KEY, LOWEST_KEY = -0x7F800001, 0x7F800000, -(2**31)


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyChoice:
    """The best token of each row, of logits as they are or after penalties and noise."""

    # [S] int64  the lowest id among equals; 0 where not finite
    token_ids: Tensor
    # [S] bool  False = the row holds NaN or +inf, or nothing above -inf
    is_finite: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """How P rows of logits are drawn; every tensor is [P], aligned to 16 bytes."""

    # int64  line of each row in the logits
    lines: Tensor
    # int64  any 64-bit pattern
    seeds: Tensor
    # int64  output tokens so far
    indices: Tensor
    # fp32  > 0
    temperatures: Tensor
    # int32  0 = no cut
    top_ks: Tensor
    # fp32  1 = no cut
    top_ps: Tensor
    # fp32  -log(min_p) >= 0; inf = no cut
    max_depths: Tensor
