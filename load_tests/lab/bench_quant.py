"""How long quantised linear maps of Qwen3-8B take on a GPU, beside the same in bfloat16.

    python -m load_tests.lab.bench_quant                        # everything, into a table
    python -m load_tests.lab.bench_quant --formats int4 --kinds gated --tokens 1 64 --tune
    python -m load_tests.lab.bench_quant --formats fp8-row --tokens 16 64 --ways rounded --tune
    python -m load_tests.lab.bench_quant --formats fp8-row fp8-block --ways many cutlass deepgemm

Kernels are compiled first, in processes side by side. Each is then held against float64 of the same
quantised numbers, and a CUDA graph computes one product with each of several weights, more than the
L2 cache holds; a time is the median of replays, a product. A case that fails is a row that says
why. The floor is the weight's bytes over the memory's rate or the operations over the matrix units'
(at twice bfloat16's rate where both operands are FP8), whichever is longer.

`chosen` is what the engine runs by itself. `pieces` and `rounded` are products of up to 64 tokens
whose inputs were coded before, without the time that this takes: the engine runs one of them after
a norm, and after a gate of more than 16 tokens one in groups of 128 columns (`rounded-128`,
`pieces-128`). `one` multiplies one token without matrix units, `weights` decodes weights in
registers, `many` is what the engine runs for many tokens. `scaled_mm` is torch's product, `cutlass`
and `deepgemm` are an installed vLLM's (vllm_products.py). `--tune` tries other tilings of `one`,
`weights`, `pieces` and `rounded`, and of products of FP8 tiles.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812  (the field's own spelling)
from torch import Tensor

from engine.layers.build_linear import build_gated, build_linear
from engine.layers.linear import Linear, LinearWeight, WeightFormat
from engine.layers.quantized_cuda import FourBitMatrix, Fp8Blocks, Fp8Matrix, QuantizedLinear
from engine.layers.quantized_weight import Scales, dequantize
from kernels.fused import TritonOps
from kernels.linear.small import tile_counters
from kernels.quant import fp8_linear
from kernels.quant.coded_tokens import CodedTokens, InputForm
from kernels.quant.fp8_blocks import TILE_COLUMNS, BlocksConfig, fp8_blocks
from kernels.quant.fp8_few import MAX_TOKENS as MAX_FEW_TOKENS
from kernels.quant.fp8_few import fp8_few_linear
from kernels.quant.fp8_linear import Fp8Operand, QuantConfig
from kernels.quant.int4_joined import int4_joined_linear
from kernels.quant.one_token import fp8_one_token, int4_one_token, supports_one_token
from kernels.quant.sizes import choose_half
from kernels.quant.token_groups import code_tokens, quantize_tokens
from kernels.silu_mul import silu_mul
from load_tests.lab.floors import H200
from load_tests.lab.vllm_products import vllm_ways
from load_tests.tables import render_rows

# Weight rows (gate's and up's together) and columns.
KINDS = {
    "gated": (24576, 4096),
    "deep": (4096, 12288),
    "square": (4096, 4096),
    "narrow": (6144, 4096),
}
TOKENS = (1, 16, 64, 128, 256, 1024, 8192)
FORMATS = ("bf16", "fp8-block", "fp8-row", "int4", "int4-zeros", "mxfp4", "nvfp4")
MIN_WEIGHT_BYTES = 200 * 2**20  # four times an H200's L2 cache
MAX_ERROR = 1e-2  # norm of the difference from float64 over the norm, inputs as they are
MAX_ROUNDED_ERROR = 6e-2  # inputs rounded to e4m3: 2.5 %, more where two such are multiplied
CHECKED_TOKENS = 256  # float64 takes too long for more
NUM_ROUNDS = 20

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One way to compute one product; microseconds."""

    kind: str
    num_tokens: int
    format: str
    way: str
    median_us: float | None = None  # None = it failed
    floor_us: float = 0.0
    error: float | None = None  # against float64, relative; None = not checked
    problem: str = ""

    @property
    def share(self) -> float:
        """Of the floor in the time taken."""
        return self.floor_us / self.median_us if self.median_us else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A named way to compute with each of several weights."""

    name: str
    products: Sequence[Product]
    is_rounded: bool = False


# ---- weights -------------------------------------------------------------------------------------


def make_weight(
    weight_format: str, num_rows: int, num_columns: int, device: str = "cuda"
) -> LinearWeight:
    """A random weight whose products have about the size of the inputs."""
    size = num_columns**-0.5
    if weight_format == "bf16":
        return LinearWeight(_random(num_rows, num_columns, device) * size)
    if weight_format.startswith("fp8"):
        tile = (128, 128) if weight_format == "fp8-block" else (1, num_columns)
        numbers = _random(num_rows, num_columns, device) * 100
        data = numbers.clamp(-448, 448).to(torch.float8_e4m3fn)  # beyond, torch makes NaN
        shape = (num_rows // tile[0], num_columns // tile[1])
        values = torch.rand(shape, device=device).add_(0.5).mul_(size / 100)
        return LinearWeight(data, None, WeightFormat.FP8, _scales(values, tile, rounds=True))
    shape = (num_rows, num_columns // 2)
    data = torch.randint(256, shape, dtype=torch.uint8, device=device)
    if weight_format.endswith("fp4"):
        scales = _scales_of_e2m1(weight_format, num_rows, num_columns, device)
        return LinearWeight(data, None, WeightFormat.FP4, scales)
    values = torch.rand((num_rows, num_columns // 128), device=device).add_(0.5).mul_(size / 5)
    scales = _scales(values.bfloat16().float(), (1, 128), rounds=False)
    if weight_format == "int4-zeros":
        zeros = torch.randint(4, 12, values.shape, dtype=torch.uint8, device=device)
        scales = replace(scales, zeros=zeros)
    return LinearWeight(data, None, WeightFormat.INT4, replace(scales, half=64))


def _scales_of_e2m1(weight_format: str, num_rows: int, num_columns: int, device: str) -> Scales:
    group = 16 if weight_format == "nvfp4" else 32
    values = torch.rand((num_rows, num_columns // group), device=device).add_(0.5)
    factors = None
    if weight_format == "nvfp4":
        values = values.mul_(200).to(torch.float8_e4m3fn)
        factors = torch.full((num_rows,), num_columns**-0.5 / 600, device=device)
    else:
        values = values.mul_(num_columns**-0.5 / 3).to(torch.float8_e8m0fnu)
    scales = _scales(values, (1, group), rounds=False)
    half = choose_half(num_columns, group)
    return replace(scales, half=half, is_e2m1=True, factors=factors)


def _scales(values: Tensor, tile: tuple[int, int], *, rounds: bool) -> Scales:
    return Scales(
        values=values, rows=tile[0], columns=tile[1], dtype=torch.bfloat16, quantizes_inputs=rounds
    )


def _random(num_rows: int, num_columns: int, device: str = "cuda") -> Tensor:
    return torch.randn(num_rows, num_columns, device=device, dtype=torch.bfloat16)


# ---- ways ----------------------------------------------------------------------------------------


def ways_of(
    weight_format: str, weights: Sequence[LinearWeight], num_tokens: int, *, gated: bool, tune: bool
) -> Iterator[Way]:
    """Every way to compute such products."""
    chosen = [_build(weight, gated) for weight in weights]
    if weight_format == "bf16":
        yield Way(name="chosen", products=chosen)
        yield Way(name="library", products=[_library(w.data, gated) for w in weights])
        return
    maps = [linear for linear in chosen if isinstance(linear, QuantizedLinear)]
    is_rounded = weight_format.startswith("fp8")
    form = maps[0].form(num_tokens)
    rounds = form is not None and form.pieces == 1
    yield Way(name="chosen", products=chosen, is_rounded=rounds)
    if num_tokens <= 1024:
        cuts: list[QuantConfig | None] = [None]
        cuts += tilings(num_tokens) if tune else []
        for cut in cuts:
            yield Way(
                name="weights" if cut is None else f"weights {_numbers(cut)}",
                products=[_by_weights(linear, cut, gated) for linear in maps],
            )
    if num_tokens >= 64:
        products = [_gate(linear.product.many, gated) for linear in maps]
        yield Way(name="many", products=products, is_rounded=is_rounded)
    if num_tokens == 1:
        yield from _one_token_ways(maps, gated=gated, tune=tune)
    if num_tokens <= MAX_FEW_TOKENS:
        yield from _coded_ways(weight_format, maps, num_tokens, gated=gated, tune=tune)
    if is_rounded and num_tokens >= 16:
        yield from _rounded_ways(weight_format, weights, maps, gated=gated, tune=tune)
    if is_rounded:
        for name, products in vllm_ways(weight_format, weights, num_tokens):
            yield Way(name=name, products=products, is_rounded=True)


def _rounded_ways(
    weight_format: str,
    weights: Sequence[LinearWeight],
    maps: Sequence[QuantizedLinear],
    *,
    gated: bool,
    tune: bool,
) -> Iterator[Way]:
    """Rounding alone, torch's own product, and other tilings of ours."""
    group = 128 if weight_format == "fp8-block" else weights[0].data.shape[1]
    yield Way(name="rounding", products=[lambda x: quantize_tokens(x, group)[0]] * len(weights))
    if weight_format == "fp8-row":
        for is_fast in (False, True):
            name = "scaled_mm fast" if is_fast else "scaled_mm"
            yield Way(name=name, products=[_scaled(w, is_fast) for w in weights], is_rounded=True)
    elif tune:
        operands = [
            linear.product.weight for linear in maps if isinstance(linear.product, Fp8Blocks)
        ]
        for cut in BLOCK_TILINGS:
            products = [_gate(_by_blocks(operand, cut), gated) for operand in operands]
            yield Way(name=f"blocks {_numbers(cut)}", products=products, is_rounded=True)


def _one_token_ways(maps: Sequence[QuantizedLinear], *, gated: bool, tune: bool) -> Iterator[Way]:
    """One token, without matrix units; nothing for 4-bit floats."""
    for cut in (None, *(ONE_TOKEN_TILINGS if tune else ())):
        name = "one" if cut is None else f"one {_numbers(cut)}"
        products = [made for linear in maps if (made := _of_one(linear, cut, gated))]
        if products:
            yield Way(name=name, products=products)


def _of_one(linear: QuantizedLinear, cut: QuantConfig | None, gated: bool) -> Product | None:
    product = linear.product
    if isinstance(product, Fp8Matrix):
        fp8 = product.weight
        return lambda x: fp8_one_token(x, fp8, cut, gated=gated)
    if isinstance(product, FourBitMatrix) and supports_one_token(product.weight):
        int4 = product.weight
        return lambda x: int4_one_token(x, int4, cut, gated=gated)
    return None


def _coded_ways(
    weight_format: str,
    maps: Sequence[QuantizedLinear],
    num_tokens: int,
    *,
    gated: bool,
    tune: bool,
) -> Iterator[Way]:
    """Products of inputs that were coded before, without the time that this takes."""
    block_m = 1 << (num_tokens - 1).bit_length()
    tried = CODED_TILINGS[64 if num_tokens > 16 else 16] if tune else ()
    cuts = (None, *(replace(cut, block_m=max(cut.block_m, block_m)) for cut in tried))
    form = maps[0].form(1)
    if form is None:
        return
    num_columns = form.group
    tiles = TILE_COLUMNS if weight_format == "fp8-block" else num_columns
    for name, form in (
        ("pieces", InputForm(pieces=2, group=num_columns)),
        ("pieces-128", InputForm(pieces=2, group=128)),
        ("rounded", InputForm(pieces=1, group=tiles)),
        ("rounded-128", InputForm(pieces=1, group=128)),
    ):
        for cut in cuts:
            products = [made for linear in maps if (made := _of_coded(linear, form, cut, gated))]
            if products:
                way = name if cut is None else f"{name} {_numbers(cut)}"
                yield Way(name=way, products=products, is_rounded=form.pieces == 1)


def _of_coded(
    linear: QuantizedLinear, form: InputForm, cut: QuantConfig | None, gated: bool
) -> Product | None:
    """None = the format has no such product."""
    product, counters = linear.product, tile_counters(torch.device("cuda"))
    coded: dict[int, CodedTokens] = {}

    def code(x: Tensor) -> CodedTokens:
        if x.data_ptr() not in coded:
            coded[x.data_ptr()] = code_tokens(x, form)
        return coded[x.data_ptr()]

    if isinstance(product, Fp8Matrix):
        fp8 = product.weight
        return lambda x: fp8_few_linear(code(x), fp8, x.dtype, counters, cut, gated=gated)
    assert isinstance(product, FourBitMatrix)
    int4 = product.weight
    if form != product.form(1):
        return None
    return lambda x: int4_joined_linear(code(x), int4, x.dtype, counters, cut, gated=gated)


def _build(weight: LinearWeight, gated: bool) -> Linear:
    return build_gated(weight, TritonOps()) if gated else build_linear(weight)


def _gate(product: Product, gated: bool) -> Product:
    return (lambda x: silu_mul(product(x))) if gated else product


def _library(weight: Tensor, gated: bool) -> Product:
    return _gate(lambda x: F.linear(x, weight), gated)


def _by_weights(linear: QuantizedLinear, cut: QuantConfig | None, gated: bool) -> Product:
    product, counters = linear.product, tile_counters(torch.device("cuda"))
    if isinstance(product, FourBitMatrix):
        num_rows, num_columns = product.weight.packed.shape[0], 2 * product.weight.packed.shape[1]
    else:
        assert isinstance(product, Fp8Matrix)
        num_rows, num_columns = product.weight.codes.shape

    def by_weights(x: Tensor) -> Tensor:
        wanted = cut or fp8_linear.choose_config(len(x), num_rows, num_columns)
        return product.few(x, counters, wanted, gated=gated)

    return by_weights


def _by_blocks(operand: Fp8Operand, cut: BlocksConfig) -> Product:
    return lambda x: fp8_blocks(*quantize_tokens(x, 128), operand, x.dtype, cut)


def _scaled(weight: LinearWeight, is_fast: bool) -> Product:
    """torch's product of inputs that were rounded before, without the time that this takes."""
    assert weight.scales is not None
    scale_b = weight.scales.values.view(1, -1)
    rounded: dict[int, tuple[Tensor, Tensor]] = {}

    def product(x: Tensor) -> Tensor:
        if x.data_ptr() not in rounded:
            rounded[x.data_ptr()] = quantize_tokens(x, x.shape[1])
        codes, scales = rounded[x.data_ptr()]
        return torch._scaled_mm(
            codes, weight.data.t(), scale_a=scales.view(-1, 1), scale_b=scale_b,
            out_dtype=x.dtype, use_fast_accum=is_fast,
        )  # fmt: skip

    return product


def tilings(num_tokens: int) -> list[QuantConfig]:
    """Other tilings of products that decode weights in registers."""
    if num_tokens > fp8_linear.MAX_ONE_TILE:
        return [
            QuantConfig(block_m=m, block_n=n, block_k=k, num_warps=warps, num_stages=stages)
            for m, n, warps in ((64, 128, 4), (64, 128, 8), (128, 128, 8), (128, 64, 4))
            for k, stages in ((64, 4), (128, 3))
        ]
    block_m = max(16, 1 << (num_tokens - 1).bit_length())
    return [
        QuantConfig(
            block_m=block_m, block_n=n, split_k=split, num_warps=warps, num_stages=stages,
            prefetch_bytes=prefetch,
        )
        for n, warps in ((64, 4), (128, 4), (128, 8), (256, 8))
        for split in (1, 2, 4, 8)
        for stages, prefetch in ((3, 512), (6, 0), (8, 512))
    ]  # fmt: skip


# By the tokens of a tile, which is no smaller than the number of tokens.
CODED_TILINGS = {
    tokens: [
        QuantConfig(
            block_m=8, block_n=n, block_k=k, split_k=split, num_warps=warps, num_stages=stages
        )
        for n, k, warps, stages, splits in cuts
        for split in splits
    ]
    for tokens, cuts in (
        (
            16,
            (
                (64, 128, 4, 4, (1, 4, 6)),
                (64, 128, 4, 6, (1, 2, 4, 6)),
                (64, 256, 4, 4, (1, 2, 4)),
                (128, 128, 4, 4, (2, 4)),
                (128, 128, 8, 4, (2, 4)),
                (256, 128, 8, 4, (1,)),
            ),
        ),
        (
            64,
            (
                (64, 128, 4, 6, (1, 2, 4)),
                (64, 256, 4, 6, (1, 2)),
                (128, 128, 8, 4, (1, 2, 4, 8)),
                (128, 128, 8, 7, (1, 2, 4)),
                (256, 128, 8, 4, (1, 2)),
            ),
        ),
    )
}
ONE_TOKEN_TILINGS = [
    QuantConfig(
        block_m=1, block_n=n, block_k=k, num_warps=warps, num_stages=stages, prefetch_bytes=prefetch
    )
    for n, k, warps, stages in (
        (8, 512, 4, 5),
        (8, 512, 4, 9),
        (16, 512, 4, 5),
        (16, 512, 4, 9),
        (16, 512, 8, 5),
        (32, 512, 4, 5),
        (32, 512, 8, 5),
        (16, 1024, 4, 5),
    )
    for prefetch in (0, 512, 4096)
]
BLOCK_TILINGS = [
    BlocksConfig(block_m=m, block_n=n, num_warps=w, num_stages=s, programs_per_sm=p)
    for m, n, w, s, p in (
        (128, 128, 8, 3, 1),
        (128, 128, 8, 4, 1),
        (128, 128, 8, 5, 1),
        (128, 128, 4, 4, 1),
        (64, 128, 4, 4, 1),
        (64, 128, 4, 4, 2),
        (128, 64, 4, 4, 2),
        (256, 64, 8, 3, 1),
    )
]


def _numbers(cut: QuantConfig | BlocksConfig) -> str:
    return ",".join(str(value) for value in asdict(cut).values())


# ---- times ---------------------------------------------------------------------------------------


def measure(weight_format: str, kind: str, args: argparse.Namespace) -> Iterator[Timing]:
    """Every way of a format on products of `kind`, or those that `args` name."""
    compiles_only = args.compile
    num_rows, num_columns = KINDS[kind]
    first = make_weight(weight_format, num_rows, num_columns)
    num_weights = 1 if compiles_only else max(2, -(-MIN_WEIGHT_BYTES // first.data.nbytes))
    weights = [first]
    weights += [make_weight(weight_format, num_rows, num_columns) for _ in range(num_weights - 1)]
    matrix = first.data
    if first.scales is not None:
        matrix = dequantize(first.data, replace(first.scales, dtype=torch.float32))
    for num_tokens in args.tokens:
        x = _random(num_tokens, num_columns)
        exact = None
        if num_tokens <= CHECKED_TOKENS and not compiles_only:
            exact = _exact(x, matrix, gated=kind == "gated")
        # Where arithmetic takes the time, weights need not come from memory.
        few = weights if num_tokens < 1024 else weights[:2]
        for way in ways_of(weight_format, few, num_tokens, gated=kind == "gated", tune=args.tune):
            if args.ways and way.name.partition(" ")[0] not in args.ways:
                continue
            timing = Timing(
                kind=kind,
                num_tokens=num_tokens,
                format=weight_format,
                way=way.name,
                floor_us=_floor_us(weight_format, way.is_rounded, num_tokens, kind),
            )
            yield _timed(timing, way, x, exact, compiles_only=compiles_only)


def _timed(
    timing: Timing, way: Way, x: Tensor, exact: Tensor | None, *, compiles_only: bool
) -> Timing:
    try:
        y = way.products[0](x)
        torch.cuda.synchronize()
        if compiles_only:
            return timing
        error = None
        if exact is not None and y.shape == exact.shape and y.dtype == x.dtype:
            error = float((y.double() - exact).norm() / exact.norm())
            if not error <= (MAX_ROUNDED_ERROR if way.is_rounded else MAX_ERROR):  # nor NaN
                return replace(timing, error=error, problem=f"off by {error:.1e}")
        rounds_us = _replays_us(way.products, x)
        return replace(timing, median_us=statistics.median(rounds_us), error=error)
    except Exception as problem:  # noqa: BLE001 - one case must not end the others
        return replace(timing, problem=f"{type(problem).__name__}: {str(problem)[:80]}")


def _exact(x: Tensor, matrix: Tensor, *, gated: bool) -> Tensor:
    y = x.double() @ matrix.double().T
    if not gated:
        return y
    gate, up = y.chunk(2, dim=1)
    return gate * torch.sigmoid(gate) * up


def _floor_us(weight_format: str, is_rounded: bool, num_tokens: int, kind: str) -> float:
    num_weights = KINDS[kind][0] * KINDS[kind][1]
    each = {"bf16": 2.0, "fp8-block": 1.0, "fp8-row": 1.0}.get(weight_format, 0.5)
    flops = 2 * num_tokens * num_weights / (2 if is_rounded else 1)
    return 1e6 * H200.seconds(num_bytes=each * num_weights, flops=flops)


def _replays_us(products: Sequence[Product], x: Tensor) -> list[float]:
    """Of one product on average, in each of the replays of all weights."""
    graph = torch.cuda.CUDAGraph()
    for product in products:
        product(x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for product in products:
            product(x)
    events = [_new_event() for _ in range(NUM_ROUNDS + 1)]
    graph.replay()
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return [1e3 * float(a.elapsed_time(b)) / len(products) for a, b in pairwise(events)]


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


# ---- the run -------------------------------------------------------------------------------------


def compile_all(args: argparse.Namespace) -> None:
    """Compile every kernel, one process for each format and kind; fills Triton's cache on disk."""
    base = [sys.executable, "-m", "load_tests.lab.bench_quant", "--compile"]
    base += ["--tune"] if args.tune else []
    base += ["--ways", *args.ways] if args.ways else []
    base += ["--tokens", *(str(number) for number in args.tokens)]
    started = [
        subprocess.Popen([*base, "--formats", weight_format, "--kinds", kind])
        for weight_format in args.formats
        for kind in args.kinds
    ]
    for process in started:
        process.wait()


def render(timings: Sequence[Timing]) -> str:
    header = ("product", "tokens", "format", "way", "us", "floor", "share", "off by")
    rows = [
        (
            timing.kind,
            str(timing.num_tokens),
            timing.format,
            timing.way,
            timing.problem if timing.median_us is None else f"{timing.median_us:.1f}",
            f"{timing.floor_us:.1f}",
            f"{timing.share:.0%}",
            "" if timing.error is None else f"{timing.error:.1e}",
        )
        for timing in sorted(timings, key=lambda t: (t.kind, t.num_tokens, t.format))
    ]
    return render_rows([header, *rows])


def best(timings: Sequence[Timing]) -> list[Timing]:
    """Without the tilings that were tried, but for the fastest of each kernel."""
    kept: dict[tuple[str, int, str, str], Timing] = {}
    for timing in timings:
        word, _, numbers = timing.way.partition(" ")
        is_tiling = "," in numbers
        name = f"{word} best" if is_tiling else timing.way
        key = (timing.kind, timing.num_tokens, timing.format, name)
        if key not in kept or (timing.median_us or 1e9) < (kept[key].median_us or 1e9):
            kept[key] = timing
    return list(kept.values())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--kinds", nargs="+", choices=sorted(KINDS), default=list(KINDS))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--ways", nargs="+", help="first words of their names; default: all")
    parser.add_argument("--tune", action="store_true", help="try other tilings too")
    parser.add_argument("--seconds", type=float, default=480.0, help="end in order after so long")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _until(
    end_s: float, weight_format: str, kind: str, args: argparse.Namespace
) -> Iterator[Timing]:
    """Timings until `end_s`; what ends them early is the last."""
    measured = measure(weight_format, kind, args)
    try:
        for timing in measured:
            yield timing
            if time.monotonic() > end_s:
                return
    except Exception as problem:  # noqa: BLE001 - one product must not end the others
        words = f"{type(problem).__name__}: {str(problem)[:80]}"
        yield Timing(kind=kind, num_tokens=0, format=weight_format, way="all", problem=words)


def main() -> None:
    args = parse()
    end_s = time.monotonic() + args.seconds
    if not args.compile:
        compile_all(args)
    timings: list[Timing] = []
    for kind in args.kinds:
        for weight_format in args.formats:
            timings += _until(end_s, weight_format, kind, args)
    if args.compile:
        return
    print(render(best(timings)))
    if args.json:
        args.json.write_text(json.dumps([asdict(timing) for timing in timings]))


if __name__ == "__main__":
    main()
