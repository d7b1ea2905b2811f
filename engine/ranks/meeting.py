"""The meeting of the ranks of one model, by a store in rank 0's file (`board.py`).

They connect over gloo on a CPU, over NCCL between GPUs (comm.py), and where the GPUs can, through
each other's memory (peer_ranks.py).
"""

from datetime import timedelta

import torch
import torch.distributed as dist

from engine.errors import WorkerError
from engine.layers.context import Comm
from engine.ranks.comm import GlooRanks, NcclRanks
from engine.ranks.rank import Rank

_HERE = "here"


def join_ranks(
    rank: Rank,
    board: str,
    incarnation: str,
    device: torch.device,
    *,
    start_s: float,
    timeout_s: float,
    uses_peer_memory: bool = True,
    in_rank_order: bool = False,
) -> Comm:
    """Waits until all ranks are here, and connects to them.

    board: the path that rank 0 has from `open_board`. incarnation: of rank 0; ranks of another one
    are never met. start_s: until all processes run, which takes longer than anything between them
    later, which `timeout_s` limits. The rest as of `connect_ranks`. Raises WorkerError.
    """
    store = _meet(rank, board, incarnation, start_s)
    return connect_ranks(
        rank,
        store,
        device,
        timeout_s,
        uses_peer_memory=uses_peer_memory,
        in_rank_order=in_rank_order,
    )


def _meet(rank: Rank, board: str, incarnation: str, timeout_s: float) -> dist.Store:
    """The store between the ranks, once all of them have come there."""
    try:
        store = dist.FileStore(board)  # without a number of ranks it removes nothing at its end
        store.set_timeout(timedelta(seconds=timeout_s))
        own = dist.PrefixStore(incarnation, store)
        own.set(f"{_HERE}-{rank.index}", "1")
        own.wait([f"{_HERE}-{index}" for index in range(rank.size)])
    except RuntimeError as error:
        raise WorkerError(
            f"{rank}: not all ranks were here within {timeout_s:.0f} s: {error}"
        ) from error
    return own


def connect_ranks(
    rank: Rank,
    store: dist.Store,
    device: torch.device,
    timeout_s: float,
    *,
    uses_peer_memory: bool = True,
    in_rank_order: bool = False,
) -> Comm:
    """Meet the other ranks at `store`; returns when all have come and a first sum is right.

    Every rank calls it once with the same size, an equal store and its own device. `timeout_s`
    limits this, and later every operation in host memory. uses_peer_memory: if the GPUs can; for
    measurements. in_rank_order: an element's sum depends on its parts alone, which costs NCCL time.
    Raises WorkerError.
    """
    store.set_timeout(timedelta(seconds=timeout_s))
    host = GlooRanks(rank, dist.PrefixStore("host", store), timeout_s)
    if device.type == "cpu":
        _check_sum(host, device)
        return host
    on_device = dist.PrefixStore("device", store)
    comm = NcclRanks(rank, on_device, host, device, timeout_s, in_rank_order=in_rank_order)
    _check_sum(comm, device)
    if rank.size == 1 or not uses_peer_memory:
        return comm
    from engine.ranks.peer_ranks import open_peer_ranks  # imports Triton

    return open_peer_ranks(comm, device)


def _check_sum(comm: Comm, device: torch.device) -> None:
    """NCCL connects with the first operation; then, too, everybody is known to be here."""
    size = comm.rank.size
    total = comm.all_reduce(torch.full((1,), comm.rank.index + 1, dtype=torch.int32, device=device))
    if isinstance(comm, NcclRanks):
        comm.wait_queued("its first sum")
    if int(total) != size * (size + 1) // 2:
        raise WorkerError(f"{comm.rank}: the first sum over the ranks is {int(total)}")
