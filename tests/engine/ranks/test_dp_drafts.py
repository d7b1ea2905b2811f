"""A model or a head drafts on two ranks with requests of their own: one rank's answers."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from engine.scheduling.dp_scheduler import DpScheduler
from engine.speculation.rank_passes import JoinedPasses
from tests.engine.ranks.exact_models import save_whole_numbers
from tests.engine.speculation.drafting_stories import exact_drafts, start_drafting
from tests.engine.speculation.eagle_heads import save_head
from tests.engine.speculation.exact_engines import start_exact
from tests.engine.speculation.guessed_engines import (
    Asked,
    Kind,
    assert_same,
    run,
    save_exact_model,
    with_shared_prefix,
)
from tests.engine.speculation.mtp_models import make_guessable, save_mtp_model
from tests.harness.in_process import Answer
from tests.harness.led_ranks import LedRanks
from tests.harness.rank_processes import RankProcesses
from tests.harness.seeds import seed_of

SEED = seed_of(__name__)
KINDS: list[Kind] = [
    {"temperature": 0.0},
    {"temperature": 1.2},
    {"temperature": 0.7, "top_k": 8},
    {"temperature": 0.9, "frequency_penalty": 0.8, "prompt_logprobs": 1},
]
HALVES = {
    "execution__enable_two_batch_overlap": True,
    "execution__tbo_min_prompt_tokens": 2,
    "execution__tbo_min_decode_rows": 2,
}
DP = {"workers__expert_parallel": True, "workers__enable_dp_attention": True}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with RankProcesses(2, tmp_path_factory.mktemp("ranks")) as started:
        yield started


def _save(drafter: str, folder: Path, other: Path) -> dict[str, object]:
    """A model of whole numbers with experts, and what drafts for it; returns the settings."""
    if drafter == "mtp":
        save_mtp_model(folder, seed=SEED)
        save_whole_numbers(folder, SEED)
        make_guessable(folder, SEED, strength=512)
        return {}
    experts = {"num_hidden_layers": 4, "num_local_experts": 6}
    save_exact_model(folder, "MixtralForCausalLM", seed=SEED, **experts)
    if drafter == "eagle3":
        save_head(other, seed=SEED)
        save_whole_numbers(other, SEED)
    else:
        save_exact_model(other, seed=SEED)
    return {"speculation__drafter": drafter, "speculation__model_path": str(other)}


class Saved(NamedTuple):
    """A model, what drafts for it by these settings, and what one rank without drafts answers."""

    folder: Path
    settings: dict[str, object]
    asked: list[Asked]
    expected: list[Answer]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """By the kind of drafter."""

    @cache
    def save(drafter: str) -> Saved:
        folder, other = (tmp_path_factory.mktemp(name) for name in ("model", "other"))
        settings = _save(drafter, folder, other)
        asked: list[Asked] = with_shared_prefix(SEED, KINDS)
        alone = start_exact(folder, speculation__drafter="none")
        with exact_drafts():
            return Saved(folder, settings, asked, run(alone, asked))

    return save


@pytest.mark.parametrize(
    ("drafter", "overlap", "splits"),
    [
        ("mtp", False, False),
        ("mtp", True, True),
        ("eagle3", False, True),
        ("eagle3", True, False),
        pytest.param("draft_model", False, False, marks=pytest.mark.nightly),
        ("draft_model", True, False),
        pytest.param("mtp", False, True, marks=pytest.mark.nightly),
        pytest.param("mtp", True, False, marks=pytest.mark.nightly),
        pytest.param("eagle3", True, True, marks=pytest.mark.nightly),
        pytest.param("draft_model", True, True, marks=pytest.mark.nightly),
    ],
)
def test_answers_are_those_of_one_rank_without_drafts(
    drafter: str, overlap: bool, splits: bool, ranks: RankProcesses, saved: Callable[[str], Saved]
) -> None:
    """Also preempted, and from cached prefixes; ranks have different numbers of requests.

    splits: every step that can be is computed as two batches.
    """
    folder, settings, asked, expected = saved(drafter)
    settings = settings | DP | {"scheduler__overlap": overlap} | (HALVES if splits else {})
    with exact_drafts(), LedRanks(ranks, start_drafting, str(folder), settings) as led:
        engine = start_drafting(ranks.comm, str(folder), settings)
        led.lead_engine(engine)
        for _ in range(2):
            assert_same(run(engine, asked), expected)
        assert_same(run(engine, asked[:1]), expected[:1])
        scheduler = engine.core.scheduler
        assert isinstance(scheduler, DpScheduler)
        counts = scheduler.drafting.counts
        assert counts.num_drafted > 40
        assert drafter != "mtp" or 0 < counts.num_accepted < counts.num_drafted
        assert all(one.drafting.counts is counts for one in scheduler.of_rank)
        passes = engine.draft_passes
        split = engine.executor.statistics().two_batches
        assert (split is not None and split.num_split_prompts > 0) == splits
        assert isinstance(passes, JoinedPasses)
        assert passes.num_met > 0, "passes of both ranks were launched as one"
