"""The objects of /v1/messages' answers. Source: Anthropic's API reference. No decisions here."""

from typing import Any, Literal

import msgspec


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens; those of the prompt that were cached are counted apart."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0


class MessageObject(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    model: str
    content: list[dict[str, Any]]  # blocks of text, thinking and tool_use
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class TokenCount(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
