"""A worker whose ranks have requests of their own: its answers, and what a dead rank costs.

By day tests/engine/ranks/test_dp_engine.py shows the answers, over processes without Ray, and
test_gangs.py what the end of a rank costs an application.
"""

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.request import SamplingParams
from load_tests.testbed.deployed import MODEL, Application, Cluster, wait_replaced
from tests.harness.in_process import answer, start_engine
from tests.harness.tiny_models import save_model

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.nightly]

NAME = "dp-attention"
APART: dict[str, object] = {
    "workers.unified": 0,
    "workers.prefill": 1,
    "workers.decode": 1,
    "scheduler.max_num_seqs": 8,
    "scheduler.max_num_batched_tokens": 32,  # a prompt takes several steps, and its KV pieces
    "handoff.piece_bytes": 1,
}
NUM_TOKENS = 60
OVERRIDES: dict[str, object] = {
    "workers.unified": 1,
    "workers.tensor_parallel_size": 2,
    "workers.expert_parallel": True,
    "workers.enable_dp_attention": True,
    "workers.num_cpus": 0.1,  # so that it has a placement group
    "workers.stall_s": 4.0,
    "scheduler.overlap": True,
    "execution.expert_load_steps": 8,
    "debug": True,
}
PROMPTS = [list(range(11 * i, 11 * i + 5 + 9 * i)) for i in range(6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("experts")
    save_model(found, "DeepseekV3ForCausalLM", vocab_size=3072, max_position_embeddings=512)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, found)
    return found


@pytest.fixture(scope="module")
def application(cluster: Cluster, folder: Path) -> Iterator[Application]:
    found = cluster.run(NAME, OVERRIDES | {"model.path": str(folder)})
    yield found
    found.stop()


def _all_at_once(application: Application) -> list[list[int]]:
    def complete(prompt: list[int]) -> list[int]:
        extra = {"ignore_eos": True}
        return application.complete(prompt, max_tokens=NUM_TOKENS, extra_body=extra)

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(complete, PROMPTS))


def _expected(folder: Path) -> list[list[int]]:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    alone = start_engine(model__path=str(folder))
    return [one.tokens for one in answer(alone, [(prompt, params) for prompt in PROMPTS])]


def test_it_answers_as_an_engine_of_one_rank_and_a_dead_rank_costs_no_token(
    application: Application, folder: Path
) -> None:
    expected = _expected(folder)
    assert _all_at_once(application) == expected
    application.wait_quiet()
    [report] = application.laps_status()["reports"]
    experts = report["experts"]
    assert experts["layers"] == [1]
    assert 1 < experts["experts"][0] <= 12
    assert 1 <= experts["ranks"][0] <= 2
    assert experts["num_idle"][0] < 12

    [worker] = application.workers("unified")
    rank, before = f"rank-1.{worker}", application.pid(worker)
    with application.stream(PROMPTS[3], max_tokens=NUM_TOKENS, temperature=0.0) as tokens:
        seen = [next(tokens) for _ in range(3)]
        os.kill(application.pid(rank), signal.SIGKILL)
        seen += tokens
    assert seen == expected[3]
    wait_replaced(worker, NAME, before)
    application.wait_ready()
    assert _all_at_once(application) == expected
    application.wait_quiet()


@pytest.mark.parametrize("channel", ["gloo_pair", "object_store"])
@pytest.mark.parametrize("sizes", [(2, 2), (1, 2), (2, 1)])
def test_prefill_and_decode_apart_answer_as_an_engine_of_one_rank(
    cluster: Cluster, folder: Path, sizes: tuple[int, int], channel: str
) -> None:
    """And go on after the death of a rank that has no requests of rank 0."""
    asked = {
        "model.path": str(folder),
        "workers.prefill_tensor_parallel_size": sizes[0],
        "workers.decode_tensor_parallel_size": sizes[1],
        "handoff.channel": channel,
    }
    name = f"{NAME}-{sizes[0]}-{sizes[1]}-{channel.replace('_', '-')}"
    application = cluster.run(name, OVERRIDES | APART | asked)
    expected = _expected(folder)
    assert _all_at_once(application) == expected
    application.wait_quiet()
    role = "decode" if sizes[1] == 2 else "prefill"
    [worker] = application.workers(role)
    before = application.pid(worker)
    with application.stream(PROMPTS[3], max_tokens=NUM_TOKENS, temperature=0.0) as tokens:
        seen = [next(tokens) for _ in range(3)]
        os.kill(application.pid(f"rank-1.{worker}"), signal.SIGKILL)
        seen += tokens
    assert seen == expected[3]
    wait_replaced(worker, name, before)
    application.wait_ready()
    assert _all_at_once(application) == expected
    application.wait_quiet()
    application.stop()
