"""Sums over ranks under the interpreter, whose blocks run one after the other.

Nobody can wait there. So all ranks' calls are run several times on the same signals, which let
everybody pass: what a rank has not written in the first round is there in the next one.
"""

import random
from collections.abc import Callable

import torch
import torch.multiprocessing as mp
from torch import Tensor

from kernels.comm import reference
from kernels.comm.gather_stream import gather_stream
from kernels.comm.packets import sum_by_packets_add_norm
from kernels.comm.peer_memory import PeerMemory
from kernels.comm.share_stream import fits_share_stream, share_stream_add_norm
from kernels.comm.shares import gather_shares, scatter_sum
from kernels.comm.signals import DATA_BEGINS, MAX_BLOCKS, MAX_RANKS, SIGNAL_BYTES
from kernels.comm.stream import DEPTH, PIECE_BYTES, fits_stream, stream_add_norm
from kernels.comm.sums import sum_add_norm, sum_over_ranks

NUM_ROUNDS = 3  # one more than there are barriers
EPS = 1e-5


class InterpretedRanks:
    """The memory of all ranks in one process."""

    def __init__(self, num_ranks: int, slot_bytes: int, *, max_blocks: int, num_calls: int) -> None:
        """num_calls: that came before, which decide the slot."""
        words = (DATA_BEGINS + 2 * slot_bytes) // 8
        self._memories = [torch.zeros(words, dtype=torch.int64) for _ in range(num_ranks)]
        for memory in self._memories:
            memory[: MAX_BLOCKS * MAX_RANKS] = 2**40
        self._before = 2 * num_calls
        self.views = [
            PeerMemory(
                rank=rank,
                memories=tuple(self._memories),
                count=torch.empty(MAX_BLOCKS, dtype=torch.int64),
                max_blocks=max_blocks,
            )
            for rank in range(num_ranks)
        ]

    def run(self, call: Callable[[PeerMemory], Tensor]) -> list[Tensor]:
        """`call` of every rank, which must not change its arguments; its results in the end."""
        for _ in range(NUM_ROUNDS):
            results = []
            for view in self.views:
                view.count.fill_(self._before)
                results.append(call(view))
                assert view.count.unique().tolist() == [self._before + 2]
        return results


def check_sums(seed: str, num_ranks: str) -> None:
    """Odd sizes, more rows than blocks, every dtype that the interpreter has, both ways."""
    rng, size = random.Random(seed), int(num_ranks)
    torch.manual_seed(rng.randrange(2**32))
    for dtype in (torch.float32, torch.float16, torch.int32):
        for two_shots in (False, True):
            numel = rng.choice((1, 7, 4096, 9001))
            ranks = _ranks(rng, size)
            parts = [_draw((numel,), dtype) for _ in range(size)]
            found = ranks.run(
                lambda view, parts=parts, two=two_shots: sum_over_ranks(
                    parts[view.rank].clone(), view, two_shots=two
                )
            )
            expected = reference.sum_over_ranks(parts)
            what = f"{dtype} {numel} two_shots={two_shots} seed {seed}"
            assert all(torch.equal(one, expected) for one in found), what


def check_shares(seed: str, num_ranks: str) -> None:
    """Every rank's share side by side, and the sum's share of every rank."""
    rng, size = random.Random(seed), int(num_ranks)
    torch.manual_seed(rng.randrange(2**32))
    for dtype in (torch.float16, torch.int32):
        shape = rng.choice((1, 4, 9)), rng.choice((1, 8, 1031))
        ranks, what = _ranks(rng, size), f"{dtype} {shape} seed {seed}"
        shares = [_draw(shape, dtype) for _ in range(size)]
        gathered = ranks.run(lambda view, x=shares: gather_shares(x[view.rank], view))
        assert all(torch.equal(one, torch.cat(shares)) for one in gathered), what
        parts = [_draw((size * shape[0], shape[1]), dtype) for _ in range(size)]
        expected = reference.sum_over_ranks(parts).chunk(size)
        scattered = ranks.run(lambda view, x=parts: scatter_sum(x[view.rank], view))
        assert all(map(torch.equal, scattered, expected)), what


def check_norms(seed: str, num_ranks: str) -> None:
    rng, size = random.Random(seed), int(num_ranks)
    torch.manual_seed(rng.randrange(2**32))
    for dtype, two_shots in ((torch.float32, False), (torch.float16, False), (torch.float16, True)):
        shape = rng.choice((1, 2, 5, 9)), rng.choice((8, 136, 512))
        ranks, parts = _ranks(rng, size), [_draw(shape, dtype) for _ in range(size)]
        residual, weight = _draw(shape, dtype), _draw(shape[1:], dtype)

        def call(
            view: PeerMemory,
            parts: list[Tensor] = parts,
            residual: Tensor = residual,
            weight: Tensor = weight,
            two_shots: bool = two_shots,
        ) -> Tensor:
            x, stream = parts[view.rank].clone(), residual.clone()
            return torch.stack(sum_add_norm(x, stream, weight, EPS, view, two_shots=two_shots))

        found = ranks.run(call)
        expected = torch.stack(reference.sum_add_norm(parts, residual.clone(), weight, EPS))
        for one in found:
            assert torch.equal(one, found[0]), f"{dtype} {shape} seed {seed}"
            torch.testing.assert_close(one, expected, msg=f"{dtype} {shape} seed {seed}")


def check_stream(seed: str, num_ranks: str) -> None:
    """Ranks in processes of their own, which do wait: places are used again within a call.

    Calls of whole sums, and of shares of them that are then gathered, take turns in the same slots.
    """
    rng, size = random.Random(seed), int(num_ranks)
    torch.manual_seed(rng.randrange(2**32))
    width, num_blocks = rng.choice((2048, 6144)), rng.choice((1, 2))
    rows_of_piece = PIECE_BYTES // 4 // width
    num_rows = rows_of_piece * num_blocks * DEPTH + rng.randrange(1, 3 * rows_of_piece)
    num_shared = -(-num_rows // size)
    parts = [[_draw((num_rows, width), torch.float32) for _ in range(size)] for _ in range(4)]
    residual, weight = _draw((num_rows, width), torch.float32), _draw((width,), torch.float32)
    slot_bytes = DEPTH * size * num_blocks * PIECE_BYTES
    num_words = (DATA_BEGINS + 2 * slot_bytes) // 8
    memories = [torch.zeros(num_words, dtype=torch.int64) for _ in range(size)]
    found = [torch.zeros(len(parts), 2, num_rows, width) for _ in range(size)]
    for shared in (*memories, *found):
        shared.share_memory_()

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        count = torch.zeros(MAX_BLOCKS, dtype=torch.int64)
        view = PeerMemory(rank=rank, memories=tuple(memories), count=count, max_blocks=num_blocks)
        assert fits_stream(residual, view)
        assert fits_share_stream(residual, view)
        begin = min(rank * num_shared, num_rows)
        rows = slice(begin, min(begin + num_shared, num_rows))
        padded = torch.zeros(num_shared, width)
        padded[: rows.stop - rows.start] = residual[rows]
        for call, own in enumerate(parts):
            if call % 2 == 0:
                given = own[rank].clone(), residual.clone(), weight, EPS, view
                found[rank][call] = torch.stack(stream_add_norm(*given))
                continue
            given = own[rank], padded.clone(), weight, EPS, view
            both = share_stream_add_norm(*given)
            for one, own_rows in zip(found[rank][call], both, strict=True):
                one.copy_(gather_stream(own_rows, view)[:num_rows])

    processes = [mp.get_context("fork").Process(target=run, args=(rank,)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    what = f"{num_rows} x {width} in {num_blocks} blocks, seed {seed}"
    assert [process.exitcode for process in processes] == [0] * size, what
    for call, own in enumerate(parts):
        expected = torch.stack(reference.sum_add_norm(own, residual.clone(), weight, EPS))
        for one in found:
            assert torch.equal(one[call], found[0][call]), what
            torch.testing.assert_close(one[call], expected, msg=f"call {call}, {what}")


def check_packets(seed: str, num_ranks: str) -> None:
    """Others' packets are put there; a rank adds them, takes them away and writes its own."""
    rng, size = random.Random(seed), int(num_ranks)
    torch.manual_seed(rng.randrange(2**32))
    shape = rng.choice((1, 3, 5)), rng.choice((8, 136, 1032))
    what = f"{shape} of {size} seed {seed}"
    parts = [_draw(shape, torch.float16) for _ in range(size)]
    residual, weight = _draw(shape, torch.float16), _draw(shape[1:], torch.float16)
    num_calls, max_blocks = rng.randrange(2**34), rng.choice((1, 2, 5))
    expected = reference.sum_add_norm(parts, residual.clone(), weight, EPS)
    for rank in range(size):
        ranks = InterpretedRanks(size, 2**12, max_blocks=max_blocks, num_calls=num_calls)
        view = ranks.views[rank]
        for sender, part in enumerate(parts):
            if sender != rank:
                _place_of(view, rank, sender, num_calls, part.numel())[:] = _packets(part)
        view.count.fill_(2 * num_calls)
        x, stream = parts[rank].clone(), residual.clone()
        found = sum_by_packets_add_norm(x, stream, weight, EPS, view)
        torch.testing.assert_close(found, expected, msg=what)
        assert view.count.unique().tolist() == [2 * num_calls + 2], what
        for other in range(size):
            sent = _place_of(view, other, rank, num_calls, x.numel())
            kept = _place_of(view, rank, other, num_calls, x.numel())
            assert not kept.any(), f"packets stay, {what}"
            assert other == rank or torch.equal(sent, _packets(parts[rank])), what


def _packets(x: Tensor) -> Tensor:
    return (x.flatten().view(torch.int16).to(torch.int32) & 0xFFFF) | 0x10000


def _place_of(view: PeerMemory, owner: int, sender: int, num_calls: int, numel: int) -> Tensor:
    """Of a sender's packets in the memory of `owner`, in the slot of the next call."""
    words = view.memories[owner].view(torch.int32)[SIGNAL_BYTES // 4 : DATA_BEGINS // 4]
    slot = words.view(2, view.num_ranks, -1)[num_calls % 2]
    return slot[sender, :numel]


def _ranks(rng: random.Random, size: int) -> InterpretedRanks:
    return InterpretedRanks(
        size, 2**19, max_blocks=rng.choice((1, 2, 5)), num_calls=rng.randrange(2**34)
    )


def _draw(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if dtype == torch.int32:
        return torch.randint(-1000, 1000, shape, dtype=dtype)
    return torch.randn(shape).to(dtype)
