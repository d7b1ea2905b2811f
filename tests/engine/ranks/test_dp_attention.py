"""DP attention: ranks with requests of their own share the experts, and compute one rank's bits."""

import shutil
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import WorkerError
from engine.layers.row_exchange import Padding, RowExchange, choose_padding
from engine.messages import TokenRecord
from engine.plan import StepPlan
from engine.ranks.rank import Rank
from engine.request import SamplingParams
from engine.runner.expert_load import ExpertLoads
from engine.runner.graph_sizes import GraphSize
from engine.runner.graphs import GraphOutput, StepGraphs
from kernels.attention.protocol import AttentionStep
from tests.engine.ranks.dp_stories import (
    BLOCK_SIZE,
    DpEngine,
    ExactEngine,
    engine_of_one_rank,
)
from tests.engine.ranks.exact_models import DP_FAULTS, save_whole_numbers, snapped_mixtures
from tests.harness.drafters import Guesser
from tests.harness.rank_processes import TIMEOUT_S, RankProcesses
from tests.harness.tiny_models import VOCAB_SIZE, save_model

GREEDY = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=14, temperature=1.2, top_p=0.9, seed=5, ignore_eos=True)
SCORED = msgspec.structs.replace(GREEDY, logprobs=2, max_tokens=5)
WITH_PROMPT = msgspec.structs.replace(SCORED, prompt_logprobs=3)
LONG = msgspec.structs.replace(GREEDY, max_tokens=40)
# A dense layer between mixtures with a shared expert.
SETTINGS = {"num_hidden_layers": 3, "mlp_only_layers": [1]}
PROMPT = [5, 130, 7, 66, 9, 65, 0, 33, 98, 12, 71, 4, 44]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with RankProcesses(2, tmp_path_factory.mktemp("two")) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    save_model(found, "Qwen2MoeForCausalLM", **SETTINGS)
    save_whole_numbers(found, seed=3)
    return found


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    with snapped_mixtures():
        yield


def _kinds(plan: StepPlan) -> tuple[str, ...]:
    return tuple(
        "idle" if not one.rows else "decode" if one.is_decode else "extend" for one in plan.of_ranks
    )


def _said(records: Sequence[TokenRecord]) -> list[object]:
    """Tokens, ends and all scores, whatever the pieces were in which a prompt was computed."""
    said: list[object] = [(r.index, r.token_id, r.logprobs, r.finish) for r in records]
    pieces = [piece for r in records if r.prompt is not None for piece in r.prompt.pieces]
    said += [number for piece in pieces for number in piece.chosen]
    said += [ids for piece in pieces for ids in piece.top_ids]
    return said


def _requests() -> list[tuple[list[int], SamplingParams]]:
    kinds = [GREEDY, DRAWN, SCORED, WITH_PROMPT]
    lengths = [5, 23, 2, 17, 9, 31, 1, 12, 20, 4]
    return [
        (list(range(7 * i, 7 * i + length)), kinds[i % len(kinds)])
        for i, length in enumerate(lengths)
    ]


@cache
def _answers_of_one_rank(folder: Path) -> object:
    """Computed by the first test that asks: each has its mixtures exact."""
    return _answers(engine_of_one_rank(folder), _requests())


def _answers(engine: ExactEngine, requests: Sequence[tuple[list[int], SamplingParams]]) -> object:
    keys = [engine.add(*request) for request in requests]
    engine.run()
    return [_said(engine.records[key]) for key in keys]


@pytest.mark.parametrize(("captures", "overlap"), [(False, False), (True, True)])
def test_tokens_and_scores_are_those_of_one_rank(
    captures: bool, overlap: bool, two: RankProcesses, folder: Path
) -> None:
    """Prompts in chunks beside decodes, idle ranks, more requests than rows."""
    expected = _answers_of_one_rank(folder)
    with DpEngine(two, folder, captures=captures, overlap=overlap) as shared:
        assert _answers(shared.engine, _requests()) == expected
    kinds = {_kinds(plan) for plan in shared.engine.plans}
    assert {("extend", "extend"), ("decode", "decode"), ("extend", "decode")} <= kinds
    assert any("idle" in kind for kind in kinds)
    assert len({str(said) for said in expected}) == len(_requests())


@pytest.mark.parametrize("overlap", [False, True])
def test_ranks_replay_graphs_of_prompts_together(
    overlap: bool, two: RankProcesses, folder: Path
) -> None:
    """All ranks the same one: those that decode, those without rows; one may compute apart."""
    expected = _answers_of_one_rank(folder)
    with DpEngine(two, folder, captures_prompts=True, overlap=overlap) as shared:
        assert _answers(shared.engine, _requests()) == expected
        counts = shared.executor.statistics().prompt_steps
    kinds = {_kinds(plan) for plan in shared.engine.plans}
    assert {("extend", "extend"), ("decode", "decode"), ("extend", "decode")} <= kinds
    assert counts is not None
    assert counts.num_replayed >= 3


def guesser_of(
    engine: ExactEngine, prompts: Sequence[Sequence[int]], *, error_rate: float
) -> Guesser:
    """Guesses what `engine` answered to `prompts`, all that it was given."""
    said = {
        tuple(prompt): engine.tokens(key)
        for prompt, key in zip(prompts, engine.records, strict=True)
    }
    return Guesser(
        lambda request: said[tuple(request.tokens[: request.num_prompt_tokens])],
        vocab_size=VOCAB_SIZE,
        error_rate=error_rate,
    )


@pytest.mark.parametrize(
    ("overlap", "captures"),
    [
        (False, ()),
        (True, ("prompts", "drafts")),
        pytest.param(True, (), marks=pytest.mark.nightly),
        pytest.param(True, ("prompts",), marks=pytest.mark.nightly),
        pytest.param(False, ("prompts",), marks=pytest.mark.nightly),
        pytest.param(False, ("prompts", "drafts"), marks=pytest.mark.nightly),
    ],
)
def test_drafts_of_a_rank_change_no_token(
    overlap: bool, captures: tuple[str, ...], two: RankProcesses, folder: Path
) -> None:
    """Some right and some wrong, of rows on one rank or on both, beside rows without any."""
    alone, requests = engine_of_one_rank(folder), [*_requests(), (PROMPT, LONG), (PROMPT[3:], LONG)]
    expected = _answers(alone, requests)
    guesser = guesser_of(alone, [prompt for prompt, _ in requests], error_rate=0.3)
    settings = {f"captures_{kind}": True for kind in captures}
    with DpEngine(two, folder, overlap=overlap, drafter=guesser, **settings) as shared:
        replays = _note_replays(shared.executor._graphs.verify)
        assert _answers(shared.engine, requests) == expected
        counts = shared.engine.scheduler.drafting.counts
        assert (len(replays) > 3) == ("drafts" in captures)
    kinds = {tuple(bool(one.drafts) for one in plan.of_ranks) for plan in shared.engine.plans}
    assert kinds >= {(True, False), (False, True), (False, False)}
    assert 0 < counts.num_accepted < counts.num_drafted
    assert not shared.engine.scheduler.drafting.kept_keys()


def _note_replays(graphs: StepGraphs | None) -> list[GraphSize]:
    """From now on it has the size of each replay."""
    found: list[GraphSize] = []
    if graphs is not None:
        replay = graphs.replay

        def noted(size: GraphSize, step: AttentionStep) -> GraphOutput:
            found.append(size)
            return replay(size, step)

        graphs.replay = noted  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("captures_prompts", [False, True])
def test_tokens_of_experts_are_those_of_all_ranks(
    captures_prompts: bool, two: RankProcesses, folder: Path
) -> None:
    """Each token once, of whichever rank; padding never."""
    with DpEngine(two, folder, captures_prompts=captures_prompts) as shared:
        ours = shared.engine
        loads = ExpertLoads(shared.executor.model, read_every=1, num_ranks=2)
        shared.executor.expert_loads = loads
        for rank, (prompt, max_tokens) in enumerate(((PROMPT, 4), (PROMPT[:5], 20))):
            params = msgspec.structs.replace(GREEDY, max_tokens=max_tokens)
            ours.add(prompt, params, rank=rank)
        ours.run()
        ours.add([3], msgspec.structs.replace(GREEDY, max_tokens=3), rank=1)
        ours.run()  # the last step's is read behind it
    assert loads.newest is not None
    num_tokens = (
        len(PROMPT) + 3 + 5 + 19 + 2
    )  # all but the last token of each, and but the last step
    num_active = shared.executor.model.spec.mixture.num_active
    assert sum(loads.newest.counts[0]) == num_tokens * num_active


@pytest.mark.parametrize("captures", [False, True])
def test_a_rank_without_rows_takes_part(captures: bool, two: RankProcesses, folder: Path) -> None:
    """In the first step, too, and in the only requests that its worker has."""
    requests = [(PROMPT, LONG)]
    expected = _answers(engine_of_one_rank(folder), requests)
    for rank in (0, 1):
        with DpEngine(two, folder, captures=captures) as shared:
            ours = shared.engine
            key = ours.add(*requests[0], rank=rank)
            ours.run()
            assert [_said(ours.records[key])] == expected
            idle = 1 - rank
            assert {_kinds(plan)[idle] for plan in ours.plans} == {"idle"}


def test_a_rank_may_compute_apart_while_others_replay(two: RankProcesses, folder: Path) -> None:
    """The last token of a prompt whose scores are asked for, beside a rank that decodes."""
    requests = [(list(range(17)), WITH_PROMPT), (PROMPT, LONG)]
    expected = _answers(engine_of_one_rank(folder), requests)
    with DpEngine(two, folder, captures=True) as shared:
        ours = shared.engine
        later = ours.add(*requests[1], rank=1)
        for _ in range(2):
            ours.step()
        first = ours.add(*requests[0], rank=0)
        ours.run()
        assert [_said(ours.records[key]) for key in (first, later)] == expected
    kinds = [_kinds(plan) for plan in ours.plans]
    assert kinds[2:4] == [("extend", "decode"), ("decode", "decode")]


def test_four_ranks_share_experts_in_groups_beside_latents(tmp_path: Path) -> None:
    save_model(tmp_path, "DeepseekV3ForCausalLM", num_hidden_layers=3, n_shared_experts=2)
    save_whole_numbers(tmp_path, seed=3)
    expected = _answers(engine_of_one_rank(tmp_path), _requests())
    (ranks := tmp_path / "ranks").mkdir()
    with RankProcesses(4, ranks) as four, DpEngine(four, tmp_path) as shared:
        assert _answers(shared.engine, _requests()) == expected
    assert {len(plan.of_ranks) for plan in shared.engine.plans} == {4}


@pytest.mark.parametrize("fault", DP_FAULTS)
def test_a_mistake_in_the_exchange_changes_tokens(
    fault: str, two: RankProcesses, folder: Path
) -> None:
    expected = _answers_of_one_rank(folder)
    with DpEngine(two, folder, fault=fault) as shared:
        assert _answers(shared.engine, _requests()) != expected


def test_a_prefix_is_found_on_the_rank_that_has_it_alone(two: RankProcesses, folder: Path) -> None:
    with DpEngine(two, folder) as shared:
        ours = shared.engine
        found = []
        for rank in (0, 1, 0, 1, None):
            key = ours.add(PROMPT, GREEDY, rank=rank)
            ours.run()
            found.append(ours.records[key][0].num_cached_tokens)
            assert ours.tokens(key) == ours.tokens(next(iter(ours.records)))
    cached = len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE
    assert found == [0, 0, cached, cached, cached]


def test_a_new_request_goes_where_its_prefix_is(two: RankProcesses, folder: Path) -> None:
    with DpEngine(two, folder) as shared:
        ours = shared.engine
        for rank in (1, None):
            key = ours.add(PROMPT, GREEDY, rank=rank)
            ours.run()
        assert ours.records[key][0].num_cached_tokens == 12
        assert [cache.num_cached_idle > 0 for cache in ours.caches.of_rank] == [False, True]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_rank_that_runs_out_of_blocks_preempts_its_own(
    overlap: bool, two: RankProcesses, folder: Path
) -> None:
    requests = [(list(range(9 * i, 9 * i + 10)), LONG) for i in range(4)]
    expected = _answers(engine_of_one_rank(folder), requests)
    with DpEngine(two, folder, overlap=overlap) as shared:
        ours = shared.engine
        keys = [ours.add(*requests[i], rank=int(i == 3)) for i in range(4)]
        ours.run()
        assert [_said(ours.records[key]) for key in keys] == expected
        preempted = [s.statistics().num_preemptions for s in ours.schedulers]
    assert preempted[0] > 0
    assert preempted[1] == 0


def test_an_aborted_request_leaves_its_rank_alone(two: RankProcesses, folder: Path) -> None:
    requests = [(PROMPT[:5], LONG), (PROMPT[5:], GREEDY)]
    expected = _answers(engine_of_one_rank(folder), requests[1:])
    with DpEngine(two, folder, overlap=True) as shared:
        ours = shared.engine
        gone, kept = (ours.add(*request, rank=1 - i) for i, request in enumerate(requests))
        for _ in range(3):
            ours.step()
        assert ours.scheduler.abort(gone)
        assert not ours.scheduler.abort(gone)
        ours.run()
        assert [_said(ours.records[kept])] == expected
        assert [cache.num_held for cache in ours.caches.of_rank] == [0, 0]


def test_a_row_that_is_not_finite_ends_alone(
    two: RankProcesses, folder: Path, tmp_path: Path
) -> None:
    """Its numbers reach the other rank's experts beside rows that go on."""
    requests = [(PROMPT, LONG), ([3, *PROMPT], DRAWN)]
    alone = engine_of_one_rank(folder)
    keys = [alone.add(*request) for request in requests]
    alone.run()
    said = {token for key in keys for token in alone.tokens(key)}
    broken = next(token for token in range(100) if token not in said | {3, *PROMPT})
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][broken] = torch.inf
    save_file(tensors, path, metadata={"format": "pt"})
    with DpEngine(two, tmp_path, overlap=True) as shared:
        ours = shared.engine
        good = [ours.add(*request, rank=rank) for rank, request in enumerate(requests)]
        bad = ours.add([9, broken, 9], LONG, rank=0)
        ours.run()
        assert [failure.key for failure in ours.failures] == [bad]
        assert [ours.tokens(key) for key in good] == [alone.tokens(key) for key in keys]


def test_the_death_of_a_rank_ends_the_step_of_all(folder: Path, tmp_path: Path) -> None:
    with RankProcesses(2, tmp_path) as ranks, DpEngine(ranks, folder) as shared:
        ours = shared.engine
        for rank in (0, 1):
            ours.add(PROMPT, LONG, rank=rank)
        for _ in range(3):
            ours.step()
        ranks.kill(1)
        with pytest.raises(WorkerError):
            ours.run()
        assert shared.has_ended.wait(TIMEOUT_S)
    assert [(end.rank, end.is_dead) for end in shared.ends] == [(1, True)]


def test_rows_are_padded_where_that_sends_less() -> None:
    assert choose_padding([8, 8], has_prompts=False) is Padding.MAX_LEN
    assert choose_padding([8, 1, 1, 1], has_prompts=False) is Padding.SUM_LEN
    assert choose_padding([8, 8, 1, 1], has_prompts=False) is Padding.MAX_LEN
    assert choose_padding([8, 8], has_prompts=True) is Padding.SUM_LEN


class _Apart:
    """A `Comm` of the last of three ranks, to which the others sent what it has, too."""

    rank = Rank(2, 3)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def exchange_rows(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        assert (sent, received) == ([2, 2, 2], [2, 2, 2])
        return x


def test_sums_may_be_in_the_order_of_the_ranks_whatever_the_padding() -> None:
    """Not by the comm's own sums, whose order depends on sizes and on the rank."""
    parts = (torch.randn(6, 8) * 10.0 ** torch.arange(8)).bfloat16()
    first, second, third = parts.view(3, 2, 8).float().unbind()
    expected = (first + second + third).bfloat16()
    padded = RowExchange.padded(_Apart(), 2, is_ordered=True)  # type: ignore[arg-type]
    unpadded = RowExchange.of_rows(_Apart(), [2, 2, 2], has_prompts=True)  # type: ignore[arg-type]
    for exchange in (padded, unpadded):
        assert torch.equal(exchange.scatter(parts, 2), expected)


def test_a_step_of_unequal_ranks_is_exchanged_in_its_own_sizes(two: RankProcesses) -> None:
    padded = RowExchange.of_rows(two.comm, [3, 5], has_prompts=False)
    assert padded.num_rows == (5, 5)
    assert RowExchange.of_rows(two.comm, [3, 5], has_prompts=True).num_rows == (3, 5)
