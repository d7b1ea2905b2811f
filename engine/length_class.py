"""Classifies a prompt as short or long by the cost of computing its uncached tokens.

Used inside a worker (its queues) and across workers (placement), each with its own threshold.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

LengthClass = Literal["short", "long"]


class PrefillCost(Protocol):
    """Predicts how long a prompt takes."""

    def seconds(self, new_tokens: int, cached_tokens: int, /) -> float:
        """Seconds to compute `new_tokens` alone in a step, after `cached_tokens`."""
        ...


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Used until a fitted model is reported. An 8B model on a Hopper GPU; only ratios matter."""

    floor_s: float = 0.005  # reading weights and launching kernels, even for a single token
    token_s: float = 15e-6

    def seconds(self, new_tokens: int, cached_tokens: int, /) -> float:
        del cached_tokens
        return self.floor_s + self.token_s * new_tokens


def classify(
    num_new_tokens: int, num_cached_tokens: int, threshold_tokens: int, cost: PrefillCost
) -> LengthClass:
    """Short = it costs at most as much as `threshold_tokens` new tokens without a history."""
    cost_s = cost.seconds(num_new_tokens, num_cached_tokens)
    return "short" if cost_s <= cost.seconds(threshold_tokens, 0) else "long"
