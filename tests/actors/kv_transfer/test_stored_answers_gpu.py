"""Answers are stored on a GPU while others arrive and are decoded there, and come back whole."""

from pathlib import Path

import pytest

from configs.load import load_config
from tests.actors.kv_transfer.stored_answers import check_conversations
from tests.harness.in_process import start_engine
from tests.harness.seeds import fresh_random

pytestmark = pytest.mark.gpu

ON_GPU: dict[str, object] = {
    "model.device": "cuda",
    "model.dtype": "bfloat16",
    "model.deterministic": True,  # so that answers do not depend on who computes beside whom
    "model.max_model_len": 1024,
    "cache.block_size": 16,
    "cache.num_blocks": 128,
}


def test_a_conversation_goes_on_from_its_stored_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = fresh_random()
    given = {key.replace(".", "__"): value for key, value in ON_GPU.items()}
    alone = start_engine(**given, cache__enable_prefix_caching=False)
    folder = Path(load_config(None, {}).model.path)
    check_conversations(folder, ON_GPU, alone, monkeypatch, lambda: rng.randrange(3, 3000))
