"""The two ends of a model, which the ranks share by token ids: embedding and head.

    embedding   a rank looks up the ids that it holds, zeros for the others; the sum is everyone's
    head        a rank computes its ids' logits; all ranks gather all of them

Every rank's share is padded to the same number of ids; logits of the padding are dropped.
"""

from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812  (the field's own spelling)
from torch import Tensor

from engine.layers.context import Comm
from engine.layers.linear import Linear
from engine.ranks.rank import Rank


class Embedding(Protocol):
    """Token ids to vectors."""

    @property
    def weight(self) -> Tensor:
        """[ids, hidden]  the part that this rank holds."""
        ...

    def __call__(self, ids: Tensor, comm: Comm) -> Tensor:
        """ids: [T] integer; returns [T, hidden]."""
        ...


class Head(Protocol):
    """Hidden states to logits."""

    def __call__(self, hidden: Tensor, comm: Comm) -> Tensor:
        """hidden: [S, hidden]; returns [S, vocab], on every rank."""
        ...


class WholeEmbedding:
    __slots__ = ("weight",)

    def __init__(self, weight: Tensor) -> None:
        """weight: [vocab, hidden]."""
        self.weight = weight

    def __call__(self, ids: Tensor, comm: Comm) -> Tensor:
        return F.embedding(ids, self.weight)


class ScaledEmbedding:
    """An embedding whose vectors are multiplied by a number, rounded to their dtype."""

    __slots__ = ("_embedding", "_scale")

    def __init__(self, embedding: Embedding, scale: float) -> None:
        self._embedding = embedding
        self._scale = float(torch.tensor(scale, dtype=embedding.weight.dtype))

    @property
    def weight(self) -> Tensor:
        return self._embedding.weight

    def __call__(self, ids: Tensor, comm: Comm) -> Tensor:
        return self._embedding(ids, comm).mul_(self._scale)


class SharedEmbedding:
    __slots__ = ("_first", "weight")

    def __init__(self, weight: Tensor, first: int) -> None:
        """weight: [padded ids, hidden], of the ids from `first` on."""
        self.weight = weight
        self._first = first

    def __call__(self, ids: Tensor, comm: Comm) -> Tensor:
        own = ids - self._first
        is_elsewhere = (own < 0) | (own >= len(self.weight))
        vectors = F.embedding(own.masked_fill_(is_elsewhere, 0), self.weight)
        return comm.all_reduce(vectors.masked_fill_(is_elsewhere.unsqueeze(1), 0))


class WholeHead:
    __slots__ = ("_linear",)

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def __call__(self, hidden: Tensor, comm: Comm) -> Tensor:
        return self._linear(hidden)


class SharedHead:
    __slots__ = ("_linear", "_num_ids")

    def __init__(self, linear: Linear, num_ids: list[int]) -> None:
        """linear: hidden -> logits of this rank's padded ids. num_ids: of each rank's real ones."""
        self._linear = linear
        self._num_ids = num_ids

    def __call__(self, hidden: Tensor, comm: Comm) -> Tensor:
        own = self._linear(hidden)
        by_rank = comm.all_gather(own).view(len(self._num_ids), *own.shape)
        parts = zip(by_rank, self._num_ids, strict=True)
        return torch.cat([part[:, :num_ids] for part, num_ids in parts], dim=1)


class CappedHead:
    """A head whose logits x become cap * tanh(x / cap)."""

    __slots__ = ("_cap", "_head")

    def __init__(self, head: Head, cap: float) -> None:
        self._head = head
        self._cap = cap

    def __call__(self, hidden: Tensor, comm: Comm) -> Tensor:
        return self._head(hidden, comm).div_(self._cap).tanh_().mul_(self._cap)


def build_embedding(weight: Tensor, vocab_size: int, rank: Rank) -> Embedding:
    """weight: [padded ids, hidden], the rank's share."""
    if rank.size == 1:
        return WholeEmbedding(weight)
    return SharedEmbedding(weight, rank.padded_share(vocab_size).start)


def build_head(linear: Linear, vocab_size: int, rank: Rank) -> Head:
    """linear: hidden -> logits of the rank's share, padded."""
    if rank.size == 1:
        return WholeHead(linear)
    shares = [Rank(index, rank.size).padded_share(vocab_size) for index in range(rank.size)]
    return SharedHead(linear, [share.stop - share.start for share in shares])
