"""The memory of a step's inputs: all integers in one buffer, written on the host, sent in one copy.

    cu_tokens [R + 1] | num_keys [R] | cu_blocks [R + 1] | sampled_rows [S] | sampled_lines [S]
    | logit_indices [S] | device_rows [R] | guess_kinds [R] | num_new [R] | cu_lines [R + 1]
    | input_ids [T] | positions [T] | slots [T] | block_ids [N] | extra

The offsets of all but `extra` never change, so a CUDA graph may read the fields in place. Block ids
come behind the other fields, so that only the used part is sent, and `extra` is what a single step
needs besides: a copy takes the host longer than what it copies. The host side is a ring of pinned
buffers: one is written while the copy of an earlier one may still be queued in the stream. Knows no
plan (`inputs.py`).
"""

from collections.abc import Mapping
from functools import lru_cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling.staging import Staging
from kernels.attention.protocol import RowTensors

# Copies that may be in flight while one is written: for the step that computes, and for the one
# launched after it.
_IN_FLIGHT = 2
_ALIGNMENT = 32  # int32 elements: kernels are specialised on aligned addresses
_MAX_VIEWS = 1024  # that are kept: to make one takes as long as some kernels
_MAX_EXTRA = 2**14  # int32 elements; more goes in a copy of its own


class StepBuffers:
    """Buffers for steps of up to `max_rows` rows, `max_tokens` tokens, `max_block_ids` blocks."""

    def __init__(
        self,
        *,
        max_rows: int,
        max_tokens: int,
        max_block_ids: int,
        device: torch.device,
        max_samples: int | None = None,
        num_in_flight: int = _IN_FLIGHT,
    ) -> None:
        """max_samples: of one step; None = one for each row.

        num_in_flight: steps that may be launched and not waited for while one is written.
        """
        max_samples = max_rows if max_samples is None else max_samples
        self.max_rows = max_rows
        self.max_tokens = max_tokens
        sizes = {
            "cu_tokens": max_rows + 1,
            "num_keys": max_rows,
            "cu_blocks": max_rows + 1,
            "sampled_rows": max_samples,
            "sampled_lines": max_samples,
            "logit_indices": max_samples,
            "device_rows": max_rows,
            "guess_kinds": max_rows,
            "num_new": max_rows,
            "cu_lines": max_rows + 1,
            "input_ids": max_tokens,
            "positions": max_tokens,
            "slots": max_tokens,
            "block_ids": max_block_ids,
        }
        self._starts: dict[str, int] = {}
        length = 0
        for name, size in sizes.items():
            self._starts[name] = length
            length += _aligned(size)
        length += _MAX_EXTRA
        self._sizes = sizes
        self._staging = Staging(device)
        is_cuda = device.type == "cuda"
        self._ring = [
            torch.zeros(length, dtype=torch.int32, pin_memory=is_cuda)
            for _ in range(num_in_flight + 1)
        ]
        self._fields = [self._fields_of(memory.numpy()) for memory in self._ring]
        self._turn = 0
        self._num_sent = 0
        self._sent = torch.zeros(length, dtype=torch.int32, device=device)
        view = partial(_view, self._sent, self._starts)
        self._view = lru_cache(maxsize=_MAX_VIEWS)(view)  # steps are often alike

    def write(self) -> "HostFields":
        """The next host buffer, to be filled; its previous content was sent a round ago."""
        self._turn = (self._turn + 1) % len(self._ring)
        return self._fields[self._turn]

    def write_again(self) -> "HostFields":
        """The next host buffer, filled with what was sent last."""
        last = self._fields[self._turn].memory
        fields = self.write()
        fields.memory[: self._num_sent] = last[: self._num_sent]
        return fields

    def send(self, num_block_ids: int, extra: NDArray[np.int32] | None = None) -> Tensor | None:
        """Queue the copy of the current host buffer, including the block ids, to the device.

        extra: [E] of this step alone, returned as it is there.
        """
        self._num_sent = end = self._starts["block_ids"] + num_block_ids
        if extra is None or len(extra) > _MAX_EXTRA:
            self._copy(end)
            return None if extra is None else self._staging.send(extra)[0]
        first = _aligned(end)
        self._fields[self._turn].memory[first : first + len(extra)] = extra
        self._copy(first + len(extra))
        return self._sent[first : first + len(extra)]

    def _copy(self, end: int) -> None:
        self._sent[:end].copy_(self._ring[self._turn][:end], non_blocking=True)

    def on_device(self, name: str, size: int | None = None) -> Tensor:
        """int32 [size], a view of the same memory for every step; None: the whole field."""
        return self._view(name, self._sizes[name] if size is None else size)

    def _fields_of(self, memory: NDArray[np.int32]) -> "HostFields":
        return HostFields(
            memory,
            {
                name: memory[start : start + self._sizes[name]]
                for name, start in self._starts.items()
            },
        )


def _view(memory: Tensor, starts: Mapping[str, int], name: str, size: int) -> Tensor:
    return memory[starts[name] : starts[name] + size]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class HostFields:
    """One host buffer's fields by name, as numpy views to write into."""

    def __init__(self, memory: NDArray[np.int32], fields: dict[str, NDArray[np.int32]]) -> None:
        """`fields` are views of `memory`, all of one host buffer."""
        self.memory = memory
        self._fields = fields

    def __getitem__(self, name: str) -> NDArray[np.int32]:
        return self._fields[name]


def row_tensors(buffers: StepBuffers, num_rows: int) -> RowTensors:
    """The first `num_rows` rows of `buffers` as attention reads them, with all block ids."""
    return RowTensors(
        cu_tokens=buffers.on_device("cu_tokens", num_rows + 1),
        num_keys=buffers.on_device("num_keys", num_rows),
        cu_blocks=buffers.on_device("cu_blocks", num_rows + 1),
        block_ids=buffers.on_device("block_ids"),
    )
