"""Routes that clients of other servers look for."""

import re
from typing import Any

import httpx
import pytest

from tests.actors.ingress.edge_app import edge_app

APP = edge_app({"api.cors_origins": ["https://chat.example"]})
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


def ask(method: str, path: str, **arguments: Any) -> httpx.Response:
    async def send(client: httpx.AsyncClient) -> httpx.Response:
        return await client.request(method, path, **arguments)

    response: httpx.Response = APP.ask(send)
    return response


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (CHAT, "chat.completion"),
        ({"prompt": "hi", "max_tokens": 1}, "text_completion"),
        ({"query": "q", "items": ["a"], "label_token_ids": [3]}, "scoring"),
        ({"text_1": "a", "text_2": "b", "label_token_ids": [3, 4]}, "list"),
    ],
)
def test_an_invocation_goes_where_its_fields_say(body: dict[str, Any], kind: str) -> None:
    answer = ask("POST", "/invocations", json=body)
    assert answer.json()["object"] == kind


def test_a_batch_has_a_choice_for_each_conversation() -> None:
    messages = [CHAT["messages"], [{"role": "user", "content": "a longer question"}]]
    body = {"messages": messages, "max_tokens": 2, "return_token_ids": True}
    answer = ask("POST", "/v1/chat/completions/batch", json=body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert all(choice["token_ids"] for choice in answer["choices"])
    alone = [
        ask("POST", "/v1/chat/completions", json={"messages": one, "max_tokens": 2}).json()
        for one in messages
    ]
    num_prompt_tokens = [one["usage"]["prompt_tokens"] for one in alone]
    assert answer["usage"]["prompt_tokens"] == sum(num_prompt_tokens)
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["choices"][0]["message"] == alone[0]["choices"][0]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": CHAT["messages"]}, "messages[0]"),
        ({"messages": [CHAT["messages"], []]}, "messages[1]"),
        ({"messages": [CHAT["messages"], [{"role": "robot"}]]}, "messages[1][0].role"),
        ({"n": 2}, "n"),
        ({"stream": True}, "stream"),
        ({"echo": True}, "echo"),
        ({"temperature": 3}, "temperature"),
    ],
)
def test_a_batch_is_refused_by_the_place_at_fault(fields: dict[str, Any], param: str) -> None:
    body = {"messages": [CHAT["messages"]], "max_tokens": 1} | fields
    answer = ask("POST", "/v1/chat/completions/batch", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_an_invocation_of_nothing_is_refused() -> None:
    assert ask("POST", "/invocations", json={}).status_code == 400


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank_has_three_paths(path: str) -> None:
    body = {"query": "q", "documents": ["a", "b"], "label_token_ids": [3, 4]}
    assert len(ask("POST", path, json=body).json()["results"]) == 2


def test_pairs_have_scores() -> None:
    body = {"text_1": "a", "text_2": ["b", "c"], "label_token_ids": [3, 4]}
    answer = ask("POST", "/score", json=body).json()
    assert [entry["index"] for entry in answer["data"]] == [0, 1]
    assert all(0 < entry["score"] < 1 for entry in answer["data"])


def test_the_load_is_told() -> None:
    assert ask("GET", "/load").json() == {"server_load": 0}


def test_the_tokenizers_configuration_is_told() -> None:
    assert "chat_template" in ask("GET", "/tokenizer_info").json()


def test_the_documentation_loads_nothing_and_names_every_path() -> None:
    page = ask("GET", "/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "<script" not in page.text
    assert "http" not in page.text.replace('lang="en"', "")
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "max_output_tokens"):
        assert path in page.text


def test_the_documentation_shows_every_structure_that_it_names() -> None:
    page = ask("GET", "/docs").text
    named = set(re.findall(r'href="#(\w+)"', page))
    assert {"Message", "StreamOptions", "ToolCall"} <= named
    assert named <= set(re.findall(r'id="(\w+)"', page))
    (completion,) = re.findall(r'id="CompletionBody">.*?<table>(.*?)</table>', page, re.DOTALL)
    fields = re.findall(r"<code>(\w+)</code>", completion)
    assert fields[0] == "prompt", "required fields come first"


def test_pages_of_known_origins_may_ask() -> None:
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a"}
    known = ask(
        "OPTIONS", "/v1/chat/completions", headers={"Origin": "https://chat.example"} | asks
    )
    assert known.headers["access-control-allow-origin"] == "https://chat.example"
    other = ask(
        "OPTIONS", "/v1/chat/completions", headers={"Origin": "https://evil.example"} | asks
    )
    assert "access-control-allow-origin" not in other.headers
    answer = ask(
        "POST", "/v1/chat/completions", json=CHAT, headers={"Origin": "https://chat.example"}
    )
    assert answer.headers["access-control-allow-origin"] == "https://chat.example"
