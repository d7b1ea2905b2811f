"""Tokens shared out to ranks between one attention and the next, and sent to whole experts.

    all tokens --- scatter_rows (sum) ---> own rows --- norm, router --- dispatch --->
    rows for this rank's experts --- experts --- combine ---> own rows --- gather_rows ---> all

A rank's own rows are its share of a step's tokens, padded to the number that rank 0 has. A row goes
once to each rank that holds any of its experts, and comes back as that rank's part of the weighted
sum. How many rows travel is known only once the router has chosen, so the host waits for it once a
layer: `dispatch` cannot be captured in a graph.

Instead, every row may go to every rank (`gather_tokens`), and a reduce-scatter adds the parts. Of
few ranks nearly every row goes everywhere anyway. All sizes are known, so that can be captured.

A dense layer has no router: all rows are gathered for its feed-forward part, whose sum is
scattered. What a row is computed from, and in which order, is as without shares.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  (the field's own spelling)
from torch import Tensor

from engine.layers.context import Comm
from kernels.moe.routes import Routes


def own_rows(x: Tensor, comm: Comm, fill: int = 0) -> Tensor:
    """x: [T, ...] of all tokens; returns [P, ...], this rank's, `fill` where there is no token."""
    num_own, share = comm.rank.padded_length(len(x)), comm.rank.padded_share(len(x))
    own = x[share]
    if len(own) == num_own:
        return own.contiguous()
    return torch.cat((own, own.new_full((num_own - len(own), *x.shape[1:]), fill)))


def spread_rows(own: Tensor, num_tokens: int, comm: Comm) -> Tensor:
    """own: [P, ...]; returns [T, ...], zeros at the tokens of other ranks."""
    whole = own.new_zeros((comm.rank.size * len(own), *own.shape[1:]))
    start = comm.rank.index * len(own)
    whole[start : start + len(own)] = own
    return whole[:num_tokens]


def gather_rows(own: Tensor, num_tokens: int, comm: Comm) -> Tensor:
    """own: [P, ...]; returns [T, ...], every rank's."""
    return comm.all_gather(own)[:num_tokens]


def scatter_rows(x: Tensor, comm: Comm) -> Tensor:
    """x: [T, ...] of all tokens; returns [P, ...]: this rank's rows of the sum over the ranks."""
    num_padded = comm.rank.size * comm.rank.padded_length(len(x)) - len(x)
    if num_padded:  # even a pad of nothing copies `x`
        x = F.pad(x, (0, 0, 0, num_padded))
    return comm.reduce_scatter(x)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dispatched:
    """Rows that came for this rank's experts, and what is needed to send their outputs back."""

    # [R, hidden]
    x: Tensor
    routes: Routes  # to the experts held here, -1 = to another rank's
    # [S]  the own rows that were sent, by rank
    rows: Tensor
    sent: list[int]  # own rows for each rank
    received: list[int]
    num_own: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gathered:
    """The rows of all ranks, [n P, hidden], padding included."""

    x: Tensor
    routes: Routes  # to the experts of all ranks


def gather_tokens(x: Tensor, routes: Routes, comm: Comm) -> Gathered:
    """x: [P, hidden], routes: of these own rows to all ranks' experts."""
    # Both have 4 bytes: they travel together.
    told = torch.cat((routes.ids, routes.weights.view(torch.int32)), dim=1)
    ids, weights = (part.contiguous() for part in comm.all_gather(told).chunk(2, dim=1))
    return Gathered(
        x=comm.all_gather(x), routes=Routes(ids=ids, weights=weights.view(torch.float32))
    )


def dispatch(x: Tensor, routes: Routes, num_held: int, comm: Comm) -> Dispatched:
    """x: [P, hidden], routes: of these own rows to all ranks' experts; num_held: on each rank."""
    holders = torch.where(routes.ids >= 0, routes.ids // num_held, -1)
    ranks = torch.arange(comm.rank.size, device=x.device)
    goes_to = (holders[None] == ranks[:, None, None]).any(dim=2)  # [ranks, P]
    # One wait: the numbers of rows for all ranks, and from them.
    counts = goes_to.sum(dim=1)
    sent, received = torch.stack((counts, comm.all_to_all(counts))).tolist()
    to, rows = goes_to.nonzero(as_tuple=True)  # by rank, then by row
    held = routes.ids[rows] - to[:, None] * num_held
    held = torch.where(holders[rows] == to[:, None], held, -1).int()
    # Both have 4 bytes: they travel together.
    told = torch.cat((held, routes.weights[rows].view(torch.int32)), dim=1)
    told = comm.exchange_rows(told, sent, received)
    ids, weights = (part.contiguous() for part in told.chunk(2, dim=1))
    return Dispatched(
        x=comm.exchange_rows(x[rows], sent, received),
        routes=Routes(ids=ids, weights=weights.view(torch.float32)),
        rows=rows,
        sent=sent,
        received=received,
        num_own=len(x),
    )


def send_back(outputs: Tensor, dispatched: Dispatched, comm: Comm) -> Tensor:
    """outputs: [R, hidden] of what came; returns [S, hidden], of the rows that were sent."""
    return comm.exchange_rows(outputs, dispatched.received, dispatched.sent)


def add_parts(parts: Tensor, dispatched: Dispatched) -> Tensor:
    """fp32 [P, hidden]: the parts of every own row's sum, added in the order of the ranks."""
    total = torch.zeros(
        (dispatched.num_own, parts.shape[1]), dtype=torch.float32, device=parts.device
    )
    by_rank = (torch.split(tensor, dispatched.sent) for tensor in (dispatched.rows, parts))
    for rows, part in zip(*by_rank, strict=True):
        total.index_add_(0, rows, part.float())  # a rank has a row once
    return total
