"""Counting what attempts accept along answers that are known."""

from engine.speculation.ngram import NgramRules
from load_tests.lab.draft_acceptance import Answers, walk, walk_ngrams

ANSWER = [1, 2, 3, 4, 5, 6, 7]


def test_right_drafts_are_followed_by_one_token_more() -> None:
    found = walk([ANSWER], lambda request, at: ANSWER[at:], 3)
    assert found.num_attempts == 2  # four tokens, and three
    assert found.num_accepted == found.num_judged == [2, 2, 1]
    assert found.num_tokens == 7


def test_drafts_after_the_first_wrong_one_are_not_judged() -> None:
    found = walk([ANSWER], lambda request, at: [ANSWER[at], 0, 0], 3)
    assert found.num_judged == [3, 3, 0]
    assert found.num_accepted == [3, 0, 0]
    assert found.num_attempts == 4  # two tokens each, and the last one


def test_ngrams_learn_from_answers_before() -> None:
    answers = Answers(
        prompts=[[1, 2], [1, 2]],
        tokens=[[3, 4, 5, 6, 7], [3, 4, 5, 6, 7]],
        argmax=[],
        coupled=[],
        overlap=None,
    )
    assert sum(walk_ngrams(answers, NgramRules(max_corpus_tokens=0), 4).num_accepted) == 0
    assert walk_ngrams(answers, NgramRules(), 4).num_accepted == [1, 1, 0, 0]  # 5 6 after 3 4
