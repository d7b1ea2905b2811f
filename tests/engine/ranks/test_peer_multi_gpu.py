"""Sums through peer memory on two GPUs: their bits, replays without end, late ranks, any sizes."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.layers.context import Comm
from engine.layers.token_exchange import own_rows
from engine.ranks.peer_ranks import PeerRanks
from kernels.comm import reference
from kernels.comm.gather_stream import gather_stream
from kernels.comm.packets import fits_packets, sum_by_packets, sum_by_packets_add_norm
from kernels.comm.peer_memory import PeerMemory
from kernels.comm.share_stream import share_stream_add_norm
from kernels.comm.shares import gather_shares, scatter_sum
from kernels.comm.stream import stream_add_norm
from kernels.comm.sums import sum_add_norm, sum_over_ranks
from kernels.rms_norm import rms_norm_add
from tests.harness.rank_processes import RankProcesses
from tests.harness.seeds import seed_of

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

SIZE = 1 << (min(max(torch.cuda.device_count(), 1), 8).bit_length() - 1)  # 2, 4 or 8
SEED = seed_of(__name__)
EPS = 1e-6
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64)
NUMELS = (1, 7, 4096, 5120, 9001, 300_000, 1_000_003)
FEW = (1, 1000, 5120, 40_960)
ROWS = (1, 3, 16, 131, 133, 257)
WIDTHS = (128, 2880, 5120, 8192)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with RankProcesses(SIZE, tmp_path_factory.mktemp("ranks"), "cuda") as started:
        yield started


def _memory(comm: Comm) -> PeerMemory:
    assert isinstance(comm, PeerRanks), "these GPUs have no peer access"
    return comm.memory


def _draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """The same on every GPU that draws it."""
    generator = torch.Generator("cuda").manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, device="cuda", generator=generator).to(dtype)
    return torch.randint(-1000, 1000, shape, device="cuda", generator=generator, dtype=dtype)


def _parts(comm: Comm, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[Tensor]:
    return [_draw(shape, dtype, seed + rank) for rank in range(comm.rank.size)]


def _wrong_sums(comm: Comm, seed: int) -> list[str]:
    """Cases whose bits are not those of torch's sum in rank order."""
    memory, wrong = _memory(comm), []
    for dtype in DTYPES:
        for numel in NUMELS:
            parts = _parts(comm, (numel,), dtype, seed)
            expected = reference.sum_over_ranks(parts)
            for two_shots in (False, True):
                x = parts[comm.rank.index].clone()
                if not torch.equal(sum_over_ranks(x, memory, two_shots=two_shots), expected):
                    wrong.append(f"{dtype} {numel} two_shots={two_shots}")
            own = parts[comm.rank.index]
            fits = fits_packets(own, comm.rank.size)
            if fits and not torch.equal(sum_by_packets(own, memory), expected):
                wrong.append(f"{dtype} {numel} by packets")
    return wrong


def test_sums_have_the_bits_of_a_sum_in_rank_order(ranks: RankProcesses) -> None:
    assert ranks.run(_wrong_sums, SEED) == [[] for _ in range(SIZE)], SEED


def _wrong_shares(comm: Comm, seed: int) -> list[str]:
    memory, wrong, size = _memory(comm), [], comm.rank.size
    for dtype in DTYPES:
        for rows, width in ((1, 1), (3, 7), (16, 5120), (131, 1031)):
            parts = _parts(comm, (size * rows, width), dtype, seed)
            own = parts[comm.rank.index]
            if not torch.equal(gather_shares(own, memory), torch.cat(parts)):
                wrong.append(f"gather {dtype} {rows} x {width}")
            expected = reference.sum_over_ranks(parts).chunk(size)[comm.rank.index]
            if not torch.equal(scatter_sum(own, memory), expected):
                wrong.append(f"scatter {dtype} {rows} x {width}")
    return wrong


def test_shares_are_gathered_and_sums_scattered(ranks: RankProcesses) -> None:
    assert ranks.run(_wrong_shares, SEED) == [[] for _ in range(SIZE)], SEED


def _wrong_norms(comm: Comm, seed: int) -> list[str]:
    memory, wrong = _memory(comm), []
    for dtype in (torch.bfloat16, torch.float16):
        for rows in ROWS:
            for width in WIDTHS:
                parts = _parts(comm, (rows, width), dtype, seed)
                residual, weight = _draw((rows, width), dtype, 1), _draw((width,), dtype, 2)
                summed = reference.sum_over_ranks(parts)
                expected = rms_norm_add(summed, residual.clone(), weight, EPS)
                for two_shots in (False, True):
                    x, stream = parts[comm.rank.index].clone(), residual.clone()
                    found = sum_add_norm(x, stream, weight, EPS, memory, two_shots=two_shots)
                    if not all(map(torch.equal, found, expected)):
                        wrong.append(f"{dtype} {rows} x {width} two_shots={two_shots}")
                x, stream = parts[comm.rank.index].clone(), residual.clone()
                found = stream_add_norm(x, stream, weight, EPS, memory)
                if not all(map(torch.equal, found, expected)):
                    wrong.append(f"{dtype} {rows} x {width} in a stream")
                own = parts[comm.rank.index]
                if fits_packets(own, comm.rank.size):
                    found = sum_by_packets_add_norm(own, residual, weight, EPS, memory)
                    if not all(map(torch.equal, found, expected)):
                        wrong.append(f"{dtype} {rows} x {width} by packets")
    return wrong


def test_a_sum_with_norm_has_the_bits_of_a_sum_and_a_norm(ranks: RankProcesses) -> None:
    assert ranks.run(_wrong_norms, SEED) == [[] for _ in range(SIZE)], SEED


def _wrong_streams(comm: Comm, seed: int) -> list[str]:
    """Of many rows, one after the other without a wait, ranks late now and then."""
    memory, found = _memory(comm), {}
    for number, (rows, width) in enumerate(((4000, 8192), (16384, 5120), (1, 5120), (9001, 5120))):
        parts = _parts(comm, (rows, width), torch.bfloat16, seed)
        residual = _draw((rows, width), torch.bfloat16, 1)
        weight = _draw((width,), torch.bfloat16, 2)
        summed = reference.sum_over_ranks(parts)
        expected = rms_norm_add(summed, residual.clone(), weight, EPS)
        for again in range(5):
            x, stream = parts[comm.rank.index].clone(), residual.clone()
            _late(comm, again, number)
            got = stream_add_norm(x, stream, weight, EPS, memory)
            is_right = torch.stack([(a == b).all() for a, b in zip(got, expected, strict=True)])
            found[f"{rows} x {width}, {again}"] = is_right.all()
    return [what for what, is_right in found.items() if not is_right]


def test_a_stream_of_any_length_has_the_bits_of_a_sum_and_a_norm(ranks: RankProcesses) -> None:
    assert ranks.run(_wrong_streams, SEED) == [[] for _ in range(SIZE)], SEED


def _wrong_share_streams(comm: Comm, seed: int) -> list[str]:
    """Of any number of rows, one after the other without a wait, ranks late now and then."""
    memory, found = _memory(comm), {}
    sizes = ((4000, 8192), (16384, 5120), (1, 5120), (9001, 5120), (5, 128))
    for number, (rows, width) in enumerate(sizes):
        parts = _parts(comm, (rows, width), torch.bfloat16, seed)
        residual = _draw((rows, width), torch.bfloat16, 1)
        weight = _draw((width,), torch.bfloat16, 2)
        summed = reference.sum_over_ranks(parts)
        expected = rms_norm_add(summed, residual.clone(), weight, EPS)
        share = comm.rank.padded_share(rows)
        num_own = share.stop - share.start
        for again in range(5):
            own = own_rows(residual, comm).clone()
            _late(comm, again, number)
            got = share_stream_add_norm(parts[comm.rank.index], own, weight, EPS, memory)
            is_right = [(a[:num_own] == b[share]).all() for a, b in zip(got, expected, strict=True)]
            gathered = gather_stream(got[0], memory)[:rows]
            is_right.append((gathered == expected[0]).all())
            found[f"{rows} x {width}, {again}"] = torch.stack(is_right).all()
    return [what for what, is_right in found.items() if not is_right]


def test_shares_in_streams_have_the_bits_of_a_sum_and_a_norm(ranks: RankProcesses) -> None:
    assert ranks.run(_wrong_share_streams, SEED) == [[] for _ in range(SIZE)], SEED


def _late(comm: Comm, late: int, number: int) -> None:
    """Every rank is late at other times, by up to a millisecond."""
    if comm.rank.index == (number + late) % comm.rank.size:
        torch.cuda._sleep(random.Random(number).randrange(2_000_000))  # type: ignore[no-untyped-call]


def _sum_of_indices(comm: Comm) -> int:
    return comm.rank.size * (comm.rank.size - 1) // 2


def _wrong_mixed(comm: Comm, seed: int) -> int:
    """Calls of all sizes, one after the other without a wait; how many of them were wrong."""
    rng, memory = random.Random(seed), _memory(comm)
    checks: list[Tensor] = []
    for number in range(400):
        numel = rng.choice(NUMELS)
        parts = _parts(comm, (numel,), torch.int32, number)
        if number % 20 == 0:
            _late(comm, rng.randrange(8), number)
        summed = sum_over_ranks(parts[comm.rank.index], memory, two_shots=rng.random() < 0.3)
        others = _parts(comm, (numel,), torch.int32, number)
        checks.append((summed == reference.sum_over_ranks(others)).all())
        few = torch.full((rng.choice(FEW),), comm.rank.index + number % 16, device="cuda")
        total = sum_by_packets(few.to(torch.bfloat16), memory)
        checks.append((total == comm.rank.size * (number % 16) + _sum_of_indices(comm)).all())
    return int((~torch.stack(checks)).sum())


def test_sizes_may_change_from_call_to_call_and_ranks_be_late(ranks: RankProcesses) -> None:
    assert ranks.run(_wrong_mixed, SEED) == [0] * SIZE, SEED


def _replay(comm: Comm, num_replays: int, seed: int) -> tuple[int, bool]:
    """A graph of a step's sums: wrong replays, and whether floats kept their bits in all."""
    memory = _memory(comm)
    number = torch.zeros((), dtype=torch.int32, device="cuda")
    weight = _draw((5120,), torch.bfloat16, 3)
    x, residual = (_draw((16, 5120), torch.bfloat16, seed + i) for i in (comm.rank.index, 99))

    def run() -> tuple[Any, ...]:
        whole = number + comm.rank.index
        totals = [
            sum_over_ranks(whole.repeat(numel), memory, two_shots=numel == 4097)
            for numel in (3, 4097, 30_000)
        ]
        digit = (number % 16 + comm.rank.index).to(torch.bfloat16)
        # Packets often, as in a step of few rows: the same places again and again.
        few = [sum_by_packets(digit.repeat(n), memory) for n in (5120, 100, 5120, 5120)]
        return totals, few, sum_add_norm(x.clone(), residual.clone(), weight, EPS, memory)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        totals, few, (normed, stream) = run()
    graph.replay()
    first = normed.clone(), stream.clone()
    num_wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    has_changed = torch.zeros((), dtype=torch.bool, device="cuda")
    size, indices = comm.rank.size, _sum_of_indices(comm)
    for count in range(num_replays):
        number.fill_(count)
        graph.replay()
        if count % 1000 == 7:
            _late(comm, count, count)
        for total in totals:
            num_wrong += (total != size * count + indices).any()
        num_wrong += (torch.cat(few) != size * (count % 16) + indices).any()
        has_changed |= (normed != first[0]).any() | (stream != first[1]).any()
    return int(num_wrong), bool(has_changed)


def test_ten_thousand_replays_are_right_and_have_the_same_bits(ranks: RankProcesses) -> None:
    found = ranks.run(_replay, 10_000, SEED)
    assert found == [(0, False)] * SIZE, SEED


def _in_two_streams(comm: Comm, seed: int) -> bool:
    """Operations of two streams in turns, through the object that orders them."""
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    wrong: list[Tensor] = []
    main = torch.cuda.current_stream()
    for number in range(200):
        stream = side if number % 3 == 1 else main
        with torch.cuda.stream(stream):
            parts = _parts(comm, (1 + number * 37,), torch.int32, seed + number)
            expected = reference.sum_over_ranks(parts)
            wrong.append((comm.all_reduce(parts[comm.rank.index]) != expected).any())
    torch.cuda.synchronize()
    return bool(torch.stack(wrong).any())


def test_two_streams_may_take_turns(ranks: RankProcesses) -> None:
    assert ranks.run(_in_two_streams, SEED) == [False] * SIZE, SEED
