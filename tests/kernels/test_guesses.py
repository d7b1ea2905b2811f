"""The device decides of rows with drafts what the host would, and moves rows to where they are.

Torch by the host's rules; Triton, in the interpreter and on a GPU, by torch.
"""

import random
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.speculation.acceptance import accepted
from kernels.guessed_steps import GuessedLines, PlannedStep, RowMoves, RowStates
from kernels.guesses import accept, following, move
from tests.harness.seeds import seed_of
from tests.kernels.interpreter import run_interpreted
from tests.kernels.sampling.sample_cases import fresh_generator

SEED = seed_of(__name__)


def test_rows_get_what_the_host_accepts() -> None:
    """Of rows with none to five drafts, some lines not finite, beside rows without drafts."""
    draw = random.Random(SEED)
    max_rows, width = 9, 6
    for _ in range(60):
        rows = draw.sample(range(max_rows), draw.randint(1, 6))
        drawn: list[int] = []
        following: list[int] = []
        lines, drafts = [], []
        for _ in rows:
            its_drafts = draw.choices((1, 2), k=draw.randint(0, width - 1))
            lines.append(list(range(len(drawn), len(drawn) + 1 + len(its_drafts))))
            drafts.append(its_drafts)
            drawn += draw.choices((1, 2, -1), weights=(5, 5, 1), k=1 + len(its_drafts))
            following += [*its_drafts, 1]  # the token after the last line is another row's
            if draw.random() < 0.3:
                drawn, following = [*drawn, 2], [*following, 2]
        states = RowStates(
            shortfalls=torch.full((max_rows + 1,), 77, dtype=torch.int32),
            samples=torch.full((width, max_rows + 1), 77, dtype=torch.int32),
            newest=torch.full((max_rows + 1,), 77, dtype=torch.int32),
        )
        guessed = GuessedLines(
            rows=torch.tensor(rows),
            lines=torch.tensor([its + its[-1:] * (width - len(its)) for its in lines]),
            counts=torch.tensor([len(its) for its in lines]),
        )
        accept(torch.tensor(drawn).int(), torch.tensor(following).int(), guessed, states)
        for row, its_lines, its_drafts in zip(rows, lines, drafts, strict=True):
            samples = [drawn[line] for line in its_lines]
            tokens = accepted(samples, its_drafts)
            assert int(states.shortfalls[row]) == len(samples) - max(len(tokens), 1)
            assert int(states.newest[row]) == (tokens[-1] if tokens else 0)
            found = states.samples[: len(samples), row].tolist()
            assert found == [max(sample, 0) for sample in samples]
        for row in set(range(max_rows + 1)) - set(rows):
            assert int(states.shortfalls[row]) == int(states.newest[row]) == 77


def test_moved_rows_lie_where_they_were_written_for_fewer_tokens() -> None:
    """With padding between rows, and over the ends of blocks."""
    draw = random.Random(SEED)
    block_size = 4
    nums_new, bounds = [3, 1, 4], [9, 13, 6]  # tokens before, as planned
    blocks = [draw.sample(range(100 * r, 100 * r + 50), 5) for r in range(3)]
    block_ids = torch.tensor([i for ids in blocks for i in ids], dtype=torch.int32)
    for _ in range(20):
        behind = [draw.randint(0, 4) for _ in nums_new]
        written, expected = (
            _written(nums_new, starts, blocks, block_size)
            for starts in (bounds, [b - d for b, d in zip(bounds, behind, strict=True)])
        )
        places = [p for p, slot in enumerate(written["slots"]) if slot >= 0]
        tensors = {name: torch.tensor(values).int() for name, values in written.items()}
        planned = PlannedStep(
            **tensors,
            lines=None,
            cu_blocks=torch.tensor([0, 5, 10, 15]).int(),
            block_ids=block_ids,
        )
        token_rows = [row for row, num in enumerate(nums_new) for _ in range(num)]
        moves = RowMoves(
            rows=torch.tensor([2, 0, 1]),
            lines=torch.tensor([1, 3]),
            ends=torch.tensor([3, 3]),
            places=torch.tensor(places),
            token_rows=torch.tensor(token_rows),
        )
        shortfalls = torch.tensor([behind[1], behind[2], behind[0], 0]).int()
        assert move(planned, moves, shortfalls, block_size).tolist() == [behind[2], 0]
        assert {name: values.tolist() for name, values in tensors.items()} == expected


def _written(
    nums_new: list[int], starts: list[int], blocks: list[list[int]], block_size: int
) -> dict[str, list[int]]:
    """Each row at the end of a span of five tokens; padding has position 0 and no slot."""
    positions: list[int] = []
    slots: list[int] = []
    for num, start, ids in zip(nums_new, starts, blocks, strict=True):
        own = range(start, start + num)
        positions += [0] * (5 - num) + list(own)
        slots += [-1] * (5 - num) + [
            ids[p // block_size] * block_size + p % block_size for p in own
        ]
    num_keys = [start + num for num, start in zip(nums_new, starts, strict=True)]
    return {"num_keys": [*num_keys, 1], "positions": positions, "slots": slots}


def _indices(bound: int, size: int, generator: torch.Generator, *, distinct: bool) -> Tensor:
    if distinct:
        return torch.randperm(bound, generator=generator)[:size]
    return torch.randint(0, bound, (size,), generator=generator)


def _numbers(bound: int, *shape: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, bound, shape, generator=generator, dtype=torch.int32)


def _at(device: str, given: Any) -> Any:
    """A copy there, of a tensor or of a dataclass of tensors."""
    if is_dataclass(given):
        values = {field.name: _at(device, getattr(given, field.name)) for field in fields(given)}
        return type(given)(**values)
    return given.clone().to(device) if isinstance(given, Tensor) else given


def _assert_equal(found: Any, expected: Any) -> None:
    if is_dataclass(expected):
        for field in fields(expected):
            _assert_equal(getattr(found, field.name), getattr(expected, field.name))
    elif isinstance(expected, Tensor):
        assert torch.equal(found.cpu(), expected)


def check_following(device: str) -> None:
    from kernels.guesses_triton import following as found_by

    generator = fresh_generator()
    table = _numbers(900, 3, 31, generator=generator).view(-1)
    for size in (1, 7, 128, 300):
        ids = _numbers(900, size, generator=generator) - 93
        some = _indices(size, max(1, size // 2), generator, distinct=True).int()
        for lines, num_lines in ((None, size), (some, len(some)), (some, 1)):
            given = ids, lines, num_lines, table
            found = found_by(*[_at(device, each) for each in given])
            assert torch.equal(found.cpu(), following(*given))


def check_accept(device: str) -> None:
    from kernels.guesses_triton import accept as accept_there

    generator = fresh_generator()
    for num_guessed, width, max_rows in ((1, 2, 1), (5, 4, 9), (130, 6, 200)):
        counts = 1 + _indices(width, num_guessed, generator, distinct=False)
        firsts = torch.cumsum(counts, 0) - counts
        within = torch.minimum(torch.arange(width), counts[:, None] - 1)
        guessed = GuessedLines(
            rows=_indices(max_rows, num_guessed, generator, distinct=True),
            lines=firsts[:, None] + within,
            counts=counts,
        )
        drawn = _numbers(4, int(counts.sum()), generator=generator) - 1
        follows = _numbers(3, len(drawn), generator=generator)
        states = RowStates(
            shortfalls=_numbers(9, max_rows + 1, generator=generator),
            samples=_numbers(9, width, max_rows + 1, generator=generator),
            newest=_numbers(9, max_rows + 1, generator=generator),
        )
        found = _at(device, states)
        accept_there(_at(device, drawn), _at(device, follows), _at(device, guessed), found)
        accept(drawn, follows, guessed, states)
        _assert_equal(found, states)


def check_move(device: str) -> None:
    from kernels.guesses_triton import move as move_there

    generator = fresh_generator()
    for num_rows, num_lines, moves_lines in ((1, 1, True), (3, 140, False), (130, 40, True)):
        nums_new = 1 + _indices(5, num_rows, generator, distinct=False)
        num_tokens = int(nums_new.sum())
        cu_blocks = torch.cat([torch.zeros(1), torch.full((num_rows,), 8).cumsum(0)]).int()
        planned = PlannedStep(
            num_keys=_numbers(99, num_rows + 2, generator=generator),
            positions=16 + _numbers(100, num_tokens + 9, generator=generator),
            slots=_numbers(99, num_tokens + 9, generator=generator),
            lines=5 + _numbers(99, num_lines + 1, generator=generator) if moves_lines else None,
            cu_blocks=cu_blocks,
            block_ids=_numbers(9999, 8 * num_rows, generator=generator),
        )
        moves = RowMoves(
            rows=_indices(num_rows + 1, num_rows, generator, distinct=True),
            lines=_indices(num_rows + 1, num_lines, generator, distinct=False),
            ends=_indices(num_rows + 1, num_lines, generator, distinct=False),
            places=_indices(num_tokens + 9, num_tokens, generator, distinct=True),
            token_rows=torch.repeat_interleave(torch.arange(num_rows), nums_new),
        )
        shortfalls = _numbers(6, num_rows + 1, generator=generator)
        found = _at(device, planned)
        behind = move_there(found, _at(device, moves), _at(device, shortfalls), 16)
        expected = move(planned, moves, shortfalls, 16)
        assert torch.equal(behind.cpu(), expected)
        _assert_equal(found, planned)


def check_all(device: str) -> None:
    check_following(device)
    check_accept(device)
    check_move(device)


def test_all_operations_in_the_interpreter() -> None:
    run_interpreted("tests.kernels.test_guesses:check_all", "cpu")


@pytest.mark.gpu
def test_all_operations_on_a_gpu() -> None:
    check_all("cuda")
