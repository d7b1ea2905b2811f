"""What the host spends on a step: durations of plan, launch, wait and commit of the last steps.

With overlapped steps `wait` is what is left of the device's time after the host's; a wait near zero
says that the host is what limits.
"""

from collections import deque
from dataclasses import dataclass
from enum import Enum, auto

from engine.clock import Clock

NUM_KEPT_STEPS = 256


class Phase(Enum):
    """A part of a turn of the loop."""

    PLAN = auto()
    LAUNCH = auto()
    WAIT = auto()
    COMMIT = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseDurations:
    """Of one phase, over the last `num_steps` times it ran; zeros before the first."""

    num_steps: int
    mean_s: float
    max_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimesStatistics:
    """By phase. `plan` also counts turns in which nothing could be planned."""

    plan: PhaseDurations
    launch: PhaseDurations
    wait: PhaseDurations
    commit: PhaseDurations


class StepTimes:
    """A stopwatch with one ring of durations a phase."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_s = 0.0
        self._rings: dict[Phase, deque[float]] = {p: deque(maxlen=NUM_KEPT_STEPS) for p in Phase}

    def begin(self) -> None:
        """The next phase begins now."""
        self._began_s = self._clock.now_s()

    def end(self, phase: Phase) -> float:
        """A phase ends now, and the next begins; returns the time."""
        now_s = self._clock.now_s()
        self._rings[phase].append(now_s - self._began_s)
        self._began_s = now_s
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
        )
