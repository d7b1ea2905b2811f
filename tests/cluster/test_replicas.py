"""Two replicas of the ingress: metrics of the application, and a death that costs its own."""

import os
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from load_tests.testbed.deployed import Application, actor_pid, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow]

GENERATED = "vllm:generation_tokens_total"
NUM_STREAMS = 12
TOKENS = 160
NUM_LOOKS = 5  # each may be answered by either replica


def test_both_replicas_give_the_metrics_of_both(gang: Application) -> None:
    before = gang.metric(GENERATED)
    for _ in range(2 * NUM_LOOKS):
        gang.complete([5, 6, 7], max_tokens=3, extra_body={"ignore_eos": True})
    due = before + 2 * NUM_LOOKS * 3

    def values() -> set[float]:
        return {gang.metric(GENERATED) for _ in range(NUM_LOOKS)}

    # At least: `before` may lack the last answers of an earlier test.
    wait_until(lambda: len(values()) == 1 and min(values()) >= due, lambda: f"{values()} are {due}")
    assert gang.metric("laps_worker_up") == 1, "not once a replica"


def test_a_replica_that_dies_takes_its_own_streams_and_no_count_with_it(
    gang: Application,
) -> None:
    expected = gang.complete([5, 6, 7], max_tokens=TOKENS, extra_body={"ignore_eos": True})
    counted = gang.metric(GENERATED)
    begun: Counter[str] = Counter()

    def stream(_: int) -> str:
        tokens: list[int] = []
        with gang.client() as client:
            try:
                answer = client.completions.create(
                    model=gang.model,
                    prompt=[5, 6, 7],
                    max_tokens=TOKENS,
                    temperature=0,
                    stream=True,
                    extra_body={"ignore_eos": True, "return_token_ids": True},
                )
                for event in answer:
                    tokens += (event.choices[0].model_extra or {})["token_ids"]
                    begun["streams"] += len(tokens) == 1
            except (openai.APIError, OSError):
                return "broken" if tokens == expected[: len(tokens)] else "wrong"
        return "whole" if tokens == expected else "wrong"

    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        streams = [threads.submit(stream, number) for number in range(NUM_STREAMS)]
        wait_until(lambda: begun["streams"] > NUM_STREAMS // 2, "most streams have begun")
        victim = gang.replicas()[0]
        os.kill(actor_pid(victim, "serve"), signal.SIGKILL)
        seen = Counter(one.result() for one in streams)
    assert seen["wrong"] == 0, seen
    assert seen["whole"] > 0, f"{seen}: the other replica lost streams, too"
    wait_until(lambda: len(gang.replicas()) == 2 and victim not in gang.replicas(), "replaced")
    gang.wait_quiet()
    wait_until(lambda: gang.metric("laps_open_attempts") == 0, "no attempt is open")
    assert gang.metric(GENERATED) >= counted, "what the dead one counted is kept"
