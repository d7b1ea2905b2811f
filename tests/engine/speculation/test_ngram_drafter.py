"""Drafts from earlier occurrences: judged by a search through all places of all texts."""

import random

import pytest

from engine.speculation.ngram import NO_QUOTE, NgramDrafter, NgramRules, Quote

EVERY_PLACE = 10**6  # candidates


def most_alike(text: list[int], place: int, suffix: list[int], most: int) -> int:
    """How many tokens before `place` of `text` equal the end of `suffix`."""
    num = 0
    while num < min(most, place, len(suffix)) and text[place - num - 1] == suffix[-num - 1]:
        num += 1
    return num


class EveryPlace:
    """The same proposals, by comparing every place."""

    def __init__(self, rules: NgramRules) -> None:
        self._rules = rules
        self._answers: list[list[int]] = []

    def add_finished(self, answer: list[int]) -> None:
        most = self._rules.max_corpus_tokens
        kept = answer[max(0, len(answer) - (most - 1)) :] if most else []
        if len(kept) <= self._rules.min_match:
            return
        self._answers.append(kept)
        while sum(len(a) + 1 for a in self._answers) > most:
            self._answers.pop(0)

    def propose(self, text: list[int], num_drafts: int) -> list[int]:
        rules = self._rules
        found: list[tuple[int, int, int, list[int], int]] = []
        for age, source in enumerate([*self._answers, text]):
            for place in range(1, len(source)):
                num = most_alike(source, place, text, rules.max_match)
                if num >= rules.min_match:
                    found.append((num, source is text, age, source, place))
        if not found:
            return []
        *_, source, place = max(found, key=lambda f: (f[0], f[1], f[2], f[4]))
        if source is not text:
            return source[place : place + num_drafts]
        copy = list(text)
        for i in range(num_drafts):
            copy.append(copy[place + i])
        return copy[len(text) :]


@pytest.mark.parametrize("seed", range(60))
def test_the_longest_and_newest_match_of_all_places_is_proposed(seed: int) -> None:
    rng = random.Random(seed)
    min_match = rng.choice([1, 2, 3])
    rules = NgramRules(
        min_match=min_match,
        max_match=min_match + rng.choice([0, 1, 4, 20]),
        max_candidates=EVERY_PLACE,
        max_corpus_tokens=rng.choice([0, 12, 40, 300]),
    )
    vocabulary = rng.choice([2, 3, 6])
    drafter, oracle = NgramDrafter(rules), EveryPlace(rules)
    texts: dict[str, list[int]] = {"a": [], "b": []}
    for _ in range(40):
        if rng.random() < 0.3:
            answer = [rng.randrange(vocabulary) for _ in range(rng.randrange(25))]
            drafter.add_finished(answer)
            oracle.add_finished(answer)
        key = rng.choice("ab")
        texts[key] += [rng.randrange(vocabulary) for _ in range(rng.randrange(5))]
        num_drafts = rng.randrange(7)
        expected = oracle.propose(texts[key], num_drafts)
        assert drafter.propose(key, texts[key], num_drafts) == expected
        drafter.check()


def test_only_the_newest_candidates_are_looked_at() -> None:
    rules = NgramRules(min_match=1, max_candidates=2)
    text = [7, 8, 1, 100, 9, 1, 101, 9, 1, 102, 7, 8, 1]
    assert NgramDrafter(rules).propose("a", text, 1) == [102]  # 7 8 1 is the third from the end
    unbounded = NgramRules(min_match=1, max_candidates=3)
    assert NgramDrafter(unbounded).propose("a", text, 1) == [100]


def test_a_text_that_repeats_is_expected_to_go_on() -> None:
    assert NgramDrafter().propose("a", [5, 1, 2, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]


def test_answers_serve_other_requests_but_not_one_that_shares_nothing() -> None:
    drafter = NgramDrafter()
    drafter.add_finished([1, 2, 3, 4, 5])
    assert drafter.propose("a", [9, 1, 2, 3], 4) == [4, 5]
    assert drafter.propose("a", [9, 1, 2, 3], 4, with_corpus=False) == []


def _is_useful(quote: Quote, answer: list[int], text: list[int], drafts: list[int]) -> None:
    """The quote is of the answer, and who searches it finds what the drafter found."""
    at = next(
        i for i in range(len(answer)) if answer[i:][: len(quote.token_ids)] == quote.token_ids
    )
    ends = at + len(quote.token_ids)
    assert quote.ends_answer == (ends == len(answer)), f"from {at} to {ends} of {len(answer)}"
    searched = NgramDrafter(NgramRules(max_match=6)).propose("", [*quote.token_ids, *text], 4)
    assert searched[: len(drafts)] == drafts


@pytest.mark.parametrize("seed", range(20))
def test_a_quote_has_the_match_and_what_follows(seed: int) -> None:
    rng = random.Random(seed)
    drafter = NgramDrafter(NgramRules(max_match=6, quote_tokens=12))
    answers = [rng.sample(range(1000 * i, 1000 * i + 999), 40) for i in range(3)]
    for answer in answers:
        drafter.add_finished(answer)
    answer, held, text = rng.choice(answers), NO_QUOTE, rng.sample(range(5000, 5999), 8)
    assert drafter.quote(0, text, held, 4) is None
    text += answer[:2]
    num_quotes = 0
    for token in answer[2:]:
        quote = drafter.quote(0, text, held, 4)
        assert quote is not None
        num_quotes += quote is not held
        held = quote
        _is_useful(held, answer, text, drafter.propose(0, text, 4))
        text.append(token)
    assert 4 <= num_quotes <= 15
    assert drafter.quote(1, [9999, *answer[:2]], held, 4, with_corpus=False) is None


def test_requests_do_not_see_each_other_before_they_finish() -> None:
    drafter = NgramDrafter()
    drafter.extend("a", [1, 2, 3, 4, 5])
    assert drafter.propose("b", [1, 2, 3], 2) == []


def test_a_forgotten_request_leaves_nothing() -> None:
    drafter = NgramDrafter()
    drafter.propose("a", list(range(50)), 4)
    drafter.forget("a")
    drafter.forget("a")
    assert not any(drafter.statistics().values())
    assert drafter.propose("a", [1, 2], 4) == []  # and may come back shorter


def test_a_text_that_became_shorter_is_a_mistake_of_the_caller() -> None:
    drafter = NgramDrafter()
    drafter.extend("a", [1, 2, 3])
    with pytest.raises(AssertionError, match="a had 3 tokens, now 2"):
        drafter.propose("a", [1, 2], 4)


def test_answers_are_dropped_oldest_first_and_take_bounded_memory() -> None:
    rng = random.Random(0)
    rules = NgramRules(max_corpus_tokens=500)
    drafter = NgramDrafter(rules)
    for _ in range(200):
        drafter.add_finished([rng.randrange(1000) for _ in range(rng.randrange(1, 60))])
        held = drafter.statistics()
        assert held["num_corpus_tokens"] <= 500
        assert held["num_grams"] <= held["num_corpus_tokens"]
    drafter.check()
    drafter.add_finished(list(range(2000, 4000)))  # longer than all: its last tokens stay
    assert drafter.statistics()["num_corpus_tokens"] == 500
    assert drafter.propose("a", [3997, 3998], 3) == [3999]
    assert drafter.propose("b", [2000, 2001], 3) == []
    drafter.check()


def test_a_proposal_costs_the_new_tokens_and_the_candidates_whatever_the_length() -> None:
    rng = random.Random(0)
    rules = NgramRules()
    bound = 2 * rules.max_candidates * (rules.max_match - rules.min_match + 1)
    drafter = NgramDrafter(rules)
    text: list[int] = []
    for num_tokens in (100, 1_000, 30_000):
        text += [rng.randrange(8) for _ in range(num_tokens - len(text))]
        drafter.extend("a", text)
        for num_new in (0, 1, 3):
            text += [rng.randrange(8) for _ in range(num_new)]
            before = drafter.statistics()["num_operations"]
            drafter.propose("a", text, 8)
            assert drafter.statistics()["num_operations"] - before <= num_new + bound
