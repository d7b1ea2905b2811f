"""Bans tokens by a bit mask, one bit per token and line, as written by constraint matchers.

    logits[lines[m], 32 * w + i] = -inf    where bit i of words[m, w] is 0

In place, and only for the lines that have a mask; bits beyond the vocabulary are ignored. Torch on
a CPU, Triton on a GPU, where it is one launch that reads no logits.
"""

import torch
from torch import Tensor

from kernels.sampling.mask_words import TOKENS_PER_WORD, num_mask_words


def ban_tokens(logits: Tensor, lines: Tensor, words: Tensor) -> None:
    """Writes to `logits`, fp32, bf16 or fp16 [S, vocab] with contiguous lines.

    lines: int32 [M], distinct; words: int32 [M, num_mask_words(vocab)], contiguous.
    """
    num_lines, vocab_size = lines.shape[0], logits.shape[1]
    assert words.shape == (num_lines, num_mask_words(vocab_size)), f"{tuple(words.shape)}"
    assert lines.dtype == words.dtype == torch.int32, f"{lines.dtype}, {words.dtype}"
    if logits.is_cuda:
        from kernels.sampling.token_mask_triton import (
            ban_tokens as fused_ban_tokens,  # a CPU needs no Triton
        )

        fused_ban_tokens(logits, lines, words)
        return
    shifts = torch.arange(TOKENS_PER_WORD, dtype=torch.int32)
    bits = (words.unsqueeze(-1) >> shifts) & 1  # [M, words, 32]
    is_banned = bits.flatten(1)[:, :vocab_size] == 0
    index = lines.long()
    logits.index_copy_(0, index, logits.index_select(0, index).masked_fill(is_banned, -torch.inf))
