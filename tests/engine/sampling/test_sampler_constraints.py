"""Constraints inside the sampler: which tokens are banned, for whom, and when they are heard."""

import random

import pytest
import torch
from torch import Tensor

from engine.request import Constraint, ConstraintKind, SamplingParams, Thinking
from engine.sampling.sampler import Sampler
from tests.engine.sampling.drawn import sample

VOCAB = 77  # not a multiple of a mask's word
HELD = Constraint(ConstraintKind.REGEX, "counting up by steps")


class Steps:
    """Allows the tokens above the newest one, at most `stride` further on."""

    def __init__(self, stride: int) -> None:
        self.heard: list[int] = []
        self._stride = stride

    def allowed(self) -> range:
        newest = self.heard[-1] if self.heard else -1
        return range(newest + 1, min(VOCAB, newest + 1 + self._stride))

    def accept_token(self, token_id: int) -> bool:
        if token_id not in self.allowed():
            return False
        self.heard.append(token_id)
        return True

    def fill_next_token_bitmask(self, bitmask: Tensor, index: int = 0) -> bool:
        bits = sum(1 << token_id for token_id in self.allowed())
        words = [bits >> (32 * word) & 0xFFFFFFFF for word in range(bitmask.shape[1])]
        signed = [word - (1 << 32) if word >= 1 << 31 else word for word in words]
        bitmask[index] = torch.tensor(signed, dtype=torch.int32)
        return True


class Source:
    def __init__(self, stride: int) -> None:
        self.made: list[Steps] = []
        self._stride = stride

    def matcher(self, constraint: Constraint) -> Steps:
        assert constraint == HELD
        self.made.append(Steps(self._stride))
        return self.made[-1]


def held_params(
    temperature: float, seed: int = 0, thinking: Thinking | None = None
) -> SamplingParams:
    return SamplingParams(
        max_tokens=99, temperature=temperature, seed=seed, constraint=HELD, thinking=thinking
    )


def possible(sampler: Sampler, row: int) -> set[int]:
    """The tokens that could be drawn: each is, where its logit is far above the others."""
    found = set()
    for token_id in range(VOCAB):
        logits = torch.zeros(1, VOCAB)
        logits[0, token_id] = 1e4
        drawn = sample(sampler, logits, [row])
        if drawn.is_finite == [True] and drawn.token_ids == [token_id]:
            found.add(token_id)
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_only_rows_with_a_constraint_are_held_and_each_by_its_own_tokens(
    temperature: float,
) -> None:
    source = Source(stride=3)
    sampler = Sampler(VOCAB, 8, (0,), "cpu", source)
    free = SamplingParams(max_tokens=99, temperature=temperature, seed=5)
    sampler.add(4, free, [1], [])
    for row in (6, 1):
        sampler.add(row, held_params(temperature, row), [9, 9], [2, 4] if row == 1 else [])
    rows = [6, 4, 1]
    alone = Sampler(VOCAB, 8, (0,), "cpu")
    alone.add(4, free, [1], [])
    for _ in range(10):
        logits = torch.randn(3, VOCAB)
        kept = logits.clone()
        drawn = sample(sampler, logits, rows)
        assert torch.equal(logits, kept), "the caller's logits changed"
        assert drawn.is_finite == [True] * 3
        assert drawn.token_ids[1] == sample(alone, logits[1:2], [4]).token_ids[0]
        for matcher, position, row in ((source.made[0], 0, 6), (source.made[1], 2, 1)):
            allowed = list(matcher.allowed())
            assert drawn.token_ids[position] in allowed
            if temperature == 0.0:
                best = int(logits[position, allowed].argmax())
                assert drawn.token_ids[position] == allowed[best]
            sampler.accept_token(row, drawn.token_ids[position])
    assert source.made[1].heard[:2] == [2, 4]


def test_a_row_that_leaves_leaves_its_constraint_too() -> None:
    source = Source(stride=1)
    sampler = Sampler(VOCAB, 8, (0,), "cpu", source)
    sampler.add(3, held_params(0.0), [1], [])
    assert not sampler.is_plain([3])
    sampler.remove(3)
    sampler.add(3, SamplingParams(max_tokens=9, temperature=0.0), [1], [])
    assert sampler.is_plain([3])
    logits = torch.zeros(1, VOCAB)
    best = random.randrange(1, VOCAB)
    logits[0, best] = 1.0
    assert sample(sampler, logits, [3]).token_ids == [best]


def test_where_nothing_is_allowed_nothing_is_drawn_and_other_rows_are() -> None:
    sampler = Sampler(VOCAB, 8, (0,), "cpu", Source(stride=0))
    sampler.add(0, held_params(1.0), [1], [])
    sampler.add(1, SamplingParams(max_tokens=9, temperature=0.0), [1], [])
    assert sample(sampler, torch.randn(2, VOCAB), [0, 1]).is_finite == [False, True]


def test_nothing_allowed_is_told_from_numbers_that_are_not_finite() -> None:
    sampler = Sampler(VOCAB, 8, (0,), "cpu", Source(stride=0))
    for row, temperature in enumerate((1.0, 0.0, 1.0)):
        sampler.add(row, held_params(temperature), [1], [])
    sampler.add(3, SamplingParams(max_tokens=9, temperature=0.0), [1], [])
    logits = torch.randn(4, VOCAB)
    logits[2, 5] = torch.nan
    found = sampler.sample(logits, [0, 1, 2, 3])
    assert found.is_finite.tolist() == [False, False, False, True]
    assert found.allows_nothing is not None
    assert found.allows_nothing.tolist() == [True, True, False, False]


def test_behind_a_token_that_the_constraint_does_not_take_nothing_may_follow() -> None:
    sampler = Sampler(VOCAB, 8, (0,), "cpu", Source(stride=2))
    sampler.add(0, held_params(1.0), [1], [0, 9])
    assert possible(sampler, 0) == set()
    sampler.accept_token(0, 10)
    assert possible(sampler, 0) == set()


EOS, OPEN, CLOSE = 0, 40, 70  # none of them may begin an answer of `Steps(3)` but eos
ANSWERS = {0, 1, 2}


def test_an_answer_may_begin_at_once_or_with_thinking() -> None:
    sampler = Sampler(VOCAB, 8, (EOS,), "cpu", Source(stride=3))
    sampler.add(0, held_params(0.0, thinking=Thinking(OPEN, CLOSE)), [1], [])
    assert possible(sampler, 0) == ANSWERS | {OPEN}
    sampler.accept_token(0, 2)
    assert possible(sampler, 0) == {3, 4, 5}, "what has begun to answer thinks no more"


def test_thinking_is_free_but_cannot_end_the_output_and_the_answer_behind_it_is_held() -> None:
    source = Source(stride=3)
    sampler = Sampler(VOCAB, 8, (EOS,), "cpu", source)
    sampler.add(0, held_params(0.0, thinking=Thinking(OPEN, CLOSE)), [1], [])
    for token_id in (OPEN, 9, OPEN, 3):
        sampler.accept_token(0, token_id)
        assert possible(sampler, 0) == set(range(VOCAB)) - {EOS}
    sampler.accept_token(0, CLOSE)
    assert possible(sampler, 0) == ANSWERS
    sampler.accept_token(0, 1)
    assert possible(sampler, 0) == {2, 3, 4}
    assert source.made[0].heard == [1]


def test_a_prompt_may_have_begun_the_thinking() -> None:
    sampler = Sampler(VOCAB, 8, (EOS,), "cpu", Source(stride=3))
    sampler.add(0, held_params(0.0, thinking=Thinking(OPEN, CLOSE, is_open=True)), [1, OPEN], [])
    assert possible(sampler, 0) == set(range(VOCAB)) - {EOS}
    sampler.accept_token(0, CLOSE)
    assert possible(sampler, 0) == ANSWERS


@pytest.mark.parametrize(
    ("output_ids", "expected"),
    [
        ([OPEN, 50, 9], set(range(VOCAB)) - {EOS}),
        ([OPEN, 50, CLOSE], ANSWERS),
        ([OPEN, 50, CLOSE, 2, 4], {5, 6, 7}),
        ([2], {3, 4, 5}),
    ],
)
def test_a_row_that_comes_from_elsewhere_thinks_or_answers_on(
    output_ids: list[int], expected: set[int]
) -> None:
    sampler = Sampler(VOCAB, 8, (EOS,), "cpu", Source(stride=3))
    sampler.add(5, held_params(0.0, thinking=Thinking(OPEN, CLOSE)), [1], output_ids)
    assert possible(sampler, 5) == expected


def test_behind_an_end_inside_the_thinking_nothing_may_follow() -> None:
    sampler = Sampler(VOCAB, 8, (EOS,), "cpu", Source(stride=2))
    sampler.add(0, held_params(1.0, thinking=Thinking(OPEN, CLOSE)), [1], [OPEN, EOS])
    assert possible(sampler, 0) == set()


def test_only_allowed_tokens_are_drawn() -> None:
    sampler = Sampler(VOCAB, 8, (0,), "cpu")
    sampler.add(2, SamplingParams(max_tokens=9, allowed_token_ids=(5, 76, 31)), [1], [])
    assert possible(sampler, 2) == {5, 31, 76}
    sampler.accept_token(2, 5)
    assert possible(sampler, 2) == {5, 31, 76}


def test_a_banned_sequence_is_banned_where_it_would_end() -> None:
    sampler = Sampler(VOCAB, 8, (0,), "cpu")
    banned = ((7,), (3, 4), (3, 3, 5))
    sampler.add(2, SamplingParams(max_tokens=9, banned_sequences=banned), [3, 3], [])
    everything = set(range(VOCAB))
    assert possible(sampler, 2) == everything - {7}, "the prompt does not count"
    sampler.accept_token(2, 3)
    assert possible(sampler, 2) == everything - {7, 4}
    sampler.accept_token(2, 3)
    assert possible(sampler, 2) == everything - {7, 4, 5}
    sampler.accept_token(2, 9)
    assert possible(sampler, 2) == everything - {7}


def test_output_tokens_of_another_worker_count() -> None:
    sampler = Sampler(VOCAB, 8, (0,), "cpu")
    sampler.add(2, SamplingParams(max_tokens=9, banned_sequences=((3, 4),)), [1], [3])
    assert possible(sampler, 2) == set(range(VOCAB)) - {4}


def test_a_constraint_allowed_tokens_and_banned_ones_hold_together() -> None:
    sampler = Sampler(VOCAB, 8, (0,), "cpu", Source(stride=4))
    params = SamplingParams(
        max_tokens=9, constraint=HELD, allowed_token_ids=(1, 2, 3, 50), banned_sequences=((2,),)
    )
    sampler.add(0, params, [1], [])
    assert possible(sampler, 0) == {1, 3}
    sampler.accept_token(0, 1)
    assert possible(sampler, 0) == {3}
