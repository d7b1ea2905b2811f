"""Chooses the tokens of whole rows of logits: torch on a CPU, Triton (never waiting) on a GPU.

greedy:  argmax of the row, lowest id among equals; also of a row whose parts are on several ranks:
         of each part they exchange a word, with the best logit's order in its upper 32 bits and its
         id below, counted down from the highest, and the largest word is that of the row
draw:    as stated in `kernels.sampling.rows_triton`; its torch form are the features of
         `engine.sampling`, because these read results back to the host
"""

import torch
from torch import Tensor

from kernels.sampling.choices import HIGHEST, INF_KEY, LOWEST_KEY, MINUS_INF_KEY, GreedyChoice


def greedy(logits: Tensor) -> GreedyChoice:
    """logits: fp32, bf16 or fp16 [S, vocab]. On a GPU it can be captured in a CUDA graph."""
    if logits.is_cuda:
        from kernels.sampling.rows_triton import greedy as fused_greedy  # a CPU needs no Triton

        return fused_greedy(logits)
    # NaN and +inf win a maximum and -inf never does, so one pass finds tokens and non-finite rows.
    best, token_ids = logits.max(dim=-1)
    is_finite = best.isfinite()
    return GreedyChoice(token_ids=token_ids.masked_fill_(~is_finite, 0), is_finite=is_finite)


def best_words(logits: Tensor, first_id: int) -> Tensor:
    """logits: as of `greedy`, of the ids from `first_id` on, maybe of none; returns int64 [S]."""
    if logits.shape[1] == 0:
        return logits.new_full((len(logits),), LOWEST_KEY << 32, dtype=torch.int64)
    if logits.is_cuda:
        from kernels.sampling.rows_triton import best_words as fused_words

        return fused_words(logits, first_id)
    best, ids = logits.max(dim=-1)
    bits = torch.where(best == 0, 0.0, best.float()).view(torch.int32)
    keys = torch.where(best.isnan(), HIGHEST, bits ^ ((bits >> 31) & HIGHEST)).long()
    return (keys << 32) | ((first_id + ids) ^ HIGHEST)


def greedy_of_words(words: Tensor) -> GreedyChoice:
    """What `greedy` says of whole rows; words: int64 [ranks, S], `best_words` of each part."""
    if words.is_cuda:
        from kernels.sampling.rows_triton import greedy_of_words as fused_choice

        return fused_choice(words)
    best = words.amax(dim=0)
    keys, ids = best >> 32, (best & HIGHEST) ^ HIGHEST
    is_finite = (keys > MINUS_INF_KEY) & (keys < INF_KEY)
    return GreedyChoice(token_ids=ids.masked_fill_(~is_finite, 0), is_finite=is_finite)
