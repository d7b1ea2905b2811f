"""KV from one GPU to another by each channel: the rate, idle and while the receiver decodes.

    python -m load_tests.lab.bench_channels --json channels.json          # two GPUs of one host
    python -m load_tests.lab.bench_channels --handoffs-per-s 16 --seconds 60    # as they come
    python -m load_tests.lab.bench_channels --seconds 0 --stages          # where the time goes
    python -m load_tests.lab.bench_channels --seconds 0 --kv-dtype bfloat16 fp8_e4m3    # in turn
    python -m load_tests.lab.bench_channels --device cpu --tokens 64  # gloo only, tries the bench

A handoff is `--tokens` of Qwen3-8B, in blocks of 2.36 MB (half in FP8), digested at both ends,
piece by piece with an acknowledgement each, as between workers. The decode steps are a stand-in
(step_load.py); meanwhile handoffs follow one on the other, or come as the mixed load's prompts do
(mixed_load.py).
Starts a process for each end, which sees one GPU; needs no Ray and no model.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from configs.schema import FloorsConfig, HandoffConfig
from engine.errors import HandoffError
from engine.kv.layout import KvLayout
from engine.messages import ChannelKind
from load_tests.lab.child_processes import exit_on_sigterm
from load_tests.lab.handoff_stages import Stages, stages_of
from load_tests.lab.step_load import StepLoad
from load_tests.mixed_load import LONG_TOKENS, MixedLoad
from load_tests.tables import describe_machine, render_rows
from load_tests.testbed.channel_ends import (
    LOOPBACK,
    NUM_LANES,
    End,
    ReceivingProcess,
    SendingProcess,
)

T = TypeVar("T")

LAYOUTS = {
    dtype: KvLayout.with_heads(
        num_layers=36, block_size=16, num_kv_heads=8, head_dim=128, dtype=dtype
    )
    for dtype in ("bfloat16", "fp8_e4m3")
}
QWEN3_8B = LAYOUTS["bfloat16"]
KINDS: dict[str, tuple[ChannelKind, ...]] = {
    "cuda": ("cuda_ipc", "nccl_pair", "gloo_pair"),
    "cpu": ("gloo_pair",),
}
ARRIVED_HEADER = ("channel", "K and V", "handoffs", "GB/s on average", "p50", "p99", "slowest")
STORE_FACTOR = 2  # blocks in a store for each block of a handoff


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Decode steps of the receiver, in milliseconds."""

    num_steps: int
    p50_ms: float
    p99_ms: float
    slowest_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """Handoffs that came at random times, each waiting for the one before it."""

    num_handoffs: int
    num_bytes: int
    duration_s: float  # of the stretch, to the end of the last one
    p50_s: float  # of a handoff, from when it was due
    p99_s: float
    slowest_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one channel did; a field is None when it was not measured."""

    channel: str
    error: str = ""  # why it did not open
    kv_dtype: str = "bfloat16"  # of K and V
    num_bytes: int | None = None  # of a handoff, but for those that arrive
    open_s: float | None = None
    neighbours_gb_s: float | None = None  # blocks side by side in both stores
    scattered_gb_s: float | None = None  # blocks anywhere
    busy_gb_s: float | None = None  # scattered, NUM_LANES handoffs at a time
    loaded_gb_s: float | None = None  # scattered, while the receiver decodes
    alone: Steps | None = None
    loaded: Steps | None = None
    arrived: Arrived | None = None  # the handoffs of `loaded`, where they came at a rate


# ---- the two processes --------------------------------------------------------------------------


async def receive(end: End, folder: Path, seconds: float, stages: Stages) -> None:
    load = StepLoad(end.pieces.device) if end.pieces.is_on_gpu and seconds > 0 else None

    async def start_steps() -> None:
        assert load is not None, "there is no load on a CPU"
        load.start()

    async def stop_steps() -> list[float]:
        assert load is not None, "there is no load on a CPU"
        return await asyncio.to_thread(load.stop)

    calls = {"start_steps": start_steps, "stop_steps": stop_steps, "stages": stages.take}
    await ReceivingProcess(end, folder, calls).serve()


async def send(end: End, folder: Path, args: argparse.Namespace, stages: Stages) -> list[Outcome]:
    end.fill()
    process = SendingProcess(end, folder)
    outcomes = []
    for kind in args.channels or KINDS[args.device]:
        try:
            outcome = await measure(process, kind, args)
            if args.stages:
                blocks = [list(range(end.store.layout.num_blocks_for(args.tokens)))] * 2
                print(await stages_of(process, stages, blocks, args.rounds))
        except HandoffError as error:
            kv_dtype = end.store.layout.dtype
            outcome = Outcome(channel=kind, kv_dtype=kv_dtype, error=error.message)
        outcomes.append(outcome)
    await process.close_channel()
    process.close()
    return outcomes


async def measure(process: SendingProcess, kind: ChannelKind, args: argparse.Namespace) -> Outcome:
    """One channel, idle and under load. Raises HandoffError when it fails."""
    open_s = await process.open(kind)
    store, rng = process.end.store, random.Random(args.seed)
    num_blocks = store.layout.num_blocks_for(args.tokens)
    side_by_side = list(range(num_blocks))
    scattered = [rng.sample(range(store.num_blocks), num_blocks) for _ in range(2)]
    neighbours_s = [await process.hand_over(side_by_side, side_by_side) for _ in range(args.rounds)]
    scattered_s = [await process.hand_over(*scattered) for _ in range(args.rounds)]
    await check_arrived(process, *scattered)
    num_bytes = num_blocks * store.layout.block_bytes
    busy_s = await hand_over_in_lanes(process, num_blocks, args.rounds, rng)
    idle = Outcome(
        channel=kind,
        kv_dtype=store.layout.dtype,
        num_bytes=num_bytes,
        open_s=open_s,
        neighbours_gb_s=rate_gb_s(num_bytes, neighbours_s),
        scattered_gb_s=rate_gb_s(num_bytes, scattered_s),
        busy_gb_s=NUM_LANES * args.rounds * num_bytes / busy_s / 1e9,
    )
    if args.seconds <= 0 or (args.device == "cpu" and not args.handoffs_per_s):
        return idle
    if args.handoffs_per_s:
        return await measure_arrivals(process, idle, args)
    alone, _ = await under_load(process, lambda: asyncio.sleep(args.seconds))
    back_to_back = partial(hand_over_for, process, scattered, args.seconds)
    loaded, loaded_s = await under_load(process, back_to_back)
    return replace(idle, loaded_gb_s=rate_gb_s(num_bytes, loaded_s), alone=alone, loaded=loaded)


async def measure_arrivals(
    process: SendingProcess, idle: Outcome, args: argparse.Namespace
) -> Outcome:
    """`idle`, and handoffs as they come; on a CPU there are no steps to disturb."""
    load = MixedLoad(
        rate=args.handoffs_per_s, duration_s=args.seconds, seed=args.seed, shrink=args.shrink
    )
    if args.device == "cpu":
        return replace(idle, arrived=await hand_over_at(process, load))
    alone, _ = await under_load(process, lambda: asyncio.sleep(args.seconds))
    loaded, arrived = await under_load(process, lambda: hand_over_at(process, load))
    return replace(idle, alone=alone, loaded=loaded, arrived=arrived)


async def under_load(
    process: SendingProcess, meanwhile: Callable[[], Awaitable[T]]
) -> tuple[Steps, T]:
    """The receiver's steps while `meanwhile` goes on, and what that returned."""
    await process.call("start_steps")
    returned = await meanwhile()
    return steps_of(await process.call("stop_steps")), returned


async def hand_over_for(
    process: SendingProcess, blocks: Sequence[list[int]], seconds: float
) -> list[float]:
    """The same handoff again and again for so long; the seconds of each."""
    until_s, handoffs_s = time.perf_counter() + seconds, []
    while time.perf_counter() < until_s:
        handoffs_s.append(await process.hand_over(*blocks))
    return handoffs_s


async def hand_over_in_lanes(
    process: SendingProcess, num_blocks: int, rounds: int, rng: random.Random
) -> float:
    """The seconds of NUM_LANES x `rounds` handoffs, of which NUM_LANES are under way at a time."""
    num_stored = process.end.store.num_blocks
    from_ids, to_ids = (rng.sample(range(num_stored), NUM_LANES * num_blocks) for _ in range(2))

    async def run_lane(lane: int) -> None:
        part = slice(lane * num_blocks, (lane + 1) * num_blocks)
        for _ in range(rounds):
            await process.hand_over(from_ids[part], to_ids[part])

    started_s = time.perf_counter()
    await asyncio.gather(*map(run_lane, range(NUM_LANES)))
    ended_s = time.perf_counter()
    await check_arrived(process, from_ids, to_ids)
    return ended_s - started_s


async def hand_over_at(process: SendingProcess, load: MixedLoad) -> Arrived:
    """A handoff for each prompt of `load`, when it arrives, between blocks anywhere."""
    store, rng = process.end.store, random.Random(load.seed)
    arrivals, waits_s, num_blocks = load.arrivals(), [], 0
    assert arrivals, f"nothing arrives in {load.duration_s} s at {load.rate}/s"
    started_s = time.perf_counter()
    for arrival in arrivals:
        await asyncio.sleep(max(0.0, started_s + arrival.at_s - time.perf_counter()))
        number = store.layout.num_blocks_for(arrival.num_tokens)
        from_ids, to_ids = (rng.sample(range(store.num_blocks), number) for _ in range(2))
        await process.hand_over(from_ids, to_ids)
        waits_s.append(time.perf_counter() - started_s - arrival.at_s)
        num_blocks += number
    duration_s = max(load.duration_s, time.perf_counter() - started_s)
    await asyncio.sleep(started_s + duration_s - time.perf_counter())
    await check_arrived(process, from_ids, to_ids)
    waits_s.sort()
    return Arrived(
        num_handoffs=len(arrivals),
        num_bytes=num_blocks * store.layout.block_bytes,
        duration_s=duration_s,
        p50_s=statistics.median(waits_s),
        p99_s=waits_s[int(0.99 * (len(waits_s) - 1))],
        slowest_s=waits_s[-1],
    )


async def check_arrived(process: SendingProcess, from_ids: list[int], to_ids: list[int]) -> None:
    """A rate of wrong bytes means nothing. Raises HandoffError."""
    if await process.call("digests", to_ids) != process.end.store.digest(from_ids):
        raise HandoffError("the receiver's blocks are not the sender's")


def steps_of(steps_ms: Sequence[float]) -> Steps:
    ordered = sorted(steps_ms)
    assert len(ordered) >= 100, f"{len(ordered)} steps have no p99: measure for more --seconds"
    return Steps(
        num_steps=len(ordered),
        p50_ms=statistics.median(ordered),
        p99_ms=ordered[int(0.99 * (len(ordered) - 1))],
        slowest_ms=ordered[-1],
    )


def rate_gb_s(num_bytes: int, rounds_s: Sequence[float]) -> float:
    return num_bytes / statistics.median(rounds_s) / 1e9


# ---- the table ----------------------------------------------------------------------------------


def render(outcomes: Sequence[Outcome]) -> str:
    header = (
        "channel",
        "K and V",
        "bytes",
        "opens in",
        "ms, neighbours",
        "ms, scattered",
        "GB/s, neighbours",
        "GB/s, scattered",
        f"GB/s, {NUM_LANES} at a time",
        "GB/s, receiver decoding",
        "p50 step",
        "p99 step",
        "slowest step",
    )
    table = render_rows([header, *(_cells(outcome) for outcome in outcomes)])
    rows = [_arrived_cells(outcome, outcome.arrived) for outcome in outcomes if outcome.arrived]
    return f"{table}\n\n{render_rows([ARRIVED_HEADER, *rows])}" if rows else table


def _cells(outcome: Outcome) -> tuple[str, ...]:
    if outcome.error:
        return (outcome.channel, outcome.kv_dtype, outcome.error, *[""] * 10)
    one_alone = outcome.neighbours_gb_s, outcome.scattered_gb_s
    rates = *one_alone, outcome.busy_gb_s, outcome.loaded_gb_s
    return (
        outcome.channel,
        outcome.kv_dtype,
        "" if outcome.num_bytes is None else f"{outcome.num_bytes:,}",
        f"{outcome.open_s:.2f} s",
        *(_milliseconds(outcome.num_bytes, rate) for rate in one_alone),
        *("" if rate is None else f"{rate:.1f}" for rate in rates),
        *(_against_alone(outcome, name) for name in ("p50_ms", "p99_ms", "slowest_ms")),
    )


def _milliseconds(num_bytes: int | None, rate_gb_s: float | None) -> str:
    """Of a handoff."""
    return "" if num_bytes is None or rate_gb_s is None else f"{num_bytes / rate_gb_s / 1e6:.2f}"


def _arrived_cells(outcome: Outcome, arrived: Arrived) -> tuple[str, ...]:
    times = (f"{1e3 * s:.1f} ms" for s in (arrived.p50_s, arrived.p99_s, arrived.slowest_s))
    rate_gb_s = arrived.num_bytes / arrived.duration_s / 1e9
    sizes = str(arrived.num_handoffs), f"{rate_gb_s:.2f}"
    return (outcome.channel, outcome.kv_dtype, *sizes, *times)


def _against_alone(outcome: Outcome, name: str) -> str:
    if outcome.alone is None or outcome.loaded is None:
        return ""
    alone_ms, loaded_ms = asdict(outcome.alone)[name], asdict(outcome.loaded)[name]
    return f"{loaded_ms:.2f} ms, {loaded_ms / alone_ms:.3f}x"


# ---- processes ----------------------------------------------------------------------------------


def main() -> None:
    args = parse()
    if args.worker:
        work(args)
        return
    exit_on_sigterm()
    outcomes: list[Outcome] = []
    for kv_dtype in args.kv_dtype:
        with tempfile.TemporaryDirectory() as folder:
            run(Path(folder), args.gpus, kv_dtype)
            written = (Path(folder) / "outcomes.json").read_bytes()
        outcomes += msgspec.json.decode(written, type=list[Outcome])
    about = describe_machine() | {"torch": torch.__version__, "arguments": sys.argv[1:]}
    print(render(outcomes))
    if args.json:
        args.json.write_text(json.dumps({"about": about, "channels": list(map(asdict, outcomes))}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=sorted(KINDS), default="cuda")
    parser.add_argument(
        "--channels",
        nargs="*",
        choices=KINDS["cuda"],
        help="which kinds; default all of the device",
    )
    parser.add_argument("--tokens", type=int, default=8192, help="of one handoff")
    parser.add_argument(
        "--kv-dtype",
        nargs="+",
        choices=sorted(LAYOUTS),
        default=["bfloat16"],
        help="of K and V; several, also one twice, in turn",
    )
    parser.add_argument("--rounds", type=int, default=10, help="handoffs, idle")
    parser.add_argument("--seconds", type=float, default=5.0, help="of decode steps; 0 = none")
    parser.add_argument(
        "--handoffs-per-s", type=float, default=0.0, help="at random; default: without a pause"
    )
    parser.add_argument("--shrink", type=int, default=1, help="divides the sizes of those")
    parser.add_argument("--piece-mib", type=int, default=512, help="by nccl_pair")
    parser.add_argument("--max-ctas", type=int, default=16, help="of NCCL")
    parser.add_argument("--gpus", type=int, nargs=2, default=[0, 1], metavar=("TO", "FROM"))
    parser.add_argument("--stages", action="store_true", help="of handoffs side by side, idle")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--worker", choices=("send", "receive"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--address", default=LOOPBACK, help=argparse.SUPPRESS)
    return parser.parse_args()


def run(folder: Path, gpus: Sequence[int], kv_dtype: str) -> None:
    """Both processes, each with a GPU of its own, until the sender is done."""
    processes = []
    for gpu, worker in zip(gpus, ("receive", "send"), strict=True):
        command = [sys.executable, "-m", "load_tests.lab.bench_channels", *sys.argv[1:]]
        command += ["--worker", worker, "--folder", str(folder), "--kv-dtype", kv_dtype]
        processes.append(subprocess.Popen(["env", f"CUDA_VISIBLE_DEVICES={gpu}", *command]))
    try:
        ended = processes[1].wait()
    finally:
        for process in processes:
            process.terminate()
            process.wait()
    if ended:
        raise SystemExit(f"the sender ended with {ended}")


def work(args: argparse.Namespace) -> None:
    config = HandoffConfig(
        device_piece_bytes=args.piece_mib * 2**20,
        nccl_max_ctas=args.max_ctas,
        floors_gb_s=FloorsConfig(),
    )
    # Room for the longest of the prompts that arrive, and then as much for them to be anywhere.
    longest = max(args.tokens, LONG_TOKENS[1] // args.shrink if args.handoffs_per_s else 0)
    [kv_dtype] = args.kv_dtype
    layout = LAYOUTS[kv_dtype]
    num_blocks = STORE_FACTOR * layout.num_blocks_for(longest)
    end = End(args.folder, layout, num_blocks, config, args.device, args.address)
    stages = Stages()
    if args.stages:
        stages.watch_end(end)
    if args.worker == "receive":
        asyncio.run(receive(end, args.folder, args.seconds, stages))
        return
    outcomes = asyncio.run(send(end, args.folder, args, stages))
    written = json.dumps([asdict(outcome) for outcome in outcomes])
    (args.folder / "outcomes.json").write_text(written)


if __name__ == "__main__":
    main()
