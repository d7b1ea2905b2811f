"""A model's own layer drafts on a GPU: no answer changes, graphs or not; exact in fp32."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.engine.speculation.eagle_heads import assert_same_drafts, record_proposals
from tests.engine.speculation.gpu_work import mixed_work
from tests.engine.speculation.mtp_models import plain_mtp, save_mtp_model
from tests.harness.in_process import GREEDY, answer, start_engine
from tests.harness.tiny_models import LATENT_ON_GPU

pytestmark = pytest.mark.gpu

BASE: dict[str, Any] = {
    "model__device": "cuda",
    "cache__num_blocks": 600,
    "scheduler__max_num_seqs": 24,
}
DRAFTS: dict[str, Any] = {
    "speculation__drafter": "mtp",
    "speculation__adaptive": False,
    "speculation__max_drafts": 3,
    "speculation__max_temperature": 9.0,
}


def _save(folder: Path, seed: int) -> Path:
    sizes = {**LATENT_ON_GPU["DeepseekV3ForCausalLM"], "max_position_embeddings": 1024}
    save_mtp_model(folder, seed=seed, **{**sizes, "num_hidden_layers": 3})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _save(tmp_path_factory.mktemp("model"), seed=5)


def _fixed(folder: Path, **overrides: object) -> dict[str, Any]:
    """Settings of deterministic mode."""
    return {**BASE, "model__path": str(folder), "model__deterministic": True, **overrides}


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """Deterministic mode's answers without drafts."""
    return [found.tokens for found in answer(start_engine(**_fixed(folder)), mixed_work(30))]


def test_no_answer_changes_and_graphs_draft_the_same(
    folder: Path, expected: list[list[int]]
) -> None:
    proposals = []
    for graphs in (True, False):
        engine = start_engine(**_fixed(folder, **DRAFTS, execution__cuda_graphs=graphs))
        proposals.append(record_proposals(engine))
        assert [found.tokens for found in answer(engine, mixed_work(30))] == expected
    assert_same_drafts(*proposals)


def test_steps_with_drafts_replay_graphs_and_change_no_answer(
    folder: Path, expected: list[list[int]]
) -> None:
    """Of latent attention, which reads a row's latents once a token there."""
    engine = start_engine(**_fixed(folder, **DRAFTS, speculation__max_graph_tokens=96))
    graphs = engine.executor._graphs.verify
    assert graphs is not None
    with patch.object(graphs, "replay", wraps=graphs.replay) as replay:
        assert [found.tokens for found in answer(engine, mixed_work(30))] == expected
    assert replay.call_count > 10


def test_drafts_in_fp32_are_those_of_an_independent_layer(tmp_path: Path) -> None:
    save_mtp_model(tmp_path, seed=6, max_position_embeddings=1024)
    engine = start_engine(
        **BASE,
        **DRAFTS,
        model__path=str(tmp_path),
        model__dtype="float32",
        model__attention__prefill="reference",
        model__attention__decode="reference",
    )
    proposals = record_proposals(engine)
    answer(engine, [(prompt, GREEDY) for prompt, _ in mixed_work(6)])
    assert len(proposals) > 30
    for tokens, drafts in proposals[::5]:
        assert drafts == plain_mtp(tmp_path).greedy_drafts(tokens, len(drafts)), tokens


def test_drafts_that_no_host_reads_over_latents_give_the_same_answers(tmp_path: Path) -> None:
    """Verified by the kernel that reads a row's latents once, in the target and in the layer.

    Other kernels than those of plain steps, so a near tie may end another way.
    """
    folder = _save(tmp_path, seed=8)
    settings = {**BASE, "model__path": str(folder), "model__dtype": "float16"}
    expected = [found.tokens for found in answer(start_engine(**settings), mixed_work(24))]
    for overlap, max_graph_tokens in ((False, 0), (True, 0), (True, 96)):
        engine = start_engine(
            **settings,
            **DRAFTS,
            scheduler__overlap=overlap,
            speculation__attention_backend="decode",
            speculation__max_graph_tokens=max_graph_tokens,
        )
        drafter = engine.core.scheduler.drafting.drafter
        assert drafter is not None
        assert drafter.can_propose_ahead == overlap
        found = [one.tokens for one in answer(engine, mixed_work(24))]
        num_same = sum(one == other for one, other in zip(found, expected, strict=True))
        assert num_same > 0.7 * len(expected), f"{num_same} of {len(expected)}"
