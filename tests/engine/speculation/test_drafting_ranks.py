"""A model drafts where two ranks share it and the model that it drafts for."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.layers.context import SINGLE_RANK
from engine.speculation.draft_model import DraftModel
from tests.engine.ranks.exact_models import save_whole_numbers
from tests.engine.speculation.drafting_stories import exact_drafts, start_drafting
from tests.engine.speculation.eagle_heads import (
    DRAFT_VOCAB_SIZE,
    assert_same_drafts,
    record_proposals,
    save_head,
)
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
TWO_BATCHES = {
    "execution__enable_two_batch_overlap": True,
    "execution__tbo_min_prompt_tokens": 6,
    "execution__tbo_min_decode_rows": 2,
}
WHOLE_EXPERTS = {"workers__expert_parallel": True, "workers__expert_exchange_min_tokens": 8}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with RankProcesses(2, tmp_path_factory.mktemp("ranks")) as started:
        yield started


@pytest.fixture(scope="module", params=["mtp", "eagle3"])
def drafting(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, object], dict[str, object]]:
    """A model of whole numbers; what makes its own layer draft, or a head beside it; over ranks."""
    path, head = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("head")
    if request.param == "mtp":
        save_mtp_model(path, seed=SEED)
        save_whole_numbers(path, SEED)
        return path, {}, {}
    save_exact_model(
        path, "MixtralForCausalLM", seed=SEED, num_hidden_layers=4, num_local_experts=6
    )
    # Both ranks hold its one KV head, and the last has fewer tokens than the first.
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1}
    save_head(head, seed=SEED, draft_vocab_size=DRAFT_VOCAB_SIZE + 1, **heads)
    save_whole_numbers(head, SEED)
    settings = {"speculation__drafter": "eagle3", "speculation__model_path": str(head)}
    return path, settings, WHOLE_EXPERTS


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    return with_shared_prefix(SEED, KINDS)


def test_answers_and_drafts_are_those_of_one_rank(
    ranks: RankProcesses,
    drafting: tuple[Path, dict[str, object], dict[str, object]],
    asked: list[Asked],
) -> None:
    """Each rank has parts of all experts, or whole ones, to which tokens travel; preempted, too."""
    path, settings, over_ranks = drafting
    folder, shared = str(path), {**settings, **over_ranks}
    alone = start_exact(path, speculation__drafter="none")
    with exact_drafts(), LedRanks(ranks, start_drafting, folder, shared) as led:
        expected = run(alone, asked)
        one, engine = (
            start_drafting(SINGLE_RANK, folder, settings),
            start_drafting(ranks.comm, folder, shared),
        )
        led.lead_engine(engine)
        proposals = [record_proposals(each) for each in (one, engine)]
        for each in (one, engine):
            assert_same(run(each, asked), expected)
    assert_same_drafts(*proposals, num_at_least=10)
    assert engine.core.scheduler.statistics().num_preemptions > 0


def test_drafts_that_no_host_reads_change_no_answer(
    ranks: RankProcesses, tmp_path: Path, asked: list[Asked]
) -> None:
    """Steps overlap, drafts are partly right; each rank has whole experts, and tokens travel.

    Also from cached prefixes, and in steps that are computed as two batches.
    """
    save_mtp_model(tmp_path, seed=SEED)
    save_whole_numbers(tmp_path, SEED)
    make_guessable(tmp_path, SEED, strength=512)
    settings = WHOLE_EXPERTS | TWO_BATCHES | {"scheduler__overlap": True}
    alone = start_exact(tmp_path, speculation__drafter="none")
    with exact_drafts(), LedRanks(ranks, start_drafting, str(tmp_path), settings) as led:
        expected = run(alone, asked)
        engine = start_drafting(ranks.comm, str(tmp_path), settings)
        led.lead_engine(engine)
        for _ in range(2):
            assert_same(run(engine, asked), expected)
    drafter, counts = engine.draft_passes, engine.core.scheduler.drafting.counts
    assert isinstance(drafter, DraftModel)
    assert drafter.can_propose_ahead
    assert 0 < counts.num_accepted < counts.num_drafted
    told = engine.executor.statistics().two_batches
    assert told is not None
    assert min(told.num_split_prompts, told.num_split_decodes) > 0


def test_a_draft_model_over_two_ranks_is_as_right_as_the_target(
    ranks: RankProcesses, tmp_path: Path, asked: list[Asked]
) -> None:
    """Of the target's own weights, it is always right: each rank has its heads of both."""
    save_exact_model(tmp_path, seed=SEED)
    settings = {
        "speculation__drafter": "draft_model",
        "speculation__model_path": str(tmp_path),
        "scheduler__overlap": True,
        "cache__num_blocks": 128,
        "workers__sequence_parallel_min_tokens": 8,
    }
    alone = start_exact(tmp_path, speculation__drafter="none")
    with exact_drafts(), LedRanks(ranks, start_drafting, str(tmp_path), settings) as led:
        expected = run(alone, asked)
        engine = start_drafting(ranks.comm, str(tmp_path), settings)
        led.lead_engine(engine)
        for _ in range(2):
            assert_same(run(engine, asked), expected)
    counts = engine.core.scheduler.drafting.counts
    assert counts.num_accepted == counts.num_drafted > 20
