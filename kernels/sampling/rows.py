"""Chooses the tokens of whole rows of logits: torch on a CPU, Triton (never waiting) on a GPU.

greedy:  argmax of the row, lowest id among equals
draw:    as stated in `kernels.sampling.rows_triton`; its torch form are the features of
         `engine.sampling`, because these read results back to the host
"""

from dataclasses import dataclass

from torch import Tensor


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


def greedy(logits: Tensor) -> GreedyChoice:
    """logits: fp32, bf16 or fp16 [S, vocab]. On a GPU it can be captured in a CUDA graph."""
    if logits.is_cuda:
        from kernels.sampling.rows_triton import greedy as fused_greedy  # a CPU needs no Triton

        return fused_greedy(logits)
    # NaN and +inf win a maximum and -inf never does, so one pass finds tokens and non-finite rows.
    best, token_ids = logits.max(dim=-1)
    is_finite = best.isfinite()
    return GreedyChoice(token_ids=token_ids.masked_fill_(~is_finite, 0), is_finite=is_finite)
