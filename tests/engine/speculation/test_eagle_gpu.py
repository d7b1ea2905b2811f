"""An EAGLE-3 head on a GPU: no answer changes, with graphs and without; fp32 drafts are exact."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from demo_model.eagle_head import EagleHead
from tests.engine.speculation.eagle_heads import (
    assert_same_drafts,
    greedy_drafts,
    record_proposals,
    save_head,
)
from tests.engine.speculation.gpu_work import mixed_work
from tests.harness.in_process import GREEDY, answer, start_engine
from tests.harness.tiny_models import save_model

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 208}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
BASE: dict[str, Any] = {
    "model__device": "cuda",
    "cache__num_blocks": 600,
    "scheduler__max_num_seqs": 24,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target, head = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("head")
    save_model(
        target,
        "Qwen3ForCausalLM",
        seed=5,
        num_hidden_layers=4,
        max_position_embeddings=1024,
        dtype=torch.bfloat16,
        **SIZES,
        **HEADS,
    )
    save_head(head, seed=6, **SIZES, **HEADS)
    return target, head


@pytest.fixture(scope="module")
def expected(folders: tuple[Path, Path]) -> list[list[int]]:
    """Deterministic mode's answers without drafts."""
    plain = start_engine(**BASE, model__path=str(folders[0]), model__deterministic=True)
    return [found.tokens for found in answer(plain, mixed_work())]


def _settings(folders: tuple[Path, Path], **overrides: object) -> dict[str, Any]:
    target, head = folders
    drafts = {
        "speculation__drafter": "eagle3",
        "speculation__model_path": str(head),
        "speculation__adaptive": False,
        "speculation__max_drafts": 3,
        "speculation__max_temperature": 9.0,
    }
    return {**BASE, "model__path": str(target), **drafts, **overrides}


def test_no_answer_changes_and_graphs_draft_the_same(
    folders: tuple[Path, Path], expected: list[list[int]]
) -> None:
    proposals = []
    for graphs in (True, False):
        engine = start_engine(
            **_settings(
                folders,
                model__deterministic=True,
                execution__cuda_graphs=graphs,
                scheduler__overlap=False,  # else drafts do not come to the host
            )
        )
        proposals.append(record_proposals(engine))
        assert [found.tokens for found in answer(engine, mixed_work())] == expected
    assert_same_drafts(*proposals)


@pytest.mark.parametrize(
    "graphs", [{}, {"speculation__max_graph_tokens": 0}, {"execution__cuda_graphs": False}]
)
def test_no_answer_changes_where_drafts_stay_on_the_device(
    folders: tuple[Path, Path], expected: list[list[int]], graphs: dict[str, Any]
) -> None:
    engine = start_engine(**_settings(folders, model__deterministic=True, **graphs))
    drafting = engine.core.scheduler.drafting
    assert drafting.drafter is not None
    with patch.object(
        drafting.drafter, "propose_ahead", wraps=drafting.drafter.propose_ahead
    ) as ahead:
        assert [found.tokens for found in answer(engine, mixed_work())] == expected
    assert any(num for (asked,), _ in ahead.call_args_list for _, _, num in asked)
    assert engine.core.scheduler.drafting.counts.num_drafted > 200


def test_drafts_in_fp32_are_those_of_an_independent_head(folders: tuple[Path, Path]) -> None:
    target, folder = folders
    engine = start_engine(
        **_settings(
            folders,
            model__dtype="float32",
            model__attention__prefill="reference",
            model__attention__decode="reference",
        )
    )
    proposals = record_proposals(engine)
    answer(engine, [(prompt, GREEDY) for prompt, _ in mixed_work(6)])
    head = EagleHead.load(folder)
    assert len(proposals) > 30
    for tokens, drafts in proposals[::5]:
        assert drafts == greedy_drafts(target, head, tokens, len(drafts)), tokens


def test_a_handoff_between_two_gpu_stores_takes_features_along(
    folders: tuple[Path, Path],
) -> None:
    from configs.load import load_config
    from load_tests.testbed.local_handoff import LocalPair

    settings = _settings(folders, model__deterministic=True)
    one = start_engine(**settings)
    work = [(prompt, GREEDY) for prompt, _ in mixed_work(6)]
    expected = [found.tokens for found in answer(one, work)]
    dotted = {key.replace("__", "."): value for key, value in settings.items()}
    pair = LocalPair(load_config(None, dotted))
    assert [found.tokens for found in pair.answer(work)] == expected
    assert pair.decode.core.scheduler.drafting.counts.num_drafted > 50
