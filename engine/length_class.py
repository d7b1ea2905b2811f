"""Short or long: the class of a prompt, by what its uncached tokens cost to compute.

Used inside a worker (its queues) and across workers (placement), with a threshold of each.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

LengthClass = Literal["short", "long"]


class PrefillCost(Protocol):
    """Predicts how long a prompt takes."""

    def seconds(self, new_tokens: int, cached_tokens: int, /) -> float:
        """Returns the cost of a step that computes only `new_tokens` after `cached_tokens`."""
        ...


@dataclass(frozen=True, slots=True)
class LinearCost:
    """The cost model used until a fitted one is reported.

    Its numbers are those of an 8B model on a Hopper GPU; only their ratios matter much.
    """

    floor_s: float = 0.005  # weights are read and kernels launched for a single token, too
    token_s: float = 15e-6

    def seconds(self, new_tokens: int, cached_tokens: int, /) -> float:
        del cached_tokens
        return self.floor_s + self.token_s * new_tokens


def classify(
    num_new_tokens: int, num_cached_tokens: int, threshold_tokens: int, cost: PrefillCost
) -> LengthClass:
    """Short = it costs at most what `threshold_tokens` cost without a history."""
    cost_s = cost.seconds(num_new_tokens, num_cached_tokens)
    return "short" if cost_s <= cost.seconds(threshold_tokens, 0) else "long"
