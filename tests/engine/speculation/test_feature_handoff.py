"""What a drafter reads travels with a prompt's KV: the decode side drafts as one worker would."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from actors.kv_transfer.contracts import StagedPiece
from actors.kv_transfer.kv_pieces import KvPieces
from actors.kv_transfer.rank_pieces import RankPieces
from configs.load import load_config
from configs.schema import AppConfig
from engine.engine import Engine
from engine.layers.context import SINGLE_RANK
from engine.messages import Role
from engine.request import SamplingParams
from load_tests.testbed.local_handoff import LocalPair
from tests.engine.ranks.exact_models import save_whole_numbers
from tests.engine.speculation.drafting_stories import exact_drafts, start_drafting
from tests.engine.speculation.eagle_heads import (
    assert_same_drafts,
    record_proposals,
    save_head,
)
from tests.engine.speculation.guessed_engines import (
    Kind,
    save_exact_model,
    with_shared_prefix,
)
from tests.engine.speculation.mtp_models import make_guessable, save_mtp_model
from tests.harness.in_process import answer, start_engine
from tests.harness.led_ranks import LedRanks
from tests.harness.rank_processes import TIMEOUT_S, RankProcesses
from tests.harness.seeds import seed_of
from tests.harness.tiny_models import VOCAB_SIZE, save_model

SEED = seed_of(__name__)


@pytest.fixture(scope="module", params=["eagle3", "mtp"])
def settings(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, object]:
    target, head = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("head")
    folder: dict[str, object] = {}
    if request.param == "mtp":
        save_mtp_model(target, seed=SEED)
    else:
        save_model(target, seed=SEED, num_hidden_layers=4)
        save_head(head, seed=SEED)
        folder = {"speculation.model_path": str(head)}
    return {
        "model.path": str(target),
        "cache.num_blocks": 64,
        "cache.block_size": 4,
        "speculation.drafter": request.param,
        "speculation.adaptive": False,
        "speculation.max_drafts": 3,
        **folder,
    }


def test_tokens_and_drafts_behind_a_handoff_are_those_of_one_worker(
    settings: dict[str, object],
) -> None:
    draw = random.Random(SEED)
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    asked = [(draw.choices(range(3, VOCAB_SIZE), k=k), params) for k in (3, 4, 17, 38)]
    one = start_engine(**{key.replace(".", "__"): value for key, value in settings.items()})
    expected = [found.tokens for found in answer(one, asked)]
    pair = LocalPair(load_config(None, settings))
    assert [found.tokens for found in pair.answer(asked)] == expected
    there, here = pair.decode.core.scheduler.drafting.counts, one.core.scheduler.drafting.counts
    assert (there.drafted_at, there.accepted_at) == (here.drafted_at, here.accepted_at)
    assert there.num_drafted > 40
    assert pair.prefill.cache.num_held == pair.decode.cache.num_held == 0


class _PairOverRanks(LocalPair):
    """One side is of two ranks, and their pieces move through host memory."""

    def __init__(self, led: LedRanks, shared: Role, folder: str, settings: dict[str, Any]) -> None:
        self._led, self._shared = led, shared
        self._given = folder, settings
        super().__init__(load_config(None, {}))
        led.lead_engine(self.prefill if shared == "prefill" else self.decode)

    def build(self, config: AppConfig, role: Role) -> Engine:
        comm = self._led.ranks.comm if role == self._shared else SINGLE_RANK
        return start_drafting(comm, *self._given, role, self._note)

    def copy(self, block_ids: Sequence[int], there: Sequence[int]) -> None:
        asyncio.run(self._copy(block_ids, there))

    async def _copy(self, block_ids: Sequence[int], there: Sequence[int]) -> None:
        source, target = self._pieces(self.prefill), self._pieces(self.decode)
        piece = await source.read(block_ids)
        target.fence()
        moved: StagedPiece[Any] = StagedPiece(data=piece.data, digests=piece.digests)
        assert await target.write(there, moved), "digests differ"

    def _pieces(self, engine: Engine) -> KvPieces | RankPieces:
        if not engine.rank_stores:
            return KvPieces(engine.kv_store, num_threads=1)
        return RankPieces(engine.rank_stores, self._led.steps, TIMEOUT_S, num_threads=1)


def _save_drafting(drafter: str, folder: Path, head: Path, shared: Role) -> dict[str, object]:
    """A model of whole numbers that drafts; returns what an engine of it needs besides."""
    if drafter == "draft_model":
        save_exact_model(folder, seed=SEED)
        save_exact_model(head, seed=SEED + 1, num_hidden_layers=3)
        return {
            "speculation__drafter": "draft_model",
            "speculation__model_path": str(head),
            "speculation__prompts_on_prefill": True,
            "workers__unified": 0,
            "workers__prefill": 1,
            "workers__decode": 1,
            "workers__prefill_tensor_parallel_size": 1 + (shared == "prefill"),
            "workers__decode_tensor_parallel_size": 1 + (shared == "decode"),
        }
    if drafter == "mtp":
        save_mtp_model(folder, seed=SEED)
        save_whole_numbers(folder, SEED)
        make_guessable(folder, SEED, strength=512)
        return {}
    save_exact_model(folder, seed=SEED, num_hidden_layers=4)
    save_head(head, seed=SEED, num_attention_heads=4, num_key_value_heads=2)
    save_whole_numbers(head, SEED)
    return {"speculation__drafter": "eagle3", "speculation__model_path": str(head)}


@pytest.mark.parametrize("drafter", ["mtp", "eagle3", "draft_model"])
@pytest.mark.parametrize("shared", ["prefill", "decode"])
def test_tokens_and_drafts_behind_a_handoff_between_ranks_are_those_of_one_worker(
    shared: Role, drafter: str, tmp_path: Path
) -> None:
    """What is read moves with the KV heads: with one that all ranks have, or a part with each."""
    folder = tmp_path / "model"
    saved = _save_drafting(drafter, folder, tmp_path / "head", shared)
    kinds: list[Kind] = [{"temperature": 0.0, "max_tokens": 30}, {"temperature": 1.2}]
    asked = with_shared_prefix(SEED, kinds)
    # A pass computes both prompts, so that drafts begin at the same token.
    settings = {**saved, "cache__num_blocks": 64, "scheduler__max_num_batched_tokens": 72}
    with RankProcesses(2, tmp_path) as ranks, exact_drafts():
        one = start_drafting(SINGLE_RANK, str(folder), settings)
        proposals = [record_proposals(one)]
        expected = [found.tokens for found in answer(one, asked)]
        with LedRanks(ranks, start_drafting, str(folder), settings, shared) as led:
            pair = _PairOverRanks(led, shared, str(folder), settings)
            proposals.append(record_proposals(pair.decode))
            assert [found.tokens for found in pair.answer(asked)] == expected
    there, here = pair.decode.core.scheduler.drafting.counts, one.core.scheduler.drafting.counts
    assert (there.drafted_at, there.accepted_at) == (here.drafted_at, here.accepted_at)
    assert_same_drafts(*proposals, num_at_least=5)
    assert there.num_accepted > 0 or drafter != "mtp"
    if drafter == "draft_model":
        computed = [engine.draft_passes.num_computed_tokens for engine in (one, pair.decode)]
        assert computed[0] - computed[1] == sum(len(prompt) for prompt, _ in asked)
    assert pair.prefill.cache.num_held == pair.decode.cache.num_held == 0
