"""A stopwatch for the four phases of the step loop: how long the host takes in each."""

import time
from collections import deque
from dataclasses import dataclass
from enum import Enum, auto

from engine.clock import Clock

NUM_KEPT_STEPS = 256


class Phase(Enum):
    """A phase of one turn of the loop."""

    PLAN = auto()
    LAUNCH = auto()  # with waiting for the step before, if a row with a constraint needs its token
    WAIT = auto()
    COMMIT = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseDurations:
    """Durations of one phase over the last `num_steps` times it ran; zeros before the first."""

    num_steps: int
    mean_s: float
    max_s: float
    # The processor's part of the mean; the rest is waiting: for the device, or for other threads.
    mean_cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimesStatistics:
    """Durations by phase. `plan` also counts turns in which nothing could be planned."""

    plan: PhaseDurations
    launch: PhaseDurations
    wait: PhaseDurations
    commit: PhaseDurations


class StepTimes:
    """A stopwatch with one ring of durations per phase."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_s = 0.0
        self._began_cpu_s = 0.0
        self._rings: dict[Phase, deque[float]] = {p: deque(maxlen=NUM_KEPT_STEPS) for p in Phase}
        self._cpu_rings = {p: deque[float](maxlen=NUM_KEPT_STEPS) for p in Phase}

    def begin(self) -> None:
        """Start timing the next phase."""
        self._began_s, self._began_cpu_s = self._clock.now_s(), time.thread_time()

    def end(self, phase: Phase) -> float:
        """Record the duration of `phase` and start timing the next one; returns the time now."""
        now_s, cpu_s = self._clock.now_s(), time.thread_time()
        self._rings[phase].append(now_s - self._began_s)
        self._cpu_rings[phase].append(cpu_s - self._began_cpu_s)
        self._began_s, self._began_cpu_s = now_s, cpu_s
        return now_s

    def statistics(self) -> StepTimesStatistics:
        return StepTimesStatistics(
            plan=self._durations(Phase.PLAN),
            launch=self._durations(Phase.LAUNCH),
            wait=self._durations(Phase.WAIT),
            commit=self._durations(Phase.COMMIT),
        )

    def _durations(self, phase: Phase) -> PhaseDurations:
        ring = self._rings[phase]
        return PhaseDurations(
            num_steps=len(ring),
            mean_s=sum(ring) / max(1, len(ring)),
            max_s=max(ring, default=0.0),
            mean_cpu_s=sum(self._cpu_rings[phase]) / max(1, len(ring)),
        )
