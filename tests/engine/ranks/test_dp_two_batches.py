"""DP attention with two batches at once: ranks split their own rows; the bits are one rank's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.plan import empty_plan
from engine.runner.dp_meetings import DpMeetings
from engine.runner.dp_steps import DpSteps
from engine.runner.graph_sizes import split_verify_sizes
from engine.runner.graphs import OverlapStatistics
from engine.runner.inputs import write_idle_batch
from engine.runner.overlap.batch_splits import BatchSplit
from engine.runner.overlap.split_decodes import _rows_of
from engine.runner.step_buffers import StepBuffers
from kernels.attention.protocol import build_step
from tests.engine.ranks.dp_stories import (
    DP_ATTENTION,
    DpEngine,
    build_executor,
    engine_of_one_rank,
    logits_of_halves,
)
from tests.engine.ranks.exact_models import DP_FAULTS, save_whole_numbers, snapped_mixtures
from tests.engine.ranks.test_dp_attention import (
    GREEDY,
    PROMPT,
    WITH_PROMPT,
    _answers,
    _answers_of_one_rank,
    _kinds,
    _note_replays,
    _requests,
    _said,
    guesser_of,
)
from tests.engine.ranks.test_dp_attention import folder as folder
from tests.engine.ranks.test_dp_attention import two as two
from tests.harness.rank_processes import RankProcesses
from tests.harness.tiny_models import save_model

LONG = msgspec.structs.replace(GREEDY, max_tokens=28)


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
    with DpEngine(two, folder, captures=captures, overlap=overlap, overlaps=True) as shared:
        assert _answers(shared.engine, _requests()) == expected
        counts = _counts(shared)
    assert counts.num_split_prompts > counts.num_two_chunk > 0
    assert (counts.num_split_decodes > 0) != captures
    assert (counts.num_replayed > 0) == captures
    kinds = {_kinds(plan) for plan in shared.engine.plans}
    assert {("extend", "extend"), ("decode", "decode"), ("extend", "decode")} <= kinds


@pytest.mark.parametrize("captures", [pytest.param(False, marks=pytest.mark.nightly), True])
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


@pytest.mark.parametrize("captures", [pytest.param(False, marks=pytest.mark.nightly), True])
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
        (True, True),
        pytest.param(False, False, marks=pytest.mark.nightly),
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
    guesser = guesser_of(alone, [prompt for prompt, _ in requests], error_rate=0.3)
    with DpEngine(
        two, folder, drafter=guesser, captures_drafts=captures, overlap=overlap, overlaps=True
    ) as shared:
        replays = _note_replays(shared.executor._graphs._split_verify)
        assert _answers(shared.engine, requests) == expected
        assert (len(replays) > 3) == captures
        assert _counts(shared).num_split_prompts > 0


def test_a_rank_computes_halves_apart_while_others_replay_them(
    two: RankProcesses, folder: Path
) -> None:
    """A short prompt whose scores are asked for, beside four rows with drafts."""
    requests = [(PROMPT[:3], WITH_PROMPT), *[(PROMPT[i:], LONG) for i in range(4)]]
    alone = engine_of_one_rank(folder)
    expected = _answers(alone, requests)
    guesser = guesser_of(alone, [prompt for prompt, _ in requests], error_rate=0.0)
    with DpEngine(two, folder, captures_drafts=True, overlaps=True, drafter=guesser) as shared:
        ours = shared.engine
        later = [ours.add(*request, rank=1) for request in requests[1:]]
        for _ in range(6):
            ours.step()
        num_replayed = _counts(shared).num_replayed
        first = ours.add(*requests[0], rank=0)
        ours.step()
        assert _counts(shared).num_replayed == num_replayed + 1
        ours.run()
        assert [_said(ours.records[key]) for key in (first, *later)] == expected
    assert _kinds(ours.plans[6]) == ("extend", "extend")


@pytest.mark.nightly
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


@pytest.mark.parametrize("architecture", ["Qwen2MoeForCausalLM", "DeepseekV3ForCausalLM"])
def test_logits_differ_less_than_the_demanded_tolerance(
    architecture: str, two: RankProcesses, tmp_path: Path
) -> None:
    save_model(tmp_path, architecture, seed=8, num_hidden_layers=3)
    whole, halves = (two.run(logits_of_halves, tmp_path, overlaps) for overlaps in (False, True))
    for ours, theirs in zip(whole, halves, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert (one - other).abs().max() < 1e-4


class _HostLengths:
    """Attention that plans by the host's numbers of keys."""

    max_few_tokens = 4

    def __init__(self, reads_lengths_on_device: bool) -> None:
        self.reads_lengths_on_device = reads_lengths_on_device


def test_rows_in_an_order_that_others_do_not_know_stay_whole(
    two: RankProcesses, folder: Path
) -> None:
    """Planned ahead of their drafts, they may have less history than planned."""
    executor = build_executor(two.comm, folder, DP_ATTENTION, captures=False, overlaps=True)
    own = msgspec.structs.replace(
        empty_plan(0),
        rows=[0, 1],
        num_new_tokens=[3, 2],
        num_computed_tokens=[9, 8],
        num_samples=[3, 2],
        ahead=[0],
        drafts=[(0, [4, 5]), (1, [6])],
    )
    steps = DpSteps(two.comm)
    for reads, expected in ((True, BatchSplit(row=1, token=2, is_decode=True)), (False, None)):
        attention: Any = _HostLengths(reads)
        meetings = DpMeetings(steps, executor._graphs, attention)
        meeting = meetings.of(steps.of(empty_plan(0, [own, empty_plan(0)])), executor.two_batches)
        assert meeting.split == expected
        halves = [exchange.num_rows for exchange in meeting.exchanges]
        assert halves == ([(2, 1), (3, 1)] if reads else [(5, 1)])


def test_a_rank_without_rows_has_spans_of_equal_length() -> None:
    """In a graph of rows in spans, whose halves begin with a span."""
    size = split_verify_sizes(4, 3, 12)[-1]
    buffers = StepBuffers(max_rows=4, max_tokens=12, max_block_ids=8, device=torch.device("cpu"))
    batch = write_idle_batch(buffers, padded_to=size)
    assert batch.attention.device_rows.cu_tokens.tolist() == [0, 3, 6, 9, 12]
    assert batch.attention.device_rows.num_keys.tolist() == [1] * 4
    assert buffers.on_device("slots").tolist() == [-1] * 12


def test_attention_plans_a_row_for_a_half_without_rows() -> None:
    step = build_step([1, 1], [6, 9], [[4, 7], [1, 2, 3]], "cpu")
    half = _rows_of(step, 4, 2)
    assert half.num_new_tokens.tolist() == [1]
    assert half.num_computed_tokens.tolist() == [0]
    assert (half.num_single_rows, half.cu_blocks.tolist()) == (1, [0, 1])
    assert _rows_of(step, 0, 4).num_computed_tokens.tolist() == [6, 9]
