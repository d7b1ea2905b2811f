"""The objects of /v1/responses and its events, by OpenAI's API reference. No decisions here."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from actors.openai.response_objects import TokenLogprob

ID_PREFIX = "resp_"  # of a response

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """A JSON object that is only ever written."""


class OutputText(_Record, frozen=True):
    text: str
    annotations: list[None] = []
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    type: Literal["output_text"] = "output_text"


class ReasoningText(_Record, frozen=True):
    text: str
    type: Literal["reasoning_text"] = "reasoning_text"


class MessageItem(_Record, frozen=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class ReasoningItem(_Record, frozen=True, tag_field="type", tag="reasoning"):
    id: str
    content: list[ReasoningText]
    summary: list[None] = []
    encrypted_content: None = None
    status: ItemStatus | None = None


class CallItem(_Record, frozen=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


Item = MessageItem | ReasoningItem | CallItem
Part = OutputText | ReasoningText


class InputTokensDetails(_Record, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(_Record, frozen=True):
    reasoning_tokens: int


class ResponseUsage(_Record, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(_Record, frozen=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class RawMessage(_Record, frozen=True):
    """vLLM's: what the model read or wrote, as tokens and as their text, markers and all."""

    message: str
    tokens: list[int]
    type: Literal["raw_message_tokens"] = "raw_message_tokens"


class ResponseObject(_Record, frozen=True):
    id: str
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete"]
    output: list[Item]
    error: None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponseUsage | None = None
    completed_at: int | None = None
    object: Literal["response"] = "response"


class DeletedResponse(_Record, frozen=True):
    id: str
    deleted: bool = True
    object: Literal["response"] = "response"


def response_json(response: ResponseObject, repeated: Mapping[str, object]) -> dict[str, Any]:
    """The response with the fields that repeat its request."""
    return {**msgspec.structs.asdict(response), **repeated}


def sse_event(kind: str, fields: Mapping[str, object]) -> bytes:
    """One server-sent event under its name, which its data repeats as `type`."""
    data = msgspec.json.encode({"type": kind, **fields})
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
