"""The requests that decode, as columns: what each step asks of all of them is asked at once.

Made anew when somebody joins or leaves; until then a step moves every row on by one token. Knows no
blocks beyond their size, and no plan.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from engine.request import Request
from engine.scheduling.cost_model import StepWork
from engine.scheduling.finish import FinishRules


class DecodeColumns:
    """Who decodes, in order; `advance` mutates the requests, too."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self.requests = list(requests)
        self.rows = [r.row for r in self.requests if r.row is not None]
        self.constrained = [r for r in self.requests if r.params.constraint is not None]
        # [R]
        self._num_computed: NDArray[np.int64] = np.array(
            [request.num_computed_tokens for request in self.requests], dtype=np.int64
        )
        self._sum_computed = int(self._num_computed.sum())
        self._at_border: list[Request] | None = None  # None = not asked since they moved on
        self._num_steps_to_last: int | None = None  # None = not asked yet

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def num_computed_tokens(self) -> list[int]:
        """[R]"""
        num_computed: list[int] = self._num_computed.tolist()
        return num_computed

    @property
    def work(self) -> StepWork:
        """What the next step computes of them."""
        num_rows = len(self.requests)
        return StepWork(num_decode_rows=num_rows, num_decode_keys=self._sum_computed + num_rows)

    def at_border(self, block_size: int) -> list[Request]:
        """Whose computed tokens fill their last block; every call has the same `block_size`."""
        if self._at_border is None:
            (places,) = (self._num_computed % block_size == 0).nonzero()
            self._at_border = [self.requests[place] for place in places.tolist()]
        return self._at_border

    def at_last_token(self, rules: FinishRules) -> list[Request]:
        """What `rules` say of them; every call has the same `rules`."""
        if self._num_steps_to_last is None:
            self._num_steps_to_last = rules.num_steps_to_last(self.requests)
        return rules.at_last_token(self.requests) if self._num_steps_to_last <= 0 else []

    def advance(self) -> None:
        """The step that was planned computes a token of each."""
        self._num_computed += 1
        self._sum_computed += len(self.requests)
        self._at_border = None
        if self._num_steps_to_last is not None:
            self._num_steps_to_last -= 1
        for request in self.requests:
            request.num_computed_tokens += 1
