"""The Triton form of `token_mask`: one launch, with a program per chunk of a masked line."""

import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 4096  # tokens
_WORDS = _CHUNK // 32
_WARPS = 4


@triton.jit(do_not_specialize_on_alignment=["lines", "words"])
def _ban_kernel(
    logits,  # [S, VOCAB], lines STRIDE apart, changed
    lines,  # [M], which of the S
    words,  # [M, NUM_WORDS]
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Grid (M, chunks); for a chunk without banned tokens only the mask is read."""
    mask_line, chunk = tl.program_id(0), tl.program_id(1)
    word = chunk * WORDS + tl.arange(0, WORDS)
    bits = tl.load(words + mask_line * NUM_WORDS + word, mask=word < NUM_WORDS, other=-1)
    token = word[:, None] * 32 + tl.arange(0, 32)[None, :]
    is_banned = ((bits[:, None] >> tl.arange(0, 32)[None, :]) & 1) == 0
    line = tl.load(lines + mask_line).to(tl.int64)
    banned = tl.full((WORDS, 32), -float("inf"), dtype=logits.dtype.element_ty)
    tl.store(logits + line * STRIDE + token, banned, mask=is_banned & (token < VOCAB))


def ban_tokens(logits: Tensor, lines: Tensor, words: Tensor) -> None:
    """As `token_mask.ban_tokens`, all on one GPU. Can be captured in a CUDA graph."""
    vocab_size = logits.shape[1]
    assert logits.stride(1) == 1, f"lines of stride {logits.stride(1)}"
    assert lines.is_contiguous(), "lines with gaps"
    assert words.is_contiguous(), "words with gaps"
    if lines.shape[0] == 0:
        return
    _ban_kernel[(lines.shape[0], triton.cdiv(vocab_size, _CHUNK))](
        logits,
        lines,
        words,
        STRIDE=logits.stride(0),
        VOCAB=vocab_size,
        NUM_WORDS=words.shape[1],
        WORDS=_WORDS,
        num_warps=_WARPS,
    )
