"""Linear maps of a few tokens at the speed of reading the weights, with their start prefetched.

y = x W^T + b, and silu(x Wg^T + bg) * (x Wu^T + bu), for at most `MAX_SMALL_TOKENS` rows of x.

A program owns BLOCK_N rows of the weight and all rows of x, so each weight byte is read once. If a
weight has too few rows to keep every multiprocessor reading, its columns are split into `split_k`
parts. The last program to finish a tile adds the parts in their order, so a result does not depend
on which program was last.

With programmatic dependent launch a program starts while the kernel before it still runs. It
prefetches the first columns of its weight rows to the L2 cache, and only then waits for x, which
other kernels write.
"""

from dataclasses import dataclass, replace
from enum import Enum
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.device import device_properties, stages_that_fit
from kernels.pdl import pdl_supported, prefetch

MAX_SMALL_TOKENS = 64
# Only weights of fewer than 2^15 rows are split, into tiles of 16 rows or more.
_MAX_TILES = 2048
# Columns and rows must be multiples of 32 bytes, which keeps every load 16-byte aligned.
_SIZE_MULTIPLE = 16
_CACHE_LINE_ELEMENTS = tl.constexpr(64)  # of 16 bits
_MIN_STAGES = 2
_MAX_STAGES = 8
_KIB = 2**10
_MAX_SPLIT = 4
_MAX_SHARED_TOKENS = 32  # more were not measured with other splits
_MIN_GAIN = 1.1  # in places filled, for which another split pays
_LEAST_FILLED = 0.7  # share of the places of all waves of programs


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallConfig:
    """The tiling of one product; sizes in elements."""

    block_n: int  # weight rows of a program
    block_k: int  # columns of a pipeline stage
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 4
    is_swapped: bool = False  # the weight tile is the left operand, 64 rows or more: wgmma
    prefetch_k: int = 512  # columns prefetched before x is ready: 0 or a power of two >= 64
    starts_next_early: bool = True  # let the next kernel start at once, not after the last load


class Shape(Enum):
    """Kinds of weights that share a tiling."""

    NARROW = "few rows, more than columns: queries, keys and values"
    SQUARE = "few rows, no more than columns: output projection"
    DEEP = "few rows of many columns: down projection"
    WIDE = "very many rows: vocabulary"
    GATED = "gate and up together"


# Measured on an H200 (132 multiprocessors, 227 KiB of shared memory; where there is less, they have
# fewer stages) with Qwen3-8B's weights, each kind in a graph over more weights than the L2 cache
# holds. Microseconds, ours | cuBLAS, at 1 token: 15.1 | 15.6 narrow, 10.2 | 12.5 square, 25.6 |
# 29.9 deep, 279 | 297 wide, 49.9 | 51.1 gated (floor, weight bytes at 4.29 TB/s: 11.7, 7.8, 23.5,
# 290, 46.9). Whole model without attention: 3.98 | 4.29 ms at 1 token, 4.10 | 4.35 at 16, 4.21 |
# 4.45 at 32, 4.75 | 4.55 at 64; early start is worth 0.22 ms of it.
_CONFIGS: dict[tuple[int, Shape], SmallConfig] = {
    (16, Shape.NARROW): SmallConfig(block_n=32, block_k=128, split_k=2, num_stages=6, prefetch_k=0),
    (16, Shape.SQUARE): SmallConfig(
        block_n=64, block_k=128, split_k=2, num_stages=8, is_swapped=True, prefetch_k=256
    ),
    (16, Shape.DEEP): SmallConfig(
        block_n=64, block_k=256, split_k=2, is_swapped=True, prefetch_k=256
    ),
    (16, Shape.WIDE): SmallConfig(block_n=64, block_k=128, is_swapped=True, prefetch_k=0),
    (16, Shape.GATED): SmallConfig(
        block_n=64, block_k=128, num_stages=8, is_swapped=True, prefetch_k=256
    ),
    (32, Shape.NARROW): SmallConfig(
        block_n=32, block_k=128, split_k=2, num_stages=5, prefetch_k=256
    ),
    (32, Shape.SQUARE): SmallConfig(
        block_n=64, block_k=128, split_k=4, is_swapped=True, prefetch_k=256
    ),
    (32, Shape.DEEP): SmallConfig(
        block_n=64, block_k=128, split_k=2, num_stages=8, is_swapped=True, prefetch_k=256
    ),
    (32, Shape.WIDE): SmallConfig(block_n=64, block_k=128, prefetch_k=256),
    (32, Shape.GATED): SmallConfig(
        block_n=64, block_k=64, num_stages=5, is_swapped=True, prefetch_k=256
    ),
    (64, Shape.NARROW): SmallConfig(
        block_n=64, block_k=64, split_k=2, num_stages=5, prefetch_k=256
    ),
    (64, Shape.SQUARE): SmallConfig(block_n=128, block_k=128, split_k=4, prefetch_k=256),
    (64, Shape.DEEP): SmallConfig(block_n=128, block_k=128, split_k=4, prefetch_k=256),
    (64, Shape.WIDE): SmallConfig(block_n=128, block_k=128, num_warps=8, prefetch_k=256),
    (64, Shape.GATED): SmallConfig(block_n=64, block_k=128, prefetch_k=256),
}
# Up to this many tokens these kernels are faster than the library's.
_FASTER_UP_TO = {shape: 64 if shape is Shape.WIDE else 32 for shape in Shape}


def supports_small(weight: Tensor) -> bool:
    """Whether these kernels can read `weight` [out, in]."""
    return (
        weight.device.type == "cuda"
        and weight.dtype in (torch.bfloat16, torch.float16)
        and weight.is_contiguous()
        and weight.data_ptr() % 16 == 0
        and all(size % _SIZE_MULTIPLE == 0 for size in weight.shape)
    )


def tile_counters(device: torch.device) -> Tensor:
    """Zeros in which programs of split products count themselves; every call leaves zeros.

    Calls that may run at the same time need different counters.
    """
    return torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)


def choose_config(num_tokens: int, weight: Tensor, *, gated: bool) -> SmallConfig:
    """The tiling of a product of `num_tokens` tokens with `weight` [out, in] on its device."""
    device = device_properties(weight.device)
    num_rows, num_columns = weight.shape
    shape, bucket = shape_of(num_rows, num_columns, gated), token_bucket(num_tokens)
    return shared_config(
        bucket, shape, num_rows, device.num_sms, device.shared_memory_per_block_bytes
    )


@cache
def shared_config(
    bucket: int, shape: Shape, num_rows: int, num_sms: int, shared_memory_bytes: int
) -> SmallConfig:
    """`fitted_config`, or what shares a weight of `num_rows` more evenly among multiprocessors.

    The table was measured with one model's weights. Of others' few programs may be left when all
    the rest are done: 160 programs keep 28 of 132 multiprocessors twice as long as the rest.
    """
    config = fitted_config(bucket, shape, shared_memory_bytes)
    num_tiles = triton.cdiv(num_rows, config.block_n)
    given = shared_memory_bytes + _KIB
    if config.split_k == 1:
        programs_per_sm = given // (config.num_stages * stage_bytes(config, bucket) + 2 * _KIB)
        if programs_per_sm > 1 or _last_wave(num_tiles, 2 * num_sms, num_sms) <= _last_wave(
            num_tiles, num_sms, num_sms
        ):
            return config
        return _with_stages_for(config, bucket, 2, given) or config
    tried = replace(config, block_n=64, block_k=128, is_swapped=True, prefetch_k=256)
    num_tiles_tried = triton.cdiv(num_rows, tried.block_n)
    split_k = max(range(1, _MAX_SPLIT + 1), key=lambda k: (_fill(k * num_tiles_tried, num_sms), -k))
    num_programs = split_k * num_tiles_tried
    gained = _fill(num_programs, num_sms) / _fill(config.split_k * num_tiles, num_sms)
    if bucket > _MAX_SHARED_TOKENS or gained < _MIN_GAIN:
        return config
    tried = replace(tried, split_k=split_k)
    return _with_stages_for(tried, bucket, triton.cdiv(num_programs, num_sms), given) or config


def _fill(num_programs: int, num_sms: int) -> float:
    """Programs over places for them, where the busiest multiprocessor has one place for each."""
    return float(num_programs / (num_sms * triton.cdiv(num_programs, num_sms)))


def _last_wave(num_programs: int, num_places: int, num_sms: int) -> int:
    """Multiprocessors that still have a program in the last wave of `num_places` programs."""
    return min((num_programs - 1) % num_places + 1, num_sms)


def _with_stages_for(
    config: SmallConfig, bucket: int, programs_per_sm: int, given: int
) -> SmallConfig | None:
    """As many stages as let `programs_per_sm` programs share `given` bytes; None = too few."""
    # A program has 1 KiB reserved, and keeps barriers beside its tiles.
    num_stages = min(
        (given // programs_per_sm - 2 * _KIB) // stage_bytes(config, bucket), _MAX_STAGES
    )
    return replace(config, num_stages=num_stages) if num_stages > _MIN_STAGES else None


@cache
def fitted_config(bucket: int, shape: Shape, shared_memory_bytes: int) -> SmallConfig:
    """The measured tiling for `bucket` rows of x, with as many stages as the memory has room for.

    Where not even two stages fit, which a pipeline needs, they are of fewer columns.
    """
    config = _CONFIGS[bucket, shape]
    while True:
        num_stages = stages_that_fit(
            config.num_stages,
            stage_bytes=stage_bytes(config, bucket),
            shared_memory_bytes=shared_memory_bytes,
        )
        if num_stages >= _MIN_STAGES:
            return replace(config, num_stages=num_stages)
        config = replace(config, block_k=config.block_k // 2)


def stage_bytes(config: SmallConfig, bucket: int) -> int:
    """Shared memory of one stage: a tile of the weight and one of x, two bytes an element."""
    return 2 * config.block_k * (config.block_n + bucket)


def faster_up_to(weight: Tensor, *, gated: bool) -> int:
    """The largest number of tokens for which these kernels are faster; 0 = for none."""
    num_rows, num_columns = weight.shape
    shape, device = shape_of(num_rows, num_columns, gated), device_properties(weight.device)
    num_sms, memory_bytes = device.num_sms, device.shared_memory_per_block_bytes
    if shape is Shape.NARROW and leaves_idle(shape, num_rows, num_sms, memory_bytes):
        return 0
    return _FASTER_UP_TO[shape]


@cache
def leaves_idle(shape: Shape, num_rows: int, num_sms: int, shared_memory_bytes: int) -> bool:
    """Whether a product of one token ends with a wave of few programs, after one or more full ones.

    Measured on an H200 with narrow weights of 8,192 rows, 512 programs where 396 run at once: us,
    ours | cuBLAS, at 1 and 16 tokens: 14.6, 14.9 | 10.9, 11.0 of 2,048 columns, 39.4, 40.0 | 31.7,
    31.4 of 7,168.
    """
    bucket = token_bucket(1)
    config = shared_config(bucket, shape, num_rows, num_sms, shared_memory_bytes)
    program_bytes = config.num_stages * stage_bytes(config, bucket) + 2 * _KIB
    num_places = num_sms * ((shared_memory_bytes + _KIB) // program_bytes)
    num_programs = config.split_k * triton.cdiv(num_rows, config.block_n)
    num_waves = triton.cdiv(num_programs, num_places)
    return bool(num_waves > 1 and num_programs < _LEAST_FILLED * num_waves * num_places)


def shape_of(num_rows: int, num_columns: int, gated: bool) -> Shape:
    if gated:
        return Shape.GATED
    if num_rows >= 2**15:
        return Shape.WIDE
    if num_columns >= 2 * num_rows:
        return Shape.DEEP
    return Shape.SQUARE if num_rows <= num_columns else Shape.NARROW


def token_bucket(num_tokens: int) -> int:
    """Number of rows that `num_tokens` are padded to: 16 or the next power of two."""
    return max(16, int(triton.next_power_of_2(num_tokens)))


@triton.jit
def prefetch_rows(
    weight_ptr, rows, k_start, K: tl.constexpr, PREFETCH_K: tl.constexpr,
    LINE: tl.constexpr = _CACHE_LINE_ELEMENTS,
) -> None:  # fmt: skip
    """Prefetch columns [k_start, k_start + PREFETCH_K) of `rows` to the L2 cache.

    LINE: elements of a cache line.
    """
    lines = k_start + tl.arange(0, PREFETCH_K // LINE) * LINE
    columns = tl.minimum(lines, K - 1)
    prefetch(weight_ptr + rows[:, None] * K + columns[None, :])


@triton.jit
def _multiply_add(x, w, acc, IS_SWAPPED: tl.constexpr):
    """acc + x w^T, or its transpose acc + w x^T; the order of the sum is the same for every row."""
    if IS_SWAPPED:
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    else:
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    return acc


@triton.jit
def load_tokens(pointers, is_token, k_offsets, num_columns, MASK_K: tl.constexpr) -> tl.tensor:
    """Tile of x; rows past the step's tokens are zeros and cost no traffic."""
    mask = is_token[:, None]
    if MASK_K:
        mask = mask & (k_offsets[None, :] < num_columns)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _load_weight(pointers, k_offsets, num_columns, MASK_K: tl.constexpr):
    """Tile of the weight; its rows always exist."""
    if MASK_K:
        mask = k_offsets[None, :] < num_columns
        w = tl.load(pointers, mask=mask, other=0.0)
    else:
        w = tl.load(pointers)
    return w


@triton.jit
def add_parts(
    acc, partials_ptr, counters_ptr, tile, part, num_tokens, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLIT_K: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Publish this part; returns (whether it was the tile's last, sum of all parts in order).

    acc: [BLOCK_M, BLOCK_N]; partials: [tiles, SPLIT_K, num_tokens, BLOCK_N].
    """
    # In one line: of a tile with two sides a thread would read as many bytes one after the other as
    # of its inputs, and so a warp parts of 32 lines of the cache at once.
    places = tl.arange(0, BLOCK_M * BLOCK_N)
    part_size = num_tokens * BLOCK_N
    mask = places < part_size
    first = partials_ptr + tile.to(tl.int64) * SPLIT_K * part_size
    tl.store(first + part * part_size + places, tl.reshape(acc, (BLOCK_M * BLOCK_N,)), mask=mask)
    # Every thread must store its part before the count announces it.
    tl.debug_barrier()
    is_last = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == SPLIT_K - 1
    total = tl.zeros((BLOCK_M * BLOCK_N,), dtype=tl.float32)
    if is_last:
        for i in tl.static_range(SPLIT_K):
            # .cg: other multiprocessors wrote these parts to L2, and this L1 may be stale.
            total += tl.load(
                first + i * part_size + places, mask=mask, other=0.0, cache_modifier=".cg"
            )
        tl.store(counters_ptr + tile, 0)
    return is_last, tl.reshape(total, (BLOCK_M, BLOCK_N))


@triton.jit
def weight_rows(columns, N: tl.constexpr, IS_GATED: tl.constexpr) -> tl.tensor:
    """Weight rows of a program's columns; gate and up alternate, so a tile holds both of a pair."""
    # Columns past the end repeat the last and are not stored: cheaper than masking every load.
    inside = tl.minimum(columns, N - 1).to(tl.int64)
    if IS_GATED:
        inside = (inside % 2) * (N // 2) + inside // 2
    return inside


@triton.jit
def store_rows(
    acc, bias_ptr, y_ptr, w_rows, first_column, tokens, num_tokens, N: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IS_GATED: tl.constexpr,
) -> None:  # fmt: skip
    """Apply bias and gate in fp32, round once, store only valid tokens and columns."""
    if HAS_BIAS:
        acc += tl.load(bias_ptr + w_rows).to(tl.float32)[None, :]
    NUM_OUTPUTS: tl.constexpr = N // 2 if IS_GATED else N
    WIDTH: tl.constexpr = BLOCK_N // 2 if IS_GATED else BLOCK_N
    if IS_GATED:
        gate, up = tl.split(tl.reshape(acc, (BLOCK_M, WIDTH, 2)))
        first_column = first_column // 2
        y = gate * tl.sigmoid(gate) * up
    else:
        y = acc
    columns = first_column + tl.arange(0, WIDTH)
    mask = (tokens < num_tokens)[:, None] & (columns < NUM_OUTPUTS)[None, :]
    offsets = tokens[:, None].to(tl.int64) * NUM_OUTPUTS + columns[None, :]
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _small_linear_kernel(
    x_ptr,  # [num_tokens, K], row stride STRIDE_X
    weight_ptr,  # [N, K]
    bias_ptr,  # [N] if HAS_BIAS
    y_ptr,  # [num_tokens, N], or N // 2 if IS_GATED
    partials_ptr,  # [tiles, SPLIT_K, num_tokens, BLOCK_N] fp32 if SPLIT_K > 1
    counters_ptr,  # [tiles] zeros, left as zeros
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDE_X: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PART_K: tl.constexpr,  # columns of a part, a multiple of BLOCK_K
    IS_SWAPPED: tl.constexpr,
    PREFETCH_K: tl.constexpr,
    STARTS_NEXT_EARLY: tl.constexpr,
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
        if PREFETCH_K > 0:
            prefetch_rows(weight_ptr, w_rows, k_start, K, PREFETCH_K)
        tl.extra.cuda.gdc_wait()
    tokens = tl.arange(0, BLOCK_M)
    is_token = tokens < num_tokens
    k_offsets = tl.arange(0, BLOCK_K)
    x_pointers = x_ptr + tokens[:, None] * STRIDE_X + k_start + k_offsets[None, :]
    w_pointers = weight_ptr + w_rows[:, None] * K + k_start + k_offsets[None, :]
    if IS_SWAPPED:
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, PART_K, BLOCK_K):
        num_left = K - k_start - k
        x = load_tokens(x_pointers + k, is_token, k_offsets, num_left, MASK_K)
        w = _load_weight(w_pointers + k, k_offsets, num_left, MASK_K)
        acc = _multiply_add(x, w, acc, IS_SWAPPED)
    if USE_PDL and not STARTS_NEXT_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if IS_SWAPPED:
        acc = tl.trans(acc)
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


def small_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    counters: Tensor,
    config: SmallConfig | None = None,
) -> Tensor:
    """x: [T <= MAX_SMALL_TOKENS, K], rows may be strided; weight: [N, K]; bias: [N] or None.

    Returns [T, N]. counters: from `tile_counters`; config: default from the table. Torch twin:
    `torch.nn.functional.linear`.
    """
    y = x.new_empty((x.shape[0], weight.shape[0]))
    if y.numel() > 0:
        config = config or choose_config(x.shape[0], weight, gated=False)
        _launch(x, weight, bias, y, counters, config)
    return y


def small_gated_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    counters: Tensor,
    config: SmallConfig | None = None,
) -> Tensor:
    """silu(gate) * up of [gate | up] = x W^T + b, not rounded in between; else as `small_linear`.

    weight: [2 n, K], rows of gate first; returns [T, n].
    """
    y = x.new_empty((x.shape[0], weight.shape[0] // 2))
    if y.numel() > 0:
        config = config or choose_config(x.shape[0], weight, gated=True)
        _launch(x, weight, bias, y, counters, config)
    return y


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    counters: Tensor,
    cut: SmallConfig,
) -> None:
    num_tokens, num_columns = x.shape
    num_rows = weight.shape[0]
    check_operands(x, weight)
    num_tiles = triton.cdiv(num_rows, cut.block_n)
    partials = y
    if cut.split_k > 1:
        assert num_tiles <= counters.numel(), f"{num_tiles} tiles, {counters.numel()} counters"
        partials = x.new_empty(
            (num_tiles, cut.split_k, num_tokens, cut.block_n), dtype=torch.float32
        )
    use_pdl = pdl_supported(x.device)
    _small_linear_kernel[(num_tiles, cut.split_k)](
        x,
        weight,
        weight if bias is None else bias,
        y,
        partials,
        counters,
        num_tokens,
        N=num_rows,
        K=num_columns,
        STRIDE_X=x.stride(0),
        HAS_BIAS=bias is not None,
        IS_GATED=y.shape[1] != num_rows,
        BLOCK_M=token_bucket(num_tokens),
        BLOCK_N=cut.block_n,
        BLOCK_K=cut.block_k,
        SPLIT_K=cut.split_k,
        PART_K=triton.cdiv(num_columns, cut.block_k * cut.split_k) * cut.block_k,
        IS_SWAPPED=cut.is_swapped,
        PREFETCH_K=cut.prefetch_k,
        STARTS_NEXT_EARLY=cut.starts_next_early,
        USE_PDL=use_pdl,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        launch_pdl=use_pdl,
    )


def check_operands(x: Tensor, weight: Tensor) -> None:
    """Assert that kernels with 16-byte loads can read them: x [T, K], weight [N, K]."""
    assert weight.shape[1] == x.shape[1], f"{x.shape} against {weight.shape}"
    assert x.dtype == weight.dtype, f"{x.dtype} against {weight.dtype}"
    assert weight.is_contiguous(), f"weight has strides {weight.stride()}"
    assert x.stride(1) == 1, f"strides {x.stride()}: a row's elements must be adjacent"
    assert x.stride(0) % 8 == 0, f"strides {x.stride()}: every row must start on 16 bytes"
    assert x.data_ptr() % 16 == 0, "x must start on 16 bytes"
