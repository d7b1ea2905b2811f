"""The engine's own loop with drafts on virtual time: steps that overlap never lose much."""

import pytest

from load_tests.simulation.speculation_engine import Engine, Load, gain_of

FLOOR = 0.98


def check(num_rows: int, num_steps: int, acceptance: float) -> None:
    load = Load(num_rows=num_rows, acceptance=acceptance, num_tokens=num_rows * num_steps)
    found = gain_of(load)
    assert found.gain >= FLOOR
    if acceptance == 1.0:
        assert found.gain > 1.8


@pytest.mark.parametrize(
    ("num_rows", "num_steps", "acceptance"),
    [(1, 400, 0.0), (1, 400, 0.5), (1, 300, 1.0), (16, 300, 0.0), (16, 200, 1.0)],
)
def test_overlapped_steps_with_drafts_never_fall_below_plain_ones(
    num_rows: int, num_steps: int, acceptance: float
) -> None:
    check(num_rows, num_steps, acceptance)


@pytest.mark.nightly
@pytest.mark.parametrize("num_rows", [1, 4, 16, 64, 256])
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.5, 0.8, 1.0])
def test_they_do_so_over_many_steps_of_any_batch(num_rows: int, acceptance: float) -> None:
    load = Load(num_rows=num_rows, acceptance=acceptance, num_tokens=num_rows * 1000)
    assert gain_of(load).gain >= FLOOR


def test_nor_with_a_drafter_whose_passes_take_time() -> None:
    load = Load(num_rows=4, acceptance=0.1, pass_s=1e-3, num_tokens=4 * 400)
    assert gain_of(load).gain >= FLOOR


def test_the_controller_knows_of_rows_that_are_held_and_of_a_device_that_waits() -> None:
    """One row: each step with drafts ends before the next is planned, which plain steps do not."""
    load = Load(num_rows=1, acceptance=1.0, num_tokens=600)
    engine = Engine(load, drafts=True)
    seconds = engine.run()
    plain_s = Engine(load, drafts=False).run()
    measured = engine.controller.statistics().measured_gain
    assert measured is not None
    assert measured == pytest.approx(plain_s / seconds, rel=0.25)


def test_a_pause_without_requests_does_not_part_the_rows() -> None:
    """It is no gap between two steps: rows that wait for each other do so afterwards, too."""
    load = Load(num_rows=16, acceptance=0.8, num_tokens=3000)
    engine = Engine(load, drafts=True)
    engine.run()
    before_s = engine.run()
    engine.drain()
    engine.clock.advance(60.0)
    engine.refill()
    engine.run()
    assert engine.run() < 1.1 * before_s
    assert engine.controller.statistics().num_stops == 0


def test_a_pause_of_the_host_between_two_steps_parts_them_for_a_while_at_most() -> None:
    load = Load(num_rows=16, acceptance=0.8, num_tokens=3000)
    engine = Engine(load, drafts=True)
    engine.run()
    before_s = engine.run()
    for _ in range(30):  # as if there were nothing but pauses, until rows are kept apart
        engine.scheduler.drafting.count_idle(0.2)
    engine.scheduler.drafting._idle_s = 0.0  # which the controller does not pay for here
    for _ in range(4):
        engine.run()
    assert engine.run() < 1.1 * before_s
