"""Ranks on a GPU each: NCCL's sums in and out of graphs, and a whole engine over all of them."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.layers.context import Comm
from engine.text.tokenizing import load_tokenizer
from tests.engine.test_gpu_engine import DECISIVE, mixed_work
from tests.harness.gpu_ranks import GPU_RANKS
from tests.harness.in_process import GREEDY, Answer, answer, start_engine
from tests.harness.rank_processes import RankProcesses
from tests.harness.shared_engine import SharedEngine
from tests.harness.tiny_models import save_model

pytestmark = pytest.mark.multi_gpu

MODEL = Path(__file__).parents[3] / "demo_model" / "laps-demo"
SETTINGS = {
    "model__device": "cuda",
    "workers__num_gpus": 1,
    "cache__num_blocks": 600,
    "scheduler__max_num_seqs": 24,
    "scheduler__max_num_batched_tokens": 96,
}


@pytest.fixture(scope="module", params=GPU_RANKS)
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RankProcesses]:
    with RankProcesses(request.param, tmp_path_factory.mktemp("ranks"), "cuda") as started:
        yield started


def _verbs(comm: Comm, shape: tuple[int, ...]) -> list[list[int]]:
    x = torch.arange(torch.Size(shape).numel(), device="cuda").view(shape) * (comm.rank.index + 1)
    found = [verb(x.clone()) for verb in (comm.all_gather, comm.reduce_scatter, comm.all_to_all)]
    found.append(comm.all_reduce(x))
    return [tensor.flatten().tolist() for tensor in found]


@pytest.mark.parametrize("shape", [(1,), (3, 5), (1031, 7)], ids=str)
def test_every_verb_moves_what_it_says(ranks: RankProcesses, shape: tuple[int, ...]) -> None:
    """shape: of a rank's part."""
    size = ranks.comm.rank.size
    shape = (size * shape[0], *shape[1:])
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    inputs = [whole * (index + 1) for index in range(size)]
    for index, found in enumerate(ranks.run(_verbs, shape)):
        expected: list[Tensor] = [
            torch.cat(inputs),
            sum(inputs).chunk(size)[index],
            torch.cat([x.chunk(size)[index] for x in inputs]),
            sum(inputs),
        ]
        assert found == [tensor.flatten().tolist() for tensor in expected]


def _replayed_sums(comm: Comm, num_replays: int) -> tuple[bool, list[float]]:
    """Whether every replay was right, and the last sum of numbers that round."""
    whole = torch.zeros(129, 64, device="cuda")
    drawn = torch.randn(129, 64, device="cuda", dtype=torch.bfloat16)

    def run() -> tuple[Tensor, Tensor]:
        return comm.all_reduce(whole + comm.rank.index), comm.all_reduce(drawn.clone())

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        total, rounded = run()
    is_right = torch.ones((), dtype=torch.bool, device="cuda")
    indices = sum(range(comm.rank.size))
    for number in range(num_replays):
        whole.fill_(number)
        graph.replay()
        is_right &= (total == comm.rank.size * number + indices).all()
    comm.all_reduce(torch.zeros(1, device="cuda"))
    return bool(is_right), rounded.flatten().tolist()


def test_thousands_of_replays_are_right_and_have_the_same_bits(ranks: RankProcesses) -> None:
    (is_right, first), *others = ranks.run(_replayed_sums, 5000)
    assert is_right
    assert others == [(True, first)] * len(others)


def _tokens(answers: list[Answer]) -> list[list[int]]:
    return [one.tokens for one in answers]


@pytest.mark.parametrize("shared_from", [None, 8])
def test_the_shipped_model_says_what_it_is_sure_of(
    ranks: RankProcesses, shared_from: int | None
) -> None:
    """shared_from: so many tokens on, steps are sequence-parallel."""
    settings = SETTINGS | {"workers__sequence_parallel_min_tokens": shared_from}
    tokenizing = load_tokenizer(MODEL)
    prompts = tokenizing.encode_batch(list(DECISIVE), add_special_tokens=True)
    with SharedEngine(ranks, settings) as shared:
        statistics = shared.engine.executor.statistics()
        found = answer(shared.engine, [(list(prompt), GREEDY) for prompt in prompts])
    assert statistics.decode_graphs is not None
    for answered, expected in zip(found, DECISIVE.values(), strict=True):
        assert tokenizing.decode(answered.tokens).startswith(expected)


@pytest.mark.parametrize("num_kv_heads", [2, 1])
def test_ranks_go_the_same_way_with_and_without_graphs(
    ranks: RankProcesses, num_kv_heads: int, tmp_path: Path
) -> None:
    """More requests than rows, every kind of sampling; steps in flight behind each other."""
    save_model(
        tmp_path,
        "Qwen3ForCausalLM",
        seed=5,
        hidden_size=256,
        intermediate_size=208,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=num_kv_heads,
        head_dim=64,
        max_position_embeddings=1024,
        dtype=torch.bfloat16,
    )
    work = mixed_work(seed=7, count=60)
    for has_graphs in (False, True):
        settings = SETTINGS | {
            "model__path": str(tmp_path),
            "execution__cuda_graphs": has_graphs,
        }
        with SharedEngine(ranks, settings) as shared:
            found = answer(shared.engine, work)
        assert all(one.finish for one in found)
        assert len(shared.digests) > 60


@pytest.mark.parametrize(
    ("min_exchanged", "way"), [(None, "all_gather"), (32, "all_to_all"), (2, "all_gather")]
)
def test_ranks_with_whole_experts_go_the_same_way(
    ranks: RankProcesses, min_exchanged: int | None, way: str, tmp_path: Path
) -> None:
    """Steps in graphs, or long ones with tokens that travel; experts counted meanwhile."""
    save_model(
        tmp_path,
        "Qwen2MoeForCausalLM",
        seed=5,
        hidden_size=256,
        num_experts=16,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        dtype=torch.bfloat16,
    )
    settings = SETTINGS | {
        "model__path": str(tmp_path),
        "workers__expert_parallel": True,
        "workers__expert_exchange_min_tokens": min_exchanged,
        "workers__expert_exchange": way,
        "laps__enable_batch_prefill_cuda_graph": way == "all_gather",
        "execution__expert_load_steps": 8,
    }
    with SharedEngine(ranks, settings) as shared:
        found = answer(shared.engine, mixed_work(seed=7, count=60))
        totals = shared.engine.expert_totals()
    assert all(one.finish for one in found)
    assert totals is not None
    assert all(sum(counts) > 0 for counts in totals.counts)


def _taken_share(comm: Comm) -> float:
    """Of a rank's GPU, by whoever runs there."""
    gc.collect()  # engines of tests before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return 1 - free / total


def _fill(comm: Comm, settings: dict[str, object]) -> tuple[int, int, float]:
    """The blocks that a rank's engine counts on, those that it has, and their share of its GPU."""
    engine = start_engine(comm, **settings)
    store = engine.kv_store
    total = torch.cuda.get_device_properties(comm.rank.index).total_memory
    return engine.cache.num_blocks, store.num_blocks, store.tensor.nbytes / total


def test_all_ranks_have_as_many_blocks_as_fit_each_of_them(ranks: RankProcesses) -> None:
    share = max(ranks.run(_taken_share)) + 0.1
    settings = SETTINGS | {"cache__num_blocks": None, "cache__gpu_memory_utilization": share}
    first, *others = ranks.run(_fill, settings)
    assert others == [first] * len(others)
    num_counted, num_stored, stored_share = first
    assert num_counted == num_stored
    assert stored_share > 0.05
