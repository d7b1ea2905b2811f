"""RMSNorm of rows on a GPU, alone or fused with a residual addition before it.

    y = x / sqrt(mean(x^2) + eps) * weight        (arXiv:1910.07467)

One program holds one row in registers, so a row is read once. The order of its sum depends on its
length alone, so a row's result is bitwise equal in any batch.
Torch twins: `kernels.reference.rms_norm`, `kernels.reference.rms_norm_add`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.pdl import pdl_supported

MAX_ROW = 16384  # elements; more than 32 per thread would spill from the registers
_ELEMENTS_PER_THREAD = 16  # two 16-byte loads of each operand in flight


@triton.jit
def added(x, residual_pointers, mask) -> tl.tensor:
    """x plus a row of the residual stream, which is written, in x's dtype."""
    residual = tl.load(residual_pointers, mask=mask, other=0.0).to(tl.float32)
    x = (x.to(tl.float32) + residual).to(x.dtype)
    tl.store(residual_pointers, x, mask=mask)
    return x


@triton.jit
def normalised(x, weight, eps: tl.constexpr, n: tl.constexpr) -> tl.tensor:
    """x: a row of n numbers, zeros after them; weight: fp32. In x's dtype."""
    numbers = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(numbers * numbers, axis=0) / n + eps)
    return (numbers * scale * weight).to(x.dtype)


@triton.jit
def normalised_row(
    x_ptr, residual_ptr, weight_ptr, row, eps: tl.constexpr, n: tl.constexpr,
    x_stride: tl.constexpr, residual_stride: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """[BLOCK], in x's dtype; the residual stream is written on the way."""
    columns = tl.arange(0, BLOCK)
    mask = columns < n
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        # The norm is computed from the stream as stored, that is, after rounding.
        x = added(x, residual_ptr + row * residual_stride + columns, mask)
    return normalised(x, weight, eps, n)


@triton.jit
def _rms_norm_kernel(
    x_ptr,  # [T, n]
    residual_ptr,  # [T, n]
    weight_ptr,  # [n]
    out_ptr,  # [T, n]
    eps: tl.constexpr,
    n: tl.constexpr,
    x_stride: tl.constexpr,
    residual_stride: tl.constexpr,
    out_stride: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    out = normalised_row(
        x_ptr, residual_ptr, weight_ptr, row, eps, n, x_stride, residual_stride, HAS_RESIDUAL,
        BLOCK, USE_PDL,
    )  # fmt: skip
    columns = tl.arange(0, BLOCK)
    tl.store(out_ptr + row * out_stride + columns, out, mask=columns < n)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: [T, n] in any float type, rows may be strided, n <= 16384; weight: [n] in x's
    dtype or fp32.

    Returns a new contiguous [T, n] in x's dtype.
    """
    check_norm(x, weight)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, out, eps)
    return out


def rms_norm_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """residual += x, then x = rms_norm(residual); returns (x, residual), both in place.

    x, residual: [T, n] of one dtype, rows may be strided, n <= 16384; weight: [n].
    """
    check_norm(x, weight)
    check_norm(residual, weight)
    assert x.shape == residual.shape, f"{list(x.shape)} and {list(residual.shape)}"
    _launch(x, residual, weight, x, eps)
    return x, residual


def check_norm(x: Tensor, weight: Tensor) -> None:
    assert x.ndim == 2, f"{list(x.shape)} are no rows"
    assert weight.shape == x.shape[1:], f"weight {list(weight.shape)} for rows of {x.shape[1]}"
    dtypes = (x.dtype, torch.float32)
    assert weight.dtype in dtypes, f"{x.dtype} with a weight in {weight.dtype}"
    assert x.stride(1) == 1, f"strides {x.stride()}: elements of a row must be adjacent"
    assert weight.is_contiguous(), f"weight with stride {weight.stride()}"
    assert x.shape[1] <= MAX_ROW, f"rows of {x.shape[1]}, at most {MAX_ROW} fit a program"


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None:
    num_rows, n = x.shape
    if num_rows == 0:
        return
    block = triton.next_power_of_2(n)
    use_pdl = pdl_supported(x.device)
    _rms_norm_kernel[(num_rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        eps=eps,
        n=n,
        x_stride=x.stride(0),
        residual_stride=x.stride(0) if residual is None else residual.stride(0),
        out_stride=out.stride(0),
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        USE_PDL=use_pdl,
        num_warps=num_warps_of(block),
        launch_pdl=use_pdl,
    )


def num_warps_of(block: int) -> int:
    """For rows of up to `block` elements; the order of a row's sum follows from it."""
    return min(max(block // (32 * _ELEMENTS_PER_THREAD), 1), 16)
