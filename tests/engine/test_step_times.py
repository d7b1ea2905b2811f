"""The stopwatch of the step loop."""

from engine.clock import ManualClock
from engine.step_times import NUM_KEPT_STEPS, Phase, PhaseDurations, StepTimes


def test_only_the_last_steps_are_measured() -> None:
    clock = ManualClock()
    times = StepTimes(clock)
    for num_seconds in range(NUM_KEPT_STEPS + 1):
        times.begin()
        clock.advance(NUM_KEPT_STEPS - num_seconds)
        times.end(Phase.WAIT)
    wait = times.statistics().wait
    assert (wait.num_steps, wait.max_s) == (NUM_KEPT_STEPS, NUM_KEPT_STEPS - 1)
    assert times.statistics().plan == PhaseDurations(
        num_steps=0, mean_s=0.0, max_s=0.0, mean_cpu_s=0.0
    )
