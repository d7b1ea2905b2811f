"""What a run is said to mean: percentiles by class, limits kept, rates sustained."""

import numpy as np
import pytest

from engine.cost_model import PRIOR
from load_tests.simulation.cluster import ClusterSpec, serve
from load_tests.simulation.metrics import (
    Limits,
    Sample,
    build_sample,
    figures,
    good_share,
    is_sustained,
)
from load_tests.simulation.workload import Workload


def make_sample(ttft_s: list[float], *, is_short: bool = True, tpot_s: float = 0.01) -> Sample:
    num = len(ttft_s)
    return Sample(
        ttft_s=np.array(ttft_s),
        latency_s=np.array(ttft_s) + 1.0,
        tpot_s=np.full(num, tpot_s),
        is_short=np.full(num, is_short),
        duration_s=10.0,
    )


def test_figures_are_of_one_class_over_all_runs() -> None:
    samples = [make_sample([0.1, 0.3, 0.5]), make_sample([9.0], is_short=False)]
    short = figures(samples, "short", Limits(ttft_s=0.4))
    assert short.num_requests == 3
    assert short.ttft_p50_s == pytest.approx(0.3)
    assert short.late_share == pytest.approx(1 / 3)
    assert short.latency_mean_s == pytest.approx(1.3)
    assert figures(samples, "long", Limits()).ttft_p99_s == pytest.approx(9.0)
    assert figures(samples, "all", Limits()).num_requests == 4


def test_a_class_without_requests_has_no_figures() -> None:
    long = figures([make_sample([0.1])], "long", Limits())
    assert long.num_requests == 0
    assert np.isnan(long.ttft_p50_s)
    assert np.isnan(long.late_share)


def test_good_is_inside_every_limit() -> None:
    samples = [make_sample([0.1, 0.5]), make_sample([0.1, 0.1], tpot_s=0.06)]
    assert good_share(samples, Limits(ttft_s=0.4)) == 0.75
    assert good_share(samples, Limits(ttft_s=0.4, tpot_s=0.05)) == 0.25


def test_a_rate_is_not_sustained_while_its_backlog_grows() -> None:
    limits = Limits(ttft_s=1.0)
    steady, growing = [0.2] * 100, [0.01 * i for i in range(100)]
    overdue = [0.012 * i for i in range(100)]  # still 84 % in time, but ever later
    assert is_sustained([make_sample(steady)], limits)
    assert is_sustained([make_sample(growing)], limits)  # good to its very end
    assert not is_sustained([make_sample(overdue)], limits)
    late_at_last = [0.5] * 92 + [1.5] * 8
    assert is_sustained([make_sample(late_at_last)], Limits(ttft_s=1.0))
    worse_at_last = [0.1] * 75 + [0.5] * 16 + [1.5] * 9
    assert not is_sustained([make_sample(worse_at_last)], Limits(ttft_s=1.0))


def test_a_share_does_not_hide_that_long_prompts_wait_ever_longer() -> None:
    is_long = np.arange(2000) % 20 == 0
    waits_s = np.where(is_long, 0.01 * np.arange(2000), 0.05)
    sample = Sample(
        ttft_s=waits_s,
        latency_s=waits_s,
        tpot_s=np.zeros(2000),
        is_short=~is_long,
        duration_s=10.0,
    )
    assert good_share([sample], Limits()) > 0.9
    assert not is_sustained([sample], Limits())


def test_classes_are_by_what_was_computed() -> None:
    workload = Workload(
        name="turns",
        arrival_s=np.array([0.0, 2.0]),
        prompt_tokens=np.array([2048, 2148]),
        output_tokens=np.array([1, 1]),
        chains=[(1, 2, 3, 4), (1, 2, 3, 4)],
    )
    sample = build_sample(serve(ClusterSpec(), workload), threshold=256, costs=PRIOR)
    assert sample.is_short.tolist() == [False, True]
