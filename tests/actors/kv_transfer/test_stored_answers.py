"""What a decode worker has decoded, found by a prefill worker of its machine for the next turn."""

from pathlib import Path

import pytest

from tests.actors.kv_transfer.stored_answers import check_conversations
from tests.harness.in_process import start_engine
from tests.harness.seeds import fresh_random
from tests.harness.tiny_models import VOCAB_SIZE, save_model


@pytest.mark.slow
def test_a_conversation_goes_on_from_its_stored_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = fresh_random()
    save_model(tmp_path, "LlamaForCausalLM", seed=7, max_position_embeddings=512)
    alone = start_engine(model__path=str(tmp_path), cache__enable_prefix_caching=False)
    settings: dict[str, object] = {"cache.num_blocks": 256}
    check_conversations(tmp_path, settings, alone, monkeypatch, lambda: rng.randrange(VOCAB_SIZE))
