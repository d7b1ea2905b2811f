"""Linear maps on a CPU with weights reordered once into oneDNN's blocked format.

y = x @ weight.T + bias. Torch's own path runs fp32 products of 2 to 64 rows through a library that
leaves half of the machine unused on processors of another vendor; the blocked format takes half the
time there. For one row the plain product is faster while the weight fits in cache, so callers
choose by the number of rows. Knows nothing of models.

The library compiles code for each new number of rows and keeps it: half a megabyte each, a gigabyte
for a model whose steps had every size up to 512. So rows are padded to one of a few sizes.
"""

from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812  (the field's own spelling)
from torch import Tensor

# Number of rows for which the blocked format is chosen; measured fast from 2 rows to thousands.
_EXPECTED_ROWS = 16
_SIZES_PER_OCTAVE_LOG2 = 3  # eight sizes, so at most an eighth of the rows is padding


def can_pack(weight: Tensor) -> bool:
    """Whether this build and device have a blocked format for `weight`."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and torch._C._has_mkldnn
    )


def pack_weight(weight: Tensor) -> Tensor:
    """A copy of `weight` [out, in] that only `packed_linear` can read."""
    assert can_pack(weight), f"no packed format for {weight.dtype} on {weight.device}"
    return cast("Tensor", torch.ops.mkldnn._reorder_linear_weight(weight, _EXPECTED_ROWS))


def packed_linear(x: Tensor, packed_weight: Tensor, bias: Tensor | None) -> Tensor:
    """x: [T, in] in the weight's dtype, bias: [out] or None; returns [T, out]."""
    num_rows = x.shape[0]
    num_padded = padded_rows(num_rows)
    if num_padded > num_rows:
        x = F.pad(x, (0, 0, 0, num_padded - num_rows))
    y = torch.ops.mkldnn._linear_pointwise(x, packed_weight, bias, "none", [], "")
    return cast("Tensor", y[:num_rows])


def padded_rows(num_rows: int) -> int:
    """The number of rows passed to the library: all up to 16, then eight per power of two."""
    step = 1 << max(0, (num_rows - 1).bit_length() - 1 - _SIZES_PER_OCTAVE_LOG2)
    return -(-num_rows // step) * step
