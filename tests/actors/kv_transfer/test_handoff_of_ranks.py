"""Answers after a handoff between workers of one and of two ranks have one process's very bits."""

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch

from engine.kv.layout import KvLayout
from engine.request import SamplingParams
from tests.actors.kv_transfer.rank_handoffs import (
    NUM_DECODED,
    Way,
    drawn_blocks,
    hand_over,
    move_once,
    pull_own_heads,
)
from tests.engine.ranks.exact_models import save_whole_numbers
from tests.harness.rank_processes import STAGED, RankProcesses
from tests.harness.tiny_models import save_model

PARAMS = SamplingParams(max_tokens=64, temperature=1.2, top_p=0.9, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with RankProcesses(2, tmp_path_factory.mktemp("two")) as ranks:
        yield ranks


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("Qwen3ForCausalLM", {"num_key_value_heads": 1}),
        ("Qwen3ForCausalLM", {"num_key_value_heads": 2}),
        ("DeepseekV2ForCausalLM", {"first_k_dense_replace": 2}),
    ],
    ids=["one KV head", "two KV heads", "latents"],
)
def test_an_answer_is_one_process_s_however_many_ranks_its_two_workers_have(
    architecture: str, settings: dict[str, object], two: RankProcesses, tmp_path: Path
) -> None:
    """Greedy and drawn. Of one KV head, and of latents, both ranks hold a copy."""
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    save_model(tmp_path, architecture, seed=seed, **settings)
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


MULTI = (
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
)


@pytest.mark.parametrize("way", ["host", "pulled", "staged"])
@pytest.mark.parametrize(
    ("ranks_on", "device"),
    [
        ("cpu", "cpu"),
        pytest.param(STAGED, "cuda", marks=pytest.mark.gpu),
        pytest.param("cuda", "cuda", marks=MULTI),
    ],
    ids=["cpu", "one GPU", "two GPUs"],
)
def test_blocks_of_all_ranks_move_through_rank_0(
    ranks_on: str, device: str, way: Way, tmp_path: Path
) -> None:
    """On GPUs rank 0 maps the other's store by CUDA IPC."""
    with RankProcesses(2, tmp_path, ranks_on) as ranks:
        found = ranks.run(partial(move_once, way=way), device)
    whole = KvLayout.with_heads(
        num_layers=3, block_size=16, num_kv_heads=4, head_dim=64, dtype="bfloat16"
    )
    assert torch.equal(torch.cat(found, dim=4), drawn_blocks(whole).flip(0))


@pytest.mark.parametrize("from_one", [False, True], ids=["from two", "from one"])
@pytest.mark.parametrize(
    ("ranks_on", "device"),
    [
        pytest.param(STAGED, "cuda", marks=pytest.mark.gpu),
        pytest.param("cuda", "cuda", marks=MULTI),
    ],
    ids=["one GPU", "two GPUs"],
)
def test_each_rank_pulls_its_heads_from_another_process(
    ranks_on: str, device: str, from_one: bool, tmp_path: Path
) -> None:
    """By CUDA IPC; with threads for processes: test_rank_pulls.py."""
    with RankProcesses(2, tmp_path, ranks_on) as ranks:
        found = ranks.run(partial(pull_own_heads, from_one=from_one), device)
    whole = KvLayout.with_heads(
        num_layers=3, block_size=16, num_kv_heads=4, head_dim=128, dtype="bfloat16"
    )
    assert torch.equal(torch.cat(found, dim=4), drawn_blocks(whole))
