"""RMSNorm whose result is coded in e4m3, for the product after it.

    y = rms_norm(x + residual)      coded as in coded_tokens.py

One program holds one row, as in `kernels.rms_norm`; y is rounded to x's dtype before it is coded,
so codes are those of that kernel's result. Torch twin: `kernels.reference.TorchOps.rms_norm_coded`.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.instructions import knows_e4m3
from kernels.pdl import pdl_supported
from kernels.quant.coded_tokens import CodedTokens, InputForm, empty_coded
from kernels.quant.token_groups import code_groups
from kernels.rms_norm import check_norm, normalised_row, num_warps_of


@triton.jit(do_not_specialize=["num_tokens"])
def _coded_norm_kernel(
    x_ptr,  # [num_tokens, n]
    residual_ptr,  # [num_tokens, n]
    weight_ptr,  # [n]
    codes_ptr,  # [PIECES, num_tokens, n] e4m3
    scales_ptr,  # [groups, num_tokens] fp32
    num_tokens,
    eps: tl.constexpr,
    n: tl.constexpr,
    x_stride: tl.constexpr,
    residual_stride: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,  # columns of a group; BLOCK if there is one
    PIECES: tl.constexpr,
    KNOWS_E4M3: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    y = normalised_row(
        x_ptr, residual_ptr, weight_ptr, row, eps, n, x_stride, residual_stride, HAS_RESIDUAL,
        BLOCK, USE_PDL,
    )  # fmt: skip
    groups = tl.arange(0, BLOCK // WIDTH)
    columns = groups[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    mask = columns < n
    y = tl.reshape(y, (BLOCK // WIDTH, WIDTH)).to(tl.float32)
    scales, first, second = code_groups(y, PIECES, KNOWS_E4M3)
    places = codes_ptr + row * n + columns
    tl.store(places, first, mask=mask)
    if PIECES == 2:
        tl.store(places + num_tokens.to(tl.int64) * n, second, mask=mask)
    tl.store(scales_ptr + groups * num_tokens + row, scales, mask=groups * WIDTH < n)


def rms_norm_coded(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, form: InputForm
) -> CodedTokens:
    """x, residual: [T, n], rows may be strided, n <= 16384; weight: [n]; residual += x, in place.

    residual None: the norm of x alone. form.group: a power of two, or n.
    """
    check_norm(x, weight)
    num_tokens, n = x.shape
    coded = empty_coded(num_tokens, n, form, x)
    if residual is not None:
        assert x.shape == residual.shape, f"{list(x.shape)} and {list(residual.shape)}"
        check_norm(residual, weight)
    if num_tokens == 0:
        return coded
    block = triton.next_power_of_2(n)
    width = block if form.group >= n else form.group
    assert block % width == 0, f"groups of {form.group} in {n} columns"
    use_pdl = pdl_supported(x.device)
    _coded_norm_kernel[(num_tokens,)](
        x,
        x if residual is None else residual,
        weight,
        coded.codes,
        coded.scales,
        num_tokens,
        eps=eps,
        n=n,
        x_stride=x.stride(0),
        residual_stride=x.stride(0) if residual is None else residual.stride(0),
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        WIDTH=width,
        PIECES=form.pieces,
        KNOWS_E4M3=knows_e4m3(x.device),
        USE_PDL=use_pdl,
        num_warps=num_warps_of(block),
        launch_pdl=use_pdl,
    )
    return coded
