"""KV from one GPU to another by each channel: the rate, idle and while the receiver decodes.

    python -m load_tests.bench_channels --json channels.json          # two GPUs of one host
    python -m load_tests.bench_channels --device cpu --tokens 64      # gloo only, tries the bench

A handoff is `--tokens` of Qwen3-8B, in blocks of 2.36 MB, digested at both ends, piece by piece
with an acknowledgement each, as between workers. The decode steps are a stand-in (step_load.py).
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from configs.schema import FloorsConfig, HandoffConfig
from engine.errors import HandoffError
from engine.kv.layout import KvLayout
from engine.messages import ChannelKind
from load_tests.channel_ends import End, ReceivingProcess, SendingProcess
from load_tests.step_load import StepLoad
from load_tests.tables import describe_machine, render_rows

QWEN3_8B = KvLayout(num_layers=36, block_size=16, num_kv_heads=8, head_dim=128, dtype="bfloat16")
KINDS: dict[str, tuple[ChannelKind, ...]] = {
    "cuda": ("cuda_ipc", "nccl_pair", "gloo_pair"),
    "cpu": ("gloo_pair",),
}
STORE_FACTOR = 2  # blocks in a store for each block of a handoff


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Decode steps of the receiver, in milliseconds."""

    num_steps: int
    p50_ms: float
    p99_ms: float
    slowest_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one channel did; a field is None when it was not measured."""

    channel: str
    error: str = ""  # why it did not open
    open_s: float | None = None
    neighbours_gb_s: float | None = None  # blocks side by side in both stores
    scattered_gb_s: float | None = None  # blocks anywhere
    loaded_gb_s: float | None = None  # scattered, while the receiver decodes
    alone: Steps | None = None
    loaded: Steps | None = None


# ---- the two processes --------------------------------------------------------------------------


async def receive(end: End, folder: Path, seconds: float) -> None:
    load = StepLoad(end.pieces.device) if end.pieces.is_on_gpu and seconds > 0 else None

    async def start_steps() -> None:
        assert load is not None, "there is no load on a CPU"
        load.start()

    async def stop_steps() -> list[float]:
        assert load is not None, "there is no load on a CPU"
        return await asyncio.to_thread(load.stop)

    calls = {"start_steps": start_steps, "stop_steps": stop_steps}
    await ReceivingProcess(end, folder, calls).serve()


async def send(end: End, folder: Path, args: argparse.Namespace) -> list[Outcome]:
    end.store.tensor.normal_()
    process = SendingProcess(end, folder)
    outcomes = []
    for kind in args.channels or KINDS[args.device]:
        try:
            outcomes.append(await measure(process, kind, args))
        except HandoffError as error:
            outcomes.append(Outcome(channel=kind, error=error.message))
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
    idle = Outcome(
        channel=kind,
        open_s=open_s,
        neighbours_gb_s=rate_gb_s(num_bytes, neighbours_s),
        scattered_gb_s=rate_gb_s(num_bytes, scattered_s),
    )
    if args.seconds <= 0 or args.device == "cpu":
        return idle
    alone, _ = await under_load(process, args.seconds, None)
    loaded, loaded_s = await under_load(process, args.seconds, scattered)
    return Outcome(
        channel=kind,
        open_s=idle.open_s,
        neighbours_gb_s=idle.neighbours_gb_s,
        scattered_gb_s=idle.scattered_gb_s,
        loaded_gb_s=rate_gb_s(num_bytes, loaded_s),
        alone=alone,
        loaded=loaded,
    )


async def under_load(
    process: SendingProcess, seconds: float, blocks: Sequence[list[int]] | None
) -> tuple[Steps, list[float]]:
    """The receiver's steps for so long, and the seconds of each handoff meanwhile."""
    await process.call("start_steps")
    until_s, handoffs_s = time.perf_counter() + seconds, []
    while time.perf_counter() < until_s:
        if blocks is None:
            await asyncio.sleep(seconds / 10)
        else:
            handoffs_s.append(await process.hand_over(*blocks))
    return steps_of(await process.call("stop_steps")), handoffs_s


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
        "opens in",
        "GB/s, neighbours",
        "GB/s, scattered",
        "GB/s, receiver decoding",
        "p50 step",
        "p99 step",
        "slowest step",
    )
    return render_rows([header, *(_cells(outcome) for outcome in outcomes)])


def _cells(outcome: Outcome) -> tuple[str, ...]:
    if outcome.error:
        return (outcome.channel, outcome.error, "", "", "", "", "", "")
    rates = (outcome.neighbours_gb_s, outcome.scattered_gb_s, outcome.loaded_gb_s)
    return (
        outcome.channel,
        f"{outcome.open_s:.2f} s",
        *("" if rate is None else f"{rate:.1f}" for rate in rates),
        *(_against_alone(outcome, name) for name in ("p50_ms", "p99_ms", "slowest_ms")),
    )


def _against_alone(outcome: Outcome, name: str) -> str:
    if outcome.alone is None or outcome.loaded is None:
        return ""
    alone_ms, loaded_ms = asdict(outcome.alone)[name], asdict(outcome.loaded)[name]
    return f"{loaded_ms:.2f} ms, {loaded_ms / alone_ms:.2f}x"


# ---- processes ----------------------------------------------------------------------------------


def main() -> None:
    args = parse()
    if args.worker:
        work(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder))
        outcomes = (Path(folder) / "outcomes.json").read_text()
    about = describe_machine() | {"torch": torch.__version__, "arguments": sys.argv[1:]}
    print(render([_outcome(fields) for fields in json.loads(outcomes)]))
    if args.json:
        args.json.write_text(json.dumps({"about": about, "channels": json.loads(outcomes)}))


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
    parser.add_argument("--rounds", type=int, default=10, help="handoffs, idle")
    parser.add_argument("--seconds", type=float, default=5.0, help="of decode steps; 0 = none")
    parser.add_argument("--piece-mib", type=int, default=256, help="between GPUs")
    parser.add_argument("--max-ctas", type=int, default=16, help="of NCCL")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--worker", choices=("send", "receive"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def run(folder: Path) -> None:
    """Both processes, each with a GPU of its own, until the sender is done."""
    processes = []
    for gpu, worker in enumerate(("receive", "send")):
        command = [sys.executable, "-m", "load_tests.bench_channels", *sys.argv[1:]]
        command += ["--worker", worker, "--folder", str(folder)]
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
    num_blocks = STORE_FACTOR * QWEN3_8B.num_blocks_for(args.tokens)
    end = End(args.folder, QWEN3_8B, num_blocks, config, args.device)
    if args.worker == "receive":
        asyncio.run(receive(end, args.folder, args.seconds))
        return
    outcomes = asyncio.run(send(end, args.folder, args))
    written = json.dumps([asdict(outcome) for outcome in outcomes])
    (args.folder / "outcomes.json").write_text(written)


def _outcome(fields: dict[str, object]) -> Outcome:
    steps = {
        name: None if fields[name] is None else Steps(**fields[name])  # type: ignore[arg-type]
        for name in ("alone", "loaded")
    }
    return Outcome(**(fields | steps))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
