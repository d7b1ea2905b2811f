"""The device decides of rows with drafts what the host would, and moves rows to where they are."""

import random

import torch

from engine.speculation.acceptance import accepted
from kernels.guesses import GuessedLines, PlannedTokens, RowStates, accept, move

SEED = random.SystemRandom().randrange(10**6)


def test_rows_get_what_the_host_accepts() -> None:
    """Of rows with none to five drafts, some lines not finite, beside rows without drafts."""
    print("seed", SEED)
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
            assert int(states.shortfalls[row]) == len(samples) - len(tokens)
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
        planned = PlannedTokens(
            **tensors, cu_blocks=torch.tensor([0, 5, 10, 15]).int(), block_ids=block_ids
        )
        token_rows = [row for row, num in enumerate(nums_new) for _ in range(num)]
        move(
            planned,
            torch.tensor(behind).int(),
            torch.tensor(places),
            torch.tensor(token_rows),
            block_size,
        )
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
