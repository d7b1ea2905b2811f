"""DP attention with two batches at once: ranks split their own rows, and compute one rank's bits."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.runner.graphs import OverlapStatistics
from tests.engine.ranks.dp_stories import DpEngine, engine_of_one_rank
from tests.engine.ranks.exact_models import DP_FAULTS, snapped_mixtures
from tests.engine.ranks.test_dp_attention import (
    LONG,
    PROMPT,
    WITH_PROMPT,
    _answers,
    _answers_of_one_rank,
    _kinds,
    _requests,
    _said,
)
from tests.engine.ranks.test_dp_attention import folder as folder
from tests.engine.ranks.test_dp_attention import two as two
from tests.harness.rank_processes import RankProcesses


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
