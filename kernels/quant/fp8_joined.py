"""`kernels.quant.fp8_pieces` with one product a step: x's pieces and groups lie side by side.

    y[t, n] = sw[n] * sum over pieces p, groups g of c[p] sx[g, t] d[p, g, t, n]
    d[p, g, t, n] = sum over k in g of q[n, k] x[p, t, k]

c is 1 of the first piece and 1 / 32 of the second. A step of BLOCK_K columns is one product of the
weight's tile with a tile of x that has a column for each piece, group of the step and token, with
zeros outside of the group. Matrix units that multiply few columns wait for the weight's tile, not
for numbers: so both pieces take hardly longer than one, and groups need not be as wide as a step.
Sums of pieces and groups are added once, at the end.

Tiles have 64 rows, of which three programs are on a multiprocessor at once: a weight's programs
then fill all of them evenly, and one program's products hide what another waits for. The rest is as
in `kernels.quant.fp8_pieces`.
"""

from dataclasses import replace
from functools import cache
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.device import device_properties, stages_that_fit
from kernels.linear.small import add_parts, load_tokens, prefetch_rows, store_rows, weight_rows
from kernels.pdl import pdl_supported
from kernels.quant.coded_tokens import SECOND_PIECE, CodedTokens, InputForm, empty_coded
from kernels.quant.decode import knows_e4m3
from kernels.quant.fp8_linear import LINE_BYTES, Fp8Operand, QuantConfig, check_inputs
from kernels.quant.fp8_pieces import add_scaled, load_codes, store_coded
from kernels.quant.token_groups import code_groups

MAX_TOKENS = 64
_SECOND_PIECE = tl.constexpr(SECOND_PIECE)
_LEAST_COLUMNS = 16  # of a product of matrix units
_MOST_COLUMNS = 128  # of a step's sums, which are in registers
_PROGRAMS_PER_SM = 3
# With many rows one program a multiprocessor is enough. It reads the inputs once for twice as many
# rows, and its gate codes groups of as many columns as a step has.
_TALL_FROM = 16384  # rows
_TALL_COLUMNS = 64  # of a step's sums, at most
_LEAST_PART = 512  # columns
_PARTS = (8, 6, 4, 3, 2)


@triton.jit
def joined_rows(PIECES: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr):  # noqa: ANN201
    """The piece, the group of the step and the token of each row of x's tile."""
    rows = tl.arange(0, PIECES * GROUPS * BLOCK_M)
    return rows // (GROUPS * BLOCK_M), rows // BLOCK_M % GROUPS, rows % BLOCK_M


@triton.jit
def add_joined(acc, BLOCK_N: tl.constexpr, TERMS: tl.constexpr, BLOCK_M: tl.constexpr) -> tl.tensor:
    """acc [BLOCK_N, TERMS * BLOCK_M]; returns the sum of its terms, [BLOCK_M, BLOCK_N]."""
    return tl.trans(tl.sum(tl.reshape(acc, (BLOCK_N, TERMS, BLOCK_M)), axis=1))


@triton.jit
def _load_rows(
    pointers, is_row, group, k_offsets, num_left, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    MASK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """x's tile, zeros outside of each row's group."""
    mask = is_row[:, None]
    if GROUPS > 1:
        mask = mask & (k_offsets[None, :] // GROUP == group[:, None])
    if MASK_K:
        mask = mask & (k_offsets[None, :] < num_left)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _join(first, second) -> tl.tensor:
    """[BLOCK_M, columns] twice, or [BLOCK_M] twice; returns them one after the other."""
    both = tl.join(first, second)
    if len(first.shape) == 1:
        joined = tl.reshape(tl.trans(both), (2 * first.shape[0],))
    else:
        both = tl.permute(both, (2, 0, 1))
        joined = tl.reshape(both, (2 * first.shape[0], first.shape[1]))
    return joined


@triton.jit
def _multiply(w, x, KNOWS_E4M3: tl.constexpr) -> tl.tensor:
    """w x^T, [rows, columns of x's tile]."""
    if not KNOWS_E4M3:  # the interpreter
        w, x = w.to(tl.float32), x.to(tl.float32)
    return tl.dot(w, tl.trans(x))


@triton.jit
def _scaled(
    acc, piece, scale_pointers, x_scale_pointers, NUM_TILES: tl.constexpr, X_GROUPS: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """acc, by the factors of pieces and by scales that are the same for all columns."""
    factors = tl.where(piece == 0, 1.0, _SECOND_PIECE)
    if X_GROUPS == 1:
        factors *= tl.load(x_scale_pointers)
    acc *= factors[None, :]
    if NUM_TILES == 1:
        acc *= tl.load(scale_pointers)[:, None]
    return acc


@triton.jit(do_not_specialize=["num_tokens"])
def _fp8_joined_kernel(
    x_ptr,  # [PIECES, num_tokens, K] e4m3; if X_GROUPS is 0 [num_tokens, K], not coded
    x_scales_ptr,  # [X_GROUPS, num_tokens] fp32
    codes_ptr,  # [N, K] e4m3
    scales_ptr,  # [ceil(N / TILE_ROWS), NUM_TILES] fp32
    bias_ptr,  # [N] if HAS_BIAS
    y_ptr,  # [num_tokens, N], or N // 2 if IS_GATED; coded [PIECES, num_tokens, N // 2] e4m3
    y_scales_ptr,  # [tiles, num_tokens] fp32 if IS_CODED
    partials_ptr,  # [tiles, SPLIT_K, num_tokens, BLOCK_N] fp32 if SPLIT_K > 1
    counters_ptr,  # [tiles] zeros, left as zeros
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDE_X: tl.constexpr,
    PIECES: tl.constexpr,
    X_GROUP: tl.constexpr,
    X_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,  # of a step
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    NUM_TILES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_CODED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PART_K: tl.constexpr,  # columns of a part, a multiple of BLOCK_K
    NUM_STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    KNOWS_E4M3: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    MASK_K: tl.constexpr = PART_K * SPLIT_K != K
    tile = tl.program_id(0)
    part = tl.program_id(1)
    k_start = part * PART_K
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    w_rows = weight_rows(columns, N, IS_GATED)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if PREFETCH > 0:
            prefetch_rows(codes_ptr, w_rows, k_start, K, PREFETCH, LINE_BYTES)
        tl.extra.cuda.gdc_wait()
    tokens = tl.arange(0, BLOCK_M)
    k_offsets = tl.arange(0, BLOCK_K)
    piece, group, token = joined_rows(PIECES, GROUPS, BLOCK_M)
    x_rows = tokens if X_GROUPS == 0 else piece * num_tokens + token
    x_pointers = x_ptr + x_rows[:, None].to(tl.int64) * STRIDE_X + k_start + k_offsets[None, :]
    codes_pointers = codes_ptr + w_rows[:, None] * K + k_start + k_offsets[None, :]
    scale_pointers = scales_ptr + w_rows // TILE_ROWS * NUM_TILES
    x_scale_pointers = x_scales_ptr + tl.minimum(token, num_tokens - 1)
    acc = tl.zeros((BLOCK_N, PIECES * GROUPS * BLOCK_M), dtype=tl.float32)
    # The number of stages is named, so that loads of scales are pipelined with the others.
    for k in tl.range(0, PART_K, BLOCK_K, num_stages=NUM_STAGES):
        num_left = K - k_start - k
        w = load_codes(codes_pointers + k, k_offsets, num_left, MASK_K)
        if X_GROUPS == 0:
            x = load_tokens(x_pointers + k, tokens < num_tokens, k_offsets, num_left, MASK_K)
            own_scales, first, second = code_groups(x.to(tl.float32), PIECES, KNOWS_E4M3)
            total = _multiply(w, _join(first, second), KNOWS_E4M3)
            total *= _join(own_scales, own_scales)[None, :]
        else:
            x = _load_rows(
                x_pointers + k, token < num_tokens, group, k_offsets, num_left, X_GROUP, GROUPS,
                MASK_K,
            )  # fmt: skip
            total = _multiply(w, x, KNOWS_E4M3)
        if X_GROUPS > 1:
            index = tl.minimum((k_start + k) // X_GROUP + group, X_GROUPS - 1)
            total *= tl.load(x_scale_pointers + index * num_tokens)[None, :]
        acc = add_scaled(acc, total, scale_pointers, k_start + k, TILE_COLUMNS, NUM_TILES)
    acc = _scaled(acc, piece, scale_pointers, x_scale_pointers, NUM_TILES, X_GROUPS)
    acc = add_joined(acc, BLOCK_N, PIECES * GROUPS, BLOCK_M)
    is_last = True
    if SPLIT_K > 1:
        is_last, acc = add_parts(
            acc, partials_ptr, counters_ptr, tile, part, num_tokens, BLOCK_M, BLOCK_N, SPLIT_K
        )
    if is_last:
        if IS_CODED:
            store_coded(
                acc, bias_ptr, y_ptr, y_scales_ptr, w_rows, tile, tokens, num_tokens, N, HAS_BIAS,
                BLOCK_M, BLOCK_N, PIECES, KNOWS_E4M3,
            )  # fmt: skip
        else:
            store_rows(
                acc, bias_ptr, y_ptr, w_rows, tile * BLOCK_N, tokens, num_tokens, N, HAS_BIAS,
                BLOCK_M, BLOCK_N, IS_GATED,
            )  # fmt: skip


def choose_config(
    num_tokens: int, num_pieces: int, num_rows: int, num_columns: int, num_sms: int
) -> QuantConfig:
    """The tiling for `num_tokens` tokens and a weight [num_rows, num_columns]."""
    block_m = int(triton.next_power_of_2(num_tokens))
    if num_tokens <= 16:
        config = QuantConfig(block_m=block_m, block_n=64, num_warps=4, num_stages=6)
        programs_per_sm = _PROGRAMS_PER_SM
    elif num_rows >= _TALL_FROM and num_pieces * block_m <= _TALL_COLUMNS:
        return QuantConfig(block_m=block_m, block_n=256, num_warps=8, num_stages=4)
    else:
        config = QuantConfig(block_m=block_m, block_n=128, num_warps=8, num_stages=4)
        programs_per_sm = 2
    num_tiles = triton.cdiv(num_rows, config.block_n)
    for split_k in _PARTS:
        part, rest = divmod(num_columns, split_k * config.block_k)
        is_even = rest == 0 and part * config.block_k >= _LEAST_PART
        if is_even and num_tiles * split_k <= programs_per_sm * num_sms:
            return replace(config, split_k=split_k)
    return config


@cache
def fitted_config(
    config: QuantConfig, pieces: int, x_group: int, tile_columns: int, memory_bytes: int
) -> QuantConfig:
    """`config` with steps of columns that share a scale, or of groups side by side, that fit.

    x_group, tile_columns: columns of a scale of x and of the weight; 0 = they do not limit a step.
    """
    block_k = gcd(config.block_k, tile_columns)  # that of 0 is the other
    if x_group > 0 and block_k % x_group:
        block_k = gcd(block_k, x_group)
    least = max(1, _LEAST_COLUMNS // pieces)
    while True:
        groups = num_groups(block_k, x_group)
        block_m = max(config.block_m, least // groups)
        if groups == 1 or pieces * groups * block_m <= _MOST_COLUMNS:
            break
        block_k //= 2
    stage_bytes = block_k * (config.block_n + pieces * groups * block_m)
    num_stages = stages_that_fit(
        config.num_stages, stage_bytes=stage_bytes, shared_memory_bytes=memory_bytes
    )
    return replace(config, block_m=block_m, block_k=block_k, num_stages=max(2, num_stages))


def num_groups(block_k: int, x_group: int) -> int:
    """Of x in a step."""
    return max(1, block_k // x_group) if x_group > 0 else 1


def fp8_joined_linear(
    x: CodedTokens | Tensor,
    weight: Fp8Operand,
    dtype: torch.dtype,
    counters: Tensor,
    config: QuantConfig | None = None,
    *,
    gated: bool = False,
) -> Tensor:
    """x: [T, K], coded in one piece or two, or as they are: then every program codes what it reads.

    counters: from `kernels.linear.small.tile_counters`. Returns [T, N] in `dtype`; gated:
    silu(gate) * up, [T, N / 2], with rows of gate first in the weight.
    """
    num_rows = weight.codes.shape[0]
    num_outputs = num_rows // 2 if gated else num_rows
    y = counters.new_empty((_num_tokens(x), num_outputs), dtype=dtype)
    if y.numel() > 0:
        _launch(x, weight, y, None, counters, _cut(x, weight, config), is_gated=gated)
    return y


def fp8_joined_gate(
    x: CodedTokens, weight: Fp8Operand, counters: Tensor, config: QuantConfig | None = None
) -> CodedTokens:
    """silu(gate) * up in as many pieces as x, [T, N / 2], a group for each tile of the weight.

    N must be a multiple of the tile's rows, as `codes_gate` says.
    """
    cut = _cut(x, weight, config)
    num_rows = weight.codes.shape[0]
    assert num_rows % cut.block_n == 0, f"{num_rows} rows in tiles of {cut.block_n}"
    form = InputForm(pieces=_num_pieces(x), group=cut.block_n // 2)
    y = empty_coded(x.num_tokens, num_rows // 2, form, x.codes)
    if y.codes.numel() > 0:
        _launch(x, weight, y.codes, y.scales, counters, cut, is_gated=True)
    return y


def codes_gate(num_tokens: int, num_pieces: int, weight: Fp8Operand) -> bool:
    """Whether `fp8_joined_gate` computes with so many tokens and `weight`."""
    return weight.codes.shape[0] % _wanted(num_tokens, num_pieces, weight).block_n == 0


def _wanted(num_tokens: int, num_pieces: int, weight: Fp8Operand) -> QuantConfig:
    num_sms = device_properties(weight.codes.device).num_sms
    num_rows, num_columns = weight.codes.shape
    return choose_config(num_tokens, num_pieces, num_rows, num_columns, num_sms)


def _num_tokens(x: CodedTokens | Tensor) -> int:
    return len(x) if isinstance(x, Tensor) else x.num_tokens


def _num_pieces(x: CodedTokens | Tensor) -> int:
    return 2 if isinstance(x, Tensor) else len(x.codes)


def _cut(x: CodedTokens | Tensor, weight: Fp8Operand, config: QuantConfig | None) -> QuantConfig:
    """The tiling, as `fitted_config` says."""
    wanted = config or _wanted(_num_tokens(x), _num_pieces(x), weight)
    memory_bytes = device_properties(weight.codes.device).shared_memory_per_block_bytes
    x_group = x.group if isinstance(x, CodedTokens) and len(x.scales) > 1 else 0
    tile_columns = weight.tile_columns if weight.scales.shape[1] > 1 else 0
    return fitted_config(wanted, _num_pieces(x), x_group, tile_columns, memory_bytes)


def _launch(
    x: CodedTokens | Tensor,
    weight: Fp8Operand,
    y: Tensor,
    y_scales: Tensor | None,
    counters: Tensor,
    cut: QuantConfig,
    *,
    is_gated: bool,
) -> None:
    num_rows, num_columns = weight.codes.shape
    num_tokens, num_pieces = _num_tokens(x), _num_pieces(x)
    num_tiles = triton.cdiv(num_rows, cut.block_n)
    if isinstance(x, Tensor):
        check_inputs(x, num_columns)
        inputs, x_scales, group, x_groups = x, weight.scales, 0, 0
    else:
        inputs, x_scales, group, x_groups = x.codes, x.scales, x.group, len(x.scales)
        wanted = (num_pieces, num_tokens, num_columns)
        assert inputs.shape == wanted, f"{inputs.shape}, {num_columns} columns"
        assert inputs.is_contiguous(), f"strides {inputs.stride()}"
    assert num_tokens <= cut.block_m, f"{num_tokens} tokens in a tile of {cut.block_m}"
    partials = x_scales
    if cut.split_k > 1:
        assert num_tiles <= counters.numel(), f"{num_tiles} tiles, {counters.numel()} counters"
        partials = x_scales.new_empty((num_tiles, cut.split_k, num_tokens, cut.block_n))
    use_pdl = pdl_supported(y.device)
    _fp8_joined_kernel[(num_tiles, cut.split_k)](
        inputs,
        x_scales,
        weight.codes,
        weight.scales,
        weight.scales if weight.bias is None else weight.bias,
        y,
        x_scales if y_scales is None else y_scales,
        partials,
        counters,
        num_tokens,
        N=num_rows,
        K=num_columns,
        STRIDE_X=inputs.stride(-2),
        PIECES=num_pieces,
        X_GROUP=group,
        X_GROUPS=x_groups,
        GROUPS=num_groups(cut.block_k, group if x_groups > 1 else 0),
        TILE_ROWS=weight.tile_rows,
        TILE_COLUMNS=weight.tile_columns,
        NUM_TILES=weight.scales.shape[1],
        HAS_BIAS=weight.bias is not None,
        IS_GATED=is_gated,
        IS_CODED=y_scales is not None,
        BLOCK_M=cut.block_m,
        BLOCK_N=cut.block_n,
        BLOCK_K=cut.block_k,
        SPLIT_K=cut.split_k,
        PART_K=triton.cdiv(num_columns, cut.block_k * cut.split_k) * cut.block_k,
        NUM_STAGES=cut.num_stages,
        PREFETCH=cut.prefetch_bytes,
        KNOWS_E4M3=knows_e4m3(y.device),
        USE_PDL=use_pdl,
        num_warps=cut.num_warps,
        launch_pdl=use_pdl,
    )
