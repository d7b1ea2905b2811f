"""How long it takes to move a block, learnt from moving some."""

import math
import time

_LEARNING_RATE = 0.2
_MAX_SLOWER = 4.0  # than predicted, that one measurement may count as
_FORGET_S = 5.0


class BlockTime:
    """A predicted time. One thread learns, any may ask.

    What is predicted to be too slow is not tried, and so not measured again. So the first
    prediction is a hopeful one, a single measurement that something has held up counts for little,
    and when there was none for `_FORGET_S` seconds, all are forgotten.
    """

    def __init__(self, hopeful_s: float) -> None:
        self._hopeful_s = self._learnt_s = hopeful_s
        self._learnt_at_s = -math.inf

    @property
    def predicted_s(self) -> float:
        is_old = time.monotonic() - self._learnt_at_s > _FORGET_S
        return self._hopeful_s if is_old else self._learnt_s

    def learn(self, took_s: float) -> None:
        before_s = self.predicted_s
        counted_s = min(took_s, _MAX_SLOWER * before_s)
        self._learnt_s = before_s + _LEARNING_RATE * (counted_s - before_s)
        self._learnt_at_s = time.monotonic()
