"""The streaming client and the preflight, against a server that does what a test says."""

import random
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from load_tests.http_load.client import (
    Answer,
    AskOptions,
    BrokenStreamError,
    Chunk,
    LoadError,
    RefusedError,
    Server,
    TimedOutError,
    UnreachableError,
    ask,
)
from load_tests.http_load.dialogue import PromptStyle
from load_tests.http_load.preflight import Served, check_lengths, find_model, prepare, probe
from load_tests.http_load.schedule import Piece, Session, Turn
from load_tests.http_load.sse import EventParser
from tests.load_tests.http_load.fake_openai import FakeOpenAI, Reply, running

IDS = AskOptions(model="fake", style=PromptStyle.IDS)


def asked(fake: FakeOpenAI, options: AskOptions = IDS, num: int = 5, within_s: float = 9) -> Answer:
    prompt = [{"role": "user", "content": "hi"}] if options.style is PromptStyle.CHAT else [1, 2, 3]
    return ask(Server(url=fake.url), options, prompt, num, within_s)


def chunks(answer: Answer) -> list[Chunk]:
    with closing(answer):
        return list(answer.chunks())


def script_of(reply: Reply) -> FakeOpenAI:
    return FakeOpenAI(script=lambda number, body: reply)


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"))), st.randoms())
def test_events_survive_any_cut(texts: list[str], rng: random.Random) -> None:
    end = rng.choice(["\n", "\r\n"])
    data = "".join(f": ping{end}data: {text}{end}{end}" for text in texts).encode()
    parser, found = EventParser(), []
    while data:
        cut = rng.randint(1, len(data))
        found += parser.feed(data[:cut])
        data = data[cut:]
    assert found == texts


@pytest.mark.parametrize("style", PromptStyle)
@pytest.mark.parametrize("tells_ids", [True, False])
def test_tokens_are_counted_as_they_come(style: PromptStyle, tells_ids: bool) -> None:
    num = random.randint(2, 9)
    options = AskOptions(model="fake", style=style)
    with running(FakeOpenAI(tells_ids=tells_ids)) as fake:
        answer = asked(fake, options, num)
        found = chunks(answer)
    assert [chunk.num_tokens for chunk in found] == [1] * num
    assert "".join(chunk.text for chunk in found) == "".join(f" t{i}" for i in range(num))
    assert answer.usage is not None
    assert answer.usage.completion_tokens == num
    body = fake.seen[0].body
    assert (body["max_tokens"], body["ignore_eos"]) == (num, True)


def test_a_server_that_knows_only_openai_is_sent_nothing_else() -> None:
    options = AskOptions(model="fake", style=PromptStyle.TEXT, takes_extensions=False)
    with running(FakeOpenAI()) as fake:
        chunks(asked(fake, options))
    known = {"model", "prompt", "max_tokens", "temperature", "stream", "stream_options"}
    assert set(fake.seen[0].body) == known


def test_a_refusal_has_its_status_its_message_and_its_wish() -> None:
    reply = Reply(status=429, headers=("Retry-After: 7",), message="too many")
    with running(script_of(reply)) as fake, pytest.raises(RefusedError) as caught:
        chunks(asked(fake))
    assert (caught.value.status, caught.value.retry_after_s) == (429, 7.0)
    assert "too many" in str(caught.value)


def test_a_refusal_without_an_error_object_has_its_whole_body() -> None:
    page = {"status": "not_ready", "missing_roles": ["decode"]}
    fake = FakeOpenAI(ready=Reply(status=503), ready_page=page)
    with running(fake), pytest.raises(UnreachableError, match=r'"missing_roles": .*decode'):
        find_model(Server(url=fake.url), None)


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (Reply(cut_after=2), "broke off|without"),
        (Reply(error_after=2), "the worker died"),
    ],
)
def test_a_stream_that_does_not_end_as_it_should_is_an_error(reply: Reply, told: str) -> None:
    with running(script_of(reply)) as fake:
        answer = asked(fake)
        found = []
        with closing(answer), pytest.raises(BrokenStreamError, match=told):
            found.extend(chunk for chunk in answer.chunks())
    assert len(found) == 2


@pytest.mark.parametrize("reply", [Reply(first_s=60.0), Reply(gap_s=60.0)])
def test_an_answer_that_takes_too_long_is_given_up(reply: Reply) -> None:
    with running(script_of(reply)) as fake, pytest.raises(TimedOutError):
        chunks(asked(fake, within_s=0.3))


def test_a_server_sees_its_client_hang_up() -> None:
    with running(script_of(Reply(gap_s=0.002))) as fake:
        answer = asked(fake, num=100_000)
        with closing(answer):
            for _ in zip(range(3), answer.chunks(), strict=False):
                pass
        fake.wait_until(lambda: fake.seen[0].is_hung_up)


def test_nobody_there_and_no_url_are_told_apart() -> None:
    with running(FakeOpenAI()) as fake:
        gone = fake.url
    with pytest.raises(UnreachableError, match="no connection"):
        find_model(Server(url=gone), None)
    for url in ("127.0.0.1:8000", "ftp://x", "", "http://x:port"):
        with pytest.raises(UnreachableError, match="no URL"):
            find_model(Server(url=url), None)


def test_the_model_is_found_or_those_that_are_there_are_named() -> None:
    with running(FakeOpenAI(max_model_len=512)) as fake:
        for url in (fake.url, f"{fake.url}/", f"{fake.url}/v1"):
            assert find_model(Server(url=url), None) == Served(model="fake", max_tokens=512)
        with pytest.raises(UnreachableError, match="serves fake, but not 'other'"):
            find_model(Server(url=fake.url), "other")


def test_a_server_that_is_not_ready_is_not_loaded() -> None:
    not_ready = FakeOpenAI(ready=Reply(status=503))
    with running(not_ready) as fake, pytest.raises(UnreachableError, match="not ready"):
        find_model(Server(url=fake.url), None)
    with running(FakeOpenAI(ready=Reply(status=404))) as fake:  # most have no such path
        assert prepare(Server(url=fake.url), None, IDS)[1].model == "fake"


def test_a_refused_probe_says_what_to_try() -> None:
    told = r"a string\. Try --prompts text.*--openai-only"
    refusing = script_of(Reply(status=400, message="prompt: a string"))
    with running(refusing) as fake, pytest.raises(RefusedError, match=told):
        probe(Server(url=fake.url), IDS)


def test_requests_that_would_not_fit_the_model_are_told_before_they_are_sent() -> None:
    turn = Turn(index=0, pieces=(Piece(name="p", num_tokens=900),), num_output_tokens=200)
    sessions = [Session(index=0, start_s=0.0, turns=(turn,))]
    check_lengths(sessions, Served(model="m", max_tokens=1100))
    check_lengths(sessions, Served(model="m", max_tokens=None))
    with pytest.raises(LoadError, match=r"1099 tokens of m.*--shrink 2"):
        check_lengths(sessions, Served(model="m", max_tokens=1099))
