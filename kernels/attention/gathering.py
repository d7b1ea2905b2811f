"""Where keys and values lie in the paged store, for kernels that read them without blocks."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.attention.protocol import AttentionStep


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
