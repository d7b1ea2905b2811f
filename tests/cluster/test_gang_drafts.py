"""Workers for which a smaller model drafts answer as one process without it.

They are of two ranks, or apart: then its K and V of prompts come over the channel.
"""

from pathlib import Path

import pytest

from engine.request import SamplingParams
from load_tests.testbed.deployed import MODEL, Cluster
from tests.harness.in_process import answer, start_engine

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.nightly]

DRAFT = Path(MODEL).parent / "laps-demo-draft"
GANG: dict[str, object] = {
    "workers.unified": 1,
    "workers.tensor_parallel_size": 2,
    "workers.num_cpus": 0.1,  # so that it has a placement group
}
APART: dict[str, object] = {
    "workers.unified": 0,
    "workers.prefill": 1,
    "workers.decode": 1,
    "handoff.channel": "gloo_pair",
    "speculation.prompts_on_prefill": True,
}
OVERRIDES: dict[str, object] = {
    "scheduler.overlap": True,
    "speculation.drafter": "draft_model",
    "speculation.model_path": str(DRAFT),
    "speculation.adaptive": False,
    "speculation.max_drafts": 3,
    "debug": True,  # every step is compared between the ranks
}


@pytest.mark.parametrize("workers", [GANG, APART], ids=["gang", "apart"])
def test_workers_with_a_draft_model_answer_as_one_process(
    workers: dict[str, object], cluster: Cluster
) -> None:
    engine = start_engine(model__path=str(MODEL))
    prompts = [list(range(11, 11 + 7 * number)) for number in (1, 5, 12)]
    application = cluster.run("gang-drafts", OVERRIDES | workers)
    try:
        for sampling in ({"temperature": 0.0}, {"temperature": 0.6, "seed": 5}):
            params = SamplingParams(max_tokens=40, ignore_eos=True, **sampling)
            expected = [one.tokens for one in answer(engine, [(ids, params) for ids in prompts])]
            extra = {"ignore_eos": True}
            found = [
                application.complete(ids, max_tokens=40, extra_body=extra, **sampling)
                for ids in prompts
            ]
            assert found == expected
        accepted = "vllm:spec_decode_num_accepted_tokens_total"
        assert application.metric(accepted) > 20
    finally:
        application.stop()
