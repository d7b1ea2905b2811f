"""Every new token of a step as a row of its own, which sees the keys up to itself.

    rows     | 0 | 1       | 2   |        num_keys of tokens: of row 1 with 7 keys 5, 6, 7
    tokens   | 0 | 1  2  3 | 4 5 |

A backend for rows of one token then computes prompts, too. The rows are found on the device, from
buffers that a captured graph reads anew in every replay. Torch twin: `expand_rows_torch`.
"""

import torch
import triton
import triton.language as tl

from kernels.attention.protocol import RowTensors

_TOKENS, _ROWS = 32, 128  # of a program; looked at together


@triton.jit(
    do_not_specialize=["num_rows", "num_tokens"],
    do_not_specialize_on_alignment=["cu_tokens_ptr", "num_keys_ptr", "cu_blocks_ptr"],
)
def _expand_rows_kernel(
    cu_tokens_ptr,  # [R + 1]
    num_keys_ptr,  # [R]
    cu_blocks_ptr,  # [R + 1]
    # outputs, [num_tokens]
    token_keys_ptr,
    token_blocks_ptr,  # the first entry in block_ids of the row of each
    num_rows,
    num_tokens,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
):
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = tl.zeros([TOKENS], tl.int32)
    for start in range(0, num_rows, ROWS):
        rows = start + tl.arange(0, ROWS)
        ends = tl.load(cu_tokens_ptr + rows + 1, mask=rows < num_rows, other=2**31 - 1)
        row += tl.sum((ends[None, :] <= tokens[:, None]).to(tl.int32), 1)
    is_token = (row < num_rows) & (tokens < num_tokens)
    end = tl.load(cu_tokens_ptr + row + 1, mask=is_token, other=0)
    num_keys = tl.load(num_keys_ptr + row, mask=is_token, other=0)
    seen = tl.where(is_token, num_keys - (end - 1 - tokens), 0)
    tl.store(token_keys_ptr + tokens, tl.maximum(seen, 0), mask=tokens < num_tokens)
    first_block = tl.load(cu_blocks_ptr + row, mask=is_token, other=0)
    tl.store(token_blocks_ptr + tokens, first_block, mask=tokens < num_tokens)


def open_token_rows(rows: RowTensors, num_tokens: int) -> RowTensors:
    """Rows of `num_tokens` tokens of `rows`; `expand_rows` must fill them.

    A row's blocks begin at its `cu_blocks`; the next entry is not their end.
    """
    device = rows.num_keys.device
    sizes = num_tokens, num_tokens + 1
    keys, blocks = (torch.zeros(size, dtype=torch.int32, device=device) for size in sizes)
    return RowTensors(
        cu_tokens=torch.arange(num_tokens + 1, dtype=torch.int32, device=device),
        num_keys=keys,
        cu_blocks=blocks,
        block_ids=rows.block_ids,
    )


def expand_rows(rows: RowTensors, tokens: RowTensors) -> None:
    """Writes `tokens.num_keys` and `cu_blocks` from the current content of `rows`.

    A token after the last row's, or one that sees nothing, has no key.
    """
    num_tokens = len(tokens.num_keys)
    _expand_rows_kernel[(triton.cdiv(num_tokens, _TOKENS),)](
        rows.cu_tokens,
        rows.num_keys,
        rows.cu_blocks,
        tokens.num_keys,
        tokens.cu_blocks,
        len(rows.num_keys),
        num_tokens,
        TOKENS=_TOKENS,
        ROWS=_ROWS,
    )


def expand_rows_torch(rows: RowTensors, tokens: RowTensors) -> None:
    """The torch twin of `expand_rows`."""
    num_tokens = len(tokens.num_keys)
    token = torch.arange(num_tokens, device=tokens.num_keys.device)
    row = torch.searchsorted(rows.cu_tokens[1:].contiguous(), token, right=True)
    is_token = row < len(rows.num_keys)
    row = row.clamp(max=len(rows.num_keys) - 1)
    seen = rows.num_keys[row] - (rows.cu_tokens[row + 1] - 1 - token)
    tokens.num_keys.copy_(torch.where(is_token, seen, 0).clamp(min=0))
    tokens.cu_blocks[:num_tokens] = torch.where(is_token, rows.cu_blocks[row], 0)
