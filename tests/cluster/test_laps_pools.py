"""Length-aware placement in a whole application: pools, prefixes found again, `/laps_status`."""

from collections.abc import Iterator

import httpx
import pytest

from tests.cluster.running import Application, Cluster, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def pooled(cluster: Cluster) -> Iterator[Application]:
    """3 prefill workers in two pools and 1 decode worker."""
    application = cluster.run(
        "pooled",
        {
            "workers.prefill": 3,
            "workers.decode": 1,
            "laps.enable_laps_alloc": True,
            "laps.spill_margin_s": 0.0,
        },
    )
    yield application
    application.stop()


def _status(application: Application) -> dict[str, object]:
    response = httpx.get(f"{application.url}/laps_status", timeout=10.0)
    assert response.status_code == 200, response.text
    status: dict[str, object] = response.json()
    return status


def test_the_status_names_every_worker_and_its_pool(pooled: Application) -> None:
    status = _status(pooled)
    pools = status["pools"]
    assert isinstance(pools, dict)
    assert (len(pools["short"]), len(pools["long"])) == (1, 2)
    assert (status["enabled"], status["threshold"]) == (True, 256)
    assert status["moves"] == []


def test_a_prompt_goes_where_its_prefix_is(pooled: Application) -> None:
    """A short first turn is computed in the short pool; the second, long as a whole, follows it.

    By its whole length it would go to the long pool, where nothing of it is cached.
    """
    first_turn = [5 + index % 90 for index in range(208)]

    def num_cached(prompt: list[int]) -> int:
        body = {"model": pooled.model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        reply = httpx.post(f"{pooled.url}/v1/completions", json=body, timeout=30.0).json()
        return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])

    def is_told() -> bool:
        """The allocator knows what is cached, and that nothing is under way."""
        workers = _status(pooled)["workers"]
        assert isinstance(workers, list)
        num_blocks = sum(worker["num_cached_blocks"] for worker in workers)
        num_queued = sum(worker["queued_tokens"] for worker in workers)
        return bool(num_blocks >= len(first_turn) // 16 and num_queued == 0)

    assert num_cached(first_turn) == 0
    wait_until(is_told, "the allocator heard of the cached blocks")
    assert num_cached([*first_turn, *range(300, 500)]) == len(first_turn)
