"""Everything that a forward pass needs besides weights, passed as an argument.

No module keeps state of a step, so two contexts may be in use at once.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from engine.ranks.rank import WHOLE_MODEL, Rank
from kernels.kv.scales import KvScales


class FusedSums(Protocol):
    """Sums over the ranks that go on with the residual and the norm after them, in one kernel.

    They equal, bit for bit, the sum and `Ops.rms_norm_add` after it.
    """

    def fits(self, x: Tensor) -> bool:
        """x: [T, n]; whether such a sum may be taken, and is faster. Every rank says the same."""
        ...

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """x: [T, n], this rank's part; returns (rms_norm(s + residual), s + residual) of their
        sum s; may overwrite both.
        """
        ...

    def fits_share(self, x: Tensor) -> bool:
        """As `fits`, of `share_add_norm`."""
        ...

    def share_add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """As `add_norm` of this rank's rows of the sum (`own_rows`); residual: [P, n], these.

        What it returns at rows that are padding means nothing.
        """
        ...


class Unsummed(Protocol):
    """What a token's experts have computed, whose sum may go on with the residual and the norm.

    Both ways give the same bits.
    """

    def sum(self) -> Tensor:
        """[T, hidden]."""
        ...

    def add_norm(self, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """residual: [T, hidden]; returns (rms_norm(s + residual), s + residual) of the sum s; may
        overwrite `residual`.
        """
        ...


class Comm(Protocol):
    """Communication between the ranks of one model, at the ends of a layer's parts.

    T tokens, n ranks; every rank takes part in every call, in the same order. Raises WorkerError
    where a rank died or did not take part in time.
    """

    @property
    def rank(self) -> Rank: ...

    @property
    def fused_sums(self) -> FusedSums | None:
        """None = sums and what follows them are taken apart."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of `x` over the ranks, with the same bits on each of them; may overwrite `x`."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """x: [T, ...]; returns [n T, ...], the ranks' tensors in rank order."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """x: [n T, ...]; returns [T, ...], this rank's part of the sum over the ranks."""
        ...

    def all_to_all(self, x: Tensor) -> Tensor:
        """x: [n T, ...], T lines for each rank; returns [n T, ...], T lines from each rank."""
        ...

    def exchange_rows(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """As `all_to_all` with other numbers of lines for each rank, known on the host.

        x: [sum(sent), ...], sent[r] lines for rank r; returns [sum(received), ...].
        """
        ...

    def gather_bytes(self, data: bytes, timeout_s: float | None = None) -> list[bytes]:
        """The ranks' data in rank order, for what they agree on; goes through host memory.

        timeout_s: instead of the one that every operation has.
        """
        ...

    def close(self) -> None:
        """Hang up; nothing may be called afterwards. The other ranks' operations fail."""
        ...


class SingleRank:
    """One rank holds the whole model: nothing to exchange."""

    rank = WHOLE_MODEL
    fused_sums: FusedSums | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x

    def all_to_all(self, x: Tensor) -> Tensor:
        return x

    def exchange_rows(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        return x

    def gather_bytes(self, data: bytes, timeout_s: float | None = None) -> list[bytes]:
        return [data]

    def close(self) -> None:
        """There is nobody else."""


SINGLE_RANK = SingleRank()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """One step's positions, KV store and attention metadata."""

    rotary: tuple[Any, ...]  # the result of the model's `rotary_at` for this step
    # [T] int32  slot of each new token's K and V, block * block_size + offset; -1 = not stored
    slots: Tensor
    # [blocks, layers, planes, block_size, kv_heads, head_dim]
    kv_store: Tensor
    attention: Any  # AttentionBackend; of a model with latent attention a LatentBackend
    attention_metadata: Any  # the result of `attention.plan` for this step
    comm: Comm
    kv_scales: KvScales | None = None  # of a store of e4m3 numbers
    num_layers_before: int = 0  # of the store, before the model's own; not with latent attention
    # Between attention and attention each rank has its share of the tokens (`own_rows`).
    exchanges: bool = False
    # `RowExchange`: how the rows of ranks with DP attention meet for the experts; None = without.
    rows: Any = None
    # None = the sum over the ranks is apart, so that it may run beside another step's computation.
    fused_sums: FusedSums | None = None
    lane: int = 0  # index among the contexts that may compute at the same time
    # The only tokens computed after the last layer's K and V; None = the caller chooses later.
    last: "LastTokens | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LastTokens:
    """Each row's last token in this step, as a step of its own that writes no K and V."""

    # [R] integer  indices among the step's tokens
    indices: Tensor
    ctx: ForwardContext
