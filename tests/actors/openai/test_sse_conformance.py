"""Streams as the ingress sends them, cut anywhere: every reader of server-sent events agrees."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai._streaming import SSEDecoder

from engine.errors import WorkerError
from engine.text.tokenizing import Tokenizing
from load_tests.http_load.sse import EventParser
from tests.actors.ingress.edge_app import EdgeApp, edge_app
from tests.harness.tokenizer_folders import byte_level_folder

TEMPLATE = "{% if tools %}<tool_call>{% endif %}{% if thinks %}<think>{% endif %}hi"
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": "ü\\r\\n\\n"}}\n</tool_call>'
# What would be an event of its own, or end one, if it got out as it is.
BREAKS = 'x\n\ndata: x\r\r\u2028\x85\\"'
TIMED = {"x-laps-timings": "1"}
MESSAGES = [{"role": "user", "content": "hi"}]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request for a stream, and what the model says to it."""

    path: str
    body: dict[str, Any]
    says: str
    headers: dict[str, str] = field(default_factory=dict)
    fails_before: int | None = None  # the token; None = never


STREAMS = {
    "a call after thinking, with usage and timings": Asked(
        path="/v1/chat/completions",
        body={"messages": MESSAGES, "tools": [ADD], "stream_options": {"include_usage": True}},
        says=f"<think>{BREAKS}</think>{CALL}",
        headers=TIMED,
    ),
    "text with log-probabilities": Asked(
        path="/v1/chat/completions",
        body={"messages": MESSAGES, "logprobs": True, "top_logprobs": 1},
        says="鬱\r👩\n\n",
        headers=TIMED,
    ),
    "two choices with log-probabilities": Asked(
        path="/v1/completions",
        body={"prompt": "hi", "n": 2, "logprobs": 1, "stream_options": {"include_usage": True}},
        says="ö鬱\n\n",
    ),
    "an error in mid-stream": Asked(
        path="/v1/completions", body={"prompt": "hi"}, says=f"one two{BREAKS}", fails_before=7
    ),
}
IDS = [name.replace(" ", "-") for name in STREAMS]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> EdgeApp:
    folder = byte_level_folder(tmp_path_factory.mktemp("model"), chat_template=TEMPLATE)
    return edge_app(model_folder=folder)


@pytest.fixture(params=STREAMS.values(), ids=IDS, scope="module")
def asked(request: pytest.FixtureRequest) -> Asked:
    found: Asked = request.param
    return found


@pytest.fixture(scope="module")
def response(made: EdgeApp, asked: Asked) -> httpx.Response:
    async def pause(index: int) -> None:
        if index == asked.fails_before:
            raise WorkerError(f"a worker died{BREAKS}")

    async def send(client: httpx.AsyncClient) -> httpx.Response:
        body = {"model": "tiny", "stream": True, "max_tokens": 300} | asked.body
        return await client.post(asked.path, json=body, headers=asked.headers)

    made.workers.token_ids = ids_of(made.edge.tokenizing, asked.says)
    made.workers.pause = pause
    response: httpx.Response = made.ask(send)
    assert response.status_code == 200, response.text
    return response


def ids_of(tokenizing: Tokenizing, text: str) -> Sequence[int]:
    (ids,) = tokenizing.encode_batch([text], add_special_tokens=False)
    assert isinstance(ids, list), f"{ids!r}"
    return ids


def read_by_client(pieces: Sequence[bytes]) -> list[str]:
    """The data of the events that OpenAI's client reads."""
    events = list(SSEDecoder().iter_bytes(iter(pieces)))
    assert not any(event.event or event.id or event.retry for event in events)
    return [event.data for event in events]


def read_by_ours(pieces: Sequence[bytes]) -> list[str]:
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)]


READERS = pytest.mark.parametrize("read", [read_by_client, read_by_ours], ids=["client", "ours"])


def two_pieces(stream: bytes) -> Iterator[list[bytes]]:
    """Cut at every third byte; at which, is another in every run."""
    return ([stream[:cut], stream[cut:]] for cut in range(random.randrange(3), len(stream) + 1, 3))


def random_pieces(stream: bytes) -> list[bytes]:
    cuts = sorted(random.choices(range(len(stream) + 1), k=random.randint(1, 60)))
    return [stream[start:end] for start, end in pairwise([0, *cuts, len(stream)])]


def objects(stream: bytes) -> list[dict[str, Any]]:
    """What the events say, without the [DONE]."""
    return [json.loads(data) for data in read_by_client([stream]) if data != "[DONE]"]


@pytest.mark.slow
@READERS
def test_a_cut_at_any_byte_changes_nothing(
    response: httpx.Response, read: Callable[[Sequence[bytes]], list[str]]
) -> None:
    stream = response.content
    whole = read_by_client([stream])
    assert len(whole) >= 5
    assert stream.count(b"\n\n") == len(whole), "an event is more than its data"
    for pieces in two_pieces(stream):
        assert read(pieces) == whole, f"cut at {len(pieces[0])}"
    for _ in range(60):
        pieces = random_pieces(stream)
        assert read(pieces) == whole, [len(piece) for piece in pieces]
    assert read([bytes([byte]) for byte in stream]) == whole


@pytest.mark.slow
def test_an_event_counts_as_soon_as_it_is_complete_and_not_before(
    response: httpx.Response,
) -> None:
    stream = response.content
    for cut in range(len(stream)):
        start = stream[:cut]
        assert len(read_by_ours([start])) == start.count(b"\n\n"), f"cut at {cut}"


@READERS
def test_comments_and_other_line_ends_change_nothing(
    response: httpx.Response, read: Callable[[Sequence[bytes]], list[str]]
) -> None:
    """As a proxy on the way may send it on."""
    stream = response.content
    whole = read_by_client([stream])
    altered = stream.replace(b"\n\n", b"\n\n: still here\n\n").replace(b"\n", b"\r\n")
    for _ in range(60):
        assert read(random_pieces(altered)) == whole


def test_only_data_is_sent(response: httpx.Response) -> None:
    lines = response.content.split(b"\n")
    assert all(line == b"" or line.startswith(b"data: ") for line in lines)
    assert b"\r" not in response.content


def test_headers_keep_proxies_from_holding_it_back(response: httpx.Response) -> None:
    kind, _, charset = response.headers["content-type"].partition(";")
    assert kind == "text/event-stream"
    assert charset.strip().lower() in ("", "charset=utf-8")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-length" not in response.headers


def test_done_is_the_last_and_does_not_follow_an_error(
    response: httpx.Response, asked: Asked
) -> None:
    events = read_by_client([response.content])
    if asked.fails_before is None:
        assert events.count("[DONE]") == 1
        assert events[-1] == "[DONE]"
        assert not any("error" in each for each in objects(response.content))
        return
    assert "[DONE]" not in events
    error = json.loads(events[-1])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] == f"a worker died{BREAKS}"


def said_of(choice: dict[str, Any]) -> str:
    """The text of a chunk, of whatever kind."""
    delta = choice.get("delta", {})
    calls = [call["function"]["arguments"] for call in delta.get("tool_calls", [])]
    parts = [choice.get("text"), delta.get("reasoning_content"), delta.get("content"), *calls]
    return "".join(part for part in parts if part)


def test_what_the_model_said_arrives_whole(response: httpx.Response, asked: Asked) -> None:
    """So the streams above do hold what could break them."""
    chunks = [each for each in objects(response.content) if "error" not in each]
    said = {0: "", 1: ""}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        said[choice["index"]] += said_of(choice)
    expected = asked.says
    if "tools" in asked.body:
        arguments = json.dumps({"a": "ü\r\n\n"}, ensure_ascii=False)
        assert said[0] == f"{BREAKS}{arguments}"
    elif asked.fails_before is not None:
        assert said[0]
        assert expected.startswith(said[0])
    else:
        assert said[0] == expected
        assert said[1] in ("", expected)
    assert ("timings" in chunks[-1]) is (asked.headers == TIMED)


def test_a_stream_of_one_token_is_one_too(tmp_path: Path) -> None:
    made = edge_app(model_folder=byte_level_folder(tmp_path))
    made.workers.num_tokens = 1
    response = made.post({"stream": True, "max_tokens": 1})
    events = read_by_client([response.content])
    assert events[-1] == "[DONE]"
    assert read_by_ours([response.content]) == events
