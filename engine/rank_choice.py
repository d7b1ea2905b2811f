"""Which rank of a worker gets a request, where each rank has requests of its own (DP attention)."""

from collections.abc import Sequence
from dataclasses import dataclass

_LEAD_SHARE = 4  # a rank may have a quarter more requests than the one with the fewest, and one


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """What a new request would find on one rank."""

    num_requests: int  # that wait or run
    is_full: bool  # and takes none
    # To be computed before its first one; of a request whose KV comes from elsewhere, to be moved.
    num_tokens_before: int
    has_room: bool  # for its blocks, now
    num_available_blocks: int


def choose_rank(loads: Sequence[RankLoad]) -> int:
    """Where fewest tokens come first, among ranks that take it and have few requests.

    A step waits for the rank with the most rows, so a shared prefix may not draw all to one rank.
    """
    ranks = range(len(loads))
    taking = [rank for rank in ranks if not loads[rank].is_full] or ranks
    fewest = min(loads[rank].num_requests for rank in taking)
    limit = fewest + 1 + fewest // _LEAD_SHARE

    def cost(rank: int) -> tuple[int, ...]:
        load = loads[rank]
        return (
            int(not load.has_room),
            load.num_tokens_before,
            load.num_requests,
            -load.num_available_blocks,
        )

    return min((rank for rank in taking if loads[rank].num_requests <= limit), key=cost)
