"""Where a batch is cut in two: the published cases, and what holds for every split."""

import random

import pytest

from engine.runner.overlap.batch_splits import (
    BatchSplit,
    balanced_row,
    half_row,
    is_too_uneven,
    sequence_row,
    split_prompts,
    split_sequences,
    split_verified,
)

THRESHOLD = 0.48


@pytest.mark.parametrize(
    ("num_tokens", "tokens_per_row", "row"),
    # SGLang's test_two_batch_overlap.py, then even, odd and verified rows.
    [(0, 1, 0), (100, 1, 50), (99, 1, 49), (8, 1, 4), (17, 1, 8), (20, 5, 2), (1, 1, 0)],
)
def test_rows_of_equal_tokens_are_halved(num_tokens: int, tokens_per_row: int, row: int) -> None:
    assert sequence_row(num_tokens, tokens_per_row) == row


def test_a_batch_without_two_rows_of_equal_tokens_is_not_split() -> None:
    assert split_sequences(0) is None
    assert split_sequences(1, tokens_per_row=5) is None
    assert split_sequences(17) == BatchSplit(row=8, token=8, is_decode=True)
    assert split_sequences(4, tokens_per_row=5) == BatchSplit(row=2, token=10, is_decode=True)


def test_rows_that_verify_are_never_cut() -> None:
    """17 rows of 5: 40 and 45 tokens, as published; the balanced boundary would be the later."""
    assert split_verified([5] * 17) == BatchSplit(row=8, token=40, is_decode=True)
    assert balanced_row([5] * 17) == 9
    assert split_verified([1, 1, 2, 9]) == BatchSplit(row=3, token=4, is_decode=True)
    assert split_verified([9, 2]) == BatchSplit(row=1, token=9, is_decode=True)
    assert split_verified([7]) is None
    assert split_verified([1]) is None


@pytest.mark.parametrize(
    ("row_tokens", "row"),
    # SGLang's test_two_batch_overlap.py, then the worked example of its published analysis.
    [
        ([], 0),
        ([42], 0),
        ([42, 999], 1),
        ([999, 42], 1),
        ([4096, 4096, 4096, 4096], 2),
        ([4095, 4096, 4096, 4096, 1], 2),
        ([1, 4095, 4096, 4096, 4096], 3),
        ([4097, 4096, 4096, 4095, 1], 2),
        ([1, 1, 1, 1, 99999], 4),
        ([99999, 1, 1, 1, 1], 1),
        ([100, 50, 30, 80, 40, 60], 3),
        ([10, 20, 30, 500, 40], 3),
    ],
)
def test_the_balanced_boundary_is_the_published_one(row_tokens: list[int], row: int) -> None:
    assert balanced_row(row_tokens) == row


def test_equal_differences_go_to_the_later_boundary() -> None:
    assert balanced_row([3, 2, 3]) == 2


def test_an_even_batch_is_split_between_rows() -> None:
    split = split_prompts([100, 50, 30, 80, 40, 60], THRESHOLD)
    assert split == BatchSplit(row=3, token=180)
    assert not split.is_two_chunk


def test_a_long_row_is_cut_at_half_of_the_tokens() -> None:
    row_tokens = [10, 20, 30, 500, 40]
    assert is_too_uneven(row_tokens, balanced_row(row_tokens), THRESHOLD)
    assert half_row(row_tokens) == 3
    split = split_prompts(row_tokens, THRESHOLD)
    assert split == BatchSplit(row=3, row_tokens=240, token=300)
    assert split.is_two_chunk


def test_a_long_row_alone_is_cut() -> None:
    assert split_prompts([2049], THRESHOLD) == BatchSplit(row=0, row_tokens=1024, token=1024)


def test_half_of_the_tokens_may_end_with_a_row() -> None:
    """5 of 11 is below 0.48, and half of 11 is 5: the published rule would leave a row of 0."""
    assert is_too_uneven([5, 6], 1, THRESHOLD)
    split = split_prompts([5, 6], THRESHOLD)
    assert split == BatchSplit(row=1, token=5)
    assert not split.is_two_chunk


@pytest.mark.parametrize("row_tokens", [[], [1]])
def test_what_has_no_two_tokens_is_not_split(row_tokens: list[int]) -> None:
    assert split_prompts(row_tokens, THRESHOLD) is None


def test_a_lower_threshold_cuts_fewer_rows() -> None:
    row_tokens = [45, 55]  # a share of 0.45
    assert split_prompts(row_tokens, 0.48) == BatchSplit(row=1, row_tokens=5, token=50)
    assert split_prompts(row_tokens, 0.40) == BatchSplit(row=1, token=45)


def test_by_itself_a_share_below_the_published_0_48_is_too_uneven() -> None:
    assert split_prompts([48, 52]) == BatchSplit(row=1, token=48)
    assert split_prompts([52, 48]) == BatchSplit(row=1, token=52)
    assert split_prompts([47, 53]) == BatchSplit(row=1, row_tokens=3, token=50)
    assert split_prompts([53, 47]) == BatchSplit(row=0, row_tokens=50, token=50)


def test_every_token_is_in_exactly_one_half() -> None:
    draw = random.Random(7)
    num_cut = 0
    for _ in range(2000):
        row_tokens = [draw.choice([1, 1, 2, 7, 64, 900]) for _ in range(draw.randint(1, 9))]
        threshold = draw.choice([0.0, 0.3, 0.48, 0.5])
        split = split_prompts(row_tokens, threshold)
        total = sum(row_tokens)
        if split is None:
            assert len(row_tokens) == 1
            assert total < 2 or threshold == 0.0
            continue
        first = row_tokens[: split.row]
        second = row_tokens[split.row :]
        if split.is_two_chunk:
            num_cut += 1
            first.append(split.row_tokens)
            second[0] -= split.row_tokens
            assert abs(sum(first) - sum(second)) <= 1
        assert min(*first, *second) >= 1
        assert (sum(first), sum(second)) == (split.token, total - split.token)
    assert num_cut > 100
