"""How long it takes to move a block, learnt from moving some."""

import math

from engine.clock import Clock

_NUM_COUNTED = 32  # blocks: as many more count for half
_MAX_SLOWER = 4.0  # than predicted, that one measurement may count as
_HALF_LIFE_S = 1.0


class BlockTime:
    """A predicted time: the mean of the blocks that were moved of late.

    What is predicted to be too slow is not tried, and so not measured again. So the first
    prediction is a hopeful one, a single measurement that something has held up counts for little,
    and without another one the prediction returns to the hopeful one, half of the way in each
    `_HALF_LIFE_S`. One thread learns, any may ask.
    """

    def __init__(self, hopeful_s: float, clock: Clock) -> None:
        self._clock = clock
        self._hopeful_s = self._learnt_s = hopeful_s
        self._learnt_at_s = -math.inf

    @property
    def predicted_s(self) -> float:
        return self._predicted_at(self._clock.now_s())

    def _predicted_at(self, time_s: float) -> float:
        kept = math.exp2((self._learnt_at_s - time_s) / _HALF_LIFE_S)
        return self._hopeful_s + kept * (self._learnt_s - self._hopeful_s)

    def learn(self, took_s: float, num_blocks: int) -> None:
        """So many blocks took `took_s` together, until now."""
        now_s = self._clock.now_s()
        before_s = self._predicted_at(max(self._learnt_at_s, now_s - took_s))
        counted_s = min(took_s / num_blocks, _MAX_SLOWER * before_s)
        share = num_blocks / (num_blocks + _NUM_COUNTED)
        self._learnt_s = before_s + share * (counted_s - before_s)
        self._learnt_at_s = now_s
