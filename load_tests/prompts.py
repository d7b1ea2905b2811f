"""Prompts for figures: slices of the standard library's source, or ids at random, by a seed.

Knows no tokenizer: a caller turns text into ids and cuts them to the wanted lengths.
"""

import random
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

CHARS_PER_TOKEN = 12  # generous: a slice must not turn out too short
FIRST_TOKEN_ID, LAST_TOKEN_ID = 10, 100_000  # of ids at random, as far as the vocabulary goes


class RandomPrompts:
    """Prompts of random ids, never the same twice; the same series for one seed."""

    def __init__(self, vocab_size: int, *, seed: int) -> None:
        self._rng = random.Random(seed)
        self._end_id = min(LAST_TOKEN_ID, vocab_size)

    def draw(self, num_rows: int, num_tokens: int) -> list[list[int]]:
        """`num_rows` prompts of `num_tokens` each."""
        draw = self._rng.randrange
        return [
            [draw(FIRST_TOKEN_ID, self._end_id) for _ in range(num_tokens)] for _ in range(num_rows)
        ]


class SourceText:
    """Readable modules of the running interpreter's library, in a stable order."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` None: the interpreter's own library. Raises FileNotFoundError if it is empty."""
        self.folder = folder or Path(sysconfig.get_path("stdlib"))
        self._paths = sorted(self.folder.glob("*.py"))
        if not self._paths:
            raise FileNotFoundError(f"{self.folder}: no *.py files to take prompts from")

    def slice(self, num_chars: int, rng: random.Random) -> str:
        """`num_chars` characters from a random place; shorter files are joined until it fits."""
        text = ""
        while len(text) <= num_chars:
            text += rng.choice(self._paths).read_text(encoding="utf-8", errors="replace")
        start = rng.randrange(len(text) - num_chars)
        return text[start : start + num_chars]


def build_prompts(
    encode: Callable[[str], Sequence[int]],
    lengths_tokens: Sequence[int],
    *,
    seed: int,
    source: SourceText | None = None,
) -> list[list[int]]:
    """One prompt of exactly so many tokens for each of `lengths_tokens`."""
    rng = random.Random(seed)
    source = source or SourceText()
    prompts = []
    for num_tokens in lengths_tokens:
        ids: list[int] = []
        while len(ids) < num_tokens:
            ids += encode(source.slice(num_tokens * CHARS_PER_TOKEN, rng))
        prompts.append(ids[:num_tokens])
    return prompts


def draw_lengths(num_prompts: int, shortest: int, longest: int, *, seed: int) -> list[int]:
    """Uniformly drawn lengths in tokens, both ends included."""
    rng = random.Random(f"lengths {seed}")
    return [rng.randint(shortest, longest) for _ in range(num_prompts)]
