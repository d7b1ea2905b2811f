"""Linear maps whose result for a token is bitwise equal in any batch.

y = x W^T + b. Libraries choose another tiling for another number of tokens, and with it another
order of the sum over columns. Here a weight has one tiling for 1 and for 16384 tokens, its columns
are never split, and rows past the end are masked. A matrix instruction never sums over tokens, so a
token's result depends on its own row only. (He et al., "Defeating Nondeterminism in LLM Inference",
Thinking Machines Lab, 2025.)
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.device import device_properties, stages_that_fit
from kernels.pdl import pdl_supported

# Columns and strides must be multiples of 32 bytes, which keeps every load 16-byte aligned.
_SIZE_MULTIPLE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class InvariantConfig:
    """The single tiling of a weight; sizes in elements."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8  # token tiles that share weight tiles in the L2 cache


_MANY_ROWS = InvariantConfig(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=4)
# Narrower tiles, so that one token already occupies more multiprocessors.
_FEW_ROWS = InvariantConfig(block_m=128, block_n=64, block_k=64, num_warps=4, num_stages=6)
_FEW = 8192


def supports_invariant(weight: Tensor) -> bool:
    """Whether this kernel can read `weight` [out, in]."""
    return (
        weight.device.type == "cuda"
        and weight.dtype in (torch.bfloat16, torch.float16)
        and weight.is_contiguous()
        and weight.data_ptr() % 16 == 0
        and weight.shape[1] % _SIZE_MULTIPLE == 0
    )


def invariant_config(weight: Tensor) -> InvariantConfig:
    """The tiling; depends on the weight's shape and device alone: so results are invariant."""
    shared_memory_bytes = device_properties(weight.device).shared_memory_per_block_bytes
    return fitted_config(weight.shape[0], shared_memory_bytes)


@cache
def fitted_config(num_rows: int, shared_memory_bytes: int) -> InvariantConfig:
    """The tiling of a weight of `num_rows` rows, with as many stages as the memory has room for.

    The number of stages changes no sum: results are bitwise equal with more memory and with less.
    """
    config = _FEW_ROWS if num_rows <= _FEW else _MANY_ROWS
    num_stages = stages_that_fit(
        config.num_stages,
        stage_bytes=2 * config.block_k * (config.block_m + config.block_n),
        shared_memory_bytes=shared_memory_bytes,
    )
    assert num_stages > 0, f"{shared_memory_bytes} bytes of shared memory hold no tile"
    return replace(config, num_stages=num_stages)


@triton.jit
def _tile_of(program, num_tokens, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
             GROUP_M: tl.constexpr):  # fmt: skip
    """The tile of a program; concurrent programs form a square, so both operands stay in L2."""
    num_tiles_m = tl.cdiv(num_tokens, BLOCK_M)
    group_size = GROUP_M * tl.cdiv(N, BLOCK_N)
    first_m = (program // group_size) * GROUP_M
    height = tl.minimum(num_tiles_m - first_m, GROUP_M)
    inside = program % group_size
    return first_m + inside % height, inside // height


@triton.jit(do_not_specialize=["num_tokens"])
def _invariant_linear_kernel(
    x_ptr,  # [num_tokens, K], row stride STRIDE_X
    weight_ptr,  # [N, K]
    bias_ptr,  # [N] if HAS_BIAS
    y_ptr,  # [num_tokens, N]
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDE_X: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tile_m, tile_n = _tile_of(tl.program_id(0), num_tokens, N, BLOCK_M, BLOCK_N, GROUP_M)
    tokens = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    is_token = tokens < num_tokens
    # Columns past the end repeat the last and are not stored: cheaper than masking every load.
    w_rows = tl.minimum(columns, N - 1).to(tl.int64)
    k_offsets = tl.arange(0, BLOCK_K)
    x_pointers = x_ptr + tokens[:, None].to(tl.int64) * STRIDE_X + k_offsets[None, :]
    w_pointers = weight_ptr + w_rows[:, None] * K + k_offsets[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            x = tl.load(x_pointers + k, mask=is_token[:, None], other=0.0)
            w = tl.load(w_pointers + k)
        else:
            is_column = (k_offsets < K - k)[None, :]
            x = tl.load(x_pointers + k, mask=is_token[:, None] & is_column, other=0.0)
            w = tl.load(w_pointers + k, mask=is_column, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias_ptr + w_rows).to(tl.float32)[None, :]
    offsets = tokens[:, None].to(tl.int64) * N + columns[None, :]
    mask = is_token[:, None] & (columns < N)[None, :]
    tl.store(y_ptr + offsets, acc.to(y_ptr.dtype.element_ty), mask=mask)


def invariant_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, config: InvariantConfig | None = None
) -> Tensor:
    """x: [T, K], rows may be strided; weight: [N, K]; bias: [N] or None, added before rounding.

    Returns [T, N]. `config` replaces the weight's own tiling; results are bitwise comparable only
    with the same tiling. Torch twin: `torch.nn.functional.linear`.
    """
    num_tokens, num_columns = x.shape
    num_rows = weight.shape[0]
    assert weight.shape[1] == num_columns, f"{x.shape} against {weight.shape}"
    assert x.dtype == weight.dtype, f"{x.dtype} against {weight.dtype}"
    assert weight.is_contiguous(), f"weight has strides {weight.stride()}"
    assert x.stride(1) == 1, f"strides {x.stride()}: a row's elements must be adjacent"
    assert x.stride(0) % 8 == 0, f"strides {x.stride()}: every row must start on 16 bytes"
    assert x.data_ptr() % 16 == 0, "x must start on 16 bytes"
    y = x.new_empty((num_tokens, num_rows))
    if num_tokens == 0:
        return y
    cut = config or invariant_config(weight)
    use_pdl = pdl_supported(x.device)
    num_tiles = triton.cdiv(num_tokens, cut.block_m) * triton.cdiv(num_rows, cut.block_n)
    _invariant_linear_kernel[(num_tiles,)](
        x,
        weight,
        weight if bias is None else bias,
        y,
        num_tokens,
        N=num_rows,
        K=num_columns,
        STRIDE_X=x.stride(0),
        HAS_BIAS=bias is not None,
        BLOCK_M=cut.block_m,
        BLOCK_N=cut.block_n,
        BLOCK_K=cut.block_k,
        GROUP_M=cut.group_m,
        USE_PDL=use_pdl,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        launch_pdl=use_pdl,
    )
    return y
