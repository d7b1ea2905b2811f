"""What steps with drafts take beyond their prediction, by their size.

The prediction takes drafts for more tokens of a plain step. Other graphs, kernels that read keys
more than once, and launches one by one where a step fits no graph come on top, and in a step of
1,000 tokens this is another price than in one of ten. So it is kept by the step's tokens, in sizes
that grow by the root of two, and each kind of step has its own. Between the sizes that were seen it
is on a straight line, beyond them as at the nearest. A kind that was never seen is taken to cost
nothing more, so that it is tried.

The price of a size is the median of its last steps. A mean would take the pauses of a busy machine
into it, which plain steps have as well, and one of them would look like the price of drafts for
hundreds of steps.
"""

from collections import deque
from dataclasses import dataclass, field
from math import ceil, log2
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]

_NUM_KEPT = 9  # steps of a size


class StepKind(NamedTuple):
    """Steps that are launched alike."""

    has_prompts: bool = False
    has_graph: bool = False  # of the step's size


@dataclass(slots=True)
class _Size:
    """The last steps of about one size."""

    num_tokens: int  # of the last one
    errors_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_KEPT))

    @property
    def price_s(self) -> float:
        return max(0.0, sorted(self.errors_s)[(len(self.errors_s) - 1) // 2])


class Surcharge:
    """What was learned of it from the steps of one worker."""

    def __init__(self) -> None:
        self._sizes: dict[StepKind, dict[int, _Size]] = {}  # by size, in half powers of two

    def observe(self, kind: StepKind, num_tokens: int, error_s: float) -> None:
        """A step with drafts of so many tokens in all took `error_s` more than predicted."""
        sizes = self._sizes.setdefault(kind, {})
        size = sizes.setdefault(ceil(2 * log2(num_tokens)), _Size(num_tokens))
        size.num_tokens = num_tokens
        size.errors_s.append(error_s)

    def fade(self, share: float) -> None:
        """Only `share` of what was learned counts from now on."""
        for sizes in self._sizes.values():
            for size in sizes.values():
                size.errors_s = deque((e * share for e in size.errors_s), _NUM_KEPT)

    def seconds(self, kind: StepKind, num_tokens: Vector) -> Vector:
        """[N] of steps of so many tokens [N]."""
        sizes = self._sizes.get(kind)
        if sizes is None:
            return np.zeros(len(num_tokens))
        known = sorted((size.num_tokens, size.price_s) for size in sizes.values())
        at_tokens, prices_s = zip(*known, strict=True)
        found: Vector = np.interp(num_tokens, at_tokens, prices_s)
        return found
