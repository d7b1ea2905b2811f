"""The host tier of a deployment: what a worker evicts, its successor finds and sends on."""

import os
import signal
from collections.abc import Iterator

import pytest

from engine.kv.host.shared_file import FOLDER
from load_tests.testbed.deployed import Application, Cluster, arena_name, wait_replaced, wait_until
from tests.harness.seeds import fresh_random

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.nightly]

NUM_PROMPTS = 6
PROMPT_TOKENS = 900
TIGHT: dict[str, object] = {
    "workers.prefill": 1,
    "workers.decode": 1,
    "cache.num_blocks": 128,
    "cache.host_gib": 0.1,
    "model.max_model_len": 1024,
    "lifetimes.supervisor_silence_s": 6.0,
}


def _arena_of(application: Application, role: str) -> str | None:
    (worker,) = application.workers(role)
    return application.call_in_workers(arena_name)[worker]


@pytest.fixture(scope="module")
def application(cluster: Cluster) -> Iterator[Application]:
    application = cluster.run("host-tier", TIGHT)
    application.wait_ready()
    name = _arena_of(application, "prefill")
    assert name is not None
    yield application
    application.stop()
    wait_until(lambda: not (FOLDER / name).exists(), "the arena is gone with the last worker")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = fresh_random()
    return [[rng.randrange(3, 3000) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)]


def _ask_until_loaded(
    application: Application, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    """Ask in turn, so that each prompt has been evicted when it is asked again."""

    def ask_all() -> bool:
        assert [application.complete(prompt, max_tokens=6) for prompt in prompts] == answers
        return application.metric("laps_host_tier_loaded_blocks_total") > 0

    wait_until(ask_all, "blocks are loaded")


def test_evicted_blocks_come_back_are_sent_on_and_outlive_their_worker(
    application: Application, prompts: list[list[int]]
) -> None:
    answers = [application.complete(prompt, max_tokens=6) for prompt in prompts]
    name = _arena_of(application, "prefill")
    assert _arena_of(application, "decode") is None
    _ask_until_loaded(application, prompts, answers)
    assert application.metric("laps_host_tier_corrupt_blocks_total") == 0
    (worker,) = application.workers("prefill")
    pid = application.pid(worker)
    os.kill(pid, signal.SIGKILL)
    wait_replaced(worker, application.name, pid)
    application.wait_ready()
    assert _arena_of(application, "prefill") == name
    wait_until(
        lambda: application.metric("laps_host_tier_usage") > 0, "what was stored is still there"
    )
    _ask_until_loaded(application, prompts, answers)
    application.wait_quiet()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_conversation_goes_on_from_the_answers_that_its_decode_worker_stored(
    cluster: Cluster, prompts: list[list[int]], num_ranks: int
) -> None:
    """No cache evicts anything: all that is loaded are answers."""
    answers = {"cache.host_answers": True, "cache.num_blocks": 1024}
    settings = TIGHT | answers | {"workers.tensor_parallel_size": num_ranks}
    application = cluster.run(f"host-answers-{num_ranks}", settings)
    application.wait_ready()
    assert _arena_of(application, "prefill") == _arena_of(application, "decode") is not None
    turns = iter(prompts)

    def take_two_turns() -> bool:
        prompt = next(turns)
        told = application.complete(prompt, max_tokens=60)
        again = prompt + told + prompt[:5]
        found = application.complete(again, max_tokens=6)
        assert found == application.complete(
            again, max_tokens=6, extra_body={"cache_salt": "other"}
        )
        return application.metric("laps_host_tier_loaded_blocks_total") > 0

    wait_until(take_two_turns, "an answer is loaded")
    assert application.metric("laps_host_tier_corrupt_blocks_total") == 0
    application.wait_quiet()
    application.stop()


def test_a_gang_stores_and_loads_parts_and_a_dead_rank_costs_no_stored_block(
    cluster: Cluster, prompts: list[list[int]]
) -> None:
    alone = {"workers.prefill": 0, "workers.decode": 0, "workers.unified": 1}
    gang = TIGHT | alone | {"workers.tensor_parallel_size": 2, "debug": True}
    application = cluster.run("host-tier-gang", gang)
    application.wait_ready()
    answers = [application.complete(prompt, max_tokens=6) for prompt in prompts]
    name = _arena_of(application, "unified")
    _ask_until_loaded(application, prompts, answers)
    (worker,) = application.workers("unified")
    before = application.pid(worker)
    os.kill(application.pid(f"rank-1.{worker}"), signal.SIGKILL)
    wait_replaced(worker, application.name, before)
    application.wait_ready()
    assert _arena_of(application, "unified") == name
    _ask_until_loaded(application, prompts, answers)
    assert application.metric("laps_host_tier_corrupt_blocks_total") == 0
    application.wait_quiet()
    application.stop()
    assert name is not None
    wait_until(lambda: not (FOLDER / name).exists(), "the arena is gone with the last worker")
