"""Linear maps with integers of four bits and inputs in two FP8 pieces.

    y[t, n] = sum over groups j of s[n, j] * (sum over k in j of q[n, k] x[t, k] - z[n, j] x[t, k])

and silu(gate) * up of two such products; x in pieces that lie side by side as in
`kernels.quant.fp8_few`. Read as e4m3, the bytes 0 to 15 are 0 to 15 times 2^-9: the subnormal
numbers, and the first ones above them, which have the same last place. So a byte of two numbers
takes a shift and two masks to become two operands of Hopper's FP8 units. Zero points take products
of their own, of a constant operand; sums of 128 columns are added in fp32. Torch twin:
`engine.layers.quantized_weight.dequantize` and `torch.nn.functional.linear`.

Bytes are in runs of 128 columns (`kernels.quant.int4`), one a step, which share a scale. The rest
is as in `kernels.quant.fp8_few`.
"""

from dataclasses import replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.device import device_properties, stages_that_fit
from kernels.instructions import knows_e4m3, uses_ptx
from kernels.linear.small import add_parts, load_tokens, prefetch_rows, store_rows, weight_rows
from kernels.pdl import pdl_supported
from kernels.quant.coded_tokens import SECOND_PIECE, CodedTokens
from kernels.quant.dequantize import nibbles_e4m3
from kernels.quant.fp8_few import add_joined, joined_rows
from kernels.quant.fp8_linear import LINE_BYTES, QuantConfig
from kernels.quant.int4_linear import FourBitOperand
from kernels.quant.steps import Codes, load_scale

MAX_TOKENS = 16  # of more it is slower than `kernels.quant.int4_linear`
_SECOND_PIECE = tl.constexpr(SECOND_PIECE)
_HALF = 64  # bytes of a run
_RUN = 2 * _HALF
_PLACE = tl.constexpr(2.0**-9)  # what a 1 is as e4m3
_ONE, _MINUS_EIGHT = tl.constexpr(0x01), tl.constexpr(0x88)  # in places
_INT4 = tl.constexpr(int(Codes.INT4))
_PROGRAMS_PER_SM = 4
_LEAST_PART = 512  # columns
_PARTS = (8, 6, 4, 3, 2)


def supports_joined(weight: FourBitOperand, dtype: torch.dtype) -> bool:
    """Whether this kernel computes with `weight` and inputs in `dtype`, on their device."""
    capability = device_properties(weight.packed.device).capability
    return (
        dtype is torch.bfloat16  # pieces of a float16 are not all of it
        and capability is not None
        and capability[0] == 9
        and reads_runs(weight)
    )


def reads_runs(weight: FourBitOperand) -> bool:
    """Whether `weight` has integers in runs of 128 columns that share a scale."""
    is_integer = weight.codes in (Codes.INT4, Codes.INT4_ZEROS)
    return is_integer and weight.half == _HALF and weight.group % _RUN == 0


@triton.jit
def _multiply(w, x, total, KNOWS_E4M3: tl.constexpr) -> tl.tensor:
    """total + w x^T; w: bytes that are e4m3."""
    w = w.to(tl.float8e4nv, bitcast=True)
    if not KNOWS_E4M3:  # the interpreter
        w, x = w.to(tl.float32), x.to(tl.float32)
    return tl.dot(w, tl.trans(x), total)


@triton.jit
def _whole_run(packed, USES_PTX: tl.constexpr) -> tl.tensor:
    """packed: bytes of runs [rows, HALF]; returns the numbers in bytes, [rows, 2 * HALF]."""
    low, high = nibbles_e4m3(packed, USES_PTX)
    both = tl.permute(tl.join(low, high), (0, 2, 1))
    return tl.reshape(both, (packed.shape[0], 2 * packed.shape[1]))


@triton.jit
def _run_sums(
    packed, x, zero, CODES: tl.constexpr, USES_PTX: tl.constexpr, KNOWS_E4M3: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """The sums of (q - z) x over a run, in places; zero [rows] fp32."""
    w = _whole_run(packed, USES_PTX)
    nothing = tl.zeros((w.shape[0], x.shape[0]), dtype=tl.float32)
    total = _multiply(w, x, nothing, KNOWS_E4M3)
    if CODES == _INT4:
        total = _multiply(tl.full(w.shape, _MINUS_EIGHT, tl.uint8), x, total, KNOWS_E4M3)
    else:
        sums = _multiply(tl.full(w.shape, _ONE, tl.uint8), x, nothing, KNOWS_E4M3)
        total = tl.fma(sums, -zero[:, None], total)
    return total


@triton.jit(do_not_specialize=["num_tokens"])
def _int4_joined_kernel(
    x_ptr,  # [2, num_tokens, K] e4m3
    x_scales_ptr,  # [1, num_tokens] fp32
    packed_ptr,  # [N, K / 2] uint8 in runs
    scales_ptr,  # [N, NUM_GROUPS] as CODES says
    bias_ptr,  # [N] if HAS_BIAS
    y_ptr,  # [num_tokens, N], or N // 2 if IS_GATED
    partials_ptr,  # [tiles, SPLIT_K, num_tokens, BLOCK_N] fp32 if SPLIT_K > 1
    counters_ptr,  # [tiles] zeros, left as zeros
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    CODES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PART_K: tl.constexpr,  # columns of a part, a multiple of 2 * HALF
    NUM_STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    STARTS_NEXT_EARLY: tl.constexpr,
    KNOWS_E4M3: tl.constexpr,
    USES_PTX: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    MASK_K: tl.constexpr = PART_K * SPLIT_K != K
    tile = tl.program_id(0)
    part = tl.program_id(1)
    k_start = part * PART_K
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    w_rows = weight_rows(columns, N, IS_GATED)
    if USE_PDL:
        if STARTS_NEXT_EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        if PREFETCH > 0:
            prefetch_rows(packed_ptr, w_rows, k_start // 2, K // 2, PREFETCH, LINE_BYTES)
        tl.extra.cuda.gdc_wait()
    byte_offsets = tl.arange(0, HALF)
    k_offsets = tl.arange(0, 2 * HALF)
    piece, _, token = joined_rows(2, 1, BLOCK_M)
    is_row = token < num_tokens
    x_pointers = x_ptr + (piece * num_tokens + token)[:, None].to(tl.int64) * K
    x_pointers += k_start + k_offsets[None, :]
    packed_pointers = packed_ptr + w_rows[:, None] * (K // 2) + byte_offsets[None, :]
    packed_pointers += k_start // 2
    scale_pointers = scales_ptr + w_rows * NUM_GROUPS
    acc = tl.zeros((BLOCK_N, 2 * BLOCK_M), dtype=tl.float32)
    # The number of stages is named, so that loads of scales are pipelined with the others.
    for k in tl.range(0, PART_K, 2 * HALF, num_stages=NUM_STAGES):
        num_left = K - k_start - k
        x = load_tokens(x_pointers + k, is_row, k_offsets, num_left, MASK_K)
        if MASK_K:
            is_byte = byte_offsets < num_left
            packed = tl.load(packed_pointers + k // 2, mask=is_byte[None, :], other=0)
        else:
            packed = tl.load(packed_pointers + k // 2)
        group = tl.minimum((k_start + k) // GROUP, NUM_GROUPS - 1)
        scale, zero = load_scale(scale_pointers + group, CODES)
        total = _run_sums(packed, x, zero.to(tl.float32), CODES, USES_PTX, KNOWS_E4M3)
        acc = tl.fma(total, scale[:, None], acc)
    if USE_PDL and not STARTS_NEXT_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    factors = tl.where(piece == 0, 1.0 / _PLACE, _SECOND_PIECE / _PLACE)
    factors *= tl.load(x_scales_ptr + tl.minimum(token, num_tokens - 1))
    acc = add_joined(acc * factors[None, :], BLOCK_N, 2, BLOCK_M)
    tokens = tl.arange(0, BLOCK_M)
    is_last = True
    if SPLIT_K > 1:
        is_last, acc = add_parts(
            acc, partials_ptr, counters_ptr, tile, part, num_tokens, BLOCK_M, BLOCK_N, SPLIT_K
        )
    if is_last:
        store_rows(
            acc, bias_ptr, y_ptr, w_rows, tile * BLOCK_N, tokens, num_tokens, N, HAS_BIAS,
            BLOCK_M, BLOCK_N, IS_GATED,
        )  # fmt: skip


@cache
def choose_config(
    num_tokens: int, num_rows: int, num_columns: int, num_sms: int, memory_bytes: int
) -> QuantConfig:
    """The tiling for `num_tokens` tokens and a weight [num_rows, num_columns]."""
    block_m = max(8, int(triton.next_power_of_2(num_tokens)))
    config = QuantConfig(
        block_m=block_m, block_n=64, block_k=_RUN, num_stages=6, starts_next_early=False
    )
    if num_tokens > 16:
        config = replace(config, block_n=128, num_warps=8)
    stage_bytes = _HALF * (config.block_n + 4 * block_m) + 4 * config.block_n
    num_stages = stages_that_fit(
        config.num_stages, stage_bytes=stage_bytes, shared_memory_bytes=memory_bytes
    )
    config = replace(config, num_stages=max(2, num_stages))
    num_tiles = triton.cdiv(num_rows, config.block_n)
    most = _PROGRAMS_PER_SM * 4 // config.num_warps * num_sms
    for split_k in _PARTS:
        part, rest = divmod(num_columns, split_k * _RUN)
        if rest == 0 and part * _RUN >= _LEAST_PART and num_tiles * split_k <= most:
            return replace(config, split_k=split_k)
    return config


def int4_joined_linear(
    x: CodedTokens,
    weight: FourBitOperand,
    dtype: torch.dtype,
    counters: Tensor,
    config: QuantConfig | None = None,
    *,
    gated: bool = False,
) -> Tensor:
    """x: [T, K] in two pieces, a scale a token; weight: as `reads_runs` says.

    counters: from `kernels.linear.small.tile_counters`. Returns [T, N] in `dtype`; gated:
    silu(gate) * up, [T, N / 2], with rows of gate first in the weight.
    """
    num_rows, row_bytes = weight.packed.shape
    num_columns, num_tokens = 2 * row_bytes, x.num_tokens
    y = counters.new_empty((num_tokens, num_rows // 2 if gated else num_rows), dtype=dtype)
    if y.numel() == 0:
        return y
    assert reads_runs(weight), f"{weight.codes} in runs of {weight.half}, groups of {weight.group}"
    assert x.codes.shape == (2, num_tokens, num_columns), f"{x.codes.shape}, {num_columns} columns"
    assert len(x.scales) == 1, f"{len(x.scales)} scales a token"
    device = device_properties(weight.packed.device)
    cut = config or choose_config(
        num_tokens, num_rows, num_columns, device.num_sms, device.shared_memory_per_block_bytes
    )
    assert num_tokens <= cut.block_m, f"{num_tokens} tokens in a tile of {cut.block_m}"
    num_tiles = triton.cdiv(num_rows, cut.block_n)
    partials = x.scales
    if cut.split_k > 1:
        assert num_tiles <= counters.numel(), f"{num_tiles} tiles, {counters.numel()} counters"
        partials = x.scales.new_empty((num_tiles, cut.split_k, num_tokens, cut.block_n))
    use_pdl = pdl_supported(y.device)
    _int4_joined_kernel[(num_tiles, cut.split_k)](
        x.codes,
        x.scales,
        weight.packed,
        weight.scales,
        x.scales if weight.bias is None else weight.bias,
        y,
        partials,
        counters,
        num_tokens,
        N=num_rows,
        K=num_columns,
        GROUP=weight.group,
        NUM_GROUPS=weight.scales.shape[1],
        CODES=weight.codes,
        HAS_BIAS=weight.bias is not None,
        IS_GATED=gated,
        HALF=_HALF,
        BLOCK_M=cut.block_m,
        BLOCK_N=cut.block_n,
        SPLIT_K=cut.split_k,
        PART_K=triton.cdiv(num_columns, _RUN * cut.split_k) * _RUN,
        NUM_STAGES=cut.num_stages,
        PREFETCH=cut.prefetch_bytes,
        STARTS_NEXT_EARLY=cut.starts_next_early,
        KNOWS_E4M3=knows_e4m3(y.device),
        USES_PTX=uses_ptx(y.device),
        USE_PDL=use_pdl,
        num_warps=cut.num_warps,
        launch_pdl=use_pdl,
    )
    return y
