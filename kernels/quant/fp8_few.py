"""Linear maps of a few tokens with FP8 weights and FP8 inputs, at the speed of reading the weights.

    y[t, n] = sum over k of  (s w)[n, k] x[t, k]  +  b[n]

and silu(gate) * up of two such products. Hopper's matrix units multiply e4m3 numbers as they lie in
shared memory, so no instruction is spent on a weight. Inputs are coded as in
`kernels.quant.coded_tokens`: in two pieces, which loses nothing, or in one, rounded.

    y[t, n] = sw[n] * sum over pieces p, groups g of c[p] sx[g, t] d[p, g, t, n]
    d[p, g, t, n] = sum over k in g of q[n, k] x[p, t, k]

c is 1 of the first piece and 1 / 32 of the second. A step of BLOCK_K columns is one product of the
weight's tile with a tile of x that has a column for each piece, group of the step and token, with
zeros outside of the group. Matrix units that multiply few columns wait for the weight's tile, not
for numbers: so both pieces take hardly longer than one, and groups need not be as wide as a step.
The units add products in fewer bits than fp32, so sums of BLOCK_K columns are added in fp32
registers; those of pieces and groups are added once, at the end. Torch twin:
`engine.layers.quantized_weight.dequantize` and `torch.nn.functional.linear`.

The gate may leave its result coded, too, for the product after it: of few tokens in pieces of e5m2,
which need no scale, of more with a scale for each token of a tile's outputs. Small groups of few
tokens would take longer to multiply than to code again. The rest is as in
`kernels.quant.fp8_linear`.
"""

from dataclasses import replace
from functools import cache
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.device import device_properties, stages_for
from kernels.instructions import knows_e4m3
from kernels.linear.small import add_parts, prefetch_rows, store_rows, weight_rows
from kernels.pdl import pdl_supported
from kernels.quant.coded_tokens import (
    SECOND_PIECE,
    WIDE,
    WIDE_SCALE,
    WIDE_SECOND,
    CodedTokens,
    InputForm,
    empty_coded,
)
from kernels.quant.fp8_linear import LINE_BYTES, Fp8Operand, QuantConfig
from kernels.quant.token_groups import code_groups, wide_pieces

MAX_TOKENS = 64
_SECOND_PIECE = tl.constexpr(SECOND_PIECE)
_WIDE_SCALE = tl.constexpr(WIDE_SCALE)
_WIDE_SECOND = tl.constexpr(WIDE_SECOND)
_SIZE_MULTIPLE = 16
_LEAST_COLUMNS = 16  # of a product of matrix units
_MOST_COLUMNS = 128  # of a step's sums, which are in registers
_LEAST_PART = 512  # columns
_PART_COLUMNS = 40  # of a part for each token, at least: its sums are written and read in fp32
_PARTS = (8, 6, 4, 3, 2)
# By races on an H200 with Qwen3-8B's weights, alone and in the chain of a layer, see
# load_tests/results. Tiles of up to 16 tokens have 64 rows, of which three programs are on a
# multiprocessor at once: a weight's programs then fill all of them evenly, and one program's
# products hide what another waits for. A weight that four fill more evenly, such as the 28,672 rows
# of Llama-3.1-8B, has four, with fewer stages. Nothing is prefetched: a layer took longer with it.
_LEAST = QuantConfig(
    block_m=16, block_n=64, num_warps=4, num_stages=6, prefetch_bytes=0, starts_next_early=False
)
_LEAST_STAGES = {3: 6, 4: 4}  # by programs of a multiprocessor
_LEAST_SQUARE = replace(_LEAST, block_k=256, num_stages=4)
_SQUARE_TO = 4096  # rows and columns
_SQUARE_PROGRAMS = 2
# Of more tokens a part is written and read again in fp32, which takes as long as many weights, and
# each tile reads all inputs. So tiles are as high as lets one program run on each multiprocessor,
# and columns are split only as far.
_TILES = {
    64: QuantConfig(block_m=64, block_n=64, num_warps=4, num_stages=6, prefetch_bytes=0),
    128: QuantConfig(block_m=64, block_n=128, num_warps=8, num_stages=4, prefetch_bytes=0),
    256: QuantConfig(block_m=64, block_n=256, num_warps=8, num_stages=4, prefetch_bytes=0),
}
_DEEP = 2  # columns for each row from which on inputs, and not parts, take the time
_GATE_ROWS = 128  # of a tile, at least: half as many columns share a scale


def supports_few(weight: Fp8Operand, dtype: torch.dtype) -> bool:
    """Whether this kernel computes with `weight` and inputs in `dtype`, on their device."""
    capability = device_properties(weight.codes.device).capability
    tile_columns = weight.tile_columns
    return (
        dtype is torch.bfloat16  # pieces of a float16 are not all of it
        and capability is not None
        and capability[0] == 9
        and weight.codes.is_contiguous()
        and weight.codes.data_ptr() % 16 == 0
        and all(size % _SIZE_MULTIPLE == 0 for size in weight.codes.shape)
        and (weight.scales.shape[1] == 1 or tile_columns % 64 == 0)
    )


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
def _load_codes(pointers, k_offsets, num_columns, MASK_K: tl.constexpr) -> tl.tensor:
    """Tile of the weight; its rows always exist."""
    if MASK_K:
        w = tl.load(pointers, mask=k_offsets[None, :] < num_columns, other=0.0)
    else:
        w = tl.load(pointers)
    return w


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
def _multiply(w, x, KNOWS_E4M3: tl.constexpr) -> tl.tensor:
    """w x^T, [rows, columns of x's tile]."""
    if not KNOWS_E4M3:  # the interpreter
        w, x = w.to(tl.float32), x.to(tl.float32)
    return tl.dot(w, tl.trans(x))


@triton.jit
def _add_scaled(
    acc, total, scale_pointers, column, TILE_COLUMNS: tl.constexpr, NUM_TILES: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """acc + total, scaled where the weight has more than one scale a row."""
    if NUM_TILES > 1:
        index = tl.minimum(column // TILE_COLUMNS, NUM_TILES - 1)
        acc = tl.fma(total, tl.load(scale_pointers + index)[:, None], acc)
    else:
        acc += total
    return acc


@triton.jit
def _scaled(
    acc, piece, scale_pointers, x_scale_pointers, NUM_TILES: tl.constexpr, X_GROUPS: tl.constexpr,
    IS_WIDE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """acc, by the factors of pieces and by scales that are the same for all columns.

    IS_WIDE: pieces of x in e5m2, without scales.
    """
    if IS_WIDE:
        factors = tl.where(piece == 0, _WIDE_SCALE, _WIDE_SCALE * _WIDE_SECOND)
    else:
        factors = tl.where(piece == 0, 1.0, _SECOND_PIECE)
    if X_GROUPS == 1:
        factors *= tl.load(x_scale_pointers)
    acc *= factors[None, :]
    if NUM_TILES == 1:
        acc *= tl.load(scale_pointers)[:, None]
    return acc


@triton.jit
def _store_coded(
    acc, bias_ptr, codes_ptr, scales_ptr, w_rows, tile, tokens, num_tokens, N: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PIECES: tl.constexpr,
    KNOWS_E4M3: tl.constexpr,
) -> None:  # fmt: skip
    """silu(gate) * up of acc [BLOCK_M, BLOCK_N], coded; every column is in the weight.

    In groups of a tile's outputs, or in pieces of e5m2, by what codes_ptr points to.
    """
    if HAS_BIAS:
        acc += tl.load(bias_ptr + w_rows).to(tl.float32)[None, :]
    NUM_OUTPUTS: tl.constexpr = N // 2
    WIDTH: tl.constexpr = BLOCK_N // 2
    gate, up = tl.split(tl.reshape(acc, (BLOCK_M, WIDTH, 2)))
    y = gate * tl.sigmoid(gate) * up
    if codes_ptr.dtype.element_ty == tl.float8e5:
        first, second = wide_pieces(y)
    else:
        scales, first, second = code_groups(y, PIECES, KNOWS_E4M3)
        tl.store(scales_ptr + tile * num_tokens + tokens, scales, mask=tokens < num_tokens)
    is_token = tokens < num_tokens
    columns = tile * WIDTH + tl.arange(0, WIDTH)
    places = codes_ptr + tokens[:, None].to(tl.int64) * NUM_OUTPUTS + columns[None, :]
    tl.store(places, first, mask=is_token[:, None])
    if PIECES == 2:
        places += num_tokens.to(tl.int64) * NUM_OUTPUTS
        tl.store(places, second, mask=is_token[:, None])


@triton.jit(do_not_specialize=["num_tokens"])
def _fp8_few_kernel(
    x_ptr,  # [PIECES, num_tokens, K] e4m3, or e5m2
    x_scales_ptr,  # [X_GROUPS, num_tokens] fp32
    codes_ptr,  # [N, K] e4m3
    scales_ptr,  # [ceil(N / TILE_ROWS), NUM_TILES] fp32
    bias_ptr,  # [N] if HAS_BIAS
    # [num_tokens, N], or N // 2 if IS_GATED; coded [PIECES, num_tokens, N // 2] e4m3 or e5m2
    y_ptr,
    y_scales_ptr,  # [tiles, num_tokens] fp32 if IS_CODED in e4m3
    partials_ptr,  # [tiles, SPLIT_K, num_tokens, BLOCK_N] fp32 if SPLIT_K > 1
    counters_ptr,  # [tiles] zeros, left as zeros
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
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
    STARTS_NEXT_EARLY: tl.constexpr,
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
        if STARTS_NEXT_EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        if PREFETCH > 0:
            prefetch_rows(codes_ptr, w_rows, k_start, K, PREFETCH, LINE_BYTES)
        tl.extra.cuda.gdc_wait()
    tokens = tl.arange(0, BLOCK_M)
    k_offsets = tl.arange(0, BLOCK_K)
    piece, group, token = joined_rows(PIECES, GROUPS, BLOCK_M)
    x_rows = piece * num_tokens + token
    x_pointers = x_ptr + x_rows[:, None].to(tl.int64) * K + k_start + k_offsets[None, :]
    codes_pointers = codes_ptr + w_rows[:, None] * K + k_start + k_offsets[None, :]
    scale_pointers = scales_ptr + w_rows // TILE_ROWS * NUM_TILES
    x_scale_pointers = x_scales_ptr + tl.minimum(token, num_tokens - 1)
    acc = tl.zeros((BLOCK_N, PIECES * GROUPS * BLOCK_M), dtype=tl.float32)
    # The number of stages is named, so that loads of scales are pipelined with the others.
    for k in tl.range(0, PART_K, BLOCK_K, num_stages=NUM_STAGES):
        num_left = K - k_start - k
        w = _load_codes(codes_pointers + k, k_offsets, num_left, MASK_K)
        x = _load_rows(
            x_pointers + k, token < num_tokens, group, k_offsets, num_left, X_GROUP, GROUPS, MASK_K
        )
        total = _multiply(w, x, KNOWS_E4M3)
        if X_GROUPS > 1:
            index = tl.minimum((k_start + k) // X_GROUP + group, X_GROUPS - 1)
            total *= tl.load(x_scale_pointers + index * num_tokens)[None, :]
        acc = _add_scaled(acc, total, scale_pointers, k_start + k, TILE_COLUMNS, NUM_TILES)
    if USE_PDL and not STARTS_NEXT_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    is_wide: tl.constexpr = x_ptr.dtype.element_ty == tl.float8e5
    acc = _scaled(acc, piece, scale_pointers, x_scale_pointers, NUM_TILES, X_GROUPS, is_wide)
    acc = add_joined(acc, BLOCK_N, PIECES * GROUPS, BLOCK_M)
    is_last = True
    if SPLIT_K > 1:
        is_last, acc = add_parts(
            acc, partials_ptr, counters_ptr, tile, part, num_tokens, BLOCK_M, BLOCK_N, SPLIT_K
        )
    if is_last:
        if IS_CODED:
            _store_coded(
                acc, bias_ptr, y_ptr, y_scales_ptr, w_rows, tile, tokens, num_tokens, N, HAS_BIAS,
                BLOCK_M, BLOCK_N, PIECES, KNOWS_E4M3,
            )  # fmt: skip
        else:
            store_rows(
                acc, bias_ptr, y_ptr, w_rows, tile * BLOCK_N, tokens, num_tokens, N, HAS_BIAS,
                BLOCK_M, BLOCK_N, IS_GATED,
            )  # fmt: skip


def choose_config(
    num_tokens: int,
    num_pieces: int,
    num_rows: int,
    num_columns: int,
    num_sms: int,
    least_rows: int = 64,
) -> QuantConfig:
    """The tiling for `num_tokens` tokens and a weight [num_rows, num_columns].

    least_rows: of a tile of more than 16 tokens.
    """
    block_m = int(triton.next_power_of_2(num_tokens))
    if num_tokens <= _LEAST.block_m:
        is_square = max(num_rows, num_columns) <= _SQUARE_TO
        if is_square:
            config, programs = _LEAST_SQUARE, _SQUARE_PROGRAMS * num_sms
        else:
            most = _most_even(triton.cdiv(num_rows, _LEAST.block_n), num_sms)
            config, programs = replace(_LEAST, num_stages=_LEAST_STAGES[most]), most * num_sms
    else:
        least = max(least_rows, 128 if num_columns >= _DEEP * num_rows else 64)
        # Sums of two pieces of 256 rows would not fit the registers.
        most = 256 if num_pieces * block_m <= _MOST_COLUMNS // 2 else 128
        heights = [rows for rows in _TILES if least <= rows <= most]
        fitting = (rows for rows in heights if triton.cdiv(num_rows, rows) <= num_sms)
        config, programs = _TILES[next(fitting, heights[-1])], num_sms
    num_tiles = triton.cdiv(num_rows, config.block_n)
    least_part = max(_LEAST_PART, _PART_COLUMNS * block_m)
    for split_k in _PARTS:
        part, rest = divmod(num_columns, split_k)
        is_even = rest == 0 and part % config.block_k == 0 and part >= least_part
        if is_even and num_tiles * split_k <= programs:
            return replace(config, block_m=block_m, split_k=split_k)
    return replace(config, block_m=block_m)


def _most_even(num_tiles: int, num_sms: int) -> int:
    """Programs of a multiprocessor of which `num_tiles` leave the fewest places empty."""
    return min(_LEAST_STAGES, key=lambda most: most * triton.cdiv(num_tiles, most * num_sms))


@cache
def fitted_config(
    config: QuantConfig,
    pieces: int,
    x_group: int,
    tile_columns: int,
    memory_bytes: int,
    programs_per_sm: int = 0,
) -> QuantConfig:
    """`config` with steps of columns that share a scale, or of groups side by side, that fit.

    x_group, tile_columns: columns of a scale of x and of the weight; 0 = they do not limit a step.
    programs_per_sm: as of `stages_for`; 0 = stages are as given.
    """
    block_k = gcd(config.block_k, tile_columns)  # that of 0 is the other
    if x_group > 0 and block_k % x_group:
        block_k = gcd(block_k, x_group)
    least = max(1, _LEAST_COLUMNS // pieces)
    # Beside its sums a program has those of a step, before they are scaled: of more rows it has
    # registers for fewer columns.
    most = _MOST_COLUMNS * 128 // max(128, config.block_n)
    while True:
        groups = groups_of(block_k, x_group)
        block_m = max(config.block_m, least // groups)
        if groups == 1 or pieces * groups * block_m <= most:
            break
        block_k //= 2
    stage_bytes = block_k * (config.block_n + pieces * groups * block_m)
    num_stages = stages_for(
        programs_per_sm,
        least=config.num_stages,
        stage_bytes=stage_bytes,
        shared_memory_bytes=memory_bytes,
    )
    return replace(config, block_m=block_m, block_k=block_k, num_stages=max(2, num_stages))


def groups_of(block_k: int, x_group: int) -> int:
    """Of x in a step."""
    return max(1, block_k // x_group) if x_group > 0 else 1


def fp8_few_linear(
    x: CodedTokens,
    weight: Fp8Operand,
    dtype: torch.dtype,
    counters: Tensor,
    config: QuantConfig | None = None,
    *,
    gated: bool = False,
) -> Tensor:
    """x: [T, K], in one piece or two.

    counters: from `kernels.linear.small.tile_counters`. Returns [T, N] in `dtype`; gated:
    silu(gate) * up, [T, N / 2], with rows of gate first in the weight.
    """
    num_rows = weight.codes.shape[0]
    num_outputs = num_rows // 2 if gated else num_rows
    y = counters.new_empty((x.num_tokens, num_outputs), dtype=dtype)
    if y.numel() > 0:
        cut = _fitted(config, x, weight)
        _launch(x, weight, y, None, counters, cut, is_gated=gated)
    return y


def fp8_few_gate(
    x: CodedTokens, weight: Fp8Operand, counters: Tensor, config: QuantConfig | None = None
) -> CodedTokens:
    """silu(gate) * up, [T, N / 2], in as many pieces as x.

    Of up to 16 tokens in pieces of e5m2, of more in a group for each tile of the weight. N must be
    a multiple of the tile's rows, as `codes_gate` says.
    """
    num_pieces, num_rows = len(x.codes), weight.codes.shape[0]
    cut = _fitted(config, x, weight, _GATE_ROWS)
    assert num_rows % cut.block_n == 0, f"{num_rows} rows in tiles of {cut.block_n}"
    form = InputForm(pieces=num_pieces, group=cut.block_n // 2)
    if num_pieces == 2 and x.num_tokens <= _LEAST.block_m:
        form = WIDE
    y = empty_coded(x.num_tokens, num_rows // 2, form, x.codes)
    if y.codes.numel() > 0:
        _launch(x, weight, y.codes, y.scales, counters, cut, is_gated=True)
    return y


def codes_gate(num_tokens: int, num_pieces: int, weight: Fp8Operand) -> bool:
    """Whether `fp8_few_gate` is the way for so many tokens and `weight`."""
    cut = _wanted(num_tokens, num_pieces, weight, _GATE_ROWS)
    return weight.codes.shape[0] % cut.block_n == 0


def _wanted(
    num_tokens: int, num_pieces: int, weight: Fp8Operand, least_rows: int = 64
) -> QuantConfig:
    num_sms = device_properties(weight.codes.device).num_sms
    num_rows, num_columns = weight.codes.shape
    return choose_config(num_tokens, num_pieces, num_rows, num_columns, num_sms, least_rows)


def _fitted(
    config: QuantConfig | None, x: CodedTokens, weight: Fp8Operand, least_rows: int = 64
) -> QuantConfig:
    """`config` as far as it fits; None = what is best."""
    wanted = config or _wanted(x.num_tokens, len(x.codes), weight, least_rows)
    device = device_properties(weight.codes.device)
    x_group = x.group if len(x.scales) > 1 else 0
    tile_columns = weight.tile_columns if weight.scales.shape[1] > 1 else 0
    num_programs = triton.cdiv(weight.codes.shape[0], wanted.block_n) * wanted.split_k
    return fitted_config(
        wanted,
        len(x.codes),
        x_group,
        tile_columns,
        device.shared_memory_per_block_bytes,
        triton.cdiv(num_programs, device.num_sms) if config is None else 0,
    )


def _launch(
    x: CodedTokens,
    weight: Fp8Operand,
    y: Tensor,
    y_scales: Tensor | None,
    counters: Tensor,
    cut: QuantConfig,
    *,
    is_gated: bool,
) -> None:
    num_rows, num_columns = weight.codes.shape
    num_pieces, num_tokens, width = x.codes.shape
    num_tiles = triton.cdiv(num_rows, cut.block_n)
    num_groups = len(x.scales)
    assert width == num_columns, f"{width} inputs, {num_columns} columns"
    assert x.codes.is_contiguous(), f"strides {x.codes.stride()}"
    assert num_tokens <= cut.block_m, f"{num_tokens} tokens in a tile of {cut.block_m}"
    partials = x.scales
    if cut.split_k > 1:
        assert num_tiles <= counters.numel(), f"{num_tiles} tiles, {counters.numel()} counters"
        partials = x.scales.new_empty((num_tiles, cut.split_k, num_tokens, cut.block_n))
    use_pdl = pdl_supported(y.device)
    _fp8_few_kernel[(num_tiles, cut.split_k)](
        x.codes,
        x.scales,
        weight.codes,
        weight.scales,
        weight.scales if weight.bias is None else weight.bias,
        y,
        x.scales if y_scales is None else y_scales,
        partials,
        counters,
        num_tokens,
        N=num_rows,
        K=num_columns,
        PIECES=num_pieces,
        X_GROUP=x.group,
        X_GROUPS=num_groups,  # none of e5m2
        GROUPS=groups_of(cut.block_k, x.group if num_groups > 1 else 0),
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
        STARTS_NEXT_EARLY=cut.starts_next_early,
        KNOWS_E4M3=knows_e4m3(y.device),
        USE_PDL=use_pdl,
        num_warps=cut.num_warps,
        launch_pdl=use_pdl,
    )
