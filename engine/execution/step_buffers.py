"""A step's integers, packed: written on the host, sent in one copy, read in place on the device.

    cu_tokens [R + 1] | num_keys [R] | cu_blocks [R + 1] | sampled_rows [S] | sampled_lines [S]
    | logit_indices [S] | input_ids [T] | positions [T] | slots [T] | block_ids [N]

The places never move, so a CUDA graph may read them, and only what is used is sent: the block ids
come last. The host side is a ring of pinned buffers: one is written while the copy of an earlier
one may still wait in the stream. Knows no plan and no model.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Copies that may be under way at once: the step that computes, the one launched behind it, and
# the one being written.
_RING = 3
_ALIGNMENT = 32  # int32 elements: kernels are specialised on aligned addresses


class StepBuffers:
    """Room for steps of up to `max_rows` rows, `max_tokens` tokens and `max_block_ids` blocks."""

    def __init__(
        self, *, max_rows: int, max_tokens: int, max_block_ids: int, device: torch.device
    ) -> None:
        self.max_rows = max_rows
        self.max_tokens = max_tokens
        sizes = {
            "cu_tokens": max_rows + 1,
            "num_keys": max_rows,
            "cu_blocks": max_rows + 1,
            "sampled_rows": max_rows,
            "sampled_lines": max_rows,
            "logit_indices": max_rows,
            "input_ids": max_tokens,
            "positions": max_tokens,
            "slots": max_tokens,
            "block_ids": max_block_ids,
        }
        self._starts: dict[str, int] = {}
        length = 0
        for name, size in sizes.items():
            self._starts[name] = length
            length += -(-size // _ALIGNMENT) * _ALIGNMENT
        self._sizes = sizes
        is_cuda = device.type == "cuda"
        self._ring = [
            torch.zeros(length, dtype=torch.int32, pin_memory=is_cuda) for _ in range(_RING)
        ]
        self._fields = [self._fields_of(memory.numpy()) for memory in self._ring]
        self._turn = 0
        self._num_sent = 0
        self._sent = torch.zeros(length, dtype=torch.int32, device=device)

    def write(self) -> "HostFields":
        """The next host buffer, to be filled; what it held was sent `_RING` steps ago."""
        self._turn = (self._turn + 1) % _RING
        return self._fields[self._turn]

    def write_again(self) -> "HostFields":
        """The same, filled already with what was sent last."""
        last = self._fields[self._turn].memory
        fields = self.write()
        fields.memory[: self._num_sent] = last[: self._num_sent]
        return fields

    def send(self, num_block_ids: int) -> None:
        """Copy what was written since `write` to the device, in stream order."""
        self._num_sent = end = self._starts["block_ids"] + num_block_ids
        self._sent[:end].copy_(self._ring[self._turn][:end], non_blocking=True)

    def on_device(self, name: str, size: int | None = None) -> Tensor:
        """int32 [size], a view that is the same for every step; None: all there is."""
        start = self._starts[name]
        return self._sent[start : start + (self._sizes[name] if size is None else size)]

    def _fields_of(self, memory: NDArray[np.int32]) -> "HostFields":
        return HostFields(
            memory,
            {
                name: memory[start : start + self._sizes[name]]
                for name, start in self._starts.items()
            },
        )


class HostFields:
    """One host buffer's fields by name, numpy views to write into."""

    def __init__(self, memory: NDArray[np.int32], fields: dict[str, NDArray[np.int32]]) -> None:
        """`fields` are views of `memory`, all of one host buffer."""
        self.memory = memory
        self._fields = fields

    def __getitem__(self, name: str) -> NDArray[np.int32]:
        return self._fields[name]
