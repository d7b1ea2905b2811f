"""The Triton form of `kernels.block_digest`: one launch for all blocks, one to add their parts."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE_WORDS = 1024
_WORDS_PER_PART = 16 * _TILE_WORDS  # 128 KiB of int64: a block of 2.4 MB gives 18 programs


@triton.jit
def _digest_kernel(
    words,
    weights,
    block_ids,
    parts,
    num_words,
    num_parts,
    WORDS_PER_PART: tl.constexpr,
    TILE_WORDS: tl.constexpr,
):
    line, part = tl.program_id(0), tl.program_id(1)
    block = words + tl.load(block_ids + line).to(tl.int64) * num_words
    total = tl.zeros([TILE_WORDS], dtype=tl.int64)
    for offset in range(0, WORDS_PER_PART, TILE_WORDS):
        word = part * WORDS_PER_PART + offset + tl.arange(0, TILE_WORDS)
        is_real = word < num_words
        value = tl.load(block + word, mask=is_real, other=0).to(tl.int64)
        total += value * tl.load(weights + word, mask=is_real, other=0)
    tl.store(parts + line * num_parts + part, tl.sum(total, axis=0))


def digests(words: Tensor, weights: Tensor, block_ids: Tensor) -> Tensor:
    """words: int64 or int32 [N, W], weights: int64 [W], block_ids: int64 [n]; returns int64 [n]."""
    num_blocks, num_words = block_ids.shape[0], words.shape[1]
    num_parts = triton.cdiv(num_words, _WORDS_PER_PART)
    parts = torch.empty((num_blocks, num_parts), dtype=torch.int64, device=words.device)
    if num_blocks:
        _digest_kernel[(num_blocks, num_parts)](
            words,
            weights,
            block_ids,
            parts,
            num_words,
            num_parts,
            WORDS_PER_PART=_WORDS_PER_PART,
            TILE_WORDS=_TILE_WORDS,
        )
    return parts.sum(dim=1)
