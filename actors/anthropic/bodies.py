"""The body of /v1/messages as typed structs. Source of the fields: Anthropic's API reference.

Everything is read leniently: the clients of this protocol are agents that add fields with every
version. What is not here is ignored.
"""

from typing import Any, Literal

from msgspec import Raw, field

from actors.openai.request_bodies import LenientObject


class Block(LenientObject, frozen=True, kw_only=True):
    """A block of a message; its type says which fields it has."""

    type: str
    text: str | None = None
    # tool_use
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    # tool_result
    tool_use_id: str | None = None
    content: "str | list[Block] | None" = None
    # thinking
    thinking: str | None = None


class TextBlock(LenientObject, frozen=True, kw_only=True):
    type: str
    text: str


class MessageParam(LenientObject, frozen=True, kw_only=True):
    role: str
    content: str | list[Block]


class ToolParam(LenientObject, frozen=True, kw_only=True):
    name: str
    type: str | None = None  # null and "custom" = the client runs it
    description: str | None = None
    input_schema: Raw = field(default_factory=Raw)
    strict: bool | None = None


class ToolChoiceParam(LenientObject, frozen=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingParam(LenientObject, frozen=True, kw_only=True):
    """`budget_tokens` has no effect: nothing here ends thinking early."""

    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(LenientObject, frozen=True, kw_only=True):
    type: str
    schema: Raw = field(default_factory=Raw)


class OutputConfig(LenientObject, frozen=True, kw_only=True):
    format: OutputFormat | None = None


class CountBody(LenientObject, frozen=True, kw_only=True):
    """What decides the prompt: all that /v1/messages/count_tokens reads."""

    messages: list[MessageParam]
    model: str | None = None  # null = the model that is served
    system: str | list[TextBlock] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingParam | None = None


class MessagesBody(CountBody, frozen=True, kw_only=True):
    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # its name before `output_config`
    thread: dict[str, Any] | None = None  # refused: the messages behind it would be missing
    # Extensions, as in OpenAI's chats.
    seed: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
