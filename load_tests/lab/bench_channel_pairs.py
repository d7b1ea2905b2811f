"""KV over all pairs of prefill and decode workers at the same time: the rate of each, and the sum.

    python -m load_tests.lab.bench_channel_pairs --prefill 2 --decode 2 --json pairs.json  # 4 GPUs
    python -m load_tests.lab.bench_channel_pairs --prefill 3 --decode 1
    python -m load_tests.lab.bench_channel_pairs --device cpu --tokens 64    # gloo, tries the bench

A process for each worker, which sees one GPU; pairs of one process share its store and what it
stages, as in a worker. A handoff is `--tokens` of Qwen3-8B in blocks anywhere, digested at both
ends. Each pair hands over again and again for `--seconds`, first alone, then beside all others.
Each figure is printed at once. Needs no Ray and no model.
"""

import argparse
import asyncio
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from configs.schema import FloorsConfig, HandoffConfig
from engine.errors import HandoffError
from engine.messages import ChannelKind
from load_tests.lab.bench_channels import KINDS, QWEN3_8B, check_arrived, rate_gb_s
from load_tests.lab.child_processes import bound_to_parent, exit_on_sigterm
from load_tests.lab.server_process import ROOT
from load_tests.tables import describe_machine, render_rows
from load_tests.testbed.channel_ends import End, FileBoard, ReceivingProcess, SendingProcess

MEET_S = 90.0  # for the other workers to start, and for a channel to open
POLL_S = 0.001  # between looks of a sender at whether the others have come
LOOK_S = 0.05  # between looks at what the workers have done
EPOCHS = 1000  # of a pair, so that those of one process differ
NUM_THREADS = 64  # of a receiver; each pair keeps two waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class PairFigure:
    """What one pair moved, alone or beside all others."""

    channel: ChannelKind
    prefill: int
    decode: int
    is_alone: bool
    num_bytes: int  # of a handoff
    num_handoffs: int
    p50_ms: float  # of a handoff
    gb_s: float


class Meeting:
    """Points that all senders pass at the same time."""

    def __init__(self, folder: Path, num_senders: int) -> None:
        self._board = FileBoard(folder)
        self._num_senders = num_senders
        self._num_met = 0

    async def wait(self) -> None:
        """Raises HandoffError if the others do not come."""
        key = f"meeting {self._num_met}"
        self._num_met += 1
        until_s = time.monotonic() + MEET_S
        self._board.add(key, 1)
        while self._board.add(key, 0) < self._num_senders:
            if time.monotonic() > until_s:
                raise HandoffError(f"not all {self._num_senders} senders came within {MEET_S:g} s")
            await asyncio.sleep(POLL_S)


@dataclass(slots=True, kw_only=True)
class Pair:
    """One sender's way to one receiver, and the blocks that it moves."""

    prefill: int
    decode: int
    process: SendingProcess
    from_ids: list[int]
    to_ids: list[int]

    async def hand_over_for(
        self, kind: ChannelKind, seconds: float, *, is_alone: bool
    ) -> PairFigure:
        """The same handoff again and again. Raises HandoffError when one fails."""
        handoffs_s: list[float] = []
        until_s = time.perf_counter() + seconds
        while time.perf_counter() < until_s:
            handoffs_s.append(await self.process.hand_over(self.from_ids, self.to_ids))
        num_bytes = len(self.from_ids) * self.process.end.store.layout.block_bytes
        return PairFigure(
            channel=kind,
            prefill=self.prefill,
            decode=self.decode,
            is_alone=is_alone,
            num_bytes=num_bytes,
            num_handoffs=len(handoffs_s),
            p50_ms=1e3 * statistics.median(handoffs_s),
            gb_s=rate_gb_s(num_bytes, handoffs_s),
        )


# ---- the workers --------------------------------------------------------------------------------


async def receive(end: End, args: argparse.Namespace, decode: int) -> None:
    """Takes what all senders hand over, without end."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(NUM_THREADS))
    folders = [pair_folder(args.folder, prefill, decode) for prefill in range(args.prefill)]
    await asyncio.gather(*(ReceivingProcess(end, folder).serve() for folder in folders))


async def send(end: End, args: argparse.Namespace, prefill: int) -> None:
    """Writes the figures of one sender's pairs. Raises HandoffError when a channel fails."""
    end.fill()
    meeting = Meeting(args.folder, args.prefill)
    pairs = [build_pair(end, args, prefill, decode) for decode in range(args.decode)]
    for kind in args.channels or KINDS[args.device]:
        for pair in pairs:
            await pair.process.open(kind)
        figures = await measure(pairs, kind, meeting, args)
        lines = "".join(json.dumps(asdict(figure)) + "\n" for figure in figures)
        with figures_file(args.folder).open("a") as file:
            file.write(lines)
    for pair in pairs:
        await pair.process.close_channel()
        pair.process.close()


async def measure(
    pairs: Sequence[Pair], kind: ChannelKind, meeting: Meeting, args: argparse.Namespace
) -> list[PairFigure]:
    """Each pair of all senders in turn, then all at once."""
    figures = []
    for prefill in range(args.prefill):
        for decode in range(args.decode):
            await meeting.wait()
            if prefill == pairs[decode].prefill:
                alone = await pairs[decode].hand_over_for(kind, args.seconds, is_alone=True)
                figures.append(alone)
    await meeting.wait()
    figures += await asyncio.gather(
        *(pair.hand_over_for(kind, args.seconds, is_alone=False) for pair in pairs)
    )
    await meeting.wait()
    for pair in pairs:
        await check_arrived(pair.process, pair.from_ids, pair.to_ids)
    return figures


def build_pair(end: End, args: argparse.Namespace, prefill: int, decode: int) -> Pair:
    """Its blocks lie anywhere in both stores, apart from those of other pairs."""
    num_blocks = QWEN3_8B.num_blocks_for(args.tokens)
    from_ids, to_ids = (
        random.Random(f"{worker}").sample(range(end.store.num_blocks), end.store.num_blocks)
        for worker in (("prefill", prefill), ("decode", decode))
    )
    folder = pair_folder(args.folder, prefill, decode)
    return Pair(
        prefill=prefill,
        decode=decode,
        process=SendingProcess(end, folder, first_epoch=EPOCHS * decode),
        from_ids=from_ids[decode * num_blocks :][:num_blocks],
        to_ids=to_ids[prefill * num_blocks :][:num_blocks],
    )


def figures_file(folder: Path) -> Path:
    """A figure a line, of all senders: their standard output has lines of libraries, too."""
    return folder / "figures.jsonl"


def pair_folder(folder: Path, prefill: int, decode: int) -> Path:
    return folder / f"{prefill}-{decode}"


def work(args: argparse.Namespace) -> None:
    """One worker, in its own process."""
    role, _, number = args.worker.partition(":")
    config = HandoffConfig(device_piece_bytes=args.piece_mib * 2**20, floors_gb_s=FloorsConfig())
    num_blocks = max(args.prefill, args.decode) * QWEN3_8B.num_blocks_for(args.tokens)
    end = End(args.folder, QWEN3_8B, num_blocks, config, args.device)
    if role == "decode":
        asyncio.run(receive(end, args, int(number)))
        return
    asyncio.run(send(end, args, int(number)))


# ---- the whole ----------------------------------------------------------------------------------


def run(folder: Path, args: argparse.Namespace) -> list[PairFigure]:
    """Every worker, each with a GPU of its own, until all senders are done.

    Raises SystemExit when a worker fails.
    """
    for prefill in range(args.prefill):
        for decode in range(args.decode):
            pair_folder(folder, prefill, decode).mkdir()
    names = [f"prefill:{i}" for i in range(args.prefill)]
    names += [f"decode:{i}" for i in range(args.decode)]
    workers = {name: _start(name, gpu, folder) for gpu, name in enumerate(names)}
    try:
        lines = lines_until_over(workers, figures_file(folder), time.monotonic() + args.limit_s)
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()
    return [PairFigure(**json.loads(line)) for line in lines]


def _start(name: str, gpu: int, folder: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "load_tests.lab.bench_channel_pairs", *sys.argv[1:]]
    command += ["--worker", name, "--folder", str(folder)]
    command = ["env", f"CUDA_VISIBLE_DEVICES={gpu}", *command]
    return subprocess.Popen(bound_to_parent(command, signal.SIGKILL), cwd=ROOT)


def lines_until_over(
    workers: Mapping[str, "subprocess.Popen[bytes]"], file: Path, until_s: float
) -> list[str]:
    """Every line of figures until all senders have ended, each printed as soon as it is there.

    Raises SystemExit as soon as a worker has failed, or when the time is over.
    """
    file.touch()
    lines: list[str] = []
    while True:
        ended = {name: worker.poll() for name, worker in workers.items()}
        new = file.read_text().splitlines()[len(lines) :]
        for line in new:
            print("RESULT", line, flush=True)
        lines += new
        if all(code == 0 for name, code in ended.items() if name.startswith("prefill")):
            return lines
        if failed := [f"{name} with {code}" for name, code in ended.items() if code]:
            raise SystemExit(f"failed: {', '.join(failed)}")
        if time.monotonic() > until_s:
            raise SystemExit("the time was over before the senders were done: see --limit-s")
        time.sleep(LOOK_S)


def render(figures: Sequence[PairFigure]) -> str:
    """A row a pair, and a sum a channel."""
    rows = [["channel", "pair", "ms alone", "GB/s", "ms, all at once", "GB/s"]]
    for kind in dict.fromkeys(figure.channel for figure in figures):
        beside = [f for f in figures if f.channel == kind and not f.is_alone]
        for one in sorted(beside, key=lambda f: (f.prefill, f.decode)):
            [alone] = [
                f
                for f in figures
                if f.channel == kind
                and f.is_alone
                and (f.prefill, f.decode) == (one.prefill, one.decode)
            ]
            numbers = (alone.p50_ms, alone.gb_s, one.p50_ms, one.gb_s)
            rows.append([kind, f"P{one.prefill} to D{one.decode}", *(f"{n:.2f}" for n in numbers)])
        rows.append([kind, "sum", "", "", "", f"{sum(one.gb_s for one in beside):.2f}"])
    return render_rows(rows)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prefill", type=int, default=2, help="workers that send")
    parser.add_argument("--decode", type=int, default=2, help="workers that receive")
    parser.add_argument("--device", choices=sorted(KINDS), default="cuda")
    parser.add_argument("--channels", nargs="*", choices=KINDS["cuda"], help="default: all")
    parser.add_argument("--tokens", type=int, default=8192, help="of one handoff")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--piece-mib", type=int, default=512, help="by nccl_pair")
    parser.add_argument("--limit-s", type=float, default=120.0, help="for all of it")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    args = build_parser().parse_args()
    if args.worker:
        work(args)
        return
    exit_on_sigterm()
    with tempfile.TemporaryDirectory() as folder:
        figures = run(Path(folder), args)
    print(render(figures))
    if args.json:
        about = describe_machine() | {"torch": torch.__version__, "arguments": sys.argv[1:]}
        written = {"about": about, "pairs": [asdict(figure) for figure in figures]}
        args.json.write_text(json.dumps(written))


if __name__ == "__main__":
    main()
