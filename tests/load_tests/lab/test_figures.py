"""Prompts are reproducible and as long as asked, and figures say what was measured."""

import json
import random
from pathlib import Path

import pytest

from load_tests.prompts import SourceText, build_prompts, draw_lengths
from load_tests.tables import at_least, at_most, median_figure, render, to_json
from tests.harness.seeds import seed_of

SEED = seed_of(__name__)
WORDS = ["alpha", "beta", "gamma", "delta"]


@pytest.fixture
def source(tmp_path: Path) -> SourceText:
    for index, word in enumerate(WORDS):
        (tmp_path / f"{word}.py").write_text(f"{word} " * (10 + 37 * index))
    return SourceText(tmp_path)


def encode(text: str) -> list[int]:
    """A token for every three characters."""
    return [sum(map(ord, text[i : i + 3])) for i in range(0, len(text), 3)]


def test_prompts_have_exactly_the_asked_lengths_and_depend_only_on_the_seed(
    source: SourceText,
) -> None:
    lengths = draw_lengths(23, 1, 301, seed=SEED)
    prompts = build_prompts(encode, lengths, seed=SEED, source=source)
    assert [len(prompt) for prompt in prompts] == lengths, f"seed {SEED}"
    assert prompts == build_prompts(encode, lengths, seed=SEED, source=source), f"seed {SEED}"
    assert prompts != build_prompts(encode, lengths, seed=SEED + 1, source=source), f"seed {SEED}"


def test_lengths_reach_both_ends_and_nothing_beyond() -> None:
    lengths = draw_lengths(400, 5, 9, seed=SEED)
    assert set(lengths) == {5, 6, 7, 8, 9}, f"seed {SEED}"


def test_a_slice_longer_than_any_file_is_joined_from_several(source: SourceText) -> None:
    text = source.slice(5000, random.Random(SEED))
    assert len(text) == 5000, f"seed {SEED}"


def test_a_folder_without_source_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        SourceText(tmp_path)


def test_a_table_shows_median_range_and_whether_the_target_is_met() -> None:
    figures = [
        median_figure("rate", [3.0, 1.0, 8.0], "tokens/s"),
        at_least("ratio", [1.5, 0.5, 0.9], "x", 1.0),
        at_most("added", 19.9, "ms", 20.0),
    ]
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in render(figures).split("\n")
    ]
    assert lines[2] == ["rate", "3 tokens/s", "1 - 8", "", ""]
    assert lines[3] == ["ratio", "0.9 x", "0.5 - 1.5", ">= 1", "NO"]
    assert lines[4] == ["added", "19.9 ms", "", "<= 20", "yes"]


def test_json_holds_every_figure_and_what_it_was_measured_on() -> None:
    data = json.loads(to_json([at_least("ratio", [2.0], "x", 1.0)], {"threads": 1}))
    assert data["about"] == {"threads": 1}
    [figure] = data["figures"]
    assert figure["value"] == 2.0
    assert figure["is_met"] is True
