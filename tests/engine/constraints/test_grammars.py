"""A worker's compiled grammars: compiled once, beside everything else, and kept within bounds."""

import pytest

from engine.constraints.grammars import Grammars
from engine.constraints.vocabulary import Vocabulary
from engine.errors import RequestError
from engine.models.spec import load_spec
from engine.request import Constraint, ConstraintKind
from tests.engine.constraints.following import MODEL, accepts_text, demo_vocabulary

VOCABULARY = demo_vocabulary()


def vocabulary() -> Vocabulary:
    return VOCABULARY


def follows(grammars: Grammars, constraint: Constraint, text: str) -> bool:
    return accepts_text(grammars.matcher(constraint), VOCABULARY, text)


def regex(text: str) -> Constraint:
    return Constraint(ConstraintKind.REGEX, text)


def test_a_constraint_is_compiled_once_and_each_matcher_starts_anew() -> None:
    grammars = Grammars(vocabulary)
    grammars.prepare(regex("ab")).result()
    first, second = grammars.matcher(regex("ab")), grammars.matcher(regex("ab"))
    assert accepts_text(first, VOCABULARY, "ab")
    assert accepts_text(second, VOCABULARY, "ab")
    assert grammars.statistics().num_compiled == 1
    grammars.close()


def test_the_least_recently_used_goes_first_and_comes_back_when_asked_for() -> None:
    grammars = Grammars(vocabulary, max_grammars=2)
    for text in ("a", "b", "a", "c", "b"):
        assert follows(grammars, regex(text), text)
    assert grammars.statistics().num_compiled == 4
    assert grammars.statistics().num_grammars == 2
    grammars.close()


def test_one_stays_while_the_record_of_a_request_that_waits_lives() -> None:
    grammars = Grammars(vocabulary, max_grammars=2)
    waiting, again = regex("a"), regex("a")
    for record in (waiting, again, waiting):
        grammars.prepare(record).result()
    for text in ("b", "c", "d", "e"):
        grammars.matcher(regex(text))
    num_compiled = grammars.statistics().num_compiled
    assert follows(grammars, waiting, "a")
    del waiting
    grammars.matcher(regex("f"))
    assert follows(grammars, again, "a")
    assert grammars.statistics().num_compiled == num_compiled + 1, "nothing but f"
    del record, again
    for text in ("g", "h"):
        grammars.matcher(regex(text))
    assert grammars.statistics().num_grammars == 2
    assert follows(grammars, regex("a"), "a")
    assert grammars.statistics().num_compiled == num_compiled + 4, "f, g, h, and a anew"
    grammars.close()


def test_more_live_records_than_there_is_room_for_are_all_kept() -> None:
    grammars = Grammars(vocabulary, max_grammars=2, max_bytes=1)
    records = [regex(text) for text in "abcdef"]
    for record in records:
        grammars.prepare(record).result()
    assert grammars.statistics().num_grammars == len(records)
    del record
    records.clear()
    assert grammars.statistics().num_grammars == 1
    grammars.close()


def test_their_bytes_are_bounded_but_the_newest_is_kept() -> None:
    grammars = Grammars(vocabulary, max_bytes=1)
    for text in ("a{3}", "b{3}"):
        assert follows(grammars, regex(text), text[0] * 3)
    assert grammars.statistics().num_grammars == 1
    grammars.close()


def test_a_text_that_is_no_constraint_is_an_error_and_is_not_kept() -> None:
    grammars = Grammars(vocabulary)
    for _ in range(2):
        with pytest.raises(RequestError, match="not closed"):
            grammars.prepare(regex("(")).result()
    assert grammars.statistics().num_grammars == 0
    grammars.close()


def test_the_models_own_ends_are_what_ends_text() -> None:
    spec = load_spec(MODEL)
    assert VOCABULARY.vocab_size == spec.vocab_size
    assert tuple(VOCABULARY.eos_token_ids) == tuple(spec.eos_token_ids)
    assert all(VOCABULARY.tokenizer.is_special_token(i) for i in spec.eos_token_ids)
