"""Two ranks share a model on one GPU, by the kernels that run there; sums go through host memory.

No graphs: what is tested is that each kernel computes a rank's share (fewer heads, a part of the
vocabulary, narrower products), and that both ranks sample the same.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.layers.context import SINGLE_RANK, Comm
from engine.models.registry import AS_PUBLISHED, WeightSource, build_model
from engine.text.tokenizing import load_tokenizer
from kernels.attention.names import AttentionName, AttentionNames
from tests.engine.ranks.rank_stories import EXCHANGED, EXPERT_PARALLEL, GATHERED, exchanging
from tests.engine.runner.step_driver import StepDriver
from tests.engine.test_gpu_engine import DECISIVE, mixed_work
from tests.harness.in_process import GREEDY, answer
from tests.harness.rank_processes import STAGED, RankProcesses
from tests.harness.shared_engine import SharedEngine
from tests.harness.tiny_models import LATENT_ON_GPU, save_model

pytestmark = pytest.mark.gpu

MODEL = Path(__file__).parents[3] / "demo_model" / "laps-demo"
MAX_ERROR = 2e-2  # norm of a line's difference by its norm, bf16 and sums in another order
SETTINGS = {
    "model__device": "cuda",
    "execution__cuda_graphs": False,
    "cache__num_blocks": 600,
    "scheduler__max_num_seqs": 24,
    "scheduler__max_num_batched_tokens": 96,
    "workers__num_gpus": 1,
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with RankProcesses(2, tmp_path_factory.mktemp("ranks"), STAGED) as started:
        yield started


def _save(folder: Path, num_kv_heads: int, architecture: str = "Qwen3ForCausalLM") -> None:
    is_mixture = architecture == "Qwen3MoeForCausalLM"
    save_model(
        folder,
        architecture,
        seed=5,
        **({"moe_intermediate_size": 128, "num_experts": 8} if is_mixture else {}),
        hidden_size=256,
        intermediate_size=416,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=num_kv_heads,
        head_dim=64,
        max_position_embeddings=1024,
        dtype=torch.bfloat16,
    )


def _logits(
    comm: Comm, folder: Path, prefill: AttentionName, source: WeightSource = AS_PUBLISHED
) -> Tensor:
    """Of a prompt in chunks, and of single tokens after it; fp32 on the host."""
    cuda = torch.device("cuda")
    model = build_model(folder, dtype=torch.bfloat16, device=cuda, rank=comm.rank, source=source)
    attention = AttentionNames(prefill=prefill, decode="triton")
    options = exchanging(model, min_tokens=100)
    driver = StepDriver(
        model, seed=3, block_size=16, comm=comm, attention=attention, options=options
    )
    driver.admit(0, [(7 * i) % 131 for i in range(300)])
    driver.admit(1, [(5 * i) % 131 for i in range(40)])
    found = [driver.logits({0: 150, 1: 31})]
    found += [driver.logits({0: 1, 1: 1}) for _ in range(5)]
    found.append(driver.logits({0: 145, 1: 1}))
    return torch.cat([lines for step in found for lines in step.values()]).cpu()


@pytest.mark.parametrize(
    ("architecture", "num_kv_heads"),
    [("Qwen3ForCausalLM", 4), ("Qwen3ForCausalLM", 1), ("Qwen3MoeForCausalLM", 2)],
)
@pytest.mark.parametrize("prefill", ["flash_attn", "triton"])
def test_logits_are_close_to_those_of_one_rank(
    ranks: RankProcesses,
    prefill: AttentionName,
    architecture: str,
    num_kv_heads: int,
    tmp_path: Path,
) -> None:
    _save(tmp_path, num_kv_heads, architecture)
    alone = _logits(SINGLE_RANK, tmp_path, prefill)
    first, other = ranks.run(_logits, tmp_path, prefill)
    assert torch.equal(first, other)
    errors = (first - alone).norm(dim=1) / alone.norm(dim=1)
    # Where two experts are as good, rounding chooses, and a few lines of a mixture differ much.
    is_mixture = architecture == "Qwen3MoeForCausalLM"
    assert errors.quantile(0.8 if is_mixture else 1.0) < (1.5 if is_mixture else 2) * MAX_ERROR


@pytest.mark.parametrize(
    "source", [EXPERT_PARALLEL, EXCHANGED, GATHERED], ids=["summed", "exchanged", "gathered"]
)
@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "DeepseekV2ForCausalLM"])
def test_whole_experts_give_logits_close_to_those_of_one_rank(
    ranks: RankProcesses, architecture: str, source: WeightSource, tmp_path: Path
) -> None:
    """Of latents too, whose attention is in torch here."""
    is_latent = architecture.startswith("Deepseek")
    if is_latent:
        sizes = LATENT_ON_GPU[architecture] | {"max_position_embeddings": 1024}
        save_model(tmp_path, architecture, seed=5, **sizes)
    else:
        _save(tmp_path, 2, architecture)
    prefill: AttentionName = "triton"
    alone = _logits(SINGLE_RANK, tmp_path, prefill)
    first, other = ranks.run(_logits, tmp_path, prefill, source)
    assert torch.equal(first, other)
    errors = (first - alone).norm(dim=1) / alone.norm(dim=1)
    assert errors.quantile(0.8) < 1.5 * MAX_ERROR


def test_the_shipped_model_says_what_it_is_sure_of(ranks: RankProcesses) -> None:
    tokenizing = load_tokenizer(MODEL)
    prompts = tokenizing.encode_batch(list(DECISIVE), add_special_tokens=True)
    with SharedEngine(ranks, SETTINGS) as shared:
        found = answer(shared.engine, [(list(prompt), GREEDY) for prompt in prompts])
    for answered, expected in zip(found, DECISIVE.values(), strict=True):
        assert tokenizing.decode(answered.tokens).startswith(expected)


@pytest.mark.parametrize("num_kv_heads", [4, 1])
def test_both_ranks_sample_the_same_over_mixed_steps(
    ranks: RankProcesses, num_kv_heads: int, tmp_path: Path
) -> None:
    """More requests than rows, every kind of sampling; steps in flight behind each other."""
    _save(tmp_path, num_kv_heads)
    with SharedEngine(ranks, SETTINGS | {"model__path": str(tmp_path)}) as shared:
        found = answer(shared.engine, mixed_work(seed=7, count=60))
    assert all(one.finish for one in found)
    assert len(shared.digests) > 60
