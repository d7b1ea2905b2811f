"""How long each kernel of a mixture of experts takes on a GPU, and which tiles are best for it.

    python -m load_tests.lab.bench_moe
    python -m load_tests.lab.bench_moe --shape mixtral-8x7b --tokens 1 64 1024
    python -m load_tests.lab.bench_moe --tune
    python -m load_tests.lab.bench_moe --ranks 2 --tune --tune-tokens 16 64 256 8192
    python -m load_tests.lab.bench_moe --shape glm-4.7-flash --like deepseek-v2-lite
    python -m load_tests.lab.bench_moe --format nvfp4    # quantised experts: bench_quant's formats

`rounded` is a step but for the router with FP8 or INT4 experts and inputs rounded to FP8, as the
engine does from `execution.round_expert_inputs_from` tokens on; then come other tiles (routes,
rows, warps, stages). Routes are uniform, weights are not in the cache (moe_step.py). A floor is the
time to read the weights of experts that have tokens, or to multiply by them, whichever is longer.
`--tune` tries tiles at every number of tokens and prints the best as an entry of
kernels/moe/tiles.py; then it times them. `--ranks`: a rank's part of experts that are cut, by the
tiles that the engine would take and by those of the whole experts, if the GPU's table has them;
`--like`: by those of another shape, too. A case that fails is a line of the table.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from engine.layers.moe_cuda import expert_plan
from kernels.device import device_properties
from kernels.moe.tiles import TUNED, ExpertShape, Tile, TilePlan, is_tuned
from load_tests.lab.bench_quant import FORMATS
from load_tests.lab.floors import Machine
from load_tests.lab.moe_step import (
    H200_MEASURED,
    LIBRARY,
    MAX_ERROR,
    MAX_ROUNDED_ERROR,
    ROUNDED,
    Call,
    Layer,
    MoeStep,
    Timer,
    graph_us,
    quantised_layers,
    random_layers,
)
from load_tests.lab.moe_tuning import TUNED_TOKENS, Tuning, compile_all, render_plan
from load_tests.tables import render_rows

SHAPES = {
    "gpt-oss-20b": ExpertShape(num_experts=32, num_active=4, hidden=2880, inner=2880),
    "qwen3-30b-a3b": ExpertShape(num_experts=128, num_active=8, hidden=2048, inner=768),
    "deepseek-v2-lite": ExpertShape(num_experts=64, num_active=6, hidden=2048, inner=1408),
    "glm-4.7-flash": ExpertShape(num_experts=64, num_active=4, hidden=2048, inner=1536),
    "mixtral-8x7b": ExpertShape(num_experts=8, num_active=2, hidden=4096, inner=14336),
}
TOKENS = (1, 16, 64, 256, 1024, 8192)
LIBRARY_TOKENS = 256  # from here on torch's grouped products, without gate and gather, too
TUNING_S = 150.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One kernel at one number of tokens."""

    num_tokens: int
    distinct_experts: float
    kernel: str
    us: float | None  # None = it failed
    floor_us: float
    note: str = ""


def measure(
    step: MoeStep, plan: TilePlan, timer: Timer, machine: Machine = H200_MEASURED
) -> Iterator[Timing]:
    """Every kernel that the plan uses for the step, then all of them in their order."""
    kernels: dict[str, Callable[[], list[Call]]]
    if step.num_tokens <= plan.few_up_to:
        kernels = {
            "router": step.router,
            "gate_up": partial(step.few_gate_up, plan.few_gate_up),
            "down": partial(step.few_down, plan.few_down),
        }
    elif step.num_tokens >= plan.matrices_from:
        kernels = {
            "router": step.router,
            "align": partial(step.align, plan.tiles(step.num_tokens)[0].block_m),
            "matrices": step.matrices,
            "sum": step.total,
        }
    else:
        pair = plan.pair(step.num_tokens)
        kernels = {
            "router": step.router,
            "align": partial(step.align, pair.gate_up.block_m),
            "gate_up": partial(step.gate_up, pair.gate_up),
            "down": partial(step.down, pair.down),
            "sum": step.total,
        }
    if step.can_be_rounded:
        kernels |= {_name(tile): partial(step.rounded, tile) for tile in _tiles(step)}
    kernels["whole"] = partial(step.whole, plan)
    yield from _timed(step, kernels, plan, timer, machine)


def measure_library(
    step: MoeStep, plan: TilePlan, timer: Timer, machine: Machine = H200_MEASURED
) -> Iterator[Timing]:
    """torch's grouped products, without gate and gather, for steps of many tokens."""
    if step.num_tokens >= LIBRARY_TOKENS:
        kernels = {
            f"{LIBRARY}gate_up": step.library_gate_up,
            f"{LIBRARY}down": step.library_down,
        }
        yield from _timed(step, kernels, plan, timer, machine)


def _timed(
    step: MoeStep,
    kernels: Mapping[str, Callable[[], list[Call]]],
    plan: TilePlan,
    timer: Timer,
    machine: Machine,
) -> Iterator[Timing]:
    for name, calls in kernels.items():
        took_us, note = None, ""
        try:
            took_us = timer(calls())
            note = _error_note(step, name, plan)
        except Exception as error:  # noqa: BLE001 - one case must not end the others
            note = f"{type(error).__name__}: {str(error)[:80]}"
        yield Timing(
            num_tokens=step.num_tokens,
            distinct_experts=step.num_distinct,
            kernel=name,
            us=took_us,
            floor_us=step.floor_us(name, machine),
            note=note,
        )


def _tiles(step: MoeStep) -> Sequence[Tile | None]:
    """The tiles of `rounded` steps to time; None = the engine's."""
    return (None, *step.rounded_tiles)


def _name(tile: Tile | None) -> str:
    if tile is None:
        return ROUNDED
    return f"{ROUNDED} {tile.block_m} {tile.block_n} {tile.num_warps} {tile.num_stages}"


def _error_note(step: MoeStep, kernel: str, plan: TilePlan) -> str:
    """How far a whole step is off; nothing of a part."""
    if kernel == "whole":
        error, limit = step.worst_error(plan), MAX_ERROR
    elif kernel.startswith(ROUNDED):
        tile = next(tile for tile in _tiles(step) if _name(tile) == kernel)
        error, limit = step.rounded_error(tile), MAX_ROUNDED_ERROR
    else:
        return ""
    return f"off by {error:.1e}" + (" WRONG" if not error <= limit else "")


def run(
    shape: ExpertShape,
    layers: Sequence[Layer],
    plan: TilePlan,
    tokens: Sequence[int],
    timer: Timer,
    *,
    with_library: bool = True,
) -> list[Timing]:
    """All timings, ours before the library's; says how long each step's took."""
    timings: list[Timing] = []
    for timed in (measure, measure_library) if with_library else (measure,):
        for num_tokens in tokens:
            started_s = time.monotonic()
            try:
                timings += timed(MoeStep(shape, layers, num_tokens), plan, timer)
            except Exception as error:  # noqa: BLE001 - what was timed before is printed
                _say(f"{num_tokens} tokens: {type(error).__name__} {error}")
            _say(f"{num_tokens} tokens: {time.monotonic() - started_s:.1f} s")
    return timings


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def render(timings: Sequence[Timing]) -> str:
    header = ("tokens", "experts", "kernel", "us", "floor", "share", "")
    rows = [
        (
            str(timing.num_tokens),
            f"{timing.distinct_experts:.1f}",
            timing.kernel,
            "failed" if timing.us is None else f"{timing.us:.1f}",
            f"{timing.floor_us:.1f}",
            "" if timing.us is None else f"{timing.floor_us / timing.us:.0%}",
            timing.note,
        )
        for timing in timings
    ]
    return render_rows([header, *rows])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-30b-a3b")
    parser.add_argument("--format", choices=FORMATS, default="bf16", help="of the experts")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--tune", action="store_true", help="find the best tiles first")
    parser.add_argument("--tune-tokens", type=int, nargs="+", default=list(TUNED_TOKENS))
    parser.add_argument("--ranks", type=int, default=1, help="that cut each expert")
    parser.add_argument("--like", nargs="+", choices=sorted(SHAPES), default=[], help="other tiles")
    parser.add_argument("--tune-seconds", type=float, default=TUNING_S, metavar="S")
    parser.add_argument("--json", type=Path, help="write all timings to this file")
    args = parser.parse_args()
    if args.tune and args.format != "bf16":
        parser.error("--tune is for unquantised experts")
    if SHAPES[args.shape].inner % args.ranks:
        parser.error(f"--ranks {args.ranks}: {SHAPES[args.shape].inner} units cannot be cut so")
    return args


def plans_to_time(own: TilePlan, others: Sequence[str], gpu_name: str) -> dict[str, TilePlan]:
    """Name -> the tiles of the engine, and those of other shapes that the GPU's table has."""
    plans = {"the engine's tiles": own}
    for name in others:
        tuned = TUNED.get(gpu_name, {}).get(SHAPES[name])
        if tuned is not None:
            plans[f"tiles of {name}"] = tuned
    return plans


def main() -> None:
    args = parse()
    whole, device = SHAPES[args.shape], torch.device("cuda")
    shape = replace(whole, inner=whole.inner // args.ranks)
    gpu = device_properties(device)
    torch.manual_seed(0)
    if args.tune:
        compile_all(shape, args.tune_tokens)  # before this process takes the GPU's memory
    is_dense = args.format == "bf16"
    layers = (
        random_layers(shape, device) if is_dense else quantised_layers(shape, args.format, device)
    )
    plan = expert_plan(shape, layers[0].gate_up, layers[0].down)
    tiles = "tuned" if is_dense and is_tuned(shape, gpu) else "general"
    print(f"{args.shape} over {args.ranks} in {args.format} on {gpu.describe()}, {tiles} tiles")
    others = [*([args.shape] if args.ranks > 1 else []), *args.like]
    plans = plans_to_time(plan, others, gpu.name)
    if args.tune:
        tuning = Tuning(shape, layers, graph_us, seconds=args.tune_seconds)
        plans["tuned now"] = tuning.plan(args.tune_tokens)
        print(render_plan(gpu.name, shape, plans["tuned now"]), flush=True)
    found: dict[str, list[Timing]] = {}
    for name, timed in plans.items():
        # torch's products do not depend on a plan.
        with_library = is_dense and not found
        found[name] = run(shape, layers, timed, args.tokens, graph_us, with_library=with_library)
        print(f"{name}\n{render(found[name])}", flush=True)
    if args.json:
        rows = {name: [asdict(timing) for timing in timings] for name, timings in found.items()}
        args.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
