"""The controller on a virtual clock: never much below plain steps, near the best fixed k."""

import pytest

from load_tests.simulation.speculation import (
    Setting,
    best_fixed,
    fixed_gain,
    render_sweep,
    simulate,
    step_s,
    sweep,
)

FLOOR = 0.98


@pytest.mark.parametrize(
    ("num_rows", "num_steps", "pass_s"), [(1, 500, 0.0), (16, 250, 0.25e-3), (256, 60, 0.0)]
)
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.95])
def test_speculation_never_falls_below_plain_steps(
    num_rows: int, num_steps: int, pass_s: float, acceptance: float
) -> None:
    setting = Setting(
        num_rows=num_rows, acceptances=[acceptance], pass_s=pass_s, num_steps=num_steps
    )
    outcome = simulate(setting)
    best, _ = best_fixed(setting, acceptance)
    assert outcome.gain >= FLOOR
    assert outcome.gain >= 0.8 * best


@pytest.mark.parametrize("surcharge_s", [4e-3, 20e-3])
def test_nor_where_steps_with_drafts_cost_far_more_than_predicted(surcharge_s: float) -> None:
    setting = Setting(num_rows=4, acceptances=[0.3], surcharge_s=surcharge_s, num_steps=1000)
    assert simulate(setting).gain >= FLOOR


@pytest.mark.parametrize(("num_rows", "num_steps"), [(16, 300), (64, 150), (256, 60)])
def test_nor_where_they_take_what_they_took_on_a_gpu(num_rows: int, num_steps: int) -> None:
    """Three drafts of which 2.5 tokens count gain 1.66, 1.21 and 0.81 there."""
    setting = Setting(num_rows=num_rows, acceptances=[0.69], num_steps=num_steps, is_measured=True)
    measured = {16: 1.66, 64: 1.21, 256: 0.81}[num_rows]
    assert fixed_gain(setting, 0.69, 3) == pytest.approx(measured, rel=0.03)
    assert simulate(setting).gain >= max(FLOOR, 0.9 * measured)


@pytest.mark.parametrize(("num_rows", "num_steps"), [(1, 800), (16, 300)])
def test_pauses_of_a_busy_machine_do_not_stop_drafts_that_pay(
    num_rows: int, num_steps: int
) -> None:
    pauses = {"pause_share": 0.05, "pause_s": 20e-3}
    busy = Setting(num_rows=num_rows, acceptances=[0.8], num_steps=num_steps, **pauses)
    best, _ = best_fixed(busy, 0.8)
    assert simulate(busy).gain > 0.75 * best


@pytest.mark.parametrize(("num_rows", "num_steps"), [(1, 1500), (16, 500)])
def test_nor_where_rows_sit_out_every_other_step(num_rows: int, num_steps: int) -> None:
    hopeless = Setting(num_rows=num_rows, acceptances=[0.2], is_holding=True, num_steps=num_steps)
    assert simulate(hopeless).gain >= FLOOR
    good = Setting(num_rows=num_rows, acceptances=[0.9], is_holding=True, num_steps=num_steps // 3)
    assert simulate(good).gain > 1.5


def test_nor_where_good_and_hopeless_requests_share_the_steps() -> None:
    setting = Setting(num_rows=16, acceptances=[0.0, 0.9], num_steps=500)
    assert simulate(setting).gain > 1.4


def test_steps_take_what_was_measured() -> None:
    assert 1e3 * step_s(1, 1) == pytest.approx(4.272, rel=0.01)
    assert 1e3 * step_s(64, 64) == pytest.approx(4.937, rel=0.01)
    assert 1e3 * step_s(256, 256) == pytest.approx(9.402, rel=0.01)
    assert 1e3 * step_s(64, 64, num_keys=4096) == pytest.approx(13.47, rel=0.02)


def test_a_fixed_number_of_drafts_gains_what_its_tokens_and_seconds_say() -> None:
    setting = Setting(num_rows=1, acceptances=[1.0])
    assert fixed_gain(setting, 1.0, 0) == 1.0
    assert fixed_gain(setting, 1.0, 3) == pytest.approx(4 * step_s(1, 1) / step_s(1, 4))


def test_a_sweep_is_a_table_with_a_line_for_each_number_of_rows() -> None:
    cells = sweep([1, 2], [0.0, 0.5], Setting(num_rows=1, acceptances=[0.0], num_steps=20))
    table = render_sweep(cells).splitlines()
    assert [line.split("|")[1].strip() for line in table] == ["rows", "------", "1", "2"]
