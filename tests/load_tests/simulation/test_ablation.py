"""The ablation: every variant on the same traffic, and traffic that is what its name says."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from engine.cost_model import PRIOR
from load_tests.simulation import ablation
from load_tests.simulation.ablation import FCFS, Variant, all_traffic, busy_rate, draw_bursts


def test_the_command_prints_a_line_for_every_traffic_and_variant(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ablation.main(["--seconds", "3", "--seeds", "1", "--set", "max_step_ms=40"])
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if "|" in line][2:]
    traffic = list(all_traffic(3.0))
    assert len(rows) == sum(len(one.variants) for one in traffic) == 6 * 7 + 10 * 3
    named = {(row[1].strip(), row[2].strip(), row[3].strip()) for row in rows}
    assert len(named) == len(rows), "two lines are told apart by nothing"
    without_short = [row for row in rows if "0% short, Poisson" in row[1] and row[4].strip() == ""]
    assert len(without_short) == 3


def test_one_seed_gives_all_variants_the_same_requests_and_another_gives_others() -> None:
    for traffic in all_traffic(8.0):
        once, again, other = (traffic.draw(seed) for seed in (3, 3, 4))
        assert np.array_equal(once.arrival_s, again.arrival_s)
        assert np.array_equal(once.prompt_tokens, again.prompt_tokens)
        assert not np.array_equal(once.prompt_tokens, other.prompt_tokens)


def test_bursts_come_as_fast_as_is_said_over_a_mix_that_goes_on() -> None:
    workload = draw_bursts(seed=5, duration_s=60.0)
    phase_s = workload.arrival_s % 10.0
    in_burst = (phase_s >= 5.0) & (phase_s < 6.0)
    num_bursts = 6
    assert in_burst.sum() == pytest.approx(num_bursts * 306, rel=0.1)
    assert (~in_burst).sum() == pytest.approx(54 * 6, rel=0.4)
    assert np.mean(workload.prompt_tokens[in_burst] <= 256) > 0.99


@pytest.mark.parametrize("short_share", ablation.SHORT_SHARES)
def test_mixes_of_all_shares_keep_a_worker_as_busy(short_share: float) -> None:
    rate = busy_rate(short_share)
    drawn = ablation._Draw(short_share=short_share, rate=rate, duration_s=3000.0)(11)
    work_s = sum(PRIOR.seconds(int(n), 0) - PRIOR.floor_s for n in drawn.prompt_tokens)
    assert work_s / drawn.duration_s == pytest.approx(ablation.BUSY_SHARE, rel=0.1)


def test_variants_are_settings_of_the_config_and_the_defaults_leave_them_off() -> None:
    worker = Variant(queue="laps", mix="fill", window="fixed").worker([], is_unified=False)
    assert (worker.laps.queue, worker.laps.mix, worker.laps.window) == ("laps", "fill", "fixed")
    assert worker.laps.queue == "laps"
    plain = FCFS.worker([], is_unified=True)
    assert replace(plain, laps=msgspec.structs.replace(plain.laps, queue="priority")).laps == (
        type(plain.laps)()
    )
    with pytest.raises(msgspec.ValidationError):
        FCFS.worker(["max_step_ms=soon"], is_unified=True)
