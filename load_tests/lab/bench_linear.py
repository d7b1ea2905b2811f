"""How long one linear map of a model takes on a GPU, by each kernel that may compute it.

    python -m load_tests.lab.bench_linear --tokens 64 128 256
    python -m load_tests.lab.bench_linear --kinds gated:25600x5120 deep:5120x12800 --tokens 1 16
    python -m load_tests.lab.bench_linear --kinds gated --tokens 256 --cut 256,128,64,64,8,3,512

Each kernel is first held against float64. Then a CUDA graph computes one product with each of
several weights, more than the L2 cache holds, as a model does; a time is the median of replays, a
product. The floor is the weight's bytes over the memory's rate or the operations over the matrix
units' (floors.py), whichever is longer.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the field's own spelling)
from torch import Tensor

from kernels.device import device_properties
from kernels.linear.large import large_gated_linear, large_linear, num_multiprocessors
from kernels.linear.medium import (
    MediumConfig,
    choose_config,
    medium_gated_linear,
    medium_linear,
)
from kernels.linear.small import (
    MAX_SMALL_TOKENS,
    SmallConfig,
    fitted_config,
    shape_of,
    small_gated_linear,
    small_linear,
    tile_counters,
    token_bucket,
)
from kernels.silu_mul import silu_mul
from load_tests.lab.floors import H200
from load_tests.tables import render_rows

# Weight rows (gate's and up's together) and columns, of Qwen3-8B.
KINDS = {
    "gated": (24576, 4096),
    "deep": (4096, 12288),
    "square": (4096, 4096),
    "narrow": (6144, 4096),
}
MIN_WEIGHT_BYTES = 600 * 2**20  # ten times an H200's L2 cache
MAX_ERROR = 1e-2  # norm of the difference from float64 over the norm, bf16
NUM_ROUNDS = 30

Product = Callable[[Tensor, Tensor], Tensor]  # of x [T, K] and a weight [N, K]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One kernel on one product, microseconds."""

    kind: str
    num_tokens: int
    kernel: str
    median_us: float
    least_us: float
    floor_us: float
    error: float  # against float64, relative


def kernels_of(num_tokens: int, gated: bool, cuts: Sequence[MediumConfig]) -> dict[str, Product]:
    """What may compute such a product, by name."""
    device = torch.device("cuda")
    counters = tile_counters(device)
    medium = medium_gated_linear if gated else medium_linear
    large = large_gated_linear if gated else large_linear
    small = small_gated_linear if gated else small_linear

    def by_library(x: Tensor, weight: Tensor) -> Tensor:
        y = F.linear(x, weight)
        return silu_mul(y) if gated else y

    def by_choice(x: Tensor, weight: Tensor) -> Tensor:
        cut = choose_config(num_tokens, weight.shape[0], num_multiprocessors(device))
        return medium(x, weight, None, cut)

    found: dict[str, Product] = {"library": by_library, "medium": by_choice}
    for cut in cuts:
        name = ",".join(str(value) for value in asdict(cut).values())
        found[f"medium {name}"] = partial(_by_cut, medium, cut)
    if num_tokens <= MAX_SMALL_TOKENS:
        found["small"] = lambda x, weight: small(x, weight, None, counters)
        found["small, as in the table"] = lambda x, weight: small(
            x, weight, None, counters, _measured_cut(num_tokens, weight, gated)
        )
    found["large"] = lambda x, weight: large(x, weight, None)
    return found


def _measured_cut(num_tokens: int, weight: Tensor, gated: bool) -> SmallConfig:
    """As measured with another weight of its shape."""
    num_bytes = device_properties(weight.device).shared_memory_per_block_bytes
    shape = shape_of(weight.shape[0], weight.shape[1], gated)
    return fitted_config(token_bucket(num_tokens), shape, num_bytes)


def _by_cut(medium: Callable[..., Tensor], cut: MediumConfig, x: Tensor, weight: Tensor) -> Tensor:
    return medium(x, weight, None, cut)


def size_of(kind: str) -> tuple[int, int]:
    """A weight's rows and columns: of a name, or of `name:ROWSxCOLUMNS`."""
    name, _, size = kind.partition(":")
    if name not in KINDS:
        raise argparse.ArgumentTypeError(f"{name}: one of {', '.join(KINDS)}")
    if not size:
        return KINDS[name]
    num_rows, num_columns = (int(part) for part in size.split("x"))
    return num_rows, num_columns


def measure(kind: str, num_tokens: int, cuts: Sequence[MediumConfig]) -> Iterator[Timing]:
    """Every kernel on products of `kind`. Raises RuntimeError for one that computes wrongly."""
    num_rows, num_columns = size_of(kind)
    gated = kind.startswith("gated")
    num_weights = max(2, -(-MIN_WEIGHT_BYTES // (2 * num_rows * num_columns)))
    weights = [_random(num_rows, num_columns) * num_columns**-0.5 for _ in range(num_weights)]
    x = _random(num_tokens, num_columns)
    exact = _exact(x, weights[0], gated)
    for name, product in kernels_of(num_tokens, gated, cuts).items():
        y = product(x, weights[0])
        error = float((y.double() - exact).norm() / exact.norm())
        if not error <= MAX_ERROR:  # nor NaN
            raise RuntimeError(f"{kind}, {num_tokens} tokens, {name}: off by {error}")
        rounds_us = _replays_us(product, x, weights)
        yield Timing(
            kind=kind,
            num_tokens=num_tokens,
            kernel=name,
            median_us=statistics.median(rounds_us),
            least_us=min(rounds_us),
            floor_us=_floor_us(num_tokens, num_rows, num_columns),
            error=error,
        )


def _random(num_rows: int, num_columns: int) -> Tensor:
    return torch.randn(num_rows, num_columns, device="cuda", dtype=torch.bfloat16)


def _exact(x: Tensor, weight: Tensor, gated: bool) -> Tensor:
    y = x.double() @ weight.double().T
    if not gated:
        return y
    gate, up = y.chunk(2, dim=1)
    return gate * torch.sigmoid(gate) * up


def _replays_us(product: Product, x: Tensor, weights: Sequence[Tensor]) -> list[float]:
    """Of one product on average, in each of NUM_ROUNDS replays of all weights."""
    graph = torch.cuda.CUDAGraph()
    for weight in weights:
        product(x, weight)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for weight in weights:
            product(x, weight)
    events = [_new_event() for _ in range(NUM_ROUNDS + 1)]
    graph.replay()
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    pairs = itertools.pairwise(events)
    return [1e3 * float(a.elapsed_time(b)) / len(weights) for a, b in pairs]


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _floor_us(num_tokens: int, num_rows: int, num_columns: int) -> float:
    num_weights = num_rows * num_columns
    return 1e6 * H200.seconds(num_bytes=2 * num_weights, flops=2 * num_tokens * num_weights)


def render(timings: Sequence[Timing]) -> str:
    header = ("product", "tokens", "kernel", "us", "least", "floor", "off by")
    rows = [
        (
            timing.kind,
            str(timing.num_tokens),
            timing.kernel,
            f"{timing.median_us:.1f}",
            f"{timing.least_us:.1f}",
            f"{timing.floor_us:.1f}",
            f"{timing.error:.1e}",
        )
        for timing in timings
    ]
    return render_rows([header, *rows])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--kinds", nargs="+", type=_kind, default=list(KINDS), metavar="NAME[:ROWSxCOLUMNS]"
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument(
        "--cut",
        type=_cut,
        nargs="+",
        default=[],
        metavar="M,FIRST,SECOND,K,WARPS,STAGES,PREFETCH",
        help="of kernels.linear.medium, besides the one it chooses",
    )
    parser.add_argument("--json", type=Path, help="write everything to this file")
    return parser.parse_args()


def _kind(text: str) -> str:
    size_of(text)
    return text


def _cut(text: str) -> MediumConfig:
    names = ("block_m", "first", "second", "block_k", "num_warps", "num_stages", "prefetch_k")
    numbers = [int(part) for part in text.split(",")]
    sizes: dict[str, Any] = dict(zip(names, numbers, strict=True))
    return MediumConfig(**sizes)


def main() -> None:
    args = parse()
    timings: list[Timing] = []
    for kind in args.kinds:
        for num_tokens in args.tokens:
            timings += measure(kind, num_tokens, args.cut)
    print(render(timings))
    if args.json:
        args.json.write_text(json.dumps([asdict(timing) for timing in timings]))


if __name__ == "__main__":
    main()
