"""Adapts two-batch overlap to what was measured: how far the second batch lags, and from where on.

Pure and replayable: the same measurements in the same order give the same decisions. All ranks of
a worker must split the same steps, and each measures other times, so nothing changes while serving:
`trials.py` measures before a worker is ready.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

NUM_STEPS = 10  # measured each way
MIN_SPEEDUP = 1.05
# (communication below this share of the computation, lag); beyond them all, the last lag.
_LAGS = ((0.2, 0), (0.5, 1), (1.0, 2))
_LONGEST_LAG = 3


def adaptive_lag(communication_s: float, computation_s: float) -> int:
    """Stages between the two batches: more, the more communication is to be hidden."""
    assert communication_s >= 0, f"{communication_s} s"
    assert computation_s > 0, f"{computation_s} s"
    ratio = communication_s / computation_s
    return next((lag for below, lag in _LAGS if ratio < below), _LONGEST_LAG)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What a size of steps measured, whole and split."""

    num_tokens: int
    whole_s: float  # the median step
    split_s: float

    @property
    def pays(self) -> bool:
        return self.whole_s >= MIN_SPEEDUP * self.split_s


class OverlapTuner:
    """Tries sizes of steps, ascending: each whole first, then split, `NUM_STEPS` of both.

    while (ask := tuner.next_step()): tuner.measured(run(ask.num_tokens, ask.splits))
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        """sizes: tokens of a step, ascending."""
        assert list(sizes) == sorted(set(sizes)), f"{list(sizes)} does not ascend"
        self._sizes = tuple(sizes)
        self._measured: list[float] = []
        self.trials: list[Trial] = []

    def next_step(self) -> "TrialStep | None":
        """The step to run next; None = everything was tried."""
        if len(self.trials) == len(self._sizes):
            return None
        splits = len(self._measured) >= NUM_STEPS
        return TrialStep(num_tokens=self._sizes[len(self.trials)], splits=splits)

    def measured(self, duration_s: float) -> None:
        """Take the duration of the step that `next_step` asked for."""
        assert duration_s > 0, f"{duration_s} s"
        assert len(self.trials) < len(self._sizes), "everything was tried"
        self._measured.append(duration_s)
        if len(self._measured) == 2 * NUM_STEPS:
            whole, split = self._measured[:NUM_STEPS], self._measured[NUM_STEPS:]
            size = self._sizes[len(self.trials)]
            self.trials.append(Trial(num_tokens=size, whole_s=median(whole), split_s=median(split)))
            self._measured = []

    def threshold(self) -> int | None:
        """The smallest size from which on all that were tried pay; None = the largest does not."""
        found = None
        for trial in reversed(self.trials):
            if not trial.pays:
                break
            found = trial.num_tokens
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStep:
    num_tokens: int
    splits: bool
