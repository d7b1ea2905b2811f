"""Length-aware placement in a whole application: pools, prefixes found again, `/laps_status`."""

import httpx
import pytest

from load_tests.testbed.deployed import PATIENCE_S, Application, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def _status(application: Application) -> dict[str, object]:
    response = httpx.get(f"{application.url}/laps_status", timeout=PATIENCE_S)
    assert response.status_code == 200, response.text
    status: dict[str, object] = response.json()
    return status


def test_the_status_names_every_worker_and_its_pool(disaggregated: Application) -> None:
    status = _status(disaggregated)
    pools = status["pools"]
    assert isinstance(pools, dict)
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

    def known() -> tuple[int, int]:
        """What the allocator knows: how many blocks are cached, and tokens queued."""
        workers = _status(disaggregated)["workers"]
        assert isinstance(workers, list)
        num_blocks = sum(worker["num_cached_blocks"] for worker in workers)
        return num_blocks, sum(worker["queued_tokens"] for worker in workers)

    wait_until(lambda: known()[1] == 0, "nothing is under way")
    due_blocks = known()[0] + len(first_turn) // 16
    assert num_cached(first_turn) == 0
    # At least: it may hear of blocks that other tests cached only now.
    wait_until(lambda: known()[0] >= due_blocks, "the allocator heard of the cached blocks")
    wait_until(lambda: known()[1] == 0, "nothing is under way")
    assert num_cached([*first_turn, *range(300, 500)]) == len(first_turn)
