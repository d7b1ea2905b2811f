"""Answers after a handoff between workers of one and of two ranks have one process's very bits."""

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from engine.request import SamplingParams
from tests.actors.kv_transfer.rank_handoffs import NUM_DECODED, hand_over
from tests.engine.ranks.exact_models import save_whole_numbers
from tests.harness.rank_processes import RankProcesses
from tests.harness.tiny_models import save_model

PARAMS = SamplingParams(max_tokens=64, temperature=1.2, top_p=0.9, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with RankProcesses(2, tmp_path_factory.mktemp("two")) as ranks:
        yield ranks


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_an_answer_is_one_process_s_however_many_ranks_its_two_workers_have(
    num_kv_heads: int, two: RankProcesses, tmp_path: Path
) -> None:
    """Greedy and drawn. Of one KV head both ranks hold a copy."""
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    save_model(tmp_path, "Qwen3ForCausalLM", seed=seed, num_key_value_heads=num_kv_heads)
    save_whole_numbers(tmp_path, seed)
    for params in (PARAMS, msgspec.structs.replace(PARAMS, temperature=0.0)):
        prompt = [rng.randrange(100) for _ in range(rng.randint(20, 40))]
        given = prompt, params
        expected, _ = two.run(hand_over, tmp_path, None, *given)
        assert expected is not None
        assert len(expected[0]) == NUM_DECODED + 1
        for sizes in ((1, 2), (2, 1), (2, 2)):
            found = [
                told for told in two.run(hand_over, tmp_path, sizes, *given) if told is not None
            ]
            assert len(found) == sizes[1]
            for tokens, logits in found:
                assert tokens == expected[0], f"of {sizes}"
                assert torch.equal(logits, expected[1]), f"of {sizes}"
