"""What an attention backend is: metadata once per step, then one call per layer.

A backend reads the paged store, block-first `[blocks, layers, 2, block_size, kv_heads, head_dim]`.
It knows neither requests nor models.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What stays the same for all steps of one model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    # One per layer: a query sees itself and window - 1 keys before it; None = all before it.
    layer_windows: tuple[int | None, ...]

    def __post_init__(self) -> None:
        assert self.num_heads % self.num_kv_heads == 0, (
            f"{self.num_heads} query heads over {self.num_kv_heads} KV heads"
        )

    @property
    def num_groups(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        return float(self.head_dim**-0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStep:
    """The rows of one step, on the host.

    The first `num_single_rows` rows have one new token each, ordered by growing history; the
    others have two or more. The step's tokens lie in row order.
    """

    num_single_rows: int
    # [R]
    num_new_tokens: NDArray[np.int64]
    # [R]  tokens whose K and V are in the store already
    num_computed_tokens: NDArray[np.int64]
    # [R, B]  block ids of each row; entries past a row's last block are meaningless
    block_tables: NDArray[np.int32]


class AttentionBackend(Protocol):
    """One way to compute attention over the paged store.

    `Metadata` differs by backend, hence `Any`: only the backend that made it reads it.
    """

    def plan(self, step: AttentionStep) -> Any:  # noqa: ANN401
        """All that is constant over the layers of a step: indices and masks, on the device."""
        ...

    def run(
        self,
        q: Tensor,
        k_new: Tensor,
        v_new: Tensor,
        layer: int,
        store: Tensor,
        metadata: Any,  # noqa: ANN401
    ) -> Tensor:
        """softmax(q k^T * scale + mask) v for every token of the step.

        q: [T, heads, head_dim]; k_new, v_new: [T, kv_heads, head_dim], already in `store` too;
        returns [T, heads * head_dim]. Query head h reads KV head h // (heads / kv_heads).
        """
        ...
