"""Computes a draft model's K and V of prompts, on a worker that hands them over.

Its K and V lie in the blocks of the target's (`KvLayout.drafter`), whose digests follow from all
bytes. So a pass is part of the step that computes the same tokens: launched behind the model's
layers, so that the device does not wait for its launch, and before the blocks are digested. Neither
ever writes to a block that others may read. Nothing is sampled here.
"""

from collections import deque
from typing import Protocol

import msgspec

from engine.plan import RowAdmission, StepPlan, StepResult
from engine.request import SamplingParams

_NO_SAMPLING = SamplingParams(max_tokens=1)


class _Pass(Protocol):
    def wait(self) -> StepResult: ...


class _DraftModel(Protocol):
    """An executor; see there."""

    @property
    def max_in_flight(self) -> int: ...

    def launch(self, plan: StepPlan) -> _Pass: ...


class PromptPasses:
    """Passes of a draft model over what the target's plans compute of prompts."""

    def __init__(self, executor: _DraftModel) -> None:
        """executor: of the draft model, with the target's rows and blocks; nobody else uses it."""
        self._executor = executor
        self._in_flight: deque[_Pass] = deque()
        self._num_passes = 0
        self.num_computed_tokens = 0  # since the start

    def launch(self, plan: StepPlan) -> None:
        """Queue the pass over the plan's `drafter_rows`."""
        while len(self._in_flight) >= self._executor.max_in_flight:
            self._in_flight.popleft().wait()
        places = plan.drafter_rows
        rows = [plan.rows[i] for i in places]
        no_blocks: list[int] = []
        own = StepPlan(
            step=self._num_passes,
            rows=rows,
            num_new_tokens=[plan.num_new_tokens[i] for i in places],
            num_computed_tokens=[plan.num_computed_tokens[i] for i in places],
            num_samples=[0] * len(places),
            new_block_ids=[no_blocks] * len(places),
            admissions=[_unsampled(one) for one in plan.admissions if one.row in rows],
        )
        self._num_passes += 1
        self.num_computed_tokens += own.num_tokens
        self._in_flight.append(self._executor.launch(own))


def _unsampled(admission: RowAdmission) -> RowAdmission:
    """The row is not released: its next admission does that."""
    return msgspec.structs.replace(admission, params=_NO_SAMPLING)
