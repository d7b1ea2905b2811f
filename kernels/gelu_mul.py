"""The GELU gate of a feed-forward layer on a GPU, in its tanh form.

    y = gelu(gate) * up,  gelu(g) = g sigmoid(2 z),  z = sqrt(2 / pi) (g + 0.044715 g^3)

which is 0.5 g (1 + tanh z) (arXiv:1606.08415). Computed in fp32 and rounded once. Torch twin:
`kernels.reference.gelu_mul`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.pdl import pdl_supported

_BLOCK = 2048  # as in kernels/silu_mul.py
_NUM_WARPS = 4
_TWICE_FACTOR = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)


@triton.jit
def _gelu_mul_kernel(
    gate_up_ptr,  # [T, 2 n]
    out_ptr,  # [T, n]
    n: tl.constexpr,
    row_stride: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    blocks_per_row: tl.constexpr = (n + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    row = (program // blocks_per_row).to(tl.int64)
    columns = (program % blocks_per_row) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < n
    gate_place = gate_up_ptr + row * row_stride + columns
    gate = tl.load(gate_place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_place + n, mask=mask, other=0.0).to(tl.float32)
    bent = (gate + gate * gate * gate * 0.044715) * _TWICE_FACTOR
    out = gate * tl.sigmoid(bent) * up
    tl.store(out_ptr + row * n + columns, out.to(out_ptr.dtype.element_ty), mask=mask)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gate_up: [T, 2 n] in any float type, rows may be strided; returns a new [T, n]."""
    assert gate_up.ndim == 2, f"{list(gate_up.shape)} are no rows"
    assert gate_up.shape[1] % 2 == 0, f"{gate_up.shape[1]} columns are no two halves"
    assert gate_up.stride(1) == 1, f"strides {gate_up.stride()}: a row's elements must be adjacent"
    num_rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, n), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows == 0:
        return out
    use_pdl = pdl_supported(gate_up.device)
    _gelu_mul_kernel[(num_rows * triton.cdiv(n, _BLOCK),)](
        gate_up,
        out,
        n=n,
        row_stride=gate_up.stride(0),
        BLOCK=_BLOCK,
        USE_PDL=use_pdl,
        num_warps=_NUM_WARPS,
        launch_pdl=use_pdl,
    )
    return out
