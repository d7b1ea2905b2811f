"""A worker's compiled grammars: compiled once, beside everything else, and kept within bounds."""

from pathlib import Path

import pytest
import xgrammar

from engine.constraints.grammars import Grammars
from engine.constraints.vocabulary import load_vocabulary
from engine.errors import RequestError
from engine.models.spec import load_spec
from engine.request import Constraint, ConstraintKind

MODEL = Path(__file__).parents[3] / "demo_model" / "laps-demo"


def vocabulary() -> xgrammar.TokenizerInfo:
    spec = load_spec(MODEL)
    return load_vocabulary(MODEL, vocab_size=spec.vocab_size, eos_token_ids=spec.eos_token_ids)


def regex(text: str) -> Constraint:
    return Constraint(ConstraintKind.REGEX, text)


def test_a_constraint_is_compiled_once_and_each_matcher_starts_anew() -> None:
    grammars = Grammars(vocabulary)
    grammars.prepare(regex("ab")).result()
    first, second = grammars.matcher(regex("ab")), grammars.matcher(regex("ab"))
    assert first.accept_string("ab")
    assert second.accept_string("ab")
    assert grammars.statistics().num_compiled == 1
    grammars.close()


def test_the_least_recently_used_goes_first_and_comes_back_when_asked_for() -> None:
    grammars = Grammars(vocabulary, max_grammars=2)
    for text in ("a", "b", "a", "c", "b"):
        assert grammars.matcher(regex(text)).accept_string(text)
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
    assert grammars.matcher(waiting).accept_string("a")
    del waiting
    grammars.matcher(regex("f"))
    assert grammars.matcher(again).accept_string("a")
    assert grammars.statistics().num_compiled == num_compiled + 1, "nothing but f"
    del record, again
    for text in ("g", "h"):
        grammars.matcher(regex(text))
    assert grammars.statistics().num_grammars == 2
    assert grammars.matcher(regex("a")).accept_string("a")
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
        assert grammars.matcher(regex(text)).accept_string(text[0] * 3)
    assert grammars.statistics().num_grammars == 1
    grammars.close()


def test_a_text_that_is_no_constraint_is_an_error_and_is_not_kept() -> None:
    grammars = Grammars(vocabulary)
    for _ in range(2):
        with pytest.raises(RequestError, match="cannot be compiled"):
            grammars.prepare(regex("(")).result()
    assert grammars.statistics().num_grammars == 0
    grammars.close()


def test_special_tokens_stand_for_no_text() -> None:
    made = vocabulary()
    spec = load_spec(MODEL)
    assert made.vocab_size == spec.vocab_size
    assert list(made.stop_token_ids) == list(spec.eos_token_ids)
    assert not any(made.decoded_vocab[token_id] for token_id in spec.eos_token_ids)
