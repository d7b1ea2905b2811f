"""A model drafts over two GPUs, which share it: no answer changes, in graphs and without."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.cost_model import StepCosts, StepWork
from engine.engine import Engine
from engine.layers.context import Comm
from engine.scheduling.drafting import Drafting
from engine.speculation.draft_model import DraftModel
from engine.speculation.rank_passes import JoinedPasses
from tests.engine.speculation.eagle_heads import assert_same_drafts, record_proposals, save_head
from tests.engine.speculation.gpu_work import mixed_work
from tests.engine.speculation.mtp_models import save_mtp_model
from tests.harness.in_process import answer, start_engine
from tests.harness.led_ranks import LedRanks
from tests.harness.rank_processes import RankProcesses
from tests.harness.tiny_models import LATENT_ON_GPU, save_model

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

BASE: dict[str, Any] = {
    "model__device": "cuda",
    "model__deterministic": True,
    "workers__num_gpus": 1,
    "cache__num_blocks": 600,
    "scheduler__max_num_seqs": 24,
}
DRAFTS: dict[str, Any] = {
    "speculation__adaptive": False,
    "speculation__max_drafts": 3,
    "speculation__max_temperature": 9.0,
}
MTP = {**DRAFTS, "speculation__drafter": "mtp"}
GROUPED = {
    "hidden_size": 512,
    "intermediate_size": 736,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 1024,
    "dtype": torch.bfloat16,
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with RankProcesses(2, tmp_path_factory.mktemp("ranks"), "cuda") as started:
        yield started


def _build(comm: Comm, settings: dict[str, Any]) -> Engine:
    return start_engine(comm, **settings)


@contextmanager
def _shared(ranks: RankProcesses, settings: dict[str, Any]) -> Iterator[Engine]:
    with LedRanks(ranks, _build, settings) as led:
        engine = _build(ranks.comm, settings)
        led.lead_engine(engine)
        yield engine


def _tokens(engine: Engine) -> list[list[int]]:
    """None ends early: drafts after an end of sequence, unknown on the host, count as wrong."""
    work = [
        (prompt, msgspec.structs.replace(params, ignore_eos=True))
        for prompt, params in mixed_work(30)
    ]
    return [found.tokens for found in answer(engine, work)]


@pytest.mark.parametrize("expert_parallel", [False, True], ids=["parts of experts", "whole ones"])
def test_a_layer_over_two_gpus_changes_no_answer_and_graphs_draft_the_same(
    expert_parallel: bool, ranks: RankProcesses, tmp_path: Path
) -> None:
    sizes = {**LATENT_ON_GPU["DeepseekV3ForCausalLM"], "max_position_embeddings": 1024}
    save_mtp_model(tmp_path, seed=5, **{**sizes, "num_hidden_layers": 3})
    settings = {
        **BASE,
        "model__path": str(tmp_path),
        "workers__expert_parallel": expert_parallel,
    }
    _assert_drafts_change_no_answer(ranks, settings, MTP)


def test_a_head_over_two_gpus_changes_no_answer_and_graphs_draft_the_same(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    """Of an odd number of tokens; each GPU has one of the model's two KV heads, both the head's."""
    target, head = tmp_path / "target", tmp_path / "head"
    save_model(target, "Qwen3ForCausalLM", seed=7, **{**GROUPED, "num_hidden_layers": 4})
    heads = {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64}
    sizes = {"hidden_size": 512, "intermediate_size": 224, "draft_vocab_size": 91}
    save_head(head, seed=8, **sizes, **heads)
    drafts = {**DRAFTS, "speculation__drafter": "eagle3", "speculation__model_path": str(head)}
    _assert_drafts_change_no_answer(ranks, {**BASE, "model__path": str(target)}, drafts)


def _always_wait(
    _: Drafting,
    decodes: StepWork,
    num_held_rows: int,
    costs: StepCosts,
    *,
    num_elsewhere: int = 0,
) -> bool:
    """As `Drafting.pays_to_wait`: what pays hangs on how long steps take here."""
    return decodes.num_decode_rows > 0 and num_held_rows + num_elsewhere > 0


@pytest.mark.parametrize("max_graph_tokens", [0, 64])
def test_a_layer_drafts_on_gpus_with_requests_of_their_own(
    max_graph_tokens: int, ranks: RankProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With DP attention, whose answers are the same bits alone, beside others and on either GPU.

    Drafts over latents come to the host, so rows wait for them, and for those of the other GPU.
    """
    monkeypatch.setattr(Drafting, "pays_to_wait", _always_wait)
    sizes = {**LATENT_ON_GPU["DeepseekV3ForCausalLM"], "max_position_embeddings": 1024}
    save_mtp_model(tmp_path, seed=5, **{**sizes, "num_hidden_layers": 3})
    settings = {
        **BASE,
        "model__path": str(tmp_path),
        "workers__expert_parallel": True,
        "workers__enable_dp_attention": True,
    }
    with _shared(ranks, settings) as plain:
        expected = _tokens(plain)
        prompt, params = mixed_work(30)[0]
        params = msgspec.structs.replace(params, ignore_eos=True)
        [alone] = answer(plain, [(prompt, params)])
        assert alone.tokens == expected[0]
    drafts = {**MTP, "speculation__max_graph_tokens": max_graph_tokens}
    with _shared(ranks, settings | drafts) as engine:
        assert _tokens(engine) == expected
        assert engine.core.scheduler.drafting.counts.num_drafted > 200
        assert isinstance(engine.draft_passes, JoinedPasses)
        assert engine.draft_passes.num_met > 20


def _assert_drafts_change_no_answer(
    ranks: RankProcesses, settings: dict[str, Any], drafts: dict[str, Any]
) -> None:
    """And graphs draft the same as steps without them.

    Overlapped steps may leave drafts on the device, so those are compared of steps in turn.
    """
    with _shared(ranks, settings) as plain:
        expected = _tokens(plain)
    proposals = []
    for overlap, graphs in ((True, True), (False, True), (False, False)):
        way = {"scheduler__overlap": overlap, "execution__cuda_graphs": graphs}
        with _shared(ranks, settings | drafts | way) as engine:
            found = record_proposals(engine)
            assert _tokens(engine) == expected
            assert engine.core.scheduler.drafting.counts.num_drafted > 200
        if not overlap:
            proposals.append(found)
    assert_same_drafts(*proposals)


@pytest.mark.parametrize("max_graph_tokens", [0, 64])
def test_drafts_that_no_host_reads_are_right_on_both_gpus(
    max_graph_tokens: int, ranks: RankProcesses, tmp_path: Path
) -> None:
    """Of a draft model equal to the target; steps and passes are launched ahead."""
    save_model(tmp_path, "Qwen3ForCausalLM", seed=6, **GROUPED)
    settings = {**BASE, "model__path": str(tmp_path), "scheduler__overlap": True}
    drafts = {
        **DRAFTS,
        "speculation__drafter": "draft_model",
        "speculation__model_path": str(tmp_path),
        "speculation__max_graph_tokens": max_graph_tokens,
    }
    with _shared(ranks, settings) as plain:
        expected = _tokens(plain)
    with _shared(ranks, settings | drafts) as engine:
        assert isinstance(engine.draft_passes, DraftModel)
        assert engine.draft_passes.can_propose_ahead
        assert _tokens(engine) == expected
        counts = engine.core.scheduler.drafting.counts
    assert counts.num_accepted == counts.num_drafted > 200
