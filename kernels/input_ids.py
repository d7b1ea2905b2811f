"""Resolves input ids that are known only on the device, and keeps sampled tokens there.

    ids[t] = input_ids[t]                      if input_ids[t] >= 0
             last_tokens[-1 - input_ids[t]]    else

    last_tokens[rows[s]] = token_ids[s]        after sampling
    drawn[s] = token_ids[s]                    if is_finite[s], else -1: the result for the host

The table begins with each row's newest token; drafts of rows may follow. So a step can be launched
before the tokens it continues have reached the host. Both operations can be captured in a CUDA
graph.
"""

import torch
from torch import Tensor


def resolve_input_ids(input_ids: Tensor, last_tokens: Tensor) -> Tensor:
    """input_ids: int32 [T], last_tokens: int32 [N >= rows]; returns int32 [T]."""
    if input_ids.is_cuda:
        from kernels.input_ids_triton import resolve  # a CPU needs no Triton

        return resolve(input_ids, last_tokens)
    rows = torch.clamp(-1 - input_ids, min=0)
    return torch.where(input_ids >= 0, input_ids, last_tokens.index_select(0, rows))


def keep_last_tokens(
    token_ids: Tensor, is_finite: Tensor, rows: Tensor, last_tokens: Tensor
) -> Tensor:
    """Writes to `last_tokens`, int32; returns `drawn`, int32 [S].

    token_ids: int64 [S], is_finite: bool [S], rows: int32 [S], distinct except for a padding row
    and rows with drafts, which are left with any of their tokens: `judge` or the host says which.
    """
    if token_ids.is_cuda:
        from kernels.input_ids_triton import keep

        return keep(token_ids, is_finite, rows, last_tokens)
    newest = token_ids.int()
    last_tokens.index_copy_(0, rows.long(), newest)
    return newest.masked_fill(~is_finite, -1)
