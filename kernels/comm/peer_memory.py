"""Memory that the GPUs of all ranks map of each other, and how kernels move rows through it.

    a rank's memory:   signals, packets (kernels.comm.signals), then NUM_SLOTS slots of data

A call uses one slot, the next call the other one. A row is a line of a tensor, or a piece of
`PIECE_BYTES` of it, and is moved in vectors of 16 bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.comm.signals import DATA_BEGINS, MAX_BLOCKS, NUM_SLOTS, data_of
from kernels.device import device_properties
from kernels.rms_norm import MAX_ROW

PIECE_BYTES = 8192
VECTOR_BYTES = 16
# In which the parts of a tensor are added.
SUM_DTYPES = {
    torch.bfloat16: tl.float32,
    torch.float16: tl.float32,
    torch.float32: tl.float32,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerMemory:
    """The memory of all ranks, as one of them has it mapped; see `kernels.comm.signals`."""

    rank: int
    # int64, of each rank
    memories: tuple[Tensor, ...]
    # int64 [MAX_BLOCKS], this rank's own
    count: Tensor
    max_blocks: int  # one on each multiprocessor

    @classmethod
    def of(cls, rank: int, memories: Sequence[Tensor]) -> "PeerMemory":
        """memories: equal in size and zero in all ranks before anybody writes there."""
        mine = memories[rank]
        return cls(
            rank=rank,
            memories=tuple(memories),
            count=torch.zeros(MAX_BLOCKS, dtype=torch.int64, device=mine.device),
            max_blocks=min(MAX_BLOCKS, device_properties(mine.device).num_sms),
        )

    @property
    def num_ranks(self) -> int:
        return len(self.memories)

    @property
    def slot_bytes(self) -> int:
        room = self.memories[0].nbytes - DATA_BEGINS
        return room // NUM_SLOTS // VECTOR_BYTES * VECTOR_BYTES


def grid_of(num_units: int, max_blocks: int) -> int:
    """Blocks, of which each takes as many units, as far as that is possible."""
    per_block = -(-num_units // max_blocks)
    return -(-num_units // per_block)


def piece_of(x: Tensor) -> int:
    """Elements of a row, where rows are pieces."""
    return PIECE_BYTES // x.element_size()


def width_of(x: Tensor) -> int:
    """Elements that are moved together: where the end of `x` cuts a vector, each alone."""
    per_vector = VECTOR_BYTES // x.element_size()
    return per_vector if x.numel() % per_vector == 0 else 1


def fits_norm(x: Tensor) -> bool:
    """Whether a line is one of the rows that `sum_add_norm` takes."""
    num_bytes = x.shape[-1] * x.element_size()
    return x.ndim == 2 and num_bytes % VECTOR_BYTES == 0 and x.shape[-1] <= MAX_ROW


def check_lines(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    """Raises AssertionError where a sum with residual and norm cannot take these."""
    assert x.is_contiguous(), f"strides {x.stride()}"
    assert residual.is_contiguous(), f"strides {residual.stride()}"
    assert x.shape == residual.shape, f"{list(x.shape)} and {list(residual.shape)}"
    assert fits_norm(x), f"{list(x.shape)} in {x.dtype} are no lines of whole vectors"
    assert weight.shape == x.shape[1:], f"weight {list(weight.shape)} for rows of {x.shape[1]}"


@triton.jit
def columns_of(  # noqa: ANN201 - Triton's
    row, numel, ROW: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):
    """The elements of a row, and which of them are there; numel: of the tensor, by WIDTH."""
    columns = tl.arange(0, BLOCK)
    places = row * ROW + columns
    if ROW == BLOCK:
        return places, places < numel * WIDTH
    return places, columns < ROW


@triton.jit
def add_parts(  # noqa: ANN201 - Triton's
    x_ptr,
    mine,
    there,
    stride,
    places,
    mask,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    SUM_DTYPE: tl.constexpr,
):
    """The sum of all ranks' parts of a row: the own one of x, others' as they were written here."""
    total = tl.zeros(places.shape, SUM_DTYPE)
    for peer in tl.static_range(WORLD):
        if peer == RANK:
            part = tl.load(x_ptr + places, mask=mask, other=0.0)
        else:
            part = tl.load(mine + there + peer * stride, mask=mask, other=0.0, cache_modifier=".cg")
        total = part.to(SUM_DTYPE) if peer == 0 else total + part.to(SUM_DTYPE)  # -0 stays -0
    return total


@triton.jit
def write_to_ranks(memories, into, value, mask, SKIPPED: tl.constexpr, WORLD: tl.constexpr) -> None:
    """Write to the same place in the data of every rank but `SKIPPED`; -1 = of all."""
    for rank in tl.static_range(WORLD):
        if rank != SKIPPED:
            tl.store(data_of(memories[rank], value.dtype) + into, value, mask=mask)
