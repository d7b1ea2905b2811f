"""Patterns of JSON strings: what stays is within the original, and needs no escape."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.constraints.pattern import writable_pattern
from engine.errors import RequestError

PATTERNS = (
    "^[a-z]+$",
    "a|bc",
    ".{1,3}",
    "[^@]+@[^@.]+",
    "\\S\\s\\W\\D",
    "[\\s\\d_-]*",
    "\\w\\.\\d{2}",
    "(x|[^y])+",
    "[\\]a]",
)


@given(st.sampled_from(PATTERNS), st.text(max_size=6))
def test_what_it_matches_is_a_json_string_as_it_is_and_was_matched_before(
    pattern: str, text: str
) -> None:
    if re.fullmatch(writable_pattern(pattern, "p"), text):
        assert re.search(pattern, text)
        assert json.loads(f'"{text}"') == text


@pytest.mark.parametrize("pattern", PATTERNS)
@given(data=st.data())
def test_a_writable_text_that_matched_whole_still_does(pattern: str, data: st.DataObject) -> None:
    letters = st.characters(min_codepoint=32, max_codepoint=126, exclude_characters='"\\')
    text = data.draw(st.from_regex(pattern, fullmatch=True, alphabet=letters))
    assert re.fullmatch(writable_pattern(pattern, "p"), text)


@pytest.mark.parametrize(
    "pattern",
    ['"', "\\\\", "\\n", "[\\t]", "[A-z]", "[ -~]", "[a\\S]", "a^b", "a$b", "\\x22", "[a"],
)
def test_characters_that_need_an_escape_and_inner_anchors_are_refused(pattern: str) -> None:
    with pytest.raises(RequestError) as caught:
        writable_pattern(pattern, "schema.pattern")
    assert caught.value.param == "schema.pattern"
