"""What a drafter reads travels with a prompt's KV: the decode side drafts as one worker would."""

import random

import pytest

from configs.load import load_config
from engine.request import SamplingParams
from load_tests.testbed.local_handoff import LocalPair
from tests.engine.speculation.eagle_heads import save_head
from tests.engine.speculation.mtp_models import save_mtp_model
from tests.harness.in_process import answer, start_engine
from tests.harness.tiny_models import VOCAB_SIZE, save_model

SEED = random.SystemRandom().randrange(10**6)


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
    print("seed", SEED)
    there, here = pair.decode.core.scheduler.draft_counts, one.core.scheduler.draft_counts
    assert (there.drafted_at, there.accepted_at) == (here.drafted_at, here.accepted_at)
    assert there.num_drafted > 40
    assert pair.prefill.cache.num_held == pair.decode.cache.num_held == 0
