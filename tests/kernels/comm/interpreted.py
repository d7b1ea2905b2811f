"""Sums over ranks under the interpreter, whose blocks run one after the other.

Nobody can wait there. So all ranks' calls are run several times on the same signals, which let
everybody pass: what a rank has not written in the first round is there in the next one.
"""

import random
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.comm import reference
from kernels.comm.signals import MAX_BLOCKS, MAX_RANKS, SIGNAL_BYTES
from kernels.comm.sums import PeerMemory, sum_add_norm, sum_over_ranks

NUM_ROUNDS = 3  # one more than there are barriers
EPS = 1e-5


class InterpretedRanks:
    """The memory of all ranks in one process."""

    def __init__(self, num_ranks: int, slot_bytes: int, *, max_blocks: int, num_calls: int) -> None:
        """num_calls: that came before, which decide the slot."""
        words = (SIGNAL_BYTES + 2 * slot_bytes) // 8
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
            numel = rng.choice((1, 7, 4096, 9000, 20001))
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


def _ranks(rng: random.Random, size: int) -> InterpretedRanks:
    return InterpretedRanks(
        size, 2**19, max_blocks=rng.choice((1, 2, 5)), num_calls=rng.randrange(2**34)
    )


def _draw(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if dtype == torch.int32:
        return torch.randint(-1000, 1000, shape, dtype=dtype)
    return torch.randn(shape).to(dtype)
