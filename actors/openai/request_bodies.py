"""Bodies of requests as typed structs, and reading them strictly.

Every field of a body that is accepted stands here; anything else is refused by name. Messages,
tools and tool calls are read leniently instead: clients send back what other servers added to them,
and OpenAI's servers ignore fields there that they do not know. Shapes and types only: ranges,
limits and meaning are in actors/openai/protocol.py. Source of the fields: OpenAI's API reference;
those below "extensions" carry vLLM's names and meanings.
"""

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Raw, field

from engine.errors import RequestError

Scalar = str | int | float | bool | None
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ServiceTier = Literal["auto", "default", "flex", "scale", "priority"]
Body = TypeVar("Body", bound=msgspec.Struct)
# What the API's document says of fields that are accepted as OpenAI's servers do.
NO_EFFECT = Meta(description="No effect.")
ONLY_REPEATED = Meta(description="No effect: the answer repeats it.")


class StrictObject(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A JSON object whose every key is known; null means absent throughout."""


class LenientObject(msgspec.Struct, frozen=True, kw_only=True):
    """A JSON object that may have further keys, which are ignored."""


class StreamOptions(StrictObject, frozen=True, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # extension: usage so far on every chunk
    include_obfuscation: Annotated[bool | None, NO_EFFECT] = None  # nothing is ever padded here


class ContentPart(LenientObject, frozen=True, kw_only=True):
    """One part of a message; only text is supported, the others are known so as to be named."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(LenientObject, frozen=True, kw_only=True):
    name: str
    arguments: str | dict[str, Any] | None = None  # a JSON object, usually as text


class ToolCall(LenientObject, frozen=True, kw_only=True):
    id: str
    function: FunctionCall
    type: str | None = None


class Message(LenientObject, frozen=True, kw_only=True):
    role: str
    content: str | list[ContentPart | str] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # Extensions: for templates that keep it. The second is vLLM's newer name of the first.
    reasoning_content: str | None = None
    reasoning: Raw = field(default_factory=Raw)  # text; other servers' objects are ignored
    refusal: str | None = None  # stands in for the content
    audio: Raw = field(default_factory=Raw)
    function_call: FunctionCall | None = None  # what `tool_calls` replaced


class FunctionDefinition(LenientObject, frozen=True, kw_only=True):
    name: str
    description: str | None = None
    parameters: Raw = field(default_factory=Raw)  # a JSON schema
    strict: bool | None = None


class Tool(LenientObject, frozen=True, kw_only=True):
    type: str
    function: FunctionDefinition | None = None


class FunctionName(StrictObject, frozen=True, kw_only=True):
    name: str


class AllowedTool(LenientObject, frozen=True, kw_only=True):
    type: str
    function: FunctionName | None = None


class AllowedTools(StrictObject, frozen=True, kw_only=True):
    mode: Literal["auto", "required"] = "auto"
    tools: list[AllowedTool]


class ToolChoice(StrictObject, frozen=True, kw_only=True):
    """A choice that is more than a word."""

    type: str
    function: FunctionName | None = None
    custom: Raw = field(default_factory=Raw)  # known so as to be named
    allowed_tools: AllowedTools | None = None


class JsonSchemaFormat(StrictObject, frozen=True, kw_only=True):
    name: str
    description: str | None = None
    schema: Raw = field(default_factory=Raw)
    strict: bool | None = None


class ResponseFormat(StrictObject, frozen=True, kw_only=True):
    type: str
    json_schema: JsonSchemaFormat | None = None


class Speculation(StrictObject, frozen=True, kw_only=True):
    """How many tokens a step may guess for the request, where the server does so at all."""

    max_drafts: int  # 0 = none


class StructuredOutputs(StrictObject, frozen=True, kw_only=True):
    """vLLM's: exactly one."""

    json: Raw = field(default_factory=Raw)  # a JSON schema, or its text
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # GBNF or Lark


class Prediction(StrictObject, frozen=True, kw_only=True):
    """A guess at the answer, which may make it faster and never different: not used here."""

    type: Literal["content"]
    content: str | list[ContentPart]


class GenerationBody(StrictObject, frozen=True, kw_only=True):
    """What both endpoints share."""

    model: str | None = None  # null = the model that is served
    max_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    user: Annotated[str | None, NO_EFFECT] = None
    # Extensions.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    extra_key: str | None = None  # SGLang's: further part of what a cached prefix is known by
    priority: int | None = None
    speculation: Speculation | None = None
    response_format: ResponseFormat | None = None  # OpenAI's for chats; vLLM's for completions too
    structured_outputs: StructuredOutputs | None = None
    json_schema: Raw = field(default_factory=Raw)  # SGLang's, as the two below: one of the three
    regex: str | None = None
    ebnf: str | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    skip_special_tokens: bool | None = None
    # No tokenizer here puts any.
    spaces_between_special_tokens: Annotated[bool | None, NO_EFFECT] = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logprob_token_ids: list[int] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_tokens_as_token_ids: bool | None = None
    request_id: str | None = None
    length_penalty: Annotated[float | None, NO_EFFECT] = None  # for beam search
    # Known, refused unless at the value that changes nothing (see UNSUPPORTED).
    early_stopping: Raw = field(default_factory=Raw)
    ec_transfer_params: Raw = field(default_factory=Raw)
    guided_choice: Raw = field(default_factory=Raw)
    guided_decoding_backend: Raw = field(default_factory=Raw)
    guided_grammar: Raw = field(default_factory=Raw)
    guided_json: Raw = field(default_factory=Raw)
    guided_regex: Raw = field(default_factory=Raw)
    kv_transfer_params: Raw = field(default_factory=Raw)
    logits_processors: Raw = field(default_factory=Raw)
    prompt_embeds: Raw = field(default_factory=Raw)
    repetition_detection: Raw = field(default_factory=Raw)
    return_token_offsets: Raw = field(default_factory=Raw)
    thinking_token_budget: Raw = field(default_factory=Raw)
    use_beam_search: Raw = field(default_factory=Raw)
    vllm_xargs: Raw = field(default_factory=Raw)


class _ChatFields(GenerationBody, frozen=True, kw_only=True):
    """All of a chat but its messages."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    store: Annotated[bool | None, NO_EFFECT] = None
    metadata: Annotated[dict[str, str] | None, NO_EFFECT] = None
    service_tier: Annotated[ServiceTier | None, NO_EFFECT] = None
    safety_identifier: Annotated[str | None, NO_EFFECT] = None
    prompt_cache_key: Annotated[str | None, NO_EFFECT] = None
    prompt_cache_retention: Annotated[str | None, NO_EFFECT] = None
    prompt_cache_options: Annotated[dict[str, Scalar] | None, NO_EFFECT] = None
    prediction: Annotated[Prediction | None, NO_EFFECT] = None
    # Tools.
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None  # a wish: no effect where the template knows none
    # Extensions.
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Scalar] | None = None
    # Known, refused unless at the value that changes nothing (see UNSUPPORTED).
    audio: Raw = field(default_factory=Raw)
    chat_template: Raw = field(default_factory=Raw)
    documents: Raw = field(default_factory=Raw)
    function_call: Raw = field(default_factory=Raw)
    functions: Raw = field(default_factory=Raw)
    media_io_kwargs: Raw = field(default_factory=Raw)
    mm_processor_kwargs: Raw = field(default_factory=Raw)
    modalities: Raw = field(default_factory=Raw)
    moderation: Raw = field(default_factory=Raw)
    return_assistant_tokens_mask: Raw = field(default_factory=Raw)
    return_prompt_text: Raw = field(default_factory=Raw)
    verbosity: Raw = field(default_factory=Raw)
    web_search_options: Raw = field(default_factory=Raw)


class ChatBody(_ChatFields, frozen=True, kw_only=True):
    messages: list[Message]


class ChatBatchBody(_ChatFields, frozen=True, kw_only=True):
    """vLLM's /v1/chat/completions/batch: conversations that share all other fields."""

    messages: list[list[Message]]

    def chat(self, position: int) -> ChatBody:
        """One of the conversations, as a request of its own."""
        shared = {name: getattr(self, name) for name in _ChatFields.__struct_fields__}
        return ChatBody(messages=self.messages[position], **shared)


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    best_of: int | None = None  # only as n
    suffix: str | None = None  # not supported


class _PromptsBody(StrictObject, frozen=True, kw_only=True):
    """What requests share that ask about prompts and want no output."""

    model: str | None = None  # null = the model that is served
    user: Annotated[str | None, NO_EFFECT] = None
    # As in the other endpoints.
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    priority: int | None = None


class EmbeddingBody(_PromptsBody, frozen=True, kw_only=True):
    """OpenAI's /v1/embeddings."""

    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    # Extensions.
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None


class _LabelsBody(_PromptsBody, frozen=True, kw_only=True):
    """What requests share that ask how likely labels are."""

    label_token_ids: list[int] | None = None


class ScoreBody(_LabelsBody, frozen=True, kw_only=True):
    """/v1/score in one of two shapes.

    SGLang's: how likely each label is as the next token behind query and item. vLLM's: how relevant
    the second text of each pair is to the first, as /v1/rerank has it.
    """

    query: str | list[int] | None = None
    items: str | list[str | list[int]] | None = None
    apply_softmax: bool | None = None  # over the labels alone
    item_first: bool | None = None  # the item stands before the query
    # vLLM's: one text and several, or as many of each; under either pair of names.
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    instruction: str | None = None
    template: str | None = None


class RerankDocument(StrictObject, frozen=True, kw_only=True):
    text: str


class RerankBody(_LabelsBody, frozen=True, kw_only=True):
    """/v1/rerank as Cohere and Jina have it, for a model that says yes or no."""

    query: str
    documents: list[str | RerankDocument]
    top_n: int | None = None
    return_documents: bool | None = None
    # Ours: what the model is asked, in the words of its chat template or of a template sent along.
    instruction: str | None = None
    template: str | None = None


class TokenizeBody(StrictObject, frozen=True, kw_only=True):
    """vLLM's /tokenize: exactly one of `prompt` and `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None  # null = as the endpoint of such a prompt does
    return_token_strs: bool | None = None
    # With messages only.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Scalar] | None = None
    tools: list[Tool] | None = None


class DetokenizeBody(StrictObject, frozen=True, kw_only=True):
    """vLLM's /detokenize."""

    model: str | None = None
    tokens: list[int]


class Invocation(LenientObject, frozen=True, kw_only=True):
    """The fields that tell which endpoint a body is for."""

    messages: Raw = field(default_factory=Raw)
    prompt: Raw = field(default_factory=Raw)
    input: Raw = field(default_factory=Raw)
    query: Raw = field(default_factory=Raw)
    documents: Raw = field(default_factory=Raw)


# Parameter -> the values beside null that ask for what happens anyway.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "audio": (),
    "background": (False,),
    "chat_template": (),
    "context_management": ([], {}),
    "conversation": (),
    "documents": ([],),
    "early_stopping": (False,),
    "ec_transfer_params": ({},),
    "function_call": ("none",),
    "functions": (),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": ({},),
    "logits_processors": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prompt": (),
    "prompt_embeds": ([],),
    "repetition_detection": (),
    "return_assistant_tokens_mask": (False,),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "thinking_token_budget": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "web_search_options": (),
}
# What took the place of a deprecated parameter.
_SUCCESSORS = {
    "function_call": "tool_choice",
    "functions": "tools",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
}
_MAX_RAW_BYTES = 64  # longer than every allowed value above: no need to decode more

# msgspec's words for half of a surrogate pair, by where it stands; two have other causes, too.
_HALF_PAIR = ("surrogate pair", "end of hex escape", "Input data was truncated")

_PATH = re.compile(r" - at `(?P<path>[^`]*)`$")
_EXPECTED = re.compile(r"^Expected `(?P<expected>[^`]+)`, got `(?P<got>[^`]+)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]+)`$")
_NOUNS = {
    "str": "a string",
    "int": "an integer",
    "float": "a decimal",
    "bool": "a boolean",
    "array": "an array",
    "object": "an object",
    "null": "null",
}


def decode_body(body: bytes, kind: type[Body]) -> Body:
    """The body as a `kind`; raises RequestError (400) naming the field."""
    decoded = decode_fields(body, kind)
    for name, allowed in unsupported_fields(kind).items():
        _check_unsupported(name, getattr(decoded, name), allowed)
    return decoded


@cache
def unsupported_fields(kind: type[msgspec.Struct]) -> Mapping[str, tuple[object, ...]]:
    """The fields that `decode_body` refuses, with the values that it accepts all the same."""
    return {
        field.name: UNSUPPORTED[field.name]
        for field in msgspec.structs.fields(kind)
        if field.name in UNSUPPORTED and field.type is Raw  # of another type, it is supported
    }


def decode_fields(body: bytes, kind: type[Body]) -> Body:
    """As `decode_body`, whatever the values of parameters that are not supported."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from error
    except RecursionError as error:
        raise bad_json("it is nested too deeply") from error
    except UnicodeDecodeError as error:
        raise bad_json("it is not valid UTF-8") from error
    except msgspec.DecodeError as error:
        raise bad_json(_explain_malformed(str(error), body)) from error


def is_given(raw: Raw) -> bool:
    """Whether an undecoded field is present and not null."""
    return bytes(raw) not in (b"", b"null")


def bad_json(detail: str) -> RequestError:
    return RequestError(f"We could not parse the JSON body of your request: {detail}.")


def unsupported(param: str, detail: str = "") -> RequestError:
    return RequestError(
        f"Unsupported parameter: '{param}' is not supported by this server{detail}.",
        param=param,
        code="unsupported_parameter",
    )


def _check_unsupported(name: str, raw: Raw, allowed: tuple[object, ...]) -> None:
    if not is_given(raw):
        return
    if len(bytes(raw)) <= _MAX_RAW_BYTES and _decode_raw(raw) in allowed:
        return
    choices = " or ".join(str(msgspec.json.encode(value), "utf-8") for value in allowed)
    detail = f", except as {choices}" if choices else ""
    if name in _SUCCESSORS:
        detail += f"; use '{_SUCCESSORS[name]}' instead"
    raise unsupported(name, detail)


def _decode_raw(raw: Raw) -> object:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_json(_explain_malformed(str(error), bytes(raw))) from error


def _explain_malformed(message: str, body: bytes) -> str:
    """Says what to do about half of a surrogate pair, which Python's own reader lets pass."""
    if not any(words in message for words in _HALF_PAIR):
        return message
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return message
    return (
        "it has half of a surrogate pair, an escape from \\ud800 to \\udfff that stands alone;"
        " escape such a character by both halves, or send it as UTF-8"
    )


def _explain(message: str) -> RequestError:
    """A msgspec message in OpenAI's words, with the field's path as `param`."""
    found = _PATH.search(message)
    problem = message[: found.start()] if found else message
    path = _plain_path(found["path"]) if found else ""
    if match := _UNKNOWN.match(problem):
        name = _join(path, match["name"])
        return RequestError(
            f"Unrecognized request argument supplied: {name[:200]}",
            param=name[:200],
            code="unknown_parameter",
        )
    if match := _MISSING.match(problem):
        name = _join(path, match["name"])
        return RequestError(
            f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter"
        )
    if match := _EXPECTED.match(problem):
        # Whether null is allowed too is of no use to somebody who sent something else.
        kinds = [kind for kind in match["expected"].split(" | ") if kind != "null"]
        expected = " or ".join(_NOUNS.get(kind, kind) for kind in kinds)
        got = _NOUNS.get(match["got"], match["got"])
        return RequestError(
            f"Invalid type for '{path or 'body'}': expected {expected}, but got {got} instead.",
            param=path or None,
            code="invalid_type",
        )
    return RequestError(
        f"Invalid value for '{path or 'body'}': {problem}.",
        param=path or None,
        code="invalid_value",
    )


def _plain_path(path: str) -> str:
    """`$.messages[0].role` -> `messages[0].role`; values of a mapping lose their `[...]`."""
    return path.removeprefix("$").removeprefix(".").replace("[...]", "")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
