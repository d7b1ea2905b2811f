"""Where a file has the numbers of a published tensor, as plain records. Knows no tensors.

A published tensor may be all of a file's tensor, or a part of one that holds all experts of a
layer.
"""

from dataclasses import dataclass

DENSE_DTYPES = ("F64", "F32", "BF16", "F16")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a file has the numbers of a published tensor."""

    name: str  # in the file
    expert: int | None = None  # index on the first axis; None = all of the tensor
    first_row: int = 0  # of that expert's matrix
    row_step: int = 1  # from one of the part's rows to the next
    is_transposed: bool = False  # the file has inputs by rows


@dataclass(frozen=True, slots=True)
class FusedTensor:
    """A tensor of a file that is no published one, and what it consists of."""

    shape: tuple[int, ...]
    parts: dict[str, Source]  # by published name
    dtypes: tuple[str, ...] = DENSE_DTYPES
