"""DP attention on two GPUs, with graphs and without: what it says is what one GPU nearly says."""

import random
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.clock import ManualClock
from engine.core import Executor
from engine.engine import Engine
from engine.layers.context import Comm
from engine.request import SamplingParams
from engine.scheduling.dp_scheduler import DpScheduler
from tests.engine.test_gpu_engine import mixed_work
from tests.harness.in_process import answer, start_engine
from tests.harness.led_ranks import LedRanks
from tests.harness.rank_processes import RankProcesses
from tests.harness.tiny_models import LATENT_ON_GPU, save_model

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

ALONE = {
    "model__device": "cuda",
    "cache__num_blocks": 600,
    "scheduler__max_num_seqs": 12,
    "scheduler__max_num_batched_tokens": 96,
}
DP = {
    "workers__num_gpus": 1,
    "workers__expert_parallel": True,
    "workers__enable_dp_attention": True,
}
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
NEXT = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1, ignore_eos=True)
IN_FP32 = {
    "model__dtype": "float32",
    "model__attention__prefill": "reference",  # the one that computes in fp32
    "model__attention__decode": "reference",
    "execution__cuda_graphs": False,
}
IN_GRAPHS = {"execution__cuda_graphs": True}
OF_PROMPTS = IN_GRAPHS | {"laps__enable_batch_prefill_cuda_graph": True}
# Every step that can be is computed as two batches.
HALVES = {
    "execution__enable_two_batch_overlap": True,
    "execution__tbo_min_prompt_tokens": 2,
    "execution__tbo_min_decode_rows": 2,
}
# Of log-probabilities: sums in another order.
GAP = {"fp32": 0.01, "graphs": 0.25, "graphs of prompts": 0.25, "halves": 0.25}
# In 16 bits a choice between experts turns now and then: of one engine without ranks, too.
SHARE_ABOVE = {"fp32": 0.0, "graphs": 0.02, "graphs of prompts": 0.02, "halves": 0.02}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with RankProcesses(2, tmp_path_factory.mktemp("ranks"), "cuda") as started:
        yield started


def _build(comm: Comm, settings: dict[str, Any]) -> Executor:
    return start_engine(comm, **settings).executor


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("fp32", IN_FP32),
        ("graphs", IN_GRAPHS),
        ("graphs of prompts", OF_PROMPTS),
        ("halves", IN_GRAPHS | HALVES),
    ],
)
def test_tokens_are_those_that_one_gpu_nearly_says(
    name: str, form: dict[str, Any], ranks: RankProcesses, tmp_path: Path
) -> None:
    """More requests than rows, every kind of sampling; an idle rank at the end, and at first."""
    sizes = LATENT_ON_GPU["DeepseekV3ForCausalLM"] | {"max_position_embeddings": 1024}
    save_model(tmp_path, "DeepseekV3ForCausalLM", seed=5, **sizes)
    settings = ALONE | {"model__path": str(tmp_path)} | form
    alone = start_engine(**{key: value for key, value in settings.items() if key not in HALVES})
    work = [(list(range(40, 51)), GREEDY), *mixed_work(seed=7, count=60)]
    with LedRanks(ranks, _build, settings | DP) as led:
        engine = start_engine(ranks.comm, **settings, **DP)
        engine.core.wrap_executor(led.lead)
        found = [*answer(engine, work[:1]), *answer(engine, work[1:])]
        scheduler = engine.core.scheduler
        assert isinstance(scheduler, DpScheduler)
        assert all(s.statistics().num_output_tokens > 100 for s in scheduler.of_rank)
    assert all(one.finish for one in found)
    is_greedy = [params == GREEDY for _, params in work]
    texts = [
        prompt + one.tokens
        for (prompt, _), one, greedy in zip(work, found, is_greedy, strict=True)
        if greedy
    ]
    assert len(texts) > 3
    gaps = []
    for text, scored in zip(texts, answer(alone, [(text, NEXT) for text in texts]), strict=True):
        pieces = [piece for r in scored.records if r.prompt for piece in r.prompt.pieces]
        chosen = [number for piece in pieces for number in piece.chosen]
        best = [numbers[0] for piece in pieces for numbers in piece.top_logprobs]
        assert len(chosen) == len(text) - 1
        gaps += [b - c for b, c in zip(best, chosen, strict=True)][-GREEDY.max_tokens :]
    num_above = sum(gap > GAP[name] for gap in gaps)
    assert num_above <= SHARE_ABOVE[name] * len(gaps), sorted(gaps)[-20:]


def test_two_batches_change_no_bit_where_sums_have_an_order(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    """Decode steps in graphs of halves, steps with prompts without any; then with drafts."""
    sizes = LATENT_ON_GPU["DeepseekV3ForCausalLM"] | {"max_position_embeddings": 1024}
    save_model(tmp_path, "DeepseekV3ForCausalLM", seed=5, **sizes)
    settings = ALONE | DP | IN_GRAPHS | {"model__path": str(tmp_path), "model__deterministic": True}
    work, said = mixed_work(seed=7, count=40), []
    for form in ({}, HALVES, HALVES | {"speculation__drafter": "ngram"}):
        with LedRanks(ranks, _build, settings | form) as led:
            engine = start_engine(ranks.comm, **settings, **form)
            engine.core.wrap_executor(led.lead)
            found = answer(engine, work)
            said.append([(one.tokens, [r.logprobs for r in one.records]) for one in found])
            counts = engine.executor.statistics().two_batches
        assert (counts is None) == (not form)
        if counts is not None:
            assert min(counts.num_split_prompts, counts.num_two_chunk, counts.num_replayed) > 3
    assert said[1] == said[0]
    assert [tokens for tokens, _ in said[2]] == [tokens for tokens, _ in said[0]]


def _build_with_key(comm: Comm, key: bytes, settings: dict[str, Any]) -> Engine:
    # On this clock no time passes, so that no load is given up.
    return start_engine(comm, key, ManualClock(), **settings)


def test_what_one_gpu_has_evicted_comes_back_to_either(
    ranks: RankProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conversations over caches that are much too small; answers are those without a cache."""
    sizes = LATENT_ON_GPU["DeepseekV3ForCausalLM"] | {"max_position_embeddings": 1024}
    save_model(tmp_path, "DeepseekV3ForCausalLM", seed=5, **sizes)
    settings = (
        ALONE
        | DP
        | {
            "model__path": str(tmp_path),
            "model__deterministic": True,
            "model__max_model_len": 320,
            "cache__num_blocks": 24,
            "scheduler__max_num_seqs": 3,
        }
    )
    rng, key = random.Random(7), secrets.token_bytes(32)
    first = [[rng.randrange(3, 90) for _ in range(140)] for _ in range(6)]
    more = [[rng.randrange(3, 90) for _ in range(9)] for _ in first]

    def converse(engine: Engine) -> list[list[int]]:
        said = []
        for turn in range(2):
            texts = [a + b * turn for a, b in zip(first, more, strict=True)]
            for at in range(0, len(texts), 2):
                found = answer(engine, [(text, GREEDY) for text in texts[at : at + 2]])
                said += [one.tokens for one in found]
        return said

    without = settings | {"cache__enable_prefix_caching": False}
    with LedRanks(ranks, _build_with_key, key, without) as led:
        engine = _build_with_key(ranks.comm, key, without)
        led.lead_engine(engine)
        expected = converse(engine)
    tiered = settings | {"cache__host_gib": 0.03}
    with LedRanks(ranks, _build_with_key, key, tiered) as led:
        engine = _build_with_key(ranks.comm, key, tiered)
        led.lead_engine(engine)
        monkeypatch.setattr(engine.host_tier, "load_seconds", lambda _: 0.0)
        assert converse(engine) == expected
        load = engine.load().host_tier
        assert load is not None
        assert load.num_loaded > 0
        assert load.num_corrupt == 0
        engine.close()
