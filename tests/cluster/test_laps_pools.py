"""Length-aware placement in a whole application: pools, prefixes found again, `/laps_status`."""

import httpx
import pytest

from load_tests.testbed.deployed import PATIENCE_S, Application, num_cached_blocks, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_the_status_names_every_worker_and_its_pool(disaggregated: Application) -> None:
    status = disaggregated.laps_status()
    pools = status["pools"]
    assert (len(pools["short"]), len(pools["long"])) == (1, 1)
    assert (status["enabled"], status["threshold"]) == (True, 256)
    assert status["moves"] == []


def test_a_prompt_goes_where_its_prefix_is(disaggregated: Application) -> None:
    """A short first turn is computed in the short pool; the second, long as a whole, follows it.

    By its whole length it would go to the long pool, where nothing of it is cached.
    """
    first_turn = [19 + index % 89 for index in range(208)]

    def num_cached(prompt: list[int]) -> int:
        body = {"model": disaggregated.model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        reply = httpx.post(
            f"{disaggregated.url}/v1/completions", json=body, timeout=PATIENCE_S
        ).json()
        return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])

    def knows_all() -> bool:
        """Whether nothing is queued, and the allocator has heard of every cached block."""
        workers = disaggregated.laps_status()["workers"]
        known = {worker["worker"]: worker["num_cached_blocks"] for worker in workers}
        cached = disaggregated.call_in_workers(num_cached_blocks)
        is_idle = not any(worker["queued_tokens"] for worker in workers)
        return is_idle and known == {name: cached[name] for name in known}

    wait_until(knows_all, "nothing is under way")
    assert num_cached(first_turn) == 0
    wait_until(knows_all, "the allocator has heard of the cached blocks")
    assert num_cached([*first_turn, *range(300, 500)]) == len(first_turn)
