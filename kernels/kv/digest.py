"""Computes digests of whole KV blocks, in place or while the blocks are written or copied.

    digest[i] = sum over w of words[block_ids[i], w] * weights[w]   modulo 2^64

Bitwise equal on a CPU and a GPU: integers wrap, so the order of the sum does not matter.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def host_digest(words: NDArray[Any], weights: NDArray[np.int64]) -> int:
    """Of one block in host memory; words: int64 or int32 [W].

    numpy's sum takes 6.5 us for 98 kB that a cache has, torch's 9.7 and three more for the call.
    """
    return int(np.einsum("i,i->", words.astype(np.int64, copy=False), weights))


def block_digests(words: Tensor, weights: Tensor, block_ids: Tensor) -> Tensor:
    """words: contiguous int64 or int32 [N, W], weights: int64 [W], block_ids: int64 [n], in range.

    Returns int64 [n], on the same device. On a CPU each block is read once where it lies: copies of
    many blocks cost nine times as much, most of it to get fresh memory for them.
    """
    assert words.is_contiguous(), f"words of strides {words.stride()}"
    assert weights.shape == words.shape[1:], f"{list(weights.shape)} for {list(words.shape)}"
    if words.is_cuda:
        from kernels.kv.digest_triton import digests  # a CPU needs no Triton

        return digests(words, weights, block_ids)
    rows, factors = words.numpy(), weights.numpy()
    found = [host_digest(rows[block_id], factors) for block_id in block_ids.tolist()]
    return torch.tensor(found, dtype=torch.int64)


def write_blocks(words: Tensor, staged: Tensor, weights: Tensor, block_ids: Tensor) -> Tensor:
    """words[block_ids] = staged; returns the `block_digests` of the blocks; writes to `words`.

    staged: contiguous [n, W] of the dtype of `words`; block_ids: distinct. On a GPU a word is read
    once, for both the copy and the digest: 256 MiB take 155 us on an H200, separately 235.
    """
    assert staged.is_contiguous(), f"staged words of strides {staged.stride()}"
    expected = (len(block_ids), words.shape[1])
    assert staged.shape == expected, f"{list(staged.shape)} for {list(expected)}"
    assert staged.dtype == words.dtype, f"{staged.dtype} for {words.dtype}"
    assert weights.shape == words.shape[1:], f"{list(weights.shape)} for {list(words.shape)}"
    if words.is_cuda:
        assert words.is_contiguous(), f"words of strides {words.stride()}"
        from kernels.kv.digest_triton import digests

        return digests(words, weights, block_ids, staged=staged)
    words.index_copy_(0, block_ids, staged)
    return block_digests(words, weights, block_ids)


def copy_blocks(
    words: Tensor, weights: Tensor, block_ids: Tensor, copies: Tensor, rows: Tensor
) -> Tensor:
    """copies[rows] = words[block_ids]; returns the `block_digests` of the blocks.

    copies: contiguous [M, W] of the dtype of `words`; writes to it. rows: int64 [n], distinct.
    On a GPU a word is read once, as by `write_blocks`.
    """
    assert copies.is_contiguous(), f"copies of strides {copies.stride()}"
    assert copies.shape[1:] == words.shape[1:], f"{list(copies.shape)} for {list(words.shape)}"
    assert copies.dtype == words.dtype, f"{copies.dtype} for {words.dtype}"
    assert rows.shape == block_ids.shape, f"{list(rows.shape)} for {list(block_ids.shape)}"
    assert weights.shape == words.shape[1:], f"{list(weights.shape)} for {list(words.shape)}"
    if words.is_cuda:
        assert words.is_contiguous(), f"words of strides {words.stride()}"
        from kernels.kv.digest_triton import digests

        return digests(words, weights, block_ids, copies=(copies, rows))
    copies.index_copy_(0, rows, words.index_select(0, block_ids))
    return block_digests(words, weights, block_ids)
