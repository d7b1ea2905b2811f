"""A product for every head, y[t, h] = x[t, h] W[h], on a GPU.

Latent attention needs two: queries of latents (W is the up-projection of keys) and values (that of
values, transposed). W is read through its strides, so both are views of one weight. Sums in fp32,
columns in order; with one tile for any number of tokens a token's result has the same bits in any
batch. Torch twins: `kernels.attention.latent.absorb` and `values_of`.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.pdl import pdl_supported

_BLOCK_N = 64
_BLOCK_K = 64
_FEW_TOKENS, _FEW_TILE, _MANY_TILE = 16, 16, 64
# Of few tokens: a program holds so many numbers of W, all of its columns', in registers.
_HELD = 8192
_MIN_BLOCK_N = 16


@triton.jit
def _wait(USE_PDL: tl.constexpr) -> None:
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit(do_not_specialize=["num_tokens"])
def _by_head_kernel(
    x_ptr,  # [num_tokens, heads, K], strided
    weight_ptr,  # [heads, K, N], strided
    # outputs
    y_ptr,  # [num_tokens, heads, N]
    # constants
    num_tokens,
    NUM_HEADS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    X_TOKEN_STRIDE: tl.constexpr,
    X_HEAD_STRIDE: tl.constexpr,
    W_HEAD_STRIDE: tl.constexpr,
    W_K_STRIDE: tl.constexpr,
    W_N_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    head = tl.program_id(2)
    tokens = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k_offsets = tl.arange(0, BLOCK_K)
    is_token = (tokens < num_tokens)[:, None]
    is_column = (columns < N)[None, :]
    x_pointers = x_ptr + tokens[:, None] * X_TOKEN_STRIDE + head * X_HEAD_STRIDE
    w_pointers = weight_ptr + head.to(tl.int64) * W_HEAD_STRIDE + columns[None, :] * W_N_STRIDE
    if BLOCK_K == K:
        # No kernel writes W, so it is read while the one before still runs.
        w = tl.load(w_pointers + k_offsets[:, None] * W_K_STRIDE, mask=is_column, other=0.0)
        _wait(USE_PDL)
        x = tl.load(x_pointers + k_offsets[None, :], mask=is_token, other=0.0)
        acc = tl.dot(x, w, input_precision="ieee")
    else:
        _wait(USE_PDL)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            at = k + k_offsets
            x = tl.load(x_pointers + at[None, :], mask=is_token & (at < K)[None, :], other=0.0)
            is_weight = (at < K)[:, None] & is_column
            w = tl.load(w_pointers + at[:, None] * W_K_STRIDE, mask=is_weight, other=0.0)
            acc = tl.dot(x, w, acc, input_precision="ieee")
    y_pointers = y_ptr + (tokens[:, None] * NUM_HEADS + head) * N + columns[None, :]
    tl.store(y_pointers, acc.to(y_ptr.dtype.element_ty), mask=is_token & is_column)


def product_by_head(x: Tensor, weight: Tensor, out: Tensor, *, is_deterministic: bool) -> Tensor:
    """x: [T, heads, K], its numbers adjacent; weight: [heads, K, N], any view.

    out: [T, heads, N] contiguous, or of as many numbers; returned.
    """
    num_tokens, num_heads, num_inner = x.shape
    num_columns = weight.shape[2]
    assert weight.shape[:2] == (num_heads, num_inner), f"{x.shape} against {weight.shape}"
    assert x.dtype == weight.dtype == out.dtype, f"{x.dtype}, {weight.dtype}, {out.dtype}"
    assert x.stride(2) == 1, f"x has strides {x.stride()}"
    assert out.is_contiguous(), f"out has strides {out.stride()}"
    assert out.numel() == num_tokens * num_heads * num_columns, f"out has {out.numel()} numbers"
    if num_tokens == 0:
        return out
    is_few = num_tokens <= _FEW_TOKENS and not is_deterministic
    block_m = _FEW_TILE if is_few else _MANY_TILE
    block_n, block_k = _held_tile(num_inner) if is_few else (_BLOCK_N, _BLOCK_K)
    use_pdl = pdl_supported(x.device)
    tiles = triton.cdiv(num_tokens, block_m), triton.cdiv(num_columns, block_n), num_heads
    _by_head_kernel[tiles](
        x,
        weight,
        out,
        num_tokens,
        NUM_HEADS=num_heads,
        N=num_columns,
        K=num_inner,
        X_TOKEN_STRIDE=x.stride(0),
        X_HEAD_STRIDE=x.stride(1),
        W_HEAD_STRIDE=weight.stride(0),
        W_K_STRIDE=weight.stride(1),
        W_N_STRIDE=weight.stride(2),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        USE_PDL=use_pdl,
        num_warps=4,
        num_stages=3,
        launch_pdl=use_pdl,
    )
    return out


def _held_tile(num_inner: int) -> tuple[int, int]:
    """Columns and all of `num_inner` inputs, where a program can hold them; else a usual tile."""
    is_power = num_inner & (num_inner - 1) == 0
    if not is_power or not _MIN_BLOCK_N <= num_inner <= _HELD // _MIN_BLOCK_N:
        return _BLOCK_N, _BLOCK_K
    return min(_BLOCK_N, _HELD // num_inner), num_inner
