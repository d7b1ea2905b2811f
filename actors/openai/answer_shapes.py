"""Answers of other protocols than chats, which are generated as chats are.

A shape holds what an answer repeats of its request. Plain records: the writers are elsewhere.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

Keep = Callable[[str, bytes, list[dict[str, object]]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesShape:
    """An answer of /v1/responses."""

    repeated: Mapping[str, object]  # fields of the response object that the request decided
    has_logprobs: bool  # the client wants those of the text
    shows_tokens: bool = False  # the answer has the prompt and the output as they were, as tokens
    # Called with the finished response: its id, its JSON, and what the model said as messages that
    # continue the conversation. None = the response is not stored.
    keep: Keep | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesShape:
    """An answer of Anthropic's /v1/messages."""


AnswerShape = ResponsesShape | MessagesShape
