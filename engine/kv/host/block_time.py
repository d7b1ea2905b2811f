"""How long it takes to move a block, learnt from moving some."""

import math
import time

_LEARNING_RATE = 0.2
_FORGET_S = 30.0


class BlockTime:
    """A predicted time. One thread learns, any may ask.

    The first prediction is a hopeful one: what is predicted to be too slow is never tried, and so
    never measured. For the same reason what was measured is forgotten when nothing has been for
    `_FORGET_S` seconds: something may have held it up.
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
        self._learnt_s = before_s + _LEARNING_RATE * (took_s - before_s)
        self._learnt_at_s = time.monotonic()
