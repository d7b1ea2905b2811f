"""DP attention: ranks with requests of their own share the experts, and compute one rank's bits."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from engine.messages import TokenRecord
from engine.plan import StepPlan
from engine.request import SamplingParams
from tests.engine.ranks.dp_stories import DpEngine, engine_of_one_rank
from tests.engine.ranks.exact_models import save_whole_numbers, snapped_mixtures
from tests.harness.rank_processes import RankProcesses
from tests.harness.tiny_models import save_model

GREEDY = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=14, temperature=1.2, top_p=0.9, seed=5, ignore_eos=True)
SCORED = msgspec.structs.replace(GREEDY, logprobs=2, max_tokens=5)
WITH_PROMPT = msgspec.structs.replace(SCORED, prompt_logprobs=3)
SETTINGS = {"num_hidden_layers": 3, "mlp_only_layers": [1]}  # a dense layer, a shared expert


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


@pytest.mark.parametrize(("captures", "overlap"), [(False, False), (True, True)])
def test_tokens_and_scores_are_those_of_one_rank(
    captures: bool, overlap: bool, two: RankProcesses, folder: Path
) -> None:
    """Prompts in chunks beside decodes, idle ranks, more requests than rows."""
    alone = engine_of_one_rank(folder)
    expected = [alone.add(*request) for request in _requests()]
    alone.run()
    with DpEngine(two, folder, captures=captures, overlap=overlap) as shared:
        ours = shared.engine
        found = [ours.add(*request) for request in _requests()]
        ours.run()
    for our, their in zip(found, expected, strict=True):
        assert _said(ours.records[our]) == _said(alone.records[their])
    kinds = {_kinds(plan) for plan in ours.plans}
    assert {("extend", "extend"), ("decode", "decode"), ("extend", "decode")} <= kinds
    assert any("idle" in kind for kind in kinds)
    assert len({str(ours.tokens(key)) for key in found}) == len(found)
