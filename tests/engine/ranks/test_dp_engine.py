"""A whole engine with DP attention over two processes, built by its configuration."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.core import Executor
from engine.engine import Engine
from engine.kv.cache import check_blocks
from engine.layers.context import Comm
from engine.request import Constraint, ConstraintKind, SamplingParams
from engine.scheduling.dp_scheduler import DpScheduler
from engine.text.tokenizing import load_tokenizer
from tests.engine.ranks.test_shared_engine import MODEL, TEXTS, _assert_same
from tests.harness.in_process import answer, start_engine
from tests.harness.led_ranks import LedRanks
from tests.harness.rank_processes import RankProcesses
from tests.harness.tiny_models import save_model

SETTINGS: dict[str, Any] = {
    "scheduler__max_num_batched_tokens": 48,  # so that prompts are computed in chunks
    "scheduler__max_num_seqs": 4,
    "scheduler__overlap": True,
    "cache__num_blocks": 128,
    "cache__block_size": 8,
}
DP = {
    "workers__expert_parallel": True,
    "workers__enable_dp_attention": True,
    "speculation__drafter": "ngram",
}
REGEX = Constraint(ConstraintKind.REGEX, "[0-9]{3}-(ab|c){1,4}")
KINDS = (
    SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=0.8, seed=1, constraint=REGEX),
    SamplingParams(max_tokens=16, temperature=1.1, top_k=20, seed=-9, logprobs=2),
    SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=20),
    SamplingParams(max_tokens=0, temperature=0.0, label_token_ids=(5, 6)),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    save_model(found, "DeepseekV3ForCausalLM", vocab_size=3072, max_position_embeddings=512)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, found)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with RankProcesses(2, tmp_path_factory.mktemp("ranks")) as started:
        yield started


def _build(comm: Comm, settings: dict[str, Any]) -> Executor:
    return start_engine(comm, **settings).executor


def _requests() -> list[tuple[list[int], SamplingParams]]:
    encoded = load_tokenizer(MODEL).encode_batch(list(TEXTS), add_special_tokens=True)
    prompts = [list(ids) for ids in encoded]
    prompts.append([token for prompt in prompts for token in prompt] * 3)
    return [(prompts[i % len(prompts)], KINDS[i % len(KINDS)]) for i in range(10)]


def test_answers_are_those_of_one_rank(ranks: RankProcesses, folder: Path) -> None:
    """Structured output and scores of rows on any rank; more requests than rows."""
    settings = SETTINGS | {"model__path": str(folder)}
    alone = start_engine(**settings)
    with LedRanks(ranks, _build, settings | DP) as led:
        engine: Engine = start_engine(ranks.comm, **settings, **DP)
        engine.core.wrap_executor(led.lead)
        found = answer(engine, _requests())
        _assert_same(found, answer(alone, _requests()))
        _assert_same(answer(engine, _requests()), found)  # and now from cached prefixes
        scheduler = engine.core.scheduler
        assert isinstance(scheduler, DpScheduler)
        assert all(s.statistics().num_output_tokens > 0 for s in scheduler.of_rank)
        assert engine.load().num_blocks == 2 * 128
        check_blocks(engine.cache, scheduler.owners())
        assert engine.cache.num_held == 0
