"""The Triton form of `kernels.kv.digest`: one launch for all blocks, one to sum their parts."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_LINES = 4  # blocks that share a tile of weights, which has as many bytes as a block's words
_TILE_WORDS = 512
_WORDS_PER_PART = 16 * _TILE_WORDS  # 64 KiB of int64: four blocks of 2.4 MB give 36 programs


@triton.jit(do_not_specialize=["num_blocks"])
def _digest_kernel(
    words,
    staged,
    weights,
    block_ids,
    copies,
    rows,
    parts,
    num_blocks,
    num_words,
    num_parts,
    IS_STAGED: tl.constexpr,
    IS_COPIED: tl.constexpr,
    WORDS_PER_PART: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    LINES: tl.constexpr,
):
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    part = tl.program_id(1)
    is_line = line < num_blocks
    block = words + tl.load(block_ids + line, mask=is_line, other=0).to(tl.int64) * num_words
    read = staged + line.to(tl.int64) * num_words if IS_STAGED else block
    row = tl.load(rows + line, mask=is_line, other=0).to(tl.int64) if IS_COPIED else line
    copy = copies + row * num_words
    total = tl.zeros([LINES, TILE_WORDS], dtype=tl.int64)
    for offset in range(0, WORDS_PER_PART, TILE_WORDS):
        word = part * WORDS_PER_PART + offset + tl.arange(0, TILE_WORDS)
        is_real = word < num_words
        weight = tl.load(weights + word, mask=is_real, other=0)
        is_read = is_line[:, None] & is_real[None, :]
        value = tl.load(read[:, None] + word[None, :], mask=is_read, other=0)
        if IS_STAGED:
            tl.store(block[:, None] + word[None, :], value, mask=is_read)
        if IS_COPIED:
            tl.store(copy[:, None] + word[None, :], value, mask=is_read)
        total += value.to(tl.int64) * weight[None, :]
    tl.store(parts + line * num_parts + part, tl.sum(total, axis=1), mask=is_line)


def digests(
    words: Tensor,
    weights: Tensor,
    block_ids: Tensor,
    *,
    staged: Tensor | None = None,
    copies: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """words: int64 or int32 [N, W], weights: int64 [W], block_ids: int64 [n]; returns int64 [n].

    staged: [n, W], written to the blocks first; None = the blocks are only read.
    copies: [M, W], and its rows, int64 [n], that the blocks are copied to.
    """
    num_blocks, num_words = block_ids.shape[0], words.shape[1]
    num_parts = triton.cdiv(num_words, _WORDS_PER_PART)
    parts = torch.empty((num_blocks, num_parts), dtype=torch.int64, device=words.device)
    copied, rows = (words, block_ids) if copies is None else copies
    if num_blocks:
        _digest_kernel[(triton.cdiv(num_blocks, _LINES), num_parts)](
            words,
            words if staged is None else staged,
            weights,
            block_ids,
            copied,
            rows,
            parts,
            num_blocks,
            num_words,
            num_parts,
            IS_STAGED=staged is not None,
            IS_COPIED=copies is not None,
            WORDS_PER_PART=_WORDS_PER_PART,
            TILE_WORDS=_TILE_WORDS,
            LINES=_LINES,
        )
    return parts.sum(dim=1)
