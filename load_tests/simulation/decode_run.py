"""Decode steps of an unchanged batch in closed form: a row more key for each row and step.

step j takes   base + k (K + j n)          n rows that attend to K tokens in the first step
j steps take   j base + k (K j + n j (j - 1) / 2)
"""

import math
from dataclasses import dataclass

from engine.cost_model import StepCosts, StepWork


@dataclass(slots=True, kw_only=True)
class DecodeRun:
    """Equal steps, back to back; only `num_steps` ever changes, by `cut`."""

    start_s: float
    base_s: float  # of a step whose rows attended to nothing
    key_s: float
    num_rows: int
    num_keys: int  # of the first step
    num_steps: int

    def boundary_s(self, num_steps: int) -> float:
        """When so many of its steps are over."""
        num_keys = self.num_keys * num_steps + self.num_rows * num_steps * (num_steps - 1) / 2
        return self.start_s + num_steps * self.base_s + self.key_s * num_keys

    @property
    def end_s(self) -> float:
        return self.boundary_s(self.num_steps)

    def first_boundary_at(self, now_s: float) -> int:
        """The least number of steps that are over no sooner than `now_s`."""
        elapsed_s = now_s - self.start_s
        if elapsed_s <= 0:
            return 0
        square = self.key_s * self.num_rows / 2
        linear = self.base_s + self.key_s * self.num_keys - square
        root = math.sqrt(linear * linear + 4 * square * elapsed_s)
        guess = max(0, math.ceil(2 * elapsed_s / (linear + root)) - 1)
        while self.boundary_s(guess) < now_s:  # once or twice: the rest is rounding
            guess += 1
        return guess

    def cut(self, num_steps: int) -> None:
        """End after so many steps, if that is sooner."""
        self.num_steps = min(self.num_steps, num_steps)


def build_run(
    costs: StepCosts,
    *,
    start_s: float,
    num_rows: int,
    num_keys: int,
    num_steps: int,
    host_s: float = 0.0,
) -> DecodeRun:
    """`num_keys`: what the rows attend to in the first step, together; `host_s`: before each."""
    return DecodeRun(
        start_s=start_s,
        base_s=host_s + costs.step_seconds(StepWork(num_decode_rows=num_rows)),
        key_s=costs.decode_key_s,
        num_rows=num_rows,
        num_keys=num_keys,
        num_steps=num_steps,
    )
