"""What a forward pass needs besides weights, passed along as an argument.

No module keeps state of a step, so two contexts may be alive at once.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from kernels.attention.protocol import AttentionBackend


class Comm(Protocol):
    """Communication between the ranks of one model, at the ends of a layer's parts."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of `x` over the ranks."""
        ...


class SingleRank:
    """One rank holds the whole model: nothing to exchange."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """One step's positions, KV store and attention metadata."""

    rotary: Any  # what the model's `rotary.angles` returned for this step
    # [T] int32  where each new token's K and V go, block * block_size + offset; -1 = nowhere
    slots: Tensor
    # [blocks, layers, 2, block_size, kv_heads, head_dim]
    kv_store: Tensor
    attention: AttentionBackend
    attention_metadata: Any  # what `attention.plan` returned for this step
    comm: Comm
    # The only tokens that go on behind the last layer's K and V; None = the caller chooses later.
    last: "LastTokens | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LastTokens:
    """Each row's last token in this step, as a step of its own that writes no K and V."""

    # [R] integer  places among the step's tokens
    indices: Tensor
    ctx: ForwardContext
