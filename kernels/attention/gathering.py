"""Keys and values for kernels that read them without blocks: where they lie, and copies of them.

A kernel loads tiles of keys by address arithmetic of its copy engine if they lie one after the
other. It can have them so in two ways, and else looks their blocks up:

    fresh      no row has a history: K and V of the step itself
    gathered   history: each row's keys are copied from the store, one row after the other
    table      blocks as large as tiles; captured steps; more keys than are gathered: a table
               [rows, blocks]

Gathering costs one read and one write of the keys, a hundredth of their attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.attention.protocol import AttentionShape, AttentionStep
from kernels.kv.append import layer_lines

MAX_GATHERED_KEYS = 131_072
_LINE_BYTES = 8  # the number of a key's line


def copied_bytes(shape: AttentionShape, dtype: torch.dtype, num_keys: int) -> int:
    """The memory of one layer's copies, and of the lines of all windows, with `num_keys` keys."""
    num_keys = min(num_keys, MAX_GATHERED_KEYS)
    num_windows = len(set(shape.layer_windows))
    a_key = shape.num_kv_heads * shape.head_dim * dtype.itemsize + num_windows * _LINE_BYTES
    return 2 * num_keys * a_key


class Reads(Enum):
    """How a kernel is given keys and values."""

    FRESH = auto()
    GATHERED = auto()
    TABLE = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """Each row's keys that some query of it sees, one row after the other."""

    # [2, keys] int64  layer-0 line of the K, and of the V
    lines: Tensor
    # [R + 1] int32
    cu_keys: Tensor
    max_keys: int  # of a row

    def keys(self, store: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Copies of the layer's K and V, [keys, kv_heads, head_dim] each."""
        lines = layer_lines(store, layer)
        k, v = (lines.index_select(0, plane) for plane in self.lines)
        return k, v


def gather(
    step: AttentionStep,
    windows: Sequence[int | None],
    *,
    block_size: int,
    num_layers: int,
    device: torch.device,
) -> dict[int | None, Gathered]:
    """For each window; keys before it are left out, as queries are counted from the last key."""
    return {
        window: _gathered(step, window, block_size=block_size, num_layers=num_layers, device=device)
        for window in windows
    }


def _gathered(
    step: AttentionStep,
    window: int | None,
    *,
    block_size: int,
    num_layers: int,
    device: torch.device,
) -> Gathered:
    first = np.zeros_like(step.num_computed_tokens)
    if window is not None:
        first = np.maximum(step.num_computed_tokens - window + 1, 0)
    counts = step.num_computed_tokens + step.num_new_tokens - first
    ends = np.cumsum(counts)
    rows = np.repeat(np.arange(step.num_rows), counts)
    positions = np.arange(ends[-1]) - np.repeat(ends - counts - first, counts)
    lines = key_lines(step, rows, positions, block_size=block_size, num_layers=num_layers)
    cu_keys = np.concatenate(([0], ends)).astype(np.int32)
    return Gathered(
        lines=to_device(lines, device),
        cu_keys=to_device(cu_keys, device),
        max_keys=int(counts.max()),
    )


def key_lines(
    step: AttentionStep,
    rows: NDArray[np.int64],
    positions: NDArray[np.int64],
    *,
    block_size: int,
    num_layers: int,
) -> NDArray[np.int64]:
    """[2, n]: the line of layer 0 that holds the K, and the V, of each position of each row.

    Lines as in `kernels/kv/append.py`, whose `layer_lines` has them from a layer on.
    """
    blocks = step.block_ids[step.cu_blocks[rows] + positions // block_size].astype(np.int64)
    k_lines = blocks * (2 * num_layers * block_size) + positions % block_size
    return np.stack((k_lines, k_lines + block_size))


def to_device(host: NDArray[np.generic], device: torch.device) -> Tensor:
    """A copy that does not wait: only a pinned source lets the host run ahead of the GPU."""
    tensor = torch.from_numpy(host)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
