"""What the verbs between ranks move, that sums have the same bits everywhere, and lost ranks."""

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine.errors import ConfigError, WorkerError
from engine.layers.context import SINGLE_RANK, Comm
from engine.ranks import comm as rank_comm
from engine.ranks.comm import GlooRanks
from engine.ranks.meeting import connect_ranks
from engine.ranks.rank import Rank
from tests.harness.rank_processes import TIMEOUT_S, RankProcesses
from tests.harness.seeds import fresh_seed

SIZE = 3
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with RankProcesses(SIZE, tmp_path_factory.mktemp("ranks")) as started:
        yield started


def _numbers(index: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Whole numbers, other ones on every rank; small enough for a sum to be exact."""
    generator = torch.Generator().manual_seed(100 * index + shape[0])
    return torch.randint(-20, 20, shape, generator=generator).to(dtype)


def _verbs(comm: Comm, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    def own() -> Tensor:
        return _numbers(comm.rank.index, shape, dtype)

    return [
        comm.all_reduce(own()),
        comm.all_gather(own()),
        comm.reduce_scatter(own()),
        comm.all_to_all(own()),
    ]


@pytest.mark.parametrize("shape", [(3,), (6, 1), (9, 5), (3, 17, 2), (0, 4), (3 * 1031, 7)])
def test_every_verb_moves_what_it_says(ranks: RankProcesses, shape: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        inputs = [_numbers(index, shape, dtype) for index in range(SIZE)]
        total = torch.stack([x.double() for x in inputs]).sum(dim=0).to(dtype)
        part = shape[0] // SIZE
        for index, found in enumerate(ranks.run(_verbs, shape, dtype)):
            mine = slice(index * part, (index + 1) * part)
            expected = [total, torch.cat(inputs), total[mine], torch.cat([x[mine] for x in inputs])]
            for ours, theirs in zip(found, expected, strict=True):
                assert ours.dtype == dtype
                assert torch.equal(ours, theirs)


def _exchange(comm: Comm, counts: list[list[int]], dtype: torch.dtype) -> Tensor:
    """counts[r][s]: rows from rank r to rank s."""
    index = comm.rank.index
    rows = [_numbers(10 * index + to, (counts[index][to], 5), dtype) for to in range(SIZE)]
    return comm.exchange_rows(torch.cat(rows), counts[index], [line[index] for line in counts])


@pytest.mark.parametrize(
    "counts",
    [
        [[1, 2, 3], [4, 5, 6], [7, 8, 9]],
        [[0, 4, 0], [0, 0, 0], [2, 0, 0]],  # one rank sends nothing, and nobody itself
        [[0, 0, 0], [0, 0, 0], [0, 0, 0]],
        [[9, 0, 0], [300, 1, 0], [0, 2, 0]],  # one rank gets nothing
    ],
)
def test_any_number_of_rows_travels_to_each_rank(
    ranks: RankProcesses, counts: list[list[int]]
) -> None:
    for dtype in DTYPES:
        for to, found in enumerate(ranks.run(_exchange, counts, dtype)):
            came = [_numbers(10 * r + to, (counts[r][to], 5), dtype) for r in range(SIZE)]
            assert torch.equal(found, torch.cat(came))


def _float_sums(comm: Comm, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed + comm.rank.index)
    sums = []
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(701, 13, generator=generator).mul(1e3).to(dtype)
        sums.append(comm.all_reduce(x))
    return sums


def test_a_sum_has_the_same_bits_on_every_rank_and_every_time(ranks: RankProcesses) -> None:
    seed = fresh_seed()
    first, *others = ranks.run(_float_sums, seed) + ranks.run(_float_sums, seed)
    for found in others:
        assert all(torch.equal(*pair) for pair in zip(first, found, strict=True))
    drawn = [torch.Generator().manual_seed(seed + index) for index in range(SIZE)]
    parts = [torch.randn(701, 13, generator=generator).mul(1e3) for generator in drawn]
    assert torch.equal(first[0], parts[0] + parts[1] + parts[2])  # in rank order


def _gather_names(comm: Comm, lengths: list[int]) -> list[bytes]:
    return comm.gather_bytes(bytes([comm.rank.index]) * lengths[comm.rank.index])


@pytest.mark.parametrize("lengths", [[0, 0, 0], [5, 0, 3], [1, 70_000, 2]])
def test_bytes_of_any_length_are_gathered(ranks: RankProcesses, lengths: list[int]) -> None:
    expected = [bytes([index]) * length for index, length in enumerate(lengths)]
    assert ranks.run(_gather_names, lengths) == [expected] * SIZE


def test_one_rank_alone_has_nothing_to_exchange() -> None:
    x = torch.randn(4, 3)
    for verb in (SINGLE_RANK.all_reduce, SINGLE_RANK.all_gather, SINGLE_RANK.all_to_all):
        assert torch.equal(verb(x), x)
    assert SINGLE_RANK.gather_bytes(b"it") == [b"it"]


def test_ranks_that_do_not_all_come_are_told(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 2)
    with pytest.raises(WorkerError, match=r"rank 0 of 2: not all ranks came within 0\.5 s"):
        connect_ranks(Rank(0, 2), store, torch.device("cpu"), 0.5)


def _connect_again(comm: Comm, path: str) -> GlooRanks:
    """A second group of the same ranks."""
    store = dist.FileStore(path, comm.rank.size)
    second = connect_ranks(comm.rank, store, torch.device("cpu"), TIMEOUT_S)
    assert isinstance(second, GlooRanks)
    return second


def _absent(comm: Comm, path: str) -> None:
    """Connect, and come to an operation only once rank 0 has given it up."""
    other = _connect_again(comm, path)
    comm.gather_bytes(b"")
    other.close()


@pytest.mark.parametrize(
    "call",
    [
        lambda comm: comm.all_reduce(torch.ones(5)),
        lambda comm: comm.all_to_all(torch.ones(SIZE)),
        lambda comm: comm.gather_bytes(b"x"),
    ],
)
def test_an_operation_that_others_do_not_join_ends_in_time(
    ranks: RankProcesses, tmp_path: Path, call: Callable[[Comm], object]
) -> None:
    path = str(tmp_path / "store")
    ranks.start(_absent, path)
    comm = _connect_again(ranks.comm, path)
    comm._timeout = timedelta(seconds=0.2)  # to connect, a busy machine may take longer
    start_s = time.monotonic()
    with pytest.raises(WorkerError, match=r"rank 0 of 3: .* did not take part within 0\.2 s"):
        call(comm)
    assert time.monotonic() - start_s > 0.15
    comm.close()
    ranks.comm.gather_bytes(b"")
    ranks.answers()
    with pytest.raises(WorkerError, match="after the ranks were disconnected"):
        call(comm)


def test_a_group_whose_graphs_live_on_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Held:
        def __init__(self) -> None:
            self.is_free = threading.Event()
            self.has_ended = threading.Event()

        def abort(self) -> None:
            self.is_free.wait(TIMEOUT_S)
            self.has_ended.set()

    monkeypatch.setattr(rank_comm, "_ABORT_PATIENCE_S", 0.01)
    group = Held()
    rank_comm.abort(group)
    assert not group.has_ended.is_set()
    assert "CUDA graphs" in caplog.text
    group.is_free.set()
    assert group.has_ended.wait(TIMEOUT_S)
    rank_comm.abort(group)


def test_a_killed_rank_is_noticed_long_before_the_timeout(tmp_path: Path) -> None:
    with RankProcesses(2, tmp_path) as pair:
        assert pair.run(_gather_names, [1, 1]) == [[b"\0", b"\1"]] * 2
        pair.kill(1)
        start_s = time.monotonic()
        with pytest.raises(WorkerError, match="another rank died"):
            pair.comm.all_reduce(torch.ones(3))
        assert time.monotonic() - start_s < TIMEOUT_S


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("length", [1, 5, 8, 131])
def test_padded_shares_cover_a_length_in_order(size: int, length: int) -> None:
    ranks_of = [Rank(index, size) for index in range(size)]
    shares = [rank.padded_share(length) for rank in ranks_of]
    assert [i for share in shares for i in range(length)[share]] == list(range(length))
    assert all(s.stop - s.start <= ranks_of[0].padded_length(length) for s in shares)


def test_shares_are_equal_or_repeated_whole_or_refused() -> None:
    assert [Rank(i, 2).share(6, "x") for i in range(2)] == [slice(0, 3), slice(3, 6)]
    # Two heads of 3 rows on four ranks.
    heads = [Rank(i, 4).share(6, "x", unit=3) for i in range(4)]
    assert heads == [slice(0, 3), slice(0, 3), slice(3, 6), slice(3, 6)]
    for length, unit in ((6, None), (2, None), (9, 3), (18, 3)):
        with pytest.raises(ConfigError, match=r"workers\.tensor_parallel_size: 4 ranks"):
            Rank(0, 4).share(length, "x", unit=unit)
