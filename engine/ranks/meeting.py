"""Where the ranks of one model find each other: a store on the loopback interface of rank 0.

The ranks of a worker share a machine, so that nobody else has to reach the store. Rank 0 listens
before the others exist and tells them the port; the store lives as long as rank 0 does.
"""

import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from engine.errors import WorkerError
from engine.layers.context import Comm
from engine.ranks.comm import connect_ranks
from engine.ranks.rank import Rank

LOOPBACK = "127.0.0.1"
_HERE = "here"


def join_ranks(
    rank: Rank,
    at: socket.socket | int,
    incarnation: str,
    device: torch.device,
    *,
    start_s: float,
    timeout_s: float,
) -> Comm:
    """Waits until all ranks are here, and connects to them.

    at: what rank 0 listens on, which the store takes over; of the others, its port. incarnation: of
    rank 0; ranks of another one are never met. start_s: until all processes run, which takes longer
    than anything between them later, which `timeout_s` limits. Raises WorkerError.
    """
    store = _meet(rank, at, incarnation, start_s)
    return connect_ranks(rank, store, device, timeout_s)


def _meet(rank: Rank, at: socket.socket | int, incarnation: str, timeout_s: float) -> dist.Store:
    """The store between the ranks, once all of them have come there."""
    is_first = isinstance(at, socket.socket)
    port = at.getsockname()[1] if isinstance(at, socket.socket) else at
    try:
        store = dist.TCPStore(
            LOOPBACK,
            port,
            rank.size,
            is_master=is_first,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=at.detach() if isinstance(at, socket.socket) else None,
        )
        own = dist.PrefixStore(incarnation, store)
        own.set(f"{_HERE}-{rank.index}", "1")
        own.wait([f"{_HERE}-{index}" for index in range(rank.size)])
    except RuntimeError as error:
        raise WorkerError(
            f"rank {rank.index} of {rank.size}: not all ranks were here within {timeout_s:.0f} s:"
            f" {error}"
        ) from error
    return own
