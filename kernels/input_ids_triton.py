"""The Triton form of `kernels.input_ids`: one launch for each of its two operations.

Tensors are int32 unless stated.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_TOKENS = 256


@triton.jit(do_not_specialize=["num_tokens"])
def _resolve_kernel(
    input_ids,  # [T], -1 - r = the last token of row r
    last_tokens,  # [rows]
    ids,  # [T], output
    num_tokens,
    BLOCK_TOKENS: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    is_real = token < num_tokens
    given = tl.load(input_ids + token, mask=is_real, other=0)
    newest = tl.load(last_tokens + (-1 - given), mask=is_real & (given < 0), other=0)
    tl.store(ids + token, tl.where(given >= 0, given, newest), mask=is_real)


@triton.jit(do_not_specialize=["num_sampled"])
def _keep_kernel(
    token_ids,  # int64 [S]
    is_finite,  # bool [S]
    rows,  # [S]
    last_tokens,  # [rows], output
    drawn,  # [S], output
    num_sampled,
    BLOCK_TOKENS: tl.constexpr,
):
    line = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    is_real = line < num_sampled
    row = tl.load(rows + line, mask=is_real, other=0)
    token = tl.load(token_ids + line, mask=is_real, other=0).to(tl.int32)
    is_token = tl.load(is_finite + line, mask=is_real, other=0) != 0
    tl.store(last_tokens + row, token, mask=is_real)
    tl.store(drawn + line, tl.where(is_token, token, -1), mask=is_real)


def resolve(input_ids: Tensor, last_tokens: Tensor) -> Tensor:
    """input_ids: int32 [T], last_tokens: int32 [N >= rows], both on one GPU; returns int32 [T]."""
    num_tokens = input_ids.shape[0]
    ids = torch.empty_like(input_ids)
    grid = (triton.cdiv(num_tokens, _BLOCK_TOKENS),)
    _resolve_kernel[grid](input_ids, last_tokens, ids, num_tokens, BLOCK_TOKENS=_BLOCK_TOKENS)
    return ids


def keep(token_ids: Tensor, is_finite: Tensor, rows: Tensor, last_tokens: Tensor) -> Tensor:
    """As `kernels.input_ids.keep_last_tokens`, all on one GPU."""
    num_sampled = token_ids.shape[0]
    drawn = torch.empty_like(rows)
    grid = (triton.cdiv(num_sampled, _BLOCK_TOKENS),)
    _keep_kernel[grid](
        token_ids,
        is_finite.view(torch.uint8),
        rows,
        last_tokens,
        drawn,
        num_sampled,
        BLOCK_TOKENS=_BLOCK_TOKENS,
    )
    return drawn
