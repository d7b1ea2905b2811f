"""The meeting of the ranks of one model, by a store in rank 0's file (`board.py`)."""

from datetime import timedelta

import torch
import torch.distributed as dist

from engine.errors import WorkerError
from engine.layers.context import Comm
from engine.ranks.comm import connect_ranks
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
            f"rank {rank.index} of {rank.size}: not all ranks were here within {timeout_s:.0f} s:"
            f" {error}"
        ) from error
    return own
