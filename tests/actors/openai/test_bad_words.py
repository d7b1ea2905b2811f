"""Which token sequences a bad word bans."""

from pathlib import Path

import pytest

from actors.openai.bad_words import banned_sequences
from engine.errors import RequestError
from engine.text.tokenizing import Tokenizing, load_tokenizer


@pytest.fixture(scope="module")
def tokenizing() -> Tokenizing:
    return load_tokenizer(Path("demo_model/laps-demo"))


def test_a_word_is_banned_alone_and_after_a_space(tokenizing: Tokenizing) -> None:
    texts = {
        tokenizing.decode(ids, skip_special_tokens=False)
        for ids in banned_sequences(["return"], tokenizing)
    }
    assert texts == {"return", " return"}


def test_leading_spaces_do_not_matter(tokenizing: Tokenizing) -> None:
    assert banned_sequences(["  return"], tokenizing) == banned_sequences(["return"], tokenizing)


def test_nothing_is_banned_without_words(tokenizing: Tokenizing) -> None:
    assert banned_sequences([], tokenizing) == ()


def test_a_word_that_is_no_text_is_refused(tokenizing: Tokenizing) -> None:
    with pytest.raises(RequestError) as caught:
        banned_sequences(["ok", "\ud800"], tokenizing)
    assert caught.value.param == "bad_words[1]"
