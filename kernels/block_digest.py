"""Checksums of whole KV blocks, read where they lie.

    digest[i] = sum over w of words[block_ids[i], w] * weights[w]   modulo 2^64

The same bits on a CPU and a GPU: integers wrap, so the order of the sum does not matter.
"""

import torch
from torch import Tensor


def block_digests(words: Tensor, weights: Tensor, block_ids: Tensor, slab_bytes: int) -> Tensor:
    """words: contiguous int64 or int32 [N, W], weights: int64 [W], block_ids: int64 [n], in range.

    slab_bytes: bounds the temporaries on a CPU. Returns int64 [n], on the same device.
    """
    assert words.is_contiguous(), f"words of strides {words.stride()}"
    assert weights.shape == words.shape[1:], f"{list(weights.shape)} for {list(words.shape)}"
    if words.is_cuda:
        from kernels.block_digest_triton import digests  # a CPU needs no Triton

        return digests(words, weights, block_ids)
    slab = max(1, slab_bytes // (words.element_size() * words.shape[1]))
    sums = [
        (words.index_select(0, part).to(torch.int64) * weights).sum(dim=1)
        for part in torch.split(block_ids, slab)
    ]
    return torch.cat(sums)
