"""Stop strings and the end of a choice: any cutting of the text gives the same result."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.messages import TokenRecord
from engine.request import FinishReason, RequestKey
from engine.text.output_text import OutputText, TextDelta
from engine.text.stop_strings import StopStrings
from engine.text.tokenizing import Tokenizing, load_tokenizer
from tests.harness.tokenizer_folders import byte_level_folder

KEY = RequestKey(request_id="0" * 32)


def run(stops: Sequence[str], pieces: Sequence[str], *, include: bool) -> tuple[str, str | None]:
    matcher = StopStrings(stops, include=include)
    emitted = ""
    for piece in pieces:
        text, matched = matcher.push(piece)
        emitted += text
        if matched is not None:
            return emitted, matched
    return emitted + matcher.flush(), None


def brute_force(stops: Sequence[str], text: str, *, include: bool) -> tuple[str, str | None]:
    """Look at every prefix with `endswith`: the first that ends in a stop string, longest one."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


few_letters = st.text(alphabet="ab鬱", max_size=40)


@settings(max_examples=300)
@given(
    stops=st.lists(st.text(alphabet="ab鬱", min_size=1, max_size=6), max_size=4),
    text=few_letters,
    cuts=st.lists(st.integers(0, 40)),
    include=st.booleans(),
)
def test_any_cutting_finds_what_a_search_of_the_whole_text_finds(
    stops: list[str], text: str, cuts: list[int], include: bool
) -> None:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(edges)]
    assert run(stops, pieces, include=include) == brute_force(stops, text, include=include)


def test_of_stop_strings_that_end_together_the_longest_counts() -> None:
    for stops in (["b", "aab", "ab"], ["aab", "b", "ab"], ["ab", "b", "aab"]):
        assert run(stops, ["xa", "ab", "y"], include=False) == ("x", "aab")


def test_the_stop_string_that_ends_first_wins_over_one_that_began_earlier() -> None:
    assert run(["abc", "b"], ["xabc"], include=False) == ("xa", "b")


@settings(max_examples=200)
@given(stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1), text=few_letters)
def test_only_text_that_may_still_become_a_stop_string_is_held_back(
    stops: list[str], text: str
) -> None:
    matcher = StopStrings(stops)
    emitted = ""
    for position, char in enumerate(text):
        new, matched = matcher.push(char)
        if matched is not None:
            return
        emitted += new
        held = text[len(emitted) : position + 1]
        tails = [text[k : position + 1] for k in range(position + 2)]
        longest = next(tail for tail in tails if any(stop.startswith(tail) for stop in stops))
        assert held == longest


def test_a_long_near_match_costs_no_more_than_its_characters() -> None:
    # Quadratic work here would be 10**9 steps; the pytest time limit is the judge.
    matcher = StopStrings(["a" * 255 + "b"] * 16)
    emitted = "".join(matcher.push("a")[0] for _ in range(20_000)) + matcher.flush()
    assert emitted == "a" * 20_000


@pytest.fixture(scope="module")
def tokenizing(tmp_path_factory: pytest.TempPathFactory) -> Tokenizing:
    return load_tokenizer(byte_level_folder(tmp_path_factory.mktemp("model")))


def ids_of(tokenizing: Tokenizing, text: str) -> list[int]:
    (ids,) = tokenizing.encode_batch([text], add_special_tokens=False)
    assert isinstance(ids, list)
    return ids


def feed(
    tokenizing: Tokenizing,
    ids: Sequence[int],
    *,
    stops: Sequence[str] = (),
    include: bool = False,
    min_tokens: int = 0,
    client_stop_ids: Sequence[int] = (),
    finish: str | None = "length",
    stop_token_id: int | None = None,
) -> tuple[list[TextDelta], OutputText]:
    output = OutputText(
        tokenizing.detokenizer(),
        StopStrings(stops, include=include),
        min_tokens=min_tokens,
        client_stop_ids=client_stop_ids,
        include_stop=include,
    )
    deltas = []
    for index, token_id in enumerate(ids):
        is_last = index == len(ids) - 1
        deltas.append(
            output.push(
                TokenRecord(
                    key=KEY,
                    index=index,
                    token_id=token_id,
                    finish=finish if is_last else None,  # type: ignore[arg-type]
                    stop_token_id=stop_token_id if is_last else None,
                )
            )
        )
        if output.is_finished:
            break
    return deltas, output


def text_of(deltas: Sequence[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


@settings(deadline=None, max_examples=100)
@given(
    text=st.text(alphabet="ab 鬱👩‍\n", max_size=30),
    stop=st.text(alphabet="ab 鬱", min_size=1, max_size=4),
)
def test_a_stop_string_across_tokens_cuts_where_a_search_would(
    tokenizing: Tokenizing, text: str, stop: str
) -> None:
    ids = ids_of(tokenizing, text + "z")
    deltas, output = feed(tokenizing, ids, stops=[stop])
    expected, matched = brute_force([stop], text + "z", include=False)
    assert text_of(deltas) == expected
    assert deltas[-1].stop_reason == matched
    assert deltas[-1].finish is (FinishReason.STOP if matched else FinishReason.LENGTH)
    assert output.is_finished
    assert [delta.finish for delta in deltas[:-1]] == [None] * (len(deltas) - 1)


def test_a_stop_string_ends_the_choice_before_its_worker_does(tokenizing: Tokenizing) -> None:
    ids = ids_of(tokenizing, "one STOP two")
    deltas, _ = feed(tokenizing, ids, stops=["STOP"])
    assert text_of(deltas) == "one "
    assert len(deltas) < len(ids)
    deltas, _ = feed(tokenizing, ids, stops=["STOP"], include=True)
    assert text_of(deltas) == "one STOP"


def test_a_stop_string_completed_by_the_last_token_is_the_reason(tokenizing: Tokenizing) -> None:
    deltas, _ = feed(tokenizing, ids_of(tokenizing, "one two"), stops=["two"])
    assert (text_of(deltas), deltas[-1].finish) == ("one ", FinishReason.STOP)


def test_text_held_for_a_stop_string_is_released_at_the_end(tokenizing: Tokenizing) -> None:
    deltas, _ = feed(tokenizing, ids_of(tokenizing, "one two"), stops=["two three"])
    assert text_of(deltas) == "one two"
    assert (deltas[-1].finish, deltas[-1].stop_reason) == (FinishReason.LENGTH, None)


def test_stop_strings_are_not_looked_for_before_min_tokens(tokenizing: Tokenizing) -> None:
    ids = ids_of(tokenizing, "xyxyxyxyxy")
    whole = "xyxyxyxyxy"
    for min_tokens in range(len(ids) + 1):
        deltas, _ = feed(tokenizing, ids, stops=["y"], min_tokens=min_tokens)
        assert len(deltas) >= max(min_tokens, 1)
        start = len(tokenizing.decode(ids[: max(min_tokens - 1, 0)]))
        cut = whole.find("y", start)
        assert text_of(deltas) == (whole if cut < 0 else whole[:cut])


def test_a_stop_string_that_begins_before_min_tokens_and_ends_behind_it_is_found(
    tokenizing: Tokenizing,
) -> None:
    ids = [token_id for char in "abSTOPcd" for token_id in ids_of(tokenizing, char)]
    for min_tokens in range(len(ids) + 1):
        deltas, _ = feed(tokenizing, ids, stops=["STOP"], min_tokens=min_tokens)
        assert text_of(deltas) == ("ab" if min_tokens <= 6 else "abSTOPcd"), min_tokens


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("abc", max_size=3), max_size=12),
    st.integers(0, 13),
    st.booleans(),
)
def test_the_first_stop_string_that_may_end_the_text_does(
    stops: list[str], pieces: list[str], num_free: int, include: bool
) -> None:
    """num_free: pieces in which no stop string may end."""
    matcher = StopStrings(stops, include=include)
    emitted, found = "", None
    for number, piece in enumerate(pieces):
        text, found = matcher.push(piece, may_stop=number >= num_free)
        emitted += text
        if found is not None:
            break
    emitted += "" if found is not None else matcher.flush()
    whole, start = "".join(pieces), len("".join(pieces[:num_free]))
    ends = [
        (end, -len(stop), stop)
        for stop in stops
        for end in range(start + 1, len(whole) + 1)
        if whole[:end].endswith(stop)
    ]
    if not ends:
        assert (emitted, found) == (whole, None)
        return
    end, _, stop = min(ends)
    assert found == stop
    assert emitted == whole[: end if include else end - len(stop)]


def test_a_torn_last_character_is_shown_once_at_the_end(tokenizing: Tokenizing) -> None:
    ids = ids_of(tokenizing, "a鬱")
    deltas, _ = feed(tokenizing, ids[:-1])
    assert text_of(deltas) == tokenizing.decode(ids[:-1])
    assert text_of(deltas).endswith("\ufffd")


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_id_of_the_clients_is_named_and_hidden_unless_included(
    tokenizing: Tokenizing, include: bool
) -> None:
    ids = ids_of(tokenizing, "one two")
    last = ids[-1]
    deltas, _ = feed(
        tokenizing, ids, client_stop_ids=[last], include=include, finish="stop", stop_token_id=last
    )
    assert text_of(deltas) == tokenizing.decode(ids if include else ids[:-1])
    assert (deltas[-1].finish, deltas[-1].stop_reason) == (FinishReason.STOP, last)


def test_the_models_own_eos_is_no_stop_reason(tokenizing: Tokenizing) -> None:
    eos = next(iter(tokenizing.token_bytes.special_ids))
    deltas, _ = feed(
        tokenizing, [*ids_of(tokenizing, "one"), eos], finish="stop", stop_token_id=eos
    )
    assert (text_of(deltas), deltas[-1].stop_reason) == ("one", None)


def test_text_offsets_count_the_characters_before_each_token(tokenizing: Tokenizing) -> None:
    ids = ids_of(tokenizing, "a鬱 the fox")
    deltas, _ = feed(tokenizing, ids, stops=["never seen"])
    offsets = [token.text_offset for delta in deltas for token in delta.tokens]
    expected = [len(tokenizing.decode(ids[:count]).rstrip("\ufffd")) for count in range(len(ids))]
    assert offsets == expected
