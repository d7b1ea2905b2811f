"""The two ends of a model, which the ranks share by token ids: embedding and head.

    embedding   a rank looks up the ids that it holds, zeros for the others; the sum is everyone's
    head        a rank computes its ids' logits; the ranks tell each other the best of them alone,
                or gather all of them, where a row needs more

Every rank's share is padded to the same number of ids; logits of the padding are dropped.
"""

from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812  (the field's own spelling)
from torch import Tensor

from engine.layers.context import Comm
from engine.layers.linear import Linear
from engine.ranks.rank import Rank
from kernels.sampling.choices import GreedyChoice
from kernels.sampling.rows import best_words, greedy, greedy_of_words


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
    """Hidden states to logits, and these to the best tokens."""

    def own_logits(self, hidden: Tensor) -> Tensor:
        """hidden: [S, hidden]; returns [S, ids], of the ids whose rows this rank holds."""
        ...

    def whole_logits(self, own: Tensor, comm: Comm) -> Tensor:
        """own: every rank's `own_logits`; returns [S, vocab], on every rank; may be `own`."""
        ...

    def best_tokens(self, own: Tensor, comm: Comm) -> GreedyChoice:
        """As `greedy` of `whole_logits`, on every rank. Can be captured in a CUDA graph."""
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

    def own_logits(self, hidden: Tensor) -> Tensor:
        return self._linear(hidden)

    def whole_logits(self, own: Tensor, comm: Comm) -> Tensor:
        return own

    def best_tokens(self, own: Tensor, comm: Comm) -> GreedyChoice:
        return greedy(own)


class SharedHead:
    __slots__ = ("_first", "_linear", "_num_own", "_shares")

    def __init__(self, linear: Linear, shares: list[slice], own: int) -> None:
        """linear: hidden -> logits of the padded ids of rank `own`. shares: ids of each rank."""
        self._linear = linear
        self._shares = shares
        self._first = shares[own].start
        self._num_own = shares[own].stop - shares[own].start

    def own_logits(self, hidden: Tensor) -> Tensor:
        return self._linear(hidden)

    def whole_logits(self, own: Tensor, comm: Comm) -> Tensor:
        by_rank = comm.all_gather(own).view(len(self._shares), *own.shape)
        parts = zip(by_rank, self._shares, strict=True)
        return torch.cat([part[:, : ids.stop - ids.start] for part, ids in parts], dim=1)

    def best_tokens(self, own: Tensor, comm: Comm) -> GreedyChoice:
        words = best_words(own[:, : self._num_own], self._first)
        return greedy_of_words(comm.all_gather(words).view(len(self._shares), len(words)))


class CappedHead:
    """A head whose logits x become cap * tanh(x / cap)."""

    __slots__ = ("_cap", "_head", "best_tokens", "whole_logits")

    def __init__(self, head: Head, cap: float) -> None:
        self._head = head
        self._cap = cap
        self.whole_logits = head.whole_logits
        self.best_tokens = head.best_tokens

    def own_logits(self, hidden: Tensor) -> Tensor:
        return self._head.own_logits(hidden).div_(self._cap).tanh_().mul_(self._cap)


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
    return SharedHead(linear, shares, rank.index)
