"""The body of /v1/responses as typed structs. Source of the fields: OpenAI's API reference.

Items of the input and tools are read leniently, as messages of chats are: clients send back what
they got, from whatever server.
"""

from typing import Annotated, Any, Literal

from msgspec import Raw, field

from actors.openai.request_bodies import (
    NO_EFFECT,
    ONLY_REPEATED,
    Effort,
    LenientObject,
    Scalar,
    ServiceTier,
    StrictObject,
    StructuredOutputs,
)


class InputPart(LenientObject, frozen=True, kw_only=True):
    """A part of a message, of a call's output, or of reasoning."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(LenientObject, frozen=True, kw_only=True):
    """Any item of the input; its type says which fields it has."""

    type: str | None = None  # null = a message
    # A message.
    role: str | None = None
    content: str | list[InputPart] | None = None  # of reasoning, too
    # A call and its output.
    call_id: str | None = None
    name: str | None = None
    arguments: str | dict[str, Any] | None = None
    output: str | list[InputPart] | None = None
    # Reasoning.
    summary: list[InputPart] | None = None


class TextFormat(LenientObject, frozen=True, kw_only=True):
    type: str
    name: str | None = None
    description: str | None = None
    schema: Raw = field(default_factory=Raw)
    strict: bool | None = None


class TextOptions(StrictObject, frozen=True, kw_only=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # only "medium"


class ReasoningOptions(StrictObject, frozen=True, kw_only=True):
    effort: Effort | None = None
    # No effect: the reasoning itself is in the answer, and nothing summarises it.
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: str | None = None


class FunctionTool(LenientObject, frozen=True, kw_only=True):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: Raw = field(default_factory=Raw)
    strict: bool | None = None


class NamedTool(LenientObject, frozen=True, kw_only=True):
    type: str
    name: str | None = None


class ResponseToolChoice(LenientObject, frozen=True, kw_only=True):
    """A function by its name, or allowed tools."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[NamedTool] | None = None


class ResponseStreamOptions(StrictObject, frozen=True, kw_only=True):
    include_obfuscation: Annotated[bool | None, NO_EFFECT] = None  # nothing is ever padded here


class ResponsesBody(StrictObject, frozen=True, kw_only=True):
    input: str | list[InputItem]
    model: str | None = None  # null = the model that is served
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    # Accepted as OpenAI's servers do.
    user: Annotated[str | None, ONLY_REPEATED] = None
    metadata: Annotated[dict[str, str] | None, ONLY_REPEATED] = None
    service_tier: Annotated[ServiceTier | None, NO_EFFECT] = None
    safety_identifier: Annotated[str | None, ONLY_REPEATED] = None
    prompt_cache_key: Annotated[str | None, ONLY_REPEATED] = None
    prompt_cache_retention: Annotated[str | None, NO_EFFECT] = None
    prompt_cache_options: Annotated[dict[str, Scalar] | None, NO_EFFECT] = None
    # Counts calls of tools that a server runs itself.
    max_tool_calls: Annotated[int | None, ONLY_REPEATED] = None
    # Extensions, as in chats.
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    top_k: int | None = None
    min_p: float | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    chat_template_kwargs: dict[str, Scalar] | None = None
    include_reasoning: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    enable_response_messages: bool | None = None  # the tokens read and written are in the answer
    # Every client with the same API key, or any without keys, may read a stored response
    # whose id it knows, so no client chooses it.
    request_id: Annotated[str | None, NO_EFFECT] = None
    # Known, refused unless at the value that changes nothing (see UNSUPPORTED).
    background: Raw = field(default_factory=Raw)
    conversation: Raw = field(default_factory=Raw)
    context_management: Raw = field(default_factory=Raw)
    prompt: Raw = field(default_factory=Raw)
    mm_processor_kwargs: Raw = field(default_factory=Raw)
    vllm_xargs: Raw = field(default_factory=Raw)
