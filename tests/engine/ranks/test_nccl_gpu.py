"""NCCL among the ranks of one GPU, which is one: its operations, alone and inside CUDA graphs."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from configs.load import load_config
from engine.build import build_engine
from engine.clock import MonotonicClock
from engine.engine import Engine
from engine.errors import WorkerError
from engine.layers.context import Comm
from engine.ranks.comm import NcclRanks
from engine.ranks.meeting import connect_ranks
from engine.ranks.rank import Rank
from engine.request import SamplingParams
from tests.harness.in_process import answer

pytestmark = pytest.mark.gpu

SETTINGS = {
    "model.device": "cuda",
    "cache.num_blocks": 400,
    "scheduler.max_num_seqs": 8,
    "scheduler.overlap": True,
}


@pytest.fixture(scope="module")
def comm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Comm]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("ranks") / "store"), 1)
    connected = connect_ranks(Rank(0, 1), store, torch.device("cuda", 0), 60.0)
    assert isinstance(connected, NcclRanks)
    yield connected
    connected.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_one_rank_gets_back_what_it_gives(comm: Comm, dtype: torch.dtype) -> None:
    x = torch.randint(-9, 9, (37, 5), device="cuda").to(dtype)
    verbs = (comm.all_gather, comm.reduce_scatter, comm.all_to_all, comm.all_reduce)
    for verb in verbs:
        assert torch.equal(verb(x.clone()), x)
        assert verb(x[:0]).shape == x[:0].shape
    assert comm.gather_bytes(b"abc") == [b"abc"]


def test_operations_are_captured_and_replayed(comm: Comm) -> None:
    x = torch.zeros(19, 8, device="cuda")

    def run() -> torch.Tensor:
        summed = comm.all_reduce(x + 1)
        return comm.all_gather(summed * 2)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = run()
    for number in range(300):
        x.fill_(number)
        graph.replay()
        assert found.min().item() == found.max().item() == 2.0 * (number + 1)


def _engine(comm: Comm | None) -> Engine:
    config = load_config(None, SETTINGS)
    given = {} if comm is None else {"comm": comm}
    return build_engine(config, "test", MonotonicClock(), print, **given)


def test_an_engine_captures_its_sums_and_gives_the_same_bits(comm: Comm) -> None:
    """Decode and prompt graphs with NCCL's operations inside, steps in flight behind each other."""
    kinds = (
        SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=30, temperature=1.0, seed=3, logprobs=2, ignore_eos=True),
    )
    requests = [([5 + i] * (1 + 9 * i), kinds[i % 2]) for i in range(12)]
    connected = _engine(comm)
    statistics = connected.executor.statistics()
    assert statistics.decode_graphs is not None
    assert statistics.prompt_graphs is not None
    found, expected = answer(connected, requests), answer(_engine(None), requests)
    assert [one.tokens for one in found] == [one.tokens for one in expected]


def test_a_device_that_does_not_end_is_given_up(
    comm: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(comm, NcclRanks)
    monkeypatch.setattr(comm, "_timeout_s", 0.05)
    torch.cuda._sleep(2_000_000_000)  # about a second
    with pytest.raises(WorkerError, match=r"rank 0 of 1: a test: not done in 0\.05 s"):
        comm.wait_queued("a test")
    torch.cuda.synchronize()
