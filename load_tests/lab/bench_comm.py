"""Sums over the ranks of one host: ours through peer memory beside NCCL's, alone and with the norm

    python -m load_tests.lab.bench_comm [--ranks 2] [--widths 5120 8192] [--rows 1 16 64 ...]
    python -m load_tests.lab.bench_comm --columns scatter "NCCL scatter" gather "NCCL's"

Microseconds of an operation in a CUDA graph of many, the slowest rank's. `fused` is sum, residual
and norm in one kernel, so is `stream`, in pieces; `+ norm` the sum and the norm after it; `gather`
of as much from each rank; `scatter` leaves each rank its rows of a sum. `in shares`: scatter, norm
of a rank's rows, gather of these; `stream of a share`: the first two in one kernel, in pieces. `of
fewer`: half as many blocks. What `kernels.comm.limits` holds is read from here. Processes see one
GPU each.
"""

import argparse
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from engine.layers.context import Comm
from engine.ranks.meeting import connect_ranks
from engine.ranks.peer_ranks import PeerRanks
from engine.ranks.rank import Rank
from kernels.comm.gather_stream import gather_stream
from kernels.comm.packets import fits_packets, sum_by_packets, sum_by_packets_add_norm
from kernels.comm.share_stream import share_stream_add_norm
from kernels.comm.shares import gather_shares, scatter_sum
from kernels.comm.stream import stream_add_norm
from kernels.comm.sums import needed_bytes, sum_add_norm, sum_over_ranks
from kernels.rms_norm import rms_norm_add
from load_tests.lab.child_processes import (
    add_limit_option,
    die_with_parent,
    end_after,
    exit_on_sigterm,
)
from load_tests.tables import render_rows

logger = logging.getLogger(__name__)

ROWS = (1, 16, 64, 256, 1024, 2048, 16384)
WIDTHS = (5120, 8192)
NUM_IN_GRAPH = 20
NUM_REPLAYS = 10
PATIENCE_S = 60.0
EPS = 1e-6
COLUMNS = (
    "packets, fused",
    "one shot, fused",
    "one shot of fewer",
    "two shots, fused",
    "two shots of fewer",
    "stream",
    "NCCL + norm",
    "packets",
    "one shot",
    "two shots",
    "NCCL",
    "gather",
    "NCCL's",
    "scatter",
    "NCCL scatter",
    "norm",
    "in shares",
    "NCCL in shares",
    "NCCL gather of shares",
    "norm of a share",
    "stream of a share",
    "stream in shares",
    "gather stream of shares",
    "two streams in shares",
)


def operations(ranks: PeerRanks, num_rows: int, width: int) -> dict[str, Callable[[], object]]:
    """By names in COLUMNS; those for which there is no room are left out."""
    x, residual, weight = (
        torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        for shape in ((num_rows, width), (num_rows, width), (width,))
    )
    memory, nccl, size = ranks.memory, ranks.others, ranks.rank.size
    fewer = replace(memory, max_blocks=memory.max_blocks // 2)
    rows = x, residual, weight, EPS

    def then_norm() -> None:
        rms_norm_add(nccl.all_reduce(x), residual, weight, EPS)

    found: dict[str, Callable[[], object]] = {
        "NCCL + norm": then_norm,
        "NCCL": partial(nccl.all_reduce, x),
        "norm": partial(rms_norm_add, *rows),
        "stream": partial(stream_add_norm, *rows, memory),
    }
    if fits_packets(x, size):
        found["packets"] = partial(sum_by_packets, x, memory)
        found["packets, fused"] = partial(sum_by_packets_add_norm, *rows, memory)
    if needed_bytes(x, size, two_shots=True, has_norm=True) <= memory.slot_bytes:
        found["one shot"] = partial(sum_over_ranks, x, memory)
        found["one shot, fused"] = partial(sum_add_norm, *rows, memory)
        found["one shot of fewer"] = partial(sum_add_norm, *rows, fewer)
        found["two shots"] = partial(sum_over_ranks, x, memory, two_shots=True)
        found["two shots, fused"] = partial(sum_add_norm, *rows, memory, two_shots=True)
        found["two shots of fewer"] = partial(sum_add_norm, *rows, fewer, two_shots=True)
        found["gather"] = partial(gather_shares, x, memory)
        found["NCCL's"] = partial(nccl.all_gather, x)
    if num_rows % size == 0:
        share, own = x[: num_rows // size], residual[: num_rows // size]

        def in_shares() -> None:
            normed, _ = rms_norm_add(scatter_sum(x, memory), own, weight, EPS)
            gather_shares(normed, memory)

        def nccl_in_shares() -> None:
            normed, _ = rms_norm_add(nccl.reduce_scatter(x), own, weight, EPS)
            nccl.all_gather(normed)

        def stream_in_shares() -> None:
            nccl.all_gather(share_stream_add_norm(x, own, weight, EPS, memory)[0])

        def two_streams_in_shares() -> None:
            gather_stream(share_stream_add_norm(x, own, weight, EPS, memory)[0], memory)

        found["gather stream of shares"] = partial(gather_stream, share, memory)
        found["two streams in shares"] = two_streams_in_shares
        found["stream of a share"] = partial(share_stream_add_norm, x, own, weight, EPS, memory)
        found["stream in shares"] = stream_in_shares
        found["NCCL scatter"] = partial(nccl.reduce_scatter, x)
        found["NCCL in shares"] = nccl_in_shares
        found["NCCL gather of shares"] = partial(nccl.all_gather, share)
        found["norm of a share"] = partial(rms_norm_add, share, own, weight, EPS)
        if x.nbytes <= memory.slot_bytes:
            found["scatter"] = partial(scatter_sum, x, memory)
            found["in shares"] = in_shares
    return found


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
    rows: list[tuple[str, ...]] = [("rows", "width", "MiB", *args.columns)]
    for width in args.widths:
        for num_rows in args.rows:
            ways = operations(comm, num_rows, width)
            asked = [ways.get(way) for way in args.columns]
            times = ["" if run is None else f"{time_us(comm, run):.2f}" for run in asked]
            if rank.index == 0:  # at once: a run may be cut short
                logger.info("%d x %d: %s", num_rows, width, " | ".join(times))
            rows.append((str(num_rows), str(width), f"{num_rows * width / 2**19:.2f}", *times))
    name = torch.cuda.get_device_name(device)
    comm.close()
    return f"{rank.size} x {name}, torch {torch.__version__}, us\n\n{render_rows(rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, choices=(2, 4, 8), default=2)
    parser.add_argument("--widths", type=int, nargs="*", default=WIDTHS)
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--columns", nargs="*", choices=COLUMNS, default=COLUMNS, metavar="NAME")
    add_limit_option(parser)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if args.store is not None:
        die_with_parent()
        measure(Rank(args.rank, args.ranks), args.store, args)
        return
    exit_on_sigterm()
    end_after(args.limit_s)
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
