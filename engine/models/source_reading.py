"""Reads the numbers of a published tensor from the tensor of a file that has them."""

from typing import Any

from torch import Tensor

from engine.models.mxfp4 import dequantize_mxfp4
from engine.models.sources import Source


def read_source(
    file: Any,  # noqa: ANN401  (safetensors' own type has no name)
    source: Source,
    share: tuple[slice, ...] | None,
    num_rows: int,
    scales_file: Any = None,  # noqa: ANN401
) -> Tensor:
    """The part of a published tensor that `share` cuts (None: all), on the host.

    Contiguous, or columns of a matrix where they lie in the file: they are read when copied.

    num_rows: of the part; scales_file: the open file that has `source.scales`, if any.
    """
    if source.expert is None:
        whole: Tensor = file.get_tensor(source.name) if share is None else _cut(file, source, share)
        return whole
    rows, *columns = share or (slice(0, num_rows),)
    if source.row_step == 1 and not source.is_transposed and source.scales is None:
        first = source.first_row
        index = (source.expert, slice(first + rows.start, first + rows.stop), *columns)
        tensor: Tensor = file.get_slice(source.name)[index]
        return tensor
    matrix = file.get_slice(source.name)[source.expert]
    if source.is_transposed:
        matrix = matrix.T
    matrix = matrix[source.first_row :: source.row_step][rows]
    if source.scales is not None:
        scales = scales_file.get_slice(source.scales)[source.expert]
        scales = scales[source.first_row :: source.row_step][rows]
        matrix = dequantize_mxfp4(matrix, scales)
    part: Tensor = matrix[:, columns[0]] if columns else matrix
    return part.contiguous()


def _cut(file: Any, source: Source, share: tuple[slice, ...]) -> Tensor:  # noqa: ANN401
    tensor: Tensor = file.get_slice(source.name)[share]
    return tensor
