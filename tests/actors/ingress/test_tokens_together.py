"""Tokens that wait together make one event; what is said is the same as token by token."""

import json
from typing import Any

import pytest

from tests.actors.ingress.edge_app import EdgeApp, edge_app

NUM_TOKENS = 24
BODY: dict[str, Any] = {
    "max_tokens": NUM_TOKENS,
    "logprobs": 2,
    "return_token_ids": True,
}
STREAMED: dict[str, Any] = BODY | {"stream": True, "stream_options": {"include_usage": True}}


def events_of(app: EdgeApp, **fields: Any) -> list[dict[str, Any]]:
    response = app.post(STREAMED | fields)
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def said(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What all events of a choice say together."""
    choices = [choice for event in events for choice in event["choices"]]
    return {
        "text": "".join(choice["text"] for choice in choices),
        "token_ids": [i for choice in choices for i in choice["token_ids"]],
        "offsets": [o for choice in choices for o in choice["logprobs"]["text_offset"]],
        "logprobs": [p for choice in choices for p in choice["logprobs"]["token_logprobs"]],
        "finish": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        "stop_reason": [choice.get("stop_reason") for choice in choices][-1],
        "prompt_ids": [c["prompt_token_ids"] for c in choices if "prompt_token_ids" in c],
        "usage": events[-1]["usage"],
    }


def stop_within(app: EdgeApp) -> str:
    """A text that ends the answer at some token in the middle."""
    text = said(events_of(app))["text"]
    return str(text[len(text) // 2 : len(text) // 2 + 3])


@pytest.mark.parametrize("num_together", [2, 5, NUM_TOKENS])
@pytest.mark.parametrize("stops", [False, True])
def test_fewer_events_say_the_same(num_together: int, stops: bool) -> None:
    alone, together = edge_app(), edge_app()
    together.workers.num_together = num_together
    fields = {"stop": [stop_within(alone)]} if stops else {}
    one_by_one, at_once = events_of(alone, **fields), events_of(together, **fields)
    assert said(at_once) == said(one_by_one)
    num_tokens = said(at_once)["usage"]["completion_tokens"]
    assert (num_tokens < NUM_TOKENS) == stops
    assert len(one_by_one) == num_tokens + 1  # and one with the usage
    assert len(at_once) == -(-num_tokens // num_together) + 1


def test_a_whole_answer_is_the_same() -> None:
    alone, together = edge_app(), edge_app()
    together.workers.num_together = 7
    bodies = [app.post(BODY | {"n": 2}).json() for app in (alone, together)]
    for body in bodies:
        del body["id"], body["created"]
    assert bodies[0] == bodies[1]
