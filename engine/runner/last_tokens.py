"""Derives a step of each row's last token alone, for the part after the last layer's K and V.

The other tokens are not needed there. The step is derived on the device, without another copy from
the host. Knows no plan and no model.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.attention.protocol import AttentionStep, RowTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class LastTokenStep:
    """R rows of one new token, whose K and V are in the store already."""

    # [R] int32  indices of the tokens in the step that they were taken from
    indices: Tensor
    # [R] int32
    positions: Tensor
    # [R] int32  -1: not written to the store
    slots: Tensor
    attention: AttentionStep


class LastTokenSteps:
    """Makes `LastTokenStep`s; holds the tensors that are the same for all of them."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._cu_tokens = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._no_slots = torch.full((max_rows,), -1, dtype=torch.int32, device=device)

    def of(self, step: AttentionStep) -> LastTokenStep:
        num_rows, rows = step.num_rows, step.device_rows
        num_keys = step.num_computed_tokens + step.num_new_tokens
        return LastTokenStep(
            indices=rows.cu_tokens[1:] - 1,
            positions=rows.num_keys - 1,
            slots=self._no_slots[:num_rows],
            attention=AttentionStep(
                num_single_rows=num_rows,
                num_new_tokens=np.ones(num_rows, dtype=np.int64),
                num_computed_tokens=num_keys - 1,
                cu_blocks=step.cu_blocks,
                block_ids=step.block_ids,
                device_rows=RowTensors(
                    cu_tokens=self._cu_tokens[: num_rows + 1],
                    num_keys=rows.num_keys,
                    cu_blocks=rows.cu_blocks,
                    block_ids=rows.block_ids,
                ),
            ),
        )
