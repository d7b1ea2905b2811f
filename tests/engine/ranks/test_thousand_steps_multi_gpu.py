"""A thousand mixed steps, of each of which all ranks report the same digest of plan and tokens.

The leader compares every step and gives out no result of one that differs (`LeadingExecutor`), so
what is left to test is that the work was mixed.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.engine import Engine
from engine.layers.context import Comm
from engine.request import Constraint, ConstraintKind, SamplingParams
from engine.text.tokenizing import load_tokenizer
from tests.harness.in_process import answer, start_engine
from tests.harness.led_ranks import LedRanks
from tests.harness.rank_processes import RankProcesses

MODEL = Path(__file__).parents[3] / "demo_model" / "laps-demo"
NUM_STEPS = 1000
NUM_REQUESTS = 50  # added at once, again and again
SETTINGS: dict[str, Any] = {
    "laps__queue": "laps",
    "laps__mix": "fill",
    "laps__laps_length_threshold": 48,
    "scheduler__max_num_batched_tokens": 64,  # so that prompts are computed in chunks
    "scheduler__max_num_seqs": 8,
    "scheduler__overlap": True,
    "cache__block_size": 8,
    "cache__num_blocks": 88,  # two or three long requests fit
}
ON_GPUS: dict[str, Any] = {
    "model__device": "cuda",
    "workers__num_gpus": 1,
    "cache__block_size": 16,  # no kernel for GPUs has smaller ones
    "cache__num_blocks": 44,
}
A_NUMBER = '{"type":"integer","minimum":0,"maximum":99999}'
SCHEMA = f'{{"type":"object","properties":{{"a":{A_NUMBER}}},"required":["a"]}}'
CONSTRAINTS = (
    Constraint(ConstraintKind.JSON_SCHEMA, SCHEMA[:-1] + ',"additionalProperties":false}'),
    Constraint(ConstraintKind.REGEX, "[0-9]{3}-(ab|c){1,4}"),
)
SHARED_TEXTS = (
    "def settings():\n    return {",
    "import os\nimport sys\n\n\ndef main():\n    path = ",
)
Work = list[tuple[list[int], SamplingParams]]


@pytest.fixture(
    params=[
        pytest.param(("cpu", 2), marks=[pytest.mark.slow, pytest.mark.nightly], id="cpu"),
        *(
            pytest.param(
                ("cuda", size),
                marks=[
                    pytest.mark.multi_gpu,
                    pytest.mark.skipif(
                        torch.cuda.device_count() < size, reason=f"needs {size} GPUs"
                    ),
                ],
                id=f"{size}-ranks",
            )
            for size in (2, 4)
        ),
    ],
)
def place(request: pytest.FixtureRequest) -> tuple[str, int]:
    """The device, and the number of ranks."""
    place: tuple[str, int] = request.param
    return place


@pytest.fixture
def ranks(place: tuple[str, int], tmp_path: Path) -> Iterator[RankProcesses]:
    device, size = place
    with RankProcesses(size, tmp_path, device) as started:
        yield started


def _build(comm: Comm, settings: dict[str, Any]) -> Engine:
    return start_engine(comm, **settings)


def _params(rng: random.Random, number: int) -> SamplingParams:
    """One of every kind of sampling."""
    return rng.choice(
        (
            SamplingParams(max_tokens=rng.randrange(1, 40), temperature=0.0),
            SamplingParams(max_tokens=60, temperature=0.9, seed=number, ignore_eos=True),
            SamplingParams(max_tokens=25, temperature=1.2, top_k=7, top_p=0.9, seed=number),
            SamplingParams(max_tokens=20, temperature=1.0, min_p=0.1, logprobs=3, seed=number),
            SamplingParams(max_tokens=30, temperature=0.8, repetition_penalty=1.3, seed=number),
            SamplingParams(max_tokens=5, temperature=0.0, prompt_logprobs=2),
            SamplingParams(
                max_tokens=60, temperature=0.8, seed=number, constraint=rng.choice(CONSTRAINTS)
            ),
        )
    )


def _work(rng: random.Random) -> Work:
    """Short prompts and long ones, most of which begin with the same tokens as others."""
    encoded = load_tokenizer(MODEL).encode_batch(list(SHARED_TEXTS), add_special_tokens=True)
    work: Work = []
    for number in range(NUM_REQUESTS):
        prompt = list(rng.choice(encoded)) * rng.choice((1, 2, 4))
        prompt += [rng.randrange(3, 3000) for _ in range(rng.choice((1, 3, 20, 150)))]
        work.append((prompt, _params(rng, number)))
    return work


def test_all_ranks_have_the_same_digest_of_a_thousand_mixed_steps(
    ranks: RankProcesses, place: tuple[str, int]
) -> None:
    settings = SETTINGS | (ON_GPUS if place[0] == "cuda" else {})
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    ended: list[tuple[SamplingParams, str | None]] = []
    with LedRanks(ranks, _build, settings) as led:
        engine = _build(ranks.comm, settings)
        led.lead_engine(engine)
        while led.steps.num_ended < NUM_STEPS:
            work = _work(rng)
            found = answer(engine, work)
            ended += [(params, one.finish) for (_, params), one in zip(work, found, strict=True)]
    counted = engine.core.scheduler.statistics()
    assert counted.num_preemptions > 0
    assert counted.num_cached_tokens > 100 * len(ended) // NUM_REQUESTS
    assert {finish for params, finish in ended if params.constraint is not None} == {"stop"}
    assert engine.cache.num_held == 0
