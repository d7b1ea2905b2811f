"""DP attention: the rows of all ranks meet for the experts, and each rank gets its own back.

    own rows --- gather ---> rows of all ranks --- experts held here --- scatter (sum) ---> own rows

MAX_LEN  every rank's rows are padded to one number: all-gather, reduce-scatter. In graphs always.
SUM_LEN  no rank's rows are padded: each goes to all ranks, and its parts come back.

A row's sum over the ranks may be in their order (`is_ordered`), in fp32: then its bits depend
neither on the rank that has it nor on how many rows there are. NCCL's own sums promise neither.

How many rows each rank has follows from the step's plan, which all ranks have: none waits for
another's number, and all choose the same way. The buffers are those of one layer of one step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as F  # noqa: N812  (the field's own spelling)
from torch import Tensor

from engine.layers.context import Comm
from engine.layers.token_exchange import Gathered
from kernels.moe.routes import Routes


class Padding(Enum):
    MAX_LEN = "every rank's rows padded to the most of any"
    SUM_LEN = "as many rows as each rank has"


def choose_padding(num_rows: Sequence[int], *, has_prompts: bool) -> Padding:
    """num_rows: of each rank, without padding. has_prompts: some rank computes a prompt.

    Prompts differ much in length. Of decode steps padding is sent unless it is more than the rows.
    """
    if has_prompts or 2 * sum(num_rows) < max(num_rows) * len(num_rows):
        return Padding.SUM_LEN
    return Padding.MAX_LEN


@dataclass(frozen=True, slots=True, kw_only=True)
class RowExchange:
    """The exchange of one step; of all ranks alike, whatever else they do in it."""

    comm: Comm
    padding: Padding
    # Of each rank, at least 1 and at least what it has; equal with MAX_LEN.
    num_rows: tuple[int, ...]
    is_ordered: bool = False  # sums; with SUM_LEN they always are

    @classmethod
    def padded(cls, comm: Comm, num_rows: int, *, is_ordered: bool = False) -> "RowExchange":
        """With room for so many rows of each rank."""
        every = (num_rows,) * comm.rank.size
        return cls(comm=comm, padding=Padding.MAX_LEN, num_rows=every, is_ordered=is_ordered)

    @classmethod
    def of_rows(
        cls, comm: Comm, num_rows: Sequence[int], *, has_prompts: bool, is_ordered: bool = False
    ) -> "RowExchange":
        """num_rows: of each rank."""
        if choose_padding(num_rows, has_prompts=has_prompts) is Padding.MAX_LEN:
            return cls.padded(comm, max(num_rows), is_ordered=is_ordered)
        return cls(comm=comm, padding=Padding.SUM_LEN, num_rows=tuple(num_rows))

    def gather(self, x: Tensor, routes: Routes) -> Gathered:
        """x: [T, hidden], routes: of these own rows to all ranks' experts."""
        num_missing = self._num_own - len(x)
        assert num_missing >= 0, f"{len(x)} rows, {self._num_own} were announced"
        ids, weights = routes.ids, routes.weights
        if num_missing > 0:
            x, weights = (F.pad(t, (0, 0, 0, num_missing)) for t in (x, weights))
            ids = F.pad(ids, (0, 0, 0, num_missing), value=-1)
        # Both have 4 bytes: they travel together.
        told = self._to_all(torch.cat((ids, weights.view(torch.int32)), dim=1))
        ids, weights = (part.contiguous() for part in told.chunk(2, dim=1))
        routes = Routes(ids=ids, weights=weights.view(torch.float32))
        return Gathered(x=self._to_all(x), routes=routes)

    def scatter(self, parts: Tensor, num_rows: int) -> Tensor:
        """parts: [R, hidden] of the gathered rows; returns [T, hidden], this rank's first
        `num_rows` rows of the sum over the ranks.
        """
        is_padded, size = self.padding is Padding.MAX_LEN, self.comm.rank.size
        if is_padded and not self.is_ordered:
            return self.comm.reduce_scatter(parts)[:num_rows]
        if is_padded:
            arrived = self.comm.all_to_all(parts)
        else:
            received = [self._num_own] * size
            arrived = self.comm.exchange_rows(parts, list(self.num_rows), received)
        first, *others = arrived.view(size, self._num_own, -1).unbind()
        total = first.float()
        for part in others:  # in the order of the ranks
            total = total + part
        return total[:num_rows].to(parts.dtype)

    @property
    def _num_own(self) -> int:
        return self.num_rows[self.comm.rank.index]

    def _to_all(self, own: Tensor) -> Tensor:
        """own: [P, ...]; returns every rank's rows, in the order of the ranks."""
        if self.padding is Padding.MAX_LEN:
            return self.comm.all_gather(own)
        size = self.comm.rank.size
        sent = own.repeat(size, 1)
        return self.comm.exchange_rows(sent, [len(own)] * size, list(self.num_rows))
