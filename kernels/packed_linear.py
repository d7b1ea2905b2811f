"""Linear maps on a CPU with weights reordered once into oneDNN's blocked format.

y = x @ weight.T + bias. Torch's own path runs fp32 products of 2 to 64 rows through a library
that leaves half of the machine unused on processors of another make; the blocked format takes
half the time there. At one row the plain product is faster while the weight fits in cache, so
callers choose by number of rows. Knows nothing of models.
"""

from typing import cast

import torch
from torch import Tensor

# Number of rows the blocked format is chosen for; measured fast from 2 rows to thousands.
_EXPECTED_ROWS = 16


def can_pack(weight: Tensor) -> bool:
    """Whether this build and device have a blocked format for `weight`."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and torch._C._has_mkldnn
    )


def pack_weight(weight: Tensor) -> Tensor:
    """Copy of `weight` [out, in] that only `packed_linear` can read."""
    assert can_pack(weight), f"no packed format for {weight.dtype} on {weight.device}"
    return cast("Tensor", torch.ops.mkldnn._reorder_linear_weight(weight, _EXPECTED_ROWS))


def packed_linear(x: Tensor, packed_weight: Tensor, bias: Tensor | None) -> Tensor:
    """x: [T, in] in the weight's dtype, bias: [out] or None; returns [T, out]."""
    return cast(
        "Tensor", torch.ops.mkldnn._linear_pointwise(x, packed_weight, bias, "none", [], "")
    )
