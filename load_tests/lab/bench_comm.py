"""Sums over the ranks of one host: ours through peer memory beside NCCL's, alone and with the norm

    python -m load_tests.lab.bench_comm [--ranks 2] [--widths 5120 8192] [--rows 1 16 64 ...]

Microseconds of an operation in a CUDA graph of many, the slowest rank's. `fused` is sum, residual
and norm in one kernel; `+ norm` the sum and the norm after it. What `kernels.comm.limits` holds is
read from here: the largest tensor at which ours is faster. Processes see one GPU each.
"""

import argparse
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from engine.layers.context import Comm
from engine.ranks.comm import connect_ranks
from engine.ranks.peer_ranks import PeerRanks
from engine.ranks.rank import Rank
from kernels.comm.sums import needed_bytes, sum_add_norm, sum_over_ranks
from kernels.rms_norm import rms_norm_add
from load_tests.tables import render_rows

ROWS = (1, 16, 64, 256, 512, 1024, 2048)
WIDTHS = (5120, 8192)
NUM_IN_GRAPH = 40
NUM_REPLAYS = 10
PATIENCE_S = 60.0
EPS = 1e-6
COLUMNS = (
    "ours: fused",
    "two shots: fused",
    "ours + norm",
    "NCCL + norm",
    "ours",
    "two shots",
    "NCCL",
    "norm",
)


def operations(ranks: PeerRanks, num_rows: int, width: int) -> list[Callable[[], object] | None]:
    """One for each of COLUMNS; None = there is no room for it."""
    x, residual, weight = (
        torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        for shape in ((num_rows, width), (num_rows, width), (width,))
    )
    memory, nccl = ranks.memory, ranks.others

    def then_norm(total: Callable[[Tensor], Tensor]) -> None:
        rms_norm_add(total(x), residual, weight, EPS)

    def fits(two_shots: bool) -> bool:
        needed = needed_bytes(x, ranks.rank.size, two_shots=two_shots, has_norm=True)
        return needed <= memory.slot_bytes

    one, two = (partial(sum_over_ranks, memory=memory, two_shots=two) for two in (False, True))
    fused = [
        partial(sum_add_norm, x, residual, weight, EPS, memory, two_shots=two)
        for two in (False, True)
    ]
    return [
        fused[0] if fits(False) else None,
        fused[1] if fits(True) else None,
        partial(then_norm, one) if fits(False) else None,
        partial(then_norm, nccl.all_reduce),
        partial(one, x) if fits(False) else None,
        partial(two, x) if fits(True) else None,
        partial(nccl.all_reduce, x),
        partial(rms_norm_add, x, residual, weight, EPS),
    ]


def time_us(comm: Comm, run: Callable[[], object]) -> float:
    """Of one operation in a graph of NUM_IN_GRAPH; the slowest rank's."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(NUM_IN_GRAPH):
            run()
    graph.replay()
    comm.gather_bytes(b"")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(NUM_REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    own_us = 1e3 * start.elapsed_time(end) / NUM_REPLAYS / NUM_IN_GRAPH
    told = comm.gather_bytes(msgspec.msgpack.encode(own_us))
    return max(msgspec.msgpack.decode(data, type=float) for data in told)


def measure(rank: Rank, store: Path, args: argparse.Namespace) -> str:
    """The table; every rank calls it. Raises AssertionError where there is no peer memory."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    comm = connect_ranks(rank, dist.FileStore(str(store), rank.size), device, PATIENCE_S)
    assert isinstance(comm, PeerRanks), "these GPUs do not map each other's memory"
    rows: list[tuple[str, ...]] = [("rows", "width", "MiB", *COLUMNS)]
    for width in args.widths:
        for num_rows in args.rows:
            times = [
                "" if run is None else f"{time_us(comm, run):.2f}"
                for run in operations(comm, num_rows, width)
            ]
            rows.append((str(num_rows), str(width), f"{num_rows * width / 2**19:.2f}", *times))
    name = torch.cuda.get_device_name(device)
    comm.close()
    return f"{rank.size} x {name}, torch {torch.__version__}, us\n\n{render_rows(rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, choices=(2, 4, 8), default=2)
    parser.add_argument("--widths", type=int, nargs="*", default=WIDTHS)
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if args.store is not None:
        measure(Rank(args.rank, args.ranks), args.store, args)
        return
    with tempfile.TemporaryDirectory() as scratch:
        store = Path(scratch) / "store"
        command = [sys.executable, "-m", "load_tests.lab.bench_comm", *sys.argv[1:]]
        others = []
        for rank in range(1, args.ranks):
            uuid = torch.cuda.get_device_properties(rank).uuid
            sees = ["env", f"CUDA_VISIBLE_DEVICES=GPU-{uuid}"]
            asked = ["--rank", str(rank), "--store", str(store)]
            others.append(subprocess.Popen([*sees, *command, *asked]))
        try:
            print(measure(Rank(0, args.ranks), store, args))
        finally:
            for process in others:
                process.kill()
                process.wait()


if __name__ == "__main__":
    main()
