"""Patterns of clients: what is let through is a match for every reader, and most of it stays."""

import json
import random
import re

import pytest

from engine.constraints.compiling import compile_constraint
from engine.constraints.pattern import portable_pattern
from engine.errors import RequestError
from engine.request import Constraint, ConstraintKind
from tests.engine.constraints.following import allowed_ids, allows, demo_vocabulary

VOCABULARY = demo_vocabulary()
PATTERNS = (
    "^[a-z]+$",
    "a|bc",
    "^a$|^bc$",
    ".{1,3}",
    "[^@]+@[^@.]+",
    "\\S\\s\\W\\D",
    "[\\s\\d_-]*x",
    "\\w\\.\\d{2}",
    "(x|[^y])+?",
    "[\\]a]{2}",
    "[[&&a~~|-]{1,2}",
    "[^\\S]a",
    "[\\Wz]{2}",
    "(?:a|b){2}(?P<n>c)?",
    '"\\\\\\t[\\n-\\r]',
    "\\u00e9\\x41\\/",
    "é|日本",
)


def regex(pattern: str) -> Constraint:
    return Constraint(ConstraintKind.REGEX, pattern)


@pytest.mark.filterwarnings("ignore:Possible (nested set|set):FutureWarning")
@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_is_drawn_at_random_matches_the_whole_pattern(pattern: str) -> None:
    grammar = compile_constraint(VOCABULARY, regex(pattern))
    for seed in range(20):
        draw = random.Random(seed)
        matcher, ids = grammar.matcher(), list[int]()
        for _ in range(12):
            allowed = allowed_ids(matcher, VOCABULARY)
            if not set(allowed).isdisjoint(VOCABULARY.eos_token_ids):
                text = VOCABULARY.tokenizer.decode_bytes(ids).decode()
                assert re.fullmatch(pattern, text, re.ASCII), (seed, text)
                assert re.fullmatch(pattern, text), (seed, text)
            going_on = [i for i in allowed if i not in VOCABULARY.eos_token_ids]
            if not going_on:
                break
            ids.append(draw.choice(going_on))
            assert matcher.accept_token(ids[-1])


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("a.c", ["abc", "a c", "aéc"], ["a\nc", "a\rc", "a\u2028c", "ac"]),
        ("^abc$", ["abc"], ["abcd", "xabc"]),
        ("\\d\\w\\s", ["1a ", "0_\t"], ["٣a ", "1é ", "1a\u00a0"]),
        ("\\D\\W\\S", ["a!b", "é 日"], ["1!b", "٣!b", "aéb", "a!\u00a0"]),
        ("[^a]", ["b", "\n", "日"], ["a", ""]),
        ("\\$\\^\\{\\}", ["$^{}"], [""]),
        ("a{2,3}", ["aa", "aaa"], ["a", "aaaa"]),
        ("", [""], ["a"]),
    ],
)
def test_what_a_pattern_means_is_kept(pattern: str, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not allows(VOCABULARY, regex(pattern), text)] == []
    assert [text for text in bad if allows(VOCABULARY, regex(pattern), text)] == []


def test_in_a_string_of_json_what_needs_an_escape_gets_one() -> None:
    pattern = portable_pattern('a[\\t"]b', "p")
    schema = json.dumps({"type": "string", "pattern": f"^{pattern}$"})
    constraint = Constraint(ConstraintKind.JSON_SCHEMA, schema)
    assert allows(VOCABULARY, constraint, '"a\\tb"')
    assert allows(VOCABULARY, constraint, '"a\\"b"')
    assert not allows(VOCABULARY, constraint, '"a\tb"')
    assert not allows(VOCABULARY, constraint, '"a"b"')


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("a^b", "start or end"),
        ("a$b", "start or end"),
        ("(^a)", "start or end"),
        ("a\\|^b", "start or end"),
        ("^*", "nothing stands before"),
        ("a**", "nothing stands before"),
        ("a+{2}", "nothing stands before"),
        ("|+", "nothing stands before"),
        ("(?=a)b", "only groups"),
        ("(?i)a", "only groups"),
        ("(a", "not closed"),
        ("a)", "closes nothing"),
        ("]", "closes nothing"),
        ("[a", "not closed"),
        ("[]a]", "different things"),
        ("[[:alpha:]]", "not supported"),
        ("[\\w-z]", "begins a range"),
        ("[a-\\d]", "ends a range"),
        ("[z-a]", "empty"),
        ("a{", "no count"),
        ("a{3,2}", "no count"),
        ("a{99999}", "no count"),
        ("\\1", "not supported"),
        ("\\bx", "not supported"),
        ("\\p{L}", "not supported"),
        ("\\ud800", "no character"),
        ("a\\", "ends with"),
        ("\\01", "before a digit"),
        ("[\\012]", "before a digit"),
    ],
)
def test_what_readers_disagree_about_is_refused_by_its_place(pattern: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        portable_pattern(pattern, "schema.pattern")
    assert caught.value.param == "schema.pattern"
