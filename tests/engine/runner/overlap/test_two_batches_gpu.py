"""Two batches on a GPU: the bits of one in deterministic mode; every backend plans both halves."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.layers.context import SINGLE_RANK, Comm, SingleRank
from engine.models.registry import build_model
from engine.runner.overlap.rule import OverlapRule
from kernels.attention.names import AttentionName, AttentionNames
from tests.engine.runner.step_driver import StepDriver
from tests.harness.rank_processes import RankProcesses
from tests.harness.tiny_models import LATENT_ON_GPU, VOCAB_SIZE, save_model

pytestmark = pytest.mark.gpu

SPLIT = OverlapRule(min_prompt_tokens=2, min_decode_rows=2)
WHOLE = OverlapRule(min_prompt_tokens=None, min_decode_rows=None)
MAX_ERROR = 2e-2  # norm of the difference by norm, bf16 and products of other sizes
ARCHITECTURES = ["LlamaForCausalLM", "Qwen3MoeForCausalLM", "Qwen2MoeForCausalLM"]
LATENT = "DeepseekV2ForCausalLM"


def _save(folder: Path, architecture: str) -> Path:
    mixture = {"moe_intermediate_size": 128} if "Moe" in architecture else {}
    if architecture == "Qwen2MoeForCausalLM":  # deterministic products take multiples of 16
        mixture["shared_expert_intermediate_size"] = 48
    sizes: dict[str, Any] = {
        "hidden_size": 512,
        "intermediate_size": 720,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "dtype": torch.bfloat16,
        **LATENT_ON_GPU.get(architecture, {}),
    }
    save_model(folder, architecture, seed=6, max_position_embeddings=4096, **mixture, **sizes)
    return folder


class LateSums(SingleRank):
    """One rank whose sums take a while and hold nothing usable meanwhile, in their own stream."""

    def all_reduce(self, x: Tensor) -> Tensor:
        kept = x.clone()
        x.fill_(torch.nan if x.is_floating_point() else 0)
        torch.cuda._sleep(100_000)  # type: ignore[no-untyped-call]  # cycles, some 60 us
        return x.copy_(kept)


def _story(
    comm: Comm,
    folder: Path,
    splits: bool,
    attention: AttentionName = "auto",
    is_deterministic: bool = False,
) -> list[Tensor]:
    """Logits of chunks and of single tokens, on the host."""
    model = build_model(
        folder,
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
        is_deterministic=is_deterministic,
        rank=comm.rank,
    )
    driver = StepDriver(
        model,
        seed=1,
        block_size=16,
        num_blocks=600,
        attention=AttentionNames(prefill=attention, decode=attention),
        fixed_tile=is_deterministic,
        comm=comm,
    )
    driver.executor.overlap_two_batches(SPLIT if splits else WHOLE, threshold=0.48)
    draw = random.Random(4)
    lengths = {0: 700, 1: 33, 2: 1, 3: 260, 4: 4}
    for row, length in lengths.items():
        driver.admit(row, [draw.randrange(VOCAB_SIZE) for _ in range(length)])
    steps = [{0: 501, 1: 30, 3: 17}, {0: 198, 1: 1, 2: 1, 3: 240}, {0: 1, 1: 1, 3: 1}]
    steps += [{1: 1, 3: 2, 4: 3}]
    found = [line.cpu() for step in steps for line in driver.logits(step).values()]
    told = driver.executor.statistics().two_batches
    assert told is not None
    assert (told.num_two_chunk > 0) == (told.num_split_decodes > 0) == splits
    return found


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, LATENT])
def test_deterministic_mode_gives_the_bits_of_whole_steps(
    architecture: str, tmp_path: Path
) -> None:
    """Also where every sum is waited for at the last moment: a missing wait reads NaN."""
    folder = _save(tmp_path, architecture)
    whole = _story(SINGLE_RANK, folder, False, is_deterministic=True)
    for comm in (SINGLE_RANK, LateSums()):
        assert all(map(torch.equal, _story(comm, folder, True, is_deterministic=True), whole))


@pytest.mark.parametrize("attention", ["triton", "flash_attn", "flashinfer"])
def test_every_attention_backend_plans_both_halves(
    attention: AttentionName, tmp_path: Path
) -> None:
    # No mixture: where two experts are as good, rounding chooses, and one token differs much.
    folder = _save(tmp_path, "LlamaForCausalLM")
    _assert_close(*(_story(SINGLE_RANK, folder, splits, attention) for splits in (True, False)))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with RankProcesses(2, tmp_path_factory.mktemp("ranks"), "cuda") as started:
        yield started


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sums_in_a_stream_of_their_own_are_waited_for(
    architecture: str, ranks: RankProcesses, tmp_path: Path
) -> None:
    folder = _save(tmp_path, architecture)
    whole, other_whole = ranks.run(_story, folder, False)
    for _ in range(5):  # a missing wait need not show at once
        split, other_split = ranks.run(_story, folder, True)
        assert all(map(torch.equal, split, other_split))
        _assert_close(split, whole)
    assert all(map(torch.equal, whole, other_whole))


def _assert_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).norm() <= MAX_ERROR * other.norm()
