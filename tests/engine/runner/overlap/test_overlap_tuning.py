"""What measurements of two-batch overlap decide."""

from collections.abc import Callable

import pytest

from engine.runner.overlap.tuning import NUM_STEPS, OverlapTuner, adaptive_lag

SIZES = (512, 2048, 8192, 32768)


@pytest.mark.parametrize(
    ("ratio", "lag"),
    [(0.0, 0), (0.19, 0), (0.2, 1), (0.49, 1), (0.5, 2), (0.99, 2), (1.0, 3), (7.0, 3)],
)
def test_the_lag_grows_with_the_share_of_communication(ratio: float, lag: int) -> None:
    assert adaptive_lag(ratio, 1.0) == lag


def _tune(split_s: Callable[[int], float]) -> OverlapTuner:
    """Whole steps take a second."""
    tuner = OverlapTuner(SIZES)
    while (step := tuner.next_step()) is not None:
        tuner.measured(split_s(step.num_tokens) if step.splits else 1.0)
    return tuner


def test_each_size_is_tried_ten_times_whole_and_ten_times_split() -> None:
    tuner = OverlapTuner(SIZES[:2])
    asked = []
    while (step := tuner.next_step()) is not None:
        asked.append((step.num_tokens, step.splits))
        tuner.measured(1.0)
    assert NUM_STEPS == 10
    assert asked == [
        (size, splits) for size in SIZES[:2] for splits in (False, True) for _ in range(10)
    ]


def test_the_threshold_is_the_smallest_size_from_which_all_gain_five_percent() -> None:
    assert _tune(lambda n: 1.3 if n < 8192 else 0.9).threshold() == 8192
    assert _tune(lambda n: 0.9 if n == 512 else 1.1 if n == 2048 else 0.9).threshold() == 8192
    assert _tune(lambda n: 0.8).threshold() == 512


def test_a_gain_below_five_percent_is_not_kept() -> None:
    assert _tune(lambda n: 0.96).threshold() is None
    assert _tune(lambda n: 1 / 1.05).threshold() == 512


def test_one_slow_step_decides_nothing() -> None:
    tuner = OverlapTuner(SIZES[:1])
    for number in range(2 * NUM_STEPS):
        is_split = number >= NUM_STEPS
        tuner.measured(9.0 if number == 13 else 0.8 if is_split else 1.0)
    assert tuner.threshold() == 512


def test_the_same_measurements_decide_the_same() -> None:
    first, second = (_tune(lambda n: 1.1 - n / 40000) for _ in range(2))
    assert first.trials == second.trials
    assert first.threshold() == second.threshold()
