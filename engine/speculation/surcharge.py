"""What steps with drafts take beyond their prediction, by their size.

The prediction takes drafts for more tokens of a plain step. Other graphs, kernels that read keys
more than once, and launches one by one where a step fits no graph come on top, and in a step of
1,000 tokens this is another price than in one of ten. So it is kept by the step's tokens, in sizes
that grow by the root of two, and each kind of step has its own. Between the sizes that were seen it
is on a straight line, beyond them as at the nearest. A kind that was never seen is taken to cost
nothing more, so that it is tried.

The device waits before the first drafts of requests, and before all drafts of a drafter that needs
the newest token on the host; and before each step, if the host takes longer than the device. That
is kept apart: a wait that does not come again is no size's price.

The price of a size is the median of its last steps, of which the first alone does not count: it may
have waited for the host, and the device's time has that in it. A mean would take the pauses of a
busy machine into it, which plain steps have as well, and one of them would look like the price of
drafts for hundreds of steps.
"""

from collections import deque
from dataclasses import dataclass
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


class _Last:
    """The seconds of the last steps of one sort."""

    def __init__(self, first_s: float = 0.0) -> None:
        """first_s: what they are taken to be until a second step confirms the first."""
        self._seconds = deque([first_s], _NUM_KEPT)

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def fade(self, share: float) -> None:
        self._seconds = deque((s * share for s in self._seconds), _NUM_KEPT)

    @property
    def price_s(self) -> float:
        """Their median, the lower of two; none is below 0."""
        return max(0.0, sorted(self._seconds)[(len(self._seconds) - 1) // 2])


@dataclass(slots=True)
class _Size:
    """Steps of about one size."""

    num_tokens: int  # of the last one
    errors: _Last


class Surcharge:
    """What was learned of it from the steps of one worker."""

    def __init__(self) -> None:
        self._waits = _Last()
        self._sizes: dict[StepKind, dict[int, _Size]] = {}  # by size, in half powers of two
        # By kind: tokens and seconds of its sizes; dropped when the kind changes.
        self._known: dict[StepKind, tuple[Vector, Vector]] = {}

    @property
    def wait_s(self) -> float:
        """That the device waits before a step with drafts, of any size."""
        return self._waits.price_s

    def observe(
        self, kind: StepKind, num_tokens: int, error_s: float, waited_s: float = 0.0
    ) -> None:
        """A step with drafts of so many tokens in all took `error_s` more than predicted.

        waited_s: before it, in which the device had nothing to do.
        """
        self._waits.add(waited_s)
        sizes = self._sizes.setdefault(kind, {})
        place = ceil(2 * log2(num_tokens))
        if place not in sizes:
            (first_s,) = self.seconds(kind, np.array([num_tokens]))
            sizes[place] = _Size(num_tokens, _Last(float(first_s)))
        self._known.pop(kind, None)
        size = sizes[place]
        size.num_tokens = num_tokens
        size.errors.add(error_s)

    def fade(self, share: float) -> None:
        """Only `share` of what was learned counts from now on."""
        self._waits.fade(share)
        self._known.clear()
        for sizes in self._sizes.values():
            for size in sizes.values():
                size.errors.fade(share)

    def seconds(self, kind: StepKind, num_tokens: Vector) -> Vector:
        """[N] of steps of so many tokens [N]."""
        sizes = self._sizes.get(kind)
        if not sizes:
            return np.zeros(len(num_tokens))
        if kind not in self._known:
            known = sorted((size.num_tokens, size.errors.price_s) for size in sizes.values())
            at_tokens, prices_s = np.array(known).T
            self._known[kind] = at_tokens, prices_s
        found: Vector = np.interp(num_tokens, *self._known[kind])
        return found
