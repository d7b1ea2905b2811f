"""The device decides of rows with drafts what the host would, and moves rows to where they are.

Torch by the host's rules; Triton, in the interpreter and on a GPU, by torch.
"""

import random
from dataclasses import fields, is_dataclass
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.speculation.acceptance import accepted
from kernels.guessed_steps import (
    AHEAD,
    JUDGED,
    OPEN_ENDED,
    GuessedBatch,
    PlannedStep,
    RowStates,
)
from kernels.guesses import judge, move
from tests.harness.gpus import gpu
from tests.harness.seeds import seed_of
from tests.kernels.cross_compile import compiled_for
from tests.kernels.interpreter import run_interpreted
from tests.kernels.sampling.sample_cases import fresh_generator

SEED = seed_of(__name__)


def _ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _ends(counts: list[int]) -> list[int]:
    return [0, *accumulate(counts)]


def test_rows_get_what_the_host_accepts() -> None:
    """Of rows with none to five drafts, some lines not finite, beside rows without drafts."""
    draw = random.Random(SEED)
    max_rows, width = 9, 6
    for _ in range(60):
        rows = draw.sample(range(max_rows), draw.randint(1, 6))
        is_judged = [draw.random() < 0.7 for _ in rows]
        drafts = [
            draw.choices((1, 2), k=draw.randint(0, width - 1) if its else 0) for its in is_judged
        ]
        prompts = [
            draw.choices((1, 2), k=draw.choice((1, 1, 3))) for _ in rows
        ]  # no line but the last
        ids, lines, drawn = [], [], []
        table = _ints(draw.choices((1, 2), k=50))
        for its_prompt, its_drafts in zip(prompts, drafts, strict=True):
            lines += range(len(ids) + len(its_prompt) - 1, len(ids) + len(its_prompt + its_drafts))
            for token in its_prompt + its_drafts:
                places = (table == token).nonzero()[:, 0].tolist()
                ids.append(draw.choice([token, *(-1 - place for place in places[:2])]))
            drawn += draw.choices((1, 2, -1), weights=(5, 5, 1), k=1 + len(its_drafts))
        states = RowStates(
            shortfalls=torch.full((max_rows + 1,), 77, dtype=torch.int32),
            samples=torch.full((width, max_rows + 1), 77, dtype=torch.int32),
            newest=torch.full((max_rows + 1,), 77, dtype=torch.int32),
        )
        nums_lines = [1 + len(its) for its in drafts]
        nums_new = [len(p) + len(its) for p, its in zip(prompts, drafts, strict=True)]
        guessed = GuessedBatch(
            rows=_ints(rows),
            kinds=_ints([JUDGED if its else 0 for its in is_judged]),
            num_new=_ints(nums_new),
            cu_tokens=_ints(_ends(nums_new)),
            cu_lines=_ints(_ends(nums_lines)),
            num_lines=len(drawn),
        )
        samples_of, follows_of = [], []
        given = None if len(lines) == len(ids) else _ints(lines)
        both = judge(_ints(drawn), _ints(ids), given, table, guessed, states).tolist()
        assert both[0] == drawn
        for start, end in zip(_ends(nums_lines), _ends(nums_lines)[1:], strict=False):
            samples_of.append(drawn[start:end])
            follows_of.append(both[1][start : end - 1])
            assert both[1][end - 1] == 0  # nothing follows a row's last line
        assert follows_of == drafts
        for row, samples, its_drafts, its in zip(rows, samples_of, drafts, is_judged, strict=True):
            if not its:
                assert int(states.shortfalls[row]) == int(states.newest[row]) == 77
                continue
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
    kinds = [AHEAD | JUDGED, JUDGED, AHEAD]
    for _ in range(20):
        behind = [draw.randint(0, 4) for _ in nums_new]
        moved = [d if kind & AHEAD else 0 for d, kind in zip(behind, kinds, strict=True)]
        written, expected = (
            _written(nums_new, starts, blocks, block_size)
            for starts in (bounds, [b - d for b, d in zip(bounds, moved, strict=True)])
        )
        tensors = {name: torch.tensor(values).int() for name, values in written.items()}
        planned = PlannedStep(
            **tensors,
            lines=_ints([7, 8, 9, 3]),
            cu_blocks=torch.tensor([0, 5, 10, 15]).int(),
            block_ids=block_ids,
        )
        guessed = GuessedBatch(
            rows=_ints([2, 0, 1]),
            kinds=_ints(kinds),
            num_new=_ints(nums_new),
            cu_tokens=_ints([0, 5, 10, 15]),
            cu_lines=_ints([0, 2, 3, 4]),
            num_lines=4,
        )
        shortfalls = _ints([behind[1], behind[2], behind[0], 0])
        found = move(planned, guessed, shortfalls, block_size).tolist()
        assert found == [behind[0], behind[0], 0, behind[2]]
        assert {name: values.tolist() for name, values in tensors.items()} == expected
        assert planned.lines.tolist() == [7, 8, 9, 3]


def test_rows_that_end_earlier_sample_after_earlier_tokens() -> None:
    """Nothing else of them moves."""
    planned = PlannedStep(
        num_keys=_ints([9, 7]),
        positions=_ints([6, 7, 8, 6]),
        slots=_ints([6, 7, 8, 38]),
        lines=_ints([2, 3]),
        cu_blocks=_ints([0, 1, 2]),
        block_ids=_ints([0, 2]),
    )
    before = _at("cpu", planned)
    guessed = GuessedBatch(
        rows=_ints([4, 1]),
        kinds=_ints([OPEN_ENDED | JUDGED, JUDGED]),
        num_new=_ints([3, 1]),
        cu_tokens=_ints([0, 3, 4]),
        cu_lines=_ints([0, 1, 2]),
        num_lines=2,
    )
    shortfalls = _ints([9, 9, 9, 9, 2, 0])
    assert move(planned, guessed, shortfalls, 16).tolist() == [2, 0]
    assert planned.lines.tolist() == [0, 3]
    planned.lines.copy_(before.lines)
    _assert_equal(planned, before)


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


def _batch(
    num_rows: int, max_rows: int, width: int, kinds: tuple[int, ...], generator: torch.Generator
) -> GuessedBatch:
    """Rows of one to `width` lines, each of a token, with padding before the tokens of each."""
    nums = 1 + _indices(width, num_rows, generator, distinct=False)
    chosen = torch.tensor(kinds)[_indices(len(kinds), num_rows, generator, distinct=False)]
    ends = torch.arange(num_rows + 1) * (width + 1)
    return GuessedBatch(
        rows=_indices(max_rows, num_rows, generator, distinct=True).int(),
        kinds=chosen.int(),
        num_new=nums.int(),
        cu_tokens=ends.int(),
        cu_lines=torch.cat([torch.zeros(1), nums.cumsum(0)]).int(),
        num_lines=int(nums.sum()),
    )


def _judged(
    num_rows: int, width: int, max_rows: int, generator: torch.Generator
) -> tuple[tuple[Any, ...], RowStates]:
    """What `judge` is given before the states, and these."""
    guessed = _batch(num_rows, max_rows, width, (0, JUDGED, JUDGED | AHEAD), generator)
    num_lines, num_ids = guessed.num_lines, num_rows * (width + 1)
    states = RowStates(
        shortfalls=_numbers(9, max_rows + 1, generator=generator),
        samples=_numbers(9, width, max_rows + 1, generator=generator),
        newest=_numbers(9, max_rows + 1, generator=generator),
    )
    given = (
        _numbers(4, num_lines, generator=generator) - 1,
        _numbers(3 + 31, num_ids, generator=generator) - 31,
        _indices(num_ids - 1, num_lines, generator, distinct=True).int(),
        _numbers(3, 31, generator=generator),
        guessed,
    )
    return given, states


def check_judge(device: str) -> None:
    from kernels.guesses_triton import judge as judge_there

    generator = fresh_generator()
    for num_rows, width, max_rows in ((1, 2, 1), (5, 4, 9), (130, 6, 200), (9, 17, 9)):
        (drawn, ids, lines, table, guessed), states = _judged(num_rows, width, max_rows, generator)
        for some_lines in (lines, None):
            given = drawn, ids, some_lines, table, guessed
            found = _at(device, states)
            left = judge_there(*[_at(device, each) for each in given], found)
            assert torch.equal(left.cpu(), judge(*given, states))
            _assert_equal(found, states)


def _moving(num_rows: int, generator: torch.Generator) -> tuple[PlannedStep, GuessedBatch, Tensor]:
    kinds = (0, JUDGED, AHEAD | JUDGED, AHEAD, OPEN_ENDED | JUDGED)
    guessed = _batch(num_rows, num_rows + 1, 40, kinds, generator)
    num_tokens = 41 * num_rows
    planned = PlannedStep(
        num_keys=_numbers(99, num_rows + 2, generator=generator),
        positions=16 + _numbers(100, num_tokens + 9, generator=generator),
        slots=torch.full((num_tokens + 9,), -1, dtype=torch.int32),
        lines=5 + _numbers(99, guessed.num_lines + 1, generator=generator),
        cu_blocks=(torch.arange(num_rows + 1) * 8).int(),
        block_ids=torch.arange(8 * num_rows).int(),
    )
    _write_slots(planned, guessed)
    return planned, guessed, _numbers(6, num_rows + 2, generator=generator)


def _write_slots(planned: PlannedStep, guessed: GuessedBatch) -> None:
    """Those that belong to the positions, as the host has written them."""
    for row, (end, num) in enumerate(
        zip(guessed.cu_tokens[1:].tolist(), guessed.num_new.tolist(), strict=True)
    ):
        position = planned.positions[end - num : end]
        block = planned.block_ids[8 * row + position // 16]
        planned.slots[end - num : end] = block * 16 + position % 16


def check_move(device: str) -> None:
    from kernels.guesses_triton import move as move_there

    generator = fresh_generator()
    for num_rows in (1, 3, 130):
        planned, guessed, shortfalls = _moving(num_rows, generator)
        found = _at(device, planned)
        behind = move_there(found, _at(device, guessed), _at(device, shortfalls), 16)
        expected = move(planned, guessed, shortfalls, 16)
        assert torch.equal(behind.cpu(), expected)
        _assert_equal(found, planned)


def check_all(device: str) -> None:
    check_judge(device)
    check_move(device)


def test_all_operations_in_the_interpreter() -> None:
    run_interpreted("tests.kernels.test_guesses:check_all", "cpu")


def test_they_compile_for_an_h200() -> None:
    from kernels import guesses_triton

    generator = fresh_generator()
    judged, states = _judged(5, 4, 9, generator)
    with compiled_for(gpu("H200"), guesses_triton) as found:
        guesses_triton.judge(*judged, states)
        guesses_triton.move(*_moving(3, generator), 16)
    assert set(found) == {"_judge_kernel", "_move_kernel"}


@pytest.mark.gpu
def test_all_operations_on_a_gpu() -> None:
    check_all("cuda")
