"""What a head keeps of a prefix that requests share is what each of them alone would have."""

import random
from pathlib import Path

import pytest
import torch

from engine.engine import Engine
from engine.request import Request, SamplingParams
from engine.speculation.feature_drafter import FeatureDrafter
from engine.turns import Turns
from kernels.reference import TorchOps
from tests.engine.speculation.eagle_heads import NUM_LAYERS, save_head
from tests.engine.speculation.exact_engines import start_exact
from tests.engine.speculation.guessed_engines import Asked, run
from tests.engine.speculation.mtp_models import save_mtp_model
from tests.harness.seeds import seed_of
from tests.harness.tiny_models import VOCAB_SIZE, save_model

SEED = seed_of(__name__)
BLOCK_SIZE = 4

# The first t + 2 tokens of a text -> entry t of the head's K and V, or latents, at various times.
Entries = dict[tuple[int, ...], list[torch.Tensor]]


@pytest.fixture(scope="module", params=["eagle3", "mtp"])
def drafting(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, object]]:
    """A model, and what an engine of it needs to draft."""
    target, head = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("head")
    settings: dict[str, object] = {
        "speculation__drafter": request.param,
        "speculation__max_temperature": 9.0,
        "speculation__max_drafts": 1,
    }
    if request.param == "mtp":
        save_mtp_model(target, seed=SEED)
        return target, settings
    save_model(target, seed=SEED, num_hidden_layers=NUM_LAYERS)
    save_head(head, seed=SEED)
    return target, {**settings, "speculation__model_path": str(head)}


class _Watched(FeatureDrafter):
    """Notes after each proposal what the head has kept of every token of those asked about."""

    def proposing(self, asked: list[tuple[Request, int]]) -> Turns[list[list[int]]]:
        found = yield from super().proposing(asked)
        self._note([request for request, _ in asked])
        return found

    def propose_ahead(self, asked: list[tuple[Request, int, int]]) -> list[list[int]]:
        found = super().propose_ahead(asked)
        self._note([request for request, _, _ in asked])
        return found

    def _note(self, requests: list[Request]) -> None:
        kept = self.executor.kv_store.tensor
        for request in requests:
            seat = self._seats.get(request.key)
            for t in range(seat.num_computed_tokens if seat else 0):
                place, offset = divmod(t, BLOCK_SIZE)
                entry = kept[request.block_ids[place], :, :, offset].clone()
                self.entries.setdefault(tuple(request.tokens[: t + 2]), []).append(entry)


def watch(engine: Engine) -> Entries:
    """Fills with each step of the engine."""
    drafter = engine.core.scheduler.drafting.drafter
    assert type(drafter) is FeatureDrafter
    drafter.__class__ = _Watched
    drafter.entries = {}
    return drafter.entries


def conversations() -> list[list[Asked]]:
    """Texts that part at the end of the third block, then the same ones with more behind them."""
    draw = random.Random(SEED)
    ids = range(3, VOCAB_SIZE)
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    shared = draw.choices(ids, k=3 * BLOCK_SIZE)
    texts = [[*shared, first, *draw.choices(ids, k=5)] for first in draw.sample(ids, 3)]
    longer = [[*text, *draw.choices(ids, k=6)] for text in texts]
    return [[(text, params) for text in these] for these in (texts, longer)]


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
def test_texts_that_part_at_the_end_of_a_block_keep_their_own_entries(
    drafting: tuple[Path, dict[str, object]], overlap: bool
) -> None:
    """In the block that ends there, and in those before it of longer texts."""
    folder, settings = drafting
    alone, together = (
        start_exact(
            folder,
            ops=TorchOps(),
            scheduler__overlap=overlap,
            scheduler__max_num_batched_tokens=96,  # so that one pass computes all texts
            cache__enable_prefix_caching=is_kept,
            **settings,
        )
        for is_kept in (False, True)
    )
    expected, found = watch(alone), watch(together)
    for asked in conversations():
        for engine in (alone, together):
            run(engine, asked)
        for text, _ in asked:
            border = tuple(text[: 3 * BLOCK_SIZE + 1])
            assert border in expected
            assert border in found
    assert together.cache.statistics().num_hit_blocks > 8
    for text in expected.keys() & found.keys():
        for entry in found[text]:
            torch.testing.assert_close(entry, expected[text][0], rtol=0, atol=1e-3)


def test_the_last_block_of_a_prompt_that_is_only_judged_has_no_next_token(
    drafting: tuple[Path, dict[str, object]],
) -> None:
    folder, settings = drafting
    engine = start_exact(folder, ops=TorchOps(), **settings)
    judged = SamplingParams(max_tokens=0, label_token_ids=(5, 6))
    prompt = list(range(3, 3 + 3 * BLOCK_SIZE))
    run(engine, [(prompt, judged)])
    assert engine.cache.statistics().num_indexed_blocks == 2
