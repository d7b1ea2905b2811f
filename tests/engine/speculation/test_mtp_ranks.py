"""A model's own layer drafts where two ranks share the model, its layer too."""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from engine import build_drafting
from engine.build import Engine
from engine.layers.context import Comm
from tests.engine.ranks.exact_models import SnappingOps, save_whole_numbers, snapped_mixtures
from tests.engine.speculation.eagle_heads import (
    DRAFTS,
    assert_same_drafts,
    record_proposals,
)
from tests.engine.speculation.guessed_engines import (
    Asked,
    Kind,
    assert_same,
    exact_arithmetic,
    run,
    start_exact,
    with_shared_prefix,
)
from tests.engine.speculation.mtp_models import save_mtp_model
from tests.harness.led_ranks import LedRanks
from tests.harness.rank_processes import RankProcesses

SEED = random.SystemRandom().randrange(10**6)
KINDS: list[Kind] = [
    {"temperature": 0.0},
    {"temperature": 1.2},
    {"temperature": 0.7, "top_k": 8},
    {"temperature": 0.9, "frequency_penalty": 0.8, "prompt_logprobs": 1},
]
WHOLE_EXPERTS = {"workers__expert_parallel": True, "workers__expert_exchange_min_tokens": 8}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with RankProcesses(2, tmp_path_factory.mktemp("ranks")) as started:
        yield started


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    print("seed", SEED)
    path = tmp_path_factory.mktemp("mtp")
    save_mtp_model(path, seed=SEED)
    save_whole_numbers(path, SEED)
    return path


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    return with_shared_prefix(SEED, KINDS)


@contextmanager
def _exact() -> Iterator[None]:
    """Of the layer that guesses, too."""
    with ExitStack() as stack:
        stack.enter_context(exact_arithmetic())
        stack.enter_context(snapped_mixtures())
        stack.enter_context(patch.object(build_drafting, "build_ops", lambda _: SnappingOps()))
        yield


def _start(comm: Comm, folder: str, settings: dict[str, Any]) -> Engine:
    """Exact for as long as the process lives, if it is another rank's."""
    if comm.rank.index > 0:
        _for_good.enter_context(_exact())
    few = {"cache__num_blocks": 18, "model__max_model_len": 64}  # two prompts fit
    drafts = {**DRAFTS, "speculation__drafter": "mtp"}
    return start_exact(Path(folder), comm=comm, **{**drafts, **few, **settings})


_for_good = ExitStack()


@pytest.mark.parametrize(
    "settings", [{}, WHOLE_EXPERTS], ids=["parts of experts", "whole experts, tokens travel"]
)
def test_answers_and_drafts_are_those_of_one_rank(
    settings: dict[str, Any], ranks: RankProcesses, folder: Path, asked: list[Asked]
) -> None:
    """Preempted, and from cached prefixes, too."""
    alone = start_exact(folder, speculation__drafter="none")
    with _exact(), LedRanks(ranks, _start, str(folder), settings) as led:
        expected = run(alone, asked)
        one = _start(alone.executor.comm, str(folder), {})
        engine = _start(ranks.comm, str(folder), settings)
        led.lead_engine(engine)
        proposals = [record_proposals(each) for each in (one, engine)]
        for _ in range(2):
            for each in (one, engine):
                assert_same(run(each, asked), expected)
    assert_same_drafts(*proposals)
    assert engine.core.scheduler.statistics().num_preemptions > 0
