"""A simulated cluster: equal to one of real schedulers, repeatable, and sane in what it shows."""

from dataclasses import replace

import numpy as np
import pytest

from configs.schema import LapsConfig
from engine.cost_model import PRIOR
from load_tests.simulation.cluster import ClusterSpec, Served, serve
from load_tests.simulation.routing import Policy
from load_tests.simulation.scenario import with_policies
from load_tests.simulation.worker import WorkerSpec
from load_tests.simulation.workload import Mix, Workload, drawn
from tests.harness.seeds import fresh_seed

ONLINE = Mix(0.8)


def online(rate: float, num_requests: int, seed: int = 0, cv: float = 1.0) -> Workload:
    return drawn("online", ONLINE, rate=rate, num_requests=num_requests, seed=seed, cv=cv)


def assert_equal_times(one: Served, other: Served) -> None:
    np.testing.assert_allclose(one.first_s, other.first_s, rtol=0, atol=1e-7)
    np.testing.assert_allclose(one.last_s, other.last_s, rtol=0, atol=1e-7)


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("queue", ["fcfs", "laps"])
def test_the_light_cluster_equals_the_one_of_real_schedulers_and_place(
    queue: str, policy: Policy
) -> None:
    spec = with_policies(ClusterSpec(num_prefill=4), queue, policy)
    workload = online(60.0, 120, cv=2.0)
    served, expected = serve(spec, workload), serve(replace(spec, is_real=True), workload)
    assert_equal_times(served, expected)
    assert served.pool_sizes == expected.pool_sizes


@pytest.mark.parametrize("num_decode", [0, 2])
def test_so_it_does_with_decodes(num_decode: int) -> None:
    worker = WorkerSpec(keeps_decodes=num_decode == 0)
    spec = ClusterSpec(worker=worker, num_prefill=3, num_decode=num_decode)
    spec = with_policies(spec, "laps", Policy.LAPS)
    workload = online(25.0, 120)
    assert_equal_times(serve(spec, workload), serve(replace(spec, is_real=True), workload))


def test_one_seed_gives_one_result_and_another_seed_another() -> None:
    spec = with_policies(ClusterSpec(num_prefill=4, num_decode=2), "laps", Policy.LAPS)
    once, again = (serve(spec, online(40.0, 200, seed=5)) for _ in range(2))
    assert np.array_equal(once.first_s, again.first_s)
    assert np.array_equal(once.last_s, again.last_s)
    assert not np.array_equal(once.first_s, serve(spec, online(40.0, 200, seed=6)).first_s)


def test_a_lone_request_takes_what_its_steps_cost() -> None:
    workload = Workload(
        name="one",
        arrival_s=np.array([1.0]),
        prompt_tokens=np.array([300]),
        output_tokens=np.array([11]),
    )
    worker = WorkerSpec(keeps_decodes=True, host_s=0.002)
    served = serve(ClusterSpec(worker=worker, policy=Policy.PREDICTED), workload)
    assert served.ttft_s[0] == pytest.approx(0.002 + PRIOR.seconds(300, 0))
    base_s = PRIOR.floor_s + PRIOR.slopes_s[0] + PRIOR.decode_row_s
    keys = np.arange(301, 311)
    assert served.latency_s[0] - served.ttft_s[0] == pytest.approx(
        10 * base_s + PRIOR.decode_key_s * keys.sum()
    )
    assert served.tpot_s[0] == pytest.approx((served.last_s[0] - served.first_s[0]) / 10)


def test_more_decode_workers_make_tokens_faster_and_first_ones_no_sooner() -> None:
    spec = with_policies(ClusterSpec(num_prefill=4, num_decode=1), "laps", Policy.PREDICTED)
    few = serve(spec, online(50.0, 500))
    many = serve(replace(spec, num_decode=4), online(50.0, 500))
    assert np.mean(many.tpot_s) < 0.93 * np.mean(few.tpot_s)
    assert np.array_equal(many.first_s, few.first_s)


def test_decoders_without_room_make_requests_wait_but_lose_none() -> None:
    worker = WorkerSpec(max_kv_tokens=9000, max_rows=8)
    spec = with_policies(ClusterSpec(worker=worker, num_decode=1), "fcfs", Policy.ROUND_ROBIN)
    served = serve(spec, online(20.0, 60))
    assert np.all(served.last_s > served.first_s)
    assert np.max(served.tpot_s) > 4 * np.min(served.tpot_s)


def test_a_worker_joins_the_pool_that_the_traffic_needs() -> None:
    laps = LapsConfig(laps_rebalance_interval_s=1.0, rebalance_cool_down_s=2.0, spill_margin_s=60)
    spec = ClusterSpec(worker=WorkerSpec(laps=laps), num_prefill=4)
    spec = with_policies(spec, "laps", Policy.LAPS)
    long = drawn("long", Mix(0.1), rate=15.0, num_requests=300, seed=1)
    served = serve(spec, long)
    assert served.pool_sizes[0].num_short == 2
    assert served.pool_sizes[-1].num_short == 1
    assert len(served.moves) == 1
    assert "to long" in served.moves[0]


def test_turns_of_a_conversation_find_their_history_where_it_is() -> None:
    turns = [(0.0, 2048, (1, 2, 3, 4)), (2.0, 2600, (1, 2, 3, 4, 5)), (4.0, 2048, (9, 2, 3, 4))]
    workload = Workload(
        name="turns",
        arrival_s=np.array([at_s for at_s, _, _ in turns]),
        prompt_tokens=np.array([num for _, num, _ in turns]),
        output_tokens=np.array([5, 5, 5]),
        chains=[chain for _, _, chain in turns],
    )
    spec = with_policies(ClusterSpec(num_prefill=4), "laps", Policy.LAPS)
    served = serve(spec, workload)
    assert served.cached_tokens.tolist() == [0, 2048, 0]
    assert served.ttft_s[1] == pytest.approx(PRIOR.seconds(2600 - 2048, 2048))


def test_a_cache_that_is_too_small_gives_up_what_was_used_longest_ago() -> None:
    chains = [(1, 2), (3, 4), (1, 2), (5, 6), (1, 2), (3, 4)]
    workload = Workload(
        name="turns",
        arrival_s=np.arange(6.0),
        prompt_tokens=np.full(6, 1100),
        output_tokens=np.ones(6, dtype=np.int64),
        chains=chains,
    )
    worker = WorkerSpec(max_kv_tokens=4 * 512)
    served = serve(ClusterSpec(worker=worker, policy=Policy.PREDICTED), workload)
    assert served.cached_tokens.tolist() == [0, 0, 1024, 0, 1024, 0]


@pytest.mark.parametrize("seed", range(3))
def test_no_worker_moves_under_a_steady_load_that_both_pools_carry(seed: int) -> None:
    spec = with_policies(ClusterSpec(num_prefill=8), "laps", Policy.LAPS)
    workload = drawn("steady", Mix(0.9), rate=40.0, num_requests=1600, seed=seed)
    served = serve(spec, workload)
    assert served.moves == ()
    assert [(size.num_short, size.num_long) for size in served.pool_sizes] == [(4, 4)]


@pytest.mark.parametrize("policy", ["pressure", "ratio"])
def test_pools_never_run_empty_while_the_traffic_turns_over(policy: str) -> None:
    """All short, then mostly long, again and again, with pools that follow as fast as may be."""
    laps = LapsConfig(
        laps_rebalance_interval_s=0.5,
        rebalance_cool_down_s=0.0,
        min_pending_s=0.0,
        spill_margin_s=60.0,
        rebalance_policy="ratio" if policy == "ratio" else "pressure",
    )
    spec = with_policies(
        ClusterSpec(worker=WorkerSpec(laps=laps), num_prefill=4), "laps", Policy.LAPS
    )
    rng = np.random.default_rng(fresh_seed())
    arrival_s = np.sort(rng.uniform(0.0, 40.0, 1600))
    is_long = (arrival_s % 10.0 > 5.0) & (rng.random(1600) < 0.7)
    served = serve(
        spec,
        Workload(
            name="turning",
            arrival_s=arrival_s,
            prompt_tokens=np.where(is_long, 3000, 60),
            output_tokens=np.ones(1600, dtype=np.int64),
        ),
    )
    assert len(served.moves) > 1
    assert min(min(size.num_short, size.num_long) for size in served.pool_sizes) >= 1
    assert {size.num_short + size.num_long for size in served.pool_sizes} == {4}
