"""The host's gap between two steps that do not overlap, and when sharing a step is worth one.

Rows that are held for drafts join a step only after the one in flight has ended; the device then
waits for the host. Rows that could go on may wait with them: a step of all rows reads the weights
once, two of fewer rows read them twice. The gap is measured by the steps that waited. Knows no
requests and no drafter.
"""

from engine.cost_model import StepCosts, StepWork

_FIRST_S = 0.5e-3  # until a gap was measured
_DECAY = 0.9  # of the mean, a gap
_MAX_RATIO = 4.0  # of a gap that counts to the mean: a pause of the host is none of them
_FADE = 0.99  # of the mean, a step that does not wait: only one that does measures it anew


class HostGap:
    """The mean gap of one scheduler's steps."""

    def __init__(self) -> None:
        self._mean_s = _FIRST_S

    def add(self, seconds: float) -> float:
        """Add a gap that the device has waited for; returns as much of it as counts."""
        seconds = min(seconds, _MAX_RATIO * self._mean_s)
        self._mean_s += (1 - _DECAY) * (seconds - self._mean_s)
        return seconds

    def fade(self) -> None:
        """Rows did not wait for held ones, so nothing is measured."""
        self._mean_s *= _FADE

    def is_worth_it(
        self,
        decodes: StepWork,
        num_held_rows: int,
        costs: StepCosts,
        *,
        num_drafts_per_row: float,
        num_elsewhere: int,
    ) -> bool:
        """Whether the rows of `decodes` shall wait for those held, to share the next step.

        In a step of their own they give fewer tokens a second, the saved gap counted, than all rows
        in one step after the gap. num_elsewhere: held rows of other ranks, which share a step at no
        cost to this one.
        """
        num_rows = decodes.num_decode_rows
        if num_rows == 0 or num_held_rows + num_elsewhere == 0:
            return False
        num_here = num_rows + num_held_rows
        num_all = num_here + num_elsewhere
        alone_s, together_s = (
            costs.step_seconds(
                StepWork(
                    num_prompt_tokens=int(num * num_drafts_per_row),
                    num_decode_rows=num,
                    num_decode_keys=decodes.num_decode_keys * num // num_rows,
                )
            )
            for num in (num_rows, num_here)
        )
        return num_rows * (together_s + self._mean_s) < num_all * (alone_s - self._mean_s)
