"""KV of a worker of two ranks to another of two: rank 0 moves all heads, or each rank pulls its own

    python -m load_tests.lab.bench_rank_pulls                   # two GPUs of one host, CUDA IPC
    python -m load_tests.lab.bench_rank_pulls --device cpu --blocks 16 --room 16    # tries it

Both workers have a rank on each GPU, and what a rank of the receiver needs is on the other one, so
every byte crosses the link. Blocks of Qwen3-32B in bf16 (4.2 MB whole), side by side in both stores
or anywhere, digested where they arrive. GB/s of whole blocks; what rank 0 asks of the other rank,
and its answer, are left out of both. On a CPU nothing can be mapped: each pulls from its own store.
"""

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from actors.kv_transfer.channels.rank_ipc import MapStore, RankOffer, RanksOffer
from actors.kv_transfer.kv_pieces import KvPieces
from actors.kv_transfer.rank_pieces import RankPieces, RankSources
from actors.kv_transfer.rank_pulls import MapSource, PullBlocks, RankPuller
from engine.host_id import host_id
from engine.kv.device_offer import DeviceOffer, map_tensor, offer_tensor
from engine.kv.layout import KvLayout
from engine.kv.store import KvStore
from engine.layers.context import Comm
from engine.ranks.meeting import connect_ranks
from engine.ranks.rank import Rank
from engine.ranks.shared_stores import part_of, share_stores
from engine.ranks.step_counts import StepCounts
from load_tests.lab.child_processes import (
    add_limit_option,
    die_with_parent,
    end_after,
    exit_on_sigterm,
)
from load_tests.lab.devices import describe_device
from load_tests.tables import render_rows

SIZE = 2
NUM_LAYERS = 64
NUM_HEADS = 8
NUM_ROUNDS = 5
PATIENCE_S = 60.0
NO_OFFER = DeviceOffer(
    num_blocks=0,
    first_element=0,
    handle=b"",
    storage_bytes=0,
    storage_offset_bytes=0,
    counter_handle=b"",
    counter_offset=0,
    event_handle=b"",
    is_event_due=False,
)


class BothWays:
    """One rank of both workers, and how either way moves the receiver's blocks."""

    def __init__(self, comm: Comm, device: torch.device, num_layers: int, room: int) -> None:
        self.comm = comm
        self.whole, half = (
            KvLayout.with_heads(
                num_layers=num_layers,
                block_size=16,
                num_kv_heads=heads,
                head_dim=128,
                dtype="bfloat16",
            )
            for heads in (NUM_HEADS, NUM_HEADS // SIZE)
        )
        sender, receiver = (KvStore(half, num_blocks=room, device=device) for _ in range(2))
        self._senders, receivers = (
            share_stores(comm, store, self.whole) for store in (sender, receiver)
        )
        self._pieces = RankPieces(receivers, StepCounts(), PATIENCE_S) if receivers else None
        given, mapped = NO_OFFER, _own_store(sender)
        if device.type == "cuda":
            given, mapped = offer_tensor(sender.tensor), map_tensor
        other = part_of(Rank(1 - comm.rank.index, SIZE), self.whole)
        told = comm.gather_bytes(msgspec.msgpack.encode(RankOffer(part=other, store=given)))
        theirs = msgspec.msgpack.decode(told[1 - comm.rank.index], type=RankOffer)
        pieces = KvPieces(receiver, num_threads=1)
        self._puller = RankPuller(part_of(comm.rank, self.whole), pieces, mapped)
        offer = RanksOffer(host=host_id(), ranks=[theirs])
        self._puller.do(msgspec.msgpack.encode(MapSource(0, offer, 0.0)))

    def by_rank_0(self, from_ids: list[int], to_ids: list[int]) -> None:
        """Rank 0 copies the heads of both ranks; the other one does nothing."""
        if self._pieces is None:
            return
        parts = [part_of(Rank(1 - rank, SIZE), self.whole) for rank in range(SIZE)]
        sources = [(part, one.store.tensor) for part, one in zip(parts, self._senders, strict=True)]
        no_digests = [0] * len(to_ids)
        asyncio.run(self._pieces.pull(RankSources(sources), from_ids, to_ids, no_digests))

    def by_ranks(self, from_ids: list[int], to_ids: list[int]) -> None:
        self._puller.do(msgspec.msgpack.encode(PullBlocks(0, from_ids, to_ids)))

    def seconds(self, move: Callable[[list[int], list[int]], None], *ids: list[int]) -> float:
        """From when both ranks begin until both have ended."""
        self.comm.gather_bytes(b"")
        started_s = time.perf_counter()
        move(*ids)
        self.comm.gather_bytes(b"")
        return time.perf_counter() - started_s


def _own_store(store: KvStore) -> MapStore:
    return lambda _offer, _like: store.tensor


def measure(rank: Rank, store: Path, args: argparse.Namespace) -> str:
    """The table; both ranks call it."""
    device = torch.device(args.device)
    comm = connect_ranks(rank, dist.FileStore(str(store), rank.size), device, PATIENCE_S)
    ways = BothWays(comm, device, args.layers, args.room)
    table: list[tuple[str, ...]] = [("blocks", "GB", "where", "by rank 0", "by ranks")]
    for number in args.blocks:
        rng = random.Random(number)  # the same on both ranks
        side_by_side = list(range(number))
        anywhere = [rng.sample(range(args.room), number) for _ in range(2)]
        for where, ids in (("side by side", [side_by_side] * 2), ("anywhere", anywhere)):
            size_gb = number * ways.whole.block_bytes / 1e9
            rates = []
            for move in (ways.by_rank_0, ways.by_ranks):
                taken_s = [ways.seconds(move, *ids) for _ in range(NUM_ROUNDS + 1)][1:]
                rates.append(f"{size_gb / statistics.median(taken_s):.1f} GB/s")
            table.append((str(number), f"{size_gb:.2f}", where, *rates))
    comm.close()
    said = "\n".join(f"{key}: {value}" for key, value in describe_device(device).items())
    return f"{render_rows(table)}\n{said}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int, default=NUM_LAYERS)
    parser.add_argument("--room", type=int, default=1024, help="blocks of a store")
    parser.add_argument("--blocks", type=int, nargs="*", default=[8, 64, 256, 512])
    add_limit_option(parser)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.store is not None:
        die_with_parent()
        measure(Rank(args.rank, SIZE), args.store, args)
        return
    exit_on_sigterm()
    end_after(args.limit_s)
    with tempfile.TemporaryDirectory() as scratch:
        store = Path(scratch) / "store"
        asked = ["--rank", "1", "--store", str(store)]
        command = [sys.executable, "-m", "load_tests.lab.bench_rank_pulls", *sys.argv[1:], *asked]
        sees: list[str] = []
        if args.device == "cuda":
            uuid = torch.cuda.get_device_properties(1).uuid
            sees = ["env", f"CUDA_VISIBLE_DEVICES=GPU-{uuid}"]
        other = subprocess.Popen([*sees, *command])
        try:
            print(measure(Rank(0, SIZE), store, args))
            other.wait(PATIENCE_S)
        finally:
            other.kill()
            other.wait()


if __name__ == "__main__":
    main()
