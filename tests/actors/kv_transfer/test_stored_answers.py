"""What a decode worker has decoded, found by a prefill worker of its machine for the next turn."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from engine.clock import ManualClock
from engine.kv.host.shared_file import FOLDER, PREFIX, name_for
from engine.request import SamplingParams
from tests.actors.kv_transfer.engine_pair import ROLES, Pair
from tests.harness.in_process import answer, start_engine
from tests.harness.seeds import fresh_random
from tests.harness.tiny_models import VOCAB_SIZE, save_model

BLOCK_SIZE = 8
NUM_CONVERSATIONS = 3


def test_a_conversation_goes_on_from_its_stored_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefill worker evicts nothing: what it loads are blocks that the other has decoded."""
    rng = fresh_random()
    save_model(tmp_path, "LlamaForCausalLM", seed=7, max_position_embeddings=512)
    alone = start_engine(model__path=str(tmp_path), cache__enable_prefix_caching=False)
    turns = [[rng.randrange(VOCAB_SIZE) for _ in range(20)] for _ in range(NUM_CONVERSATIONS)]
    num_filled: list[int] = []  # blocks, in each turn, by answers
    with ExitStack() as stack:
        more = {"cache.host_gib": 0.02, "cache.host_answers": True, "cache.num_blocks": 256}
        # On this clock no time passes, so that no load is given up on a busy machine.
        pair = Pair(stack, {}, tmp_path, (1, 1), more, clock=ManualClock())
        tiers = {role: pair.engines[role].host_tier for role in ROLES}
        for role in ROLES:
            stack.callback(pair.engines[role].close)
            monkeypatch.setattr(tiers[role], "load_seconds", lambda blocks: 0.0)
        assert tiers["decode"] is not None
        tiers["decode"].note_hit()  # else only a quarter is stored
        for number in range(3):
            params = SamplingParams(
                max_tokens=25, temperature=0.9 * (number % 2), seed=number, ignore_eos=True
            )
            found = pair.answer([(tokens, params) for tokens in turns])
            assert found == [one.tokens for one in answer(alone, [(t, params) for t in turns])]
            num_filled.append(sum(map(_num_filled, turns, found)))
            new = [[rng.randrange(VOCAB_SIZE) for _ in range(3)] for _ in turns]
            turns = [a + b + c for a, b, c in zip(turns, found, new, strict=True)]
        decode, prefill = (pair.engines[role].load().host_tier for role in ("decode", "prefill"))
        assert decode is not None
        assert prefill is not None
        assert (decode.num_stored, decode.num_loaded) == (sum(num_filled), 0)
        assert (prefill.num_stored, prefill.num_loaded) == (0, sum(num_filled[:-1]))
        for tier in tiers.values():
            assert tier is not None
            tier.check_conservation()
    assert not (FOLDER / f"{PREFIX}{name_for(bytes(32))}").exists()


def _num_filled(prompt: list[int], answer: list[int]) -> int:
    """Blocks that an answer fills; the last token is not computed."""
    return (len(prompt) + len(answer) - 1) // BLOCK_SIZE - len(prompt) // BLOCK_SIZE
