"""Reads the numbers of a published tensor from the tensor of a file that has them."""

from typing import Any

from torch import Tensor

from engine.models.sources import Source

_BLOCK_DIMENSIONS = 4  # [experts, rows, blocks, bytes]


def read_source(
    file: Any,  # noqa: ANN401  (safetensors' own type has no name)
    source: Source,
    share: tuple[slice, ...] | None,
    num_rows: int,
) -> Tensor:
    """The part of a published tensor that `share` cuts (None: all), on the host.

    Contiguous, or columns of a matrix where they lie in the file: they are read when copied.

    num_rows: of the part. The blocks of a row, if a file has such, are read as one row of bytes.
    """
    if source.expert is None:
        whole: Tensor = file.get_tensor(source.name) if share is None else _cut(file, source, share)
        return whole
    rows, *columns = share or (slice(0, num_rows),)
    stored = file.get_slice(source.name)
    are_blocks = len(stored.get_shape()) == _BLOCK_DIMENSIONS
    if source.row_step == 1 and not source.is_transposed and not are_blocks:
        first = source.first_row
        index = (source.expert, slice(first + rows.start, first + rows.stop), *columns)
        tensor: Tensor = stored[index]
        return tensor
    matrix = stored[source.expert]
    if source.is_transposed:
        matrix = matrix.T
    matrix = matrix[source.first_row :: source.row_step][rows]
    if are_blocks:
        matrix = matrix.flatten(1)
    part: Tensor = matrix[:, columns[0]] if columns else matrix
    return part.contiguous()


def _cut(file: Any, source: Source, share: tuple[slice, ...]) -> Tensor:  # noqa: ANN401
    stored = file.get_slice(source.name)
    # Dimensions of 1 at the end may be left out: the scales of [out, 1] are often [out].
    tensor: Tensor = stored[share[: len(stored.get_shape())]]
    return tensor
