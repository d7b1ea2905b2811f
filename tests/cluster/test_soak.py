"""A short soak of the whole application in every run, a longer one at night."""

import random
from dataclasses import replace

import pytest

from load_tests.lab.soak import SoakOptions, render, soak
from tests.cluster.running import Cluster

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MINUTE = SoakOptions(seconds=60.0, seed=0, num_clients=4, num_cases=16, kill_every_s=15.0)
MARGIN_S = 600  # for the oracle, two deployments and the rest afterwards, on a slow machine


def _soak(cluster: Cluster, options: SoakOptions, rng: random.Random) -> None:
    report = soak(cluster, replace(options, seed=rng.randrange(2**32)))
    assert not report.violations, render(report)
    assert report.outcomes.num_right > report.options.num_cases, render(report)


@pytest.mark.timeout(60 + MARGIN_S)
def test_a_minute_of_clients_that_leave_and_workers_that_die_costs_no_token(
    cluster: Cluster, rng: random.Random
) -> None:
    _soak(cluster, MINUTE, rng)


@pytest.mark.nightly
@pytest.mark.timeout(600 + MARGIN_S)
def test_ten_minutes_of_it_leave_memory_files_tasks_and_blocks_as_they_were(
    cluster: Cluster, rng: random.Random
) -> None:
    _soak(cluster, SoakOptions(seconds=600.0, seed=0), rng)
