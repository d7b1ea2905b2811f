"""Computes the masks of a step's constrained rows in several threads.

A grammar lets other threads run while it computes a mask, which takes 10 us to 2 ms of 150,000
tokens, by where the output is. So threads share the rows, each taking the next one when it has
ended its last. Knows no constraints.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

MIN_ROWS = 4  # with fewer, waking a thread costs more than it does

Work = Callable[[], object]


class MaskThreads:
    """Runs works that touch nothing in common, on the calling thread and some of its own."""

    def __init__(self, num_threads: int) -> None:
        """num_threads: with the calling one. The others start with the first work for them."""
        self._num_others = num_threads - 1
        self._others: ThreadPoolExecutor | None = None
        if num_threads > 1:
            self._others = ThreadPoolExecutor(self._num_others, thread_name_prefix="masks")

    def run(self, works: Sequence[Work]) -> None:
        """Returns when all have ended. Raises what one of them raises."""
        left = deque(works)
        others = []
        if self._others is not None and len(works) >= MIN_ROWS:
            num_others = min(self._num_others, len(works) - 1)
            others = [self._others.submit(_take_all, left) for _ in range(num_others)]
        try:
            _take_all(left)
        finally:
            for other in others:
                other.result()


def _take_all(left: "deque[Work]") -> None:
    """Do works until there are none; several threads take them from one end."""
    with torch.inference_mode():  # as the sampler, whose memory they write to
        while left:
            try:
                work = left.popleft()
            except IndexError:  # another thread has the last one
                return
            work()
