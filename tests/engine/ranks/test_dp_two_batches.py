"""DP attention with two batches at once: ranks split their own rows, and compute one rank's bits."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.runner.graphs import OverlapStatistics
from tests.engine.ranks.dp_stories import DpEngine, engine_of_one_rank
from tests.engine.ranks.exact_models import DP_FAULTS, save_whole_numbers, snapped_mixtures
from tests.engine.ranks.test_dp_attention import (
    GREEDY,
    LONG,
    PROMPT,
    WITH_PROMPT,
    _answers,
    _answers_of_one_rank,
    _kinds,
    _note_replays,
    _requests,
    _said,
)
from tests.engine.ranks.test_dp_attention import folder as folder
from tests.engine.ranks.test_dp_attention import two as two
from tests.harness.drafters import Guesser
from tests.harness.rank_processes import RankProcesses
from tests.harness.tiny_models import save_model


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    with snapped_mixtures():
        yield


def _counts(shared: DpEngine) -> OverlapStatistics:
    found = shared.executor.statistics().two_batches
    assert found is not None
    return found


@pytest.mark.parametrize(("captures", "overlap"), [(False, False), (True, True)])
def test_tokens_and_scores_are_those_of_one_rank(
    captures: bool, overlap: bool, two: RankProcesses, folder: Path
) -> None:
    expected = _answers_of_one_rank(folder)
    given = {"captures": captures, "overlap": overlap, "overlaps": True}
    with DpEngine(two, folder, **given) as shared:
        assert _answers(shared.engine, _requests()) == expected
        counts = _counts(shared)
    assert counts.num_split_prompts > counts.num_two_chunk > 0
    assert (counts.num_split_decodes > 0) != captures
    assert (counts.num_replayed > 0) == captures
    kinds = {_kinds(plan) for plan in shared.engine.plans}
    assert {("extend", "extend"), ("decode", "decode"), ("extend", "decode")} <= kinds


@pytest.mark.parametrize("captures", [False, True])
def test_a_rank_without_rows_takes_part_in_both_halves(
    captures: bool, two: RankProcesses, folder: Path
) -> None:
    """The other one has three rows, and then one, which makes no halves."""
    requests = [(PROMPT, LONG), (PROMPT[3:], GREEDY), (PROMPT[:5], GREEDY)]
    expected = _answers(engine_of_one_rank(folder), requests)
    for rank in (0, 1):
        with DpEngine(two, folder, captures=captures, overlaps=True) as shared:
            keys = [shared.engine.add(*request, rank=rank) for request in requests]
            shared.engine.run()
            assert [_said(shared.engine.records[key]) for key in keys] == expected
            assert {_kinds(plan)[1 - rank] for plan in shared.engine.plans} == {"idle"}
            counts = _counts(shared)
        assert counts.num_split_prompts > 0
        assert counts.num_split_decodes + counts.num_replayed > 0


@pytest.mark.parametrize("captures", [False, True])
def test_ranks_with_many_rows_and_with_one_split_alike(
    captures: bool, two: RankProcesses, folder: Path
) -> None:
    requests = [(PROMPT, LONG), *[(PROMPT[i:], LONG) for i in range(1, 5)]]
    expected = _answers(engine_of_one_rank(folder), requests)
    with DpEngine(two, folder, captures=captures, overlaps=True) as shared:
        keys = [shared.engine.add(*request, rank=int(i > 0)) for i, request in enumerate(requests)]
        shared.engine.run()
        assert [_said(shared.engine.records[key]) for key in keys] == expected
        counts = _counts(shared)
    assert counts.num_split_decodes + counts.num_replayed > 20


@pytest.mark.parametrize(
    ("overlap", "captures"),
    [
        (False, False),
        (True, True),
        pytest.param(True, False, marks=pytest.mark.nightly),
        pytest.param(False, True, marks=pytest.mark.nightly),
    ],
)
def test_drafts_change_no_token(
    overlap: bool, captures: bool, two: RankProcesses, folder: Path
) -> None:
    """With graphs of drafts in halves, where every row lies in a span; an idle rank, too."""
    alone, requests = engine_of_one_rank(folder), [*_requests(), (PROMPT, LONG), (PROMPT[3:], LONG)]
    expected = _answers(alone, requests)
    said = {
        tuple(request[0]): alone.tokens(key)
        for request, key in zip(requests, alone.records, strict=True)
    }
    guesser = Guesser(
        lambda request: said[tuple(request.tokens[: request.num_prompt_tokens])],
        vocab_size=131,
        error_rate=0.3,
    )
    given = {"captures_drafts": captures, "overlap": overlap, "overlaps": True}
    with DpEngine(two, folder, drafter=guesser, **given) as shared:
        replays = _note_replays(shared.executor._graphs._split_verify)
        assert _answers(shared.engine, requests) == expected
        assert (len(replays) > 3) == captures
        assert _counts(shared).num_split_prompts > 0


def test_a_rank_computes_halves_apart_while_others_replay_them(
    two: RankProcesses, folder: Path
) -> None:
    """The last token of a prompt whose scores are asked for, beside three rows that decode."""
    requests = [(list(range(17)), WITH_PROMPT), *[(PROMPT[i:], LONG) for i in range(3)]]
    expected = _answers(engine_of_one_rank(folder), requests)
    with DpEngine(two, folder, captures=True, overlaps=True) as shared:
        ours = shared.engine
        later = [ours.add(*request, rank=1) for request in requests[1:]]
        for _ in range(4):
            ours.step()
        first = ours.add(*requests[0], rank=0)
        ours.run()
        assert [_said(ours.records[key]) for key in (first, *later)] == expected
        assert _counts(shared).num_replayed > 0
    kinds = [_kinds(plan) for plan in ours.plans]
    assert kinds[4:6] == [("extend", "decode"), ("decode", "decode")]


def test_four_ranks_split_beside_latents(tmp_path: Path) -> None:
    save_model(tmp_path, "DeepseekV3ForCausalLM", num_hidden_layers=3, n_shared_experts=2)
    save_whole_numbers(tmp_path, seed=3)
    expected = _answers(engine_of_one_rank(tmp_path), _requests())
    (ranks := tmp_path / "ranks").mkdir()
    with RankProcesses(4, ranks) as four, DpEngine(four, tmp_path, overlaps=True) as shared:
        assert _answers(shared.engine, _requests()) == expected
        assert _counts(shared).num_split_decodes > 0


@pytest.mark.parametrize("fault", DP_FAULTS)
def test_a_mistake_in_the_exchange_of_halves_changes_tokens(
    fault: str, two: RankProcesses, folder: Path
) -> None:
    expected = _answers_of_one_rank(folder)
    with DpEngine(two, folder, fault=fault, overlaps=True) as shared:
        assert _answers(shared.engine, _requests()) != expected
