"""OpenAI's response objects as structs, their JSON, and server-sent events. No decisions here.

Source of the shapes: OpenAI's API reference; `stop_reason`, `token_ids` and `prompt_token_ids` are
vLLM's extensions. UNSET fields are left out of the JSON, None becomes null: whole answers have
every field that vLLM's have, so that clients written for it find them.
"""

from dataclasses import dataclass, field
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from actors.openai.served_model import ServedModel
from engine.errors import (
    CapacityError,
    ConfigError,
    EngineError,
    PoisonedError,
    RequestError,
)

SSE_DONE = b"data: [DONE]\n\n"
FinishText = Literal["stop", "length", "tool_calls"]

_encoder = msgspec.json.Encoder()


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """A JSON object that is only ever written."""


class PromptTokensDetails(_Record, frozen=True):
    cached_tokens: int


class Usage(_Record, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(_Record, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(_Record, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Record, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(_Record, frozen=True):
    """Of an echoed prompt's first token nothing is known but where it stands."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(_Record, frozen=True):
    """vLLM's; `rank` 1 = the model's best."""

    logprob: float
    rank: int
    decoded_token: str


# Of each prompt token, by token id: its own and the best in its place; None for the first token.
PromptLogprobList = list[dict[str, PromptLogprob] | None]


class FunctionText(_Record, frozen=True):
    name: str
    arguments: str  # JSON, as the model wrote it


class ToolCallObject(_Record, frozen=True):
    id: str
    function: FunctionText
    type: Literal["function"] = "function"


class FunctionPiece(_Record, frozen=True):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallPiece(_Record, frozen=True):
    """Of a streamed call; all but the first have only the index and the next arguments."""

    index: int
    function: FunctionPiece
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatMessage(_Record, frozen=True):
    content: str | None  # null only where something else stands in its place
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[ToolCallObject] | UnsetType = UNSET
    # The same under the name of DeepSeek and SGLang, and of vLLM.
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | None = None


class ChatDelta(_Record, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET  # and `reasoning`: as in ChatMessage
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallPiece] | UnsetType = UNSET


class ChatChoice(_Record, frozen=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishText
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatChunkChoice(_Record, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishText | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(_Record, frozen=True):
    """Also a choice of a chunk, where finish_reason is null until the last."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishText | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobList | UnsetType | None = UNSET


class ChatCompletion(_Record, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    service_tier: None = None
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobList | None = None
    kv_transfer_params: None = None


class ChatChunk(_Record, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    system_fingerprint: str | None = None
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(_Record, frozen=True):
    """Also a chunk: OpenAI gives both the same `object`."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    system_fingerprint: str | None = None
    usage: Usage | UnsetType | None = UNSET
    service_tier: UnsetType | None = UNSET
    kv_transfer_params: UnsetType | None = UNSET


class ScoreAnswer(_Record, frozen=True):
    """SGLang's shape."""

    id: str
    created: int
    model: str
    scores: list[list[float]]  # of each item, in the order of the labels
    usage: Usage
    object: Literal["scoring"] = "scoring"


class PairScore(_Record, frozen=True):
    index: int
    score: float
    object: Literal["score"] = "score"


class PairScoreAnswer(_Record, frozen=True):
    """vLLM's shape."""

    id: str
    created: int
    model: str
    data: list[PairScore]
    usage: Usage
    object: Literal["list"] = "list"


class DocumentText(_Record, frozen=True):
    text: str


class RerankResult(_Record, frozen=True):
    index: int
    relevance_score: float
    document: DocumentText | UnsetType = UNSET


class RerankAnswer(_Record, frozen=True):
    """Cohere's and Jina's shape."""

    id: str
    model: str
    results: list[RerankResult]  # the most relevant first
    usage: Usage


class EmbeddingUsage(_Record, frozen=True):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class EmbeddingObject(_Record, frozen=True):
    index: int
    embedding: list[float] | str  # str: base64 of float32, little-endian
    object: Literal["embedding"] = "embedding"


class EmbeddingList(_Record, frozen=True):
    """`id` and `created` are vLLM's."""

    id: str
    created: int
    model: str
    data: list[EmbeddingObject]
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class ModelCard(_Record, frozen=True):
    id: str
    created: int
    max_model_len: int
    root: str  # the canonical name of the same model
    object: Literal["model"] = "model"
    owned_by: str = "laps"


class ModelList(_Record, frozen=True):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class TokenizeAnswer(_Record, frozen=True):
    """vLLM's shape, as the next one."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(_Record, frozen=True):
    prompt: str


class NotReady(_Record, frozen=True):
    """What /ready says while it says 503."""

    missing_roles: list[str]
    status: Literal["not ready"] = "not ready"


class ErrorDetail(_Record, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(_Record, frozen=True):
    error: ErrorDetail


def to_json(record: msgspec.Struct) -> bytes:
    return _encoder.encode(record)


def sse_event(record: _Record) -> bytes:
    """One server-sent event; JSON holds no raw line break, so one data line is enough."""
    return b"data: " + _encoder.encode(record) + b"\n\n"


def model_card(model: ServedModel, name: str) -> ModelCard:
    """The object of GET /v1/models/{name}, `name` being one of the model's."""
    return ModelCard(
        id=name, created=model.created_s, max_model_len=model.max_model_len, root=model.name
    )


def model_list(model: ServedModel) -> ModelList:
    """The object of GET /v1/models: every name is a card."""
    return ModelList(data=[model_card(model, name) for name in model.names])


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReply:
    """An error as HTTP sends it."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)


def error_reply(error: Exception) -> ErrorReply:
    """The reply for an error raised before the first byte; unknown ones say nothing but 500."""
    headers = {}
    if isinstance(error, CapacityError):
        # Whole seconds, rounded up: the header knows no fractions, and 0 would mean at once.
        headers["Retry-After"] = str(max(1, -int(-error.retry_after_s // 1)))
    return ErrorReply(
        status=_status(error), body=to_json(ErrorBody(error=error_detail(error))), headers=headers
    )


def sse_error(error: Exception) -> bytes:
    """The last event of a stream that failed; no `[DONE]` follows it."""
    return sse_event(ErrorBody(error=error_detail(error)))


def _status(error: Exception) -> int:
    if isinstance(error, RequestError | CapacityError):
        return error.status
    return 504 if isinstance(error, TimeoutError) else 500


def error_detail(error: Exception) -> ErrorDetail:
    """What a client is told of an error."""
    match error:
        case RequestError():
            return ErrorDetail(
                message=error.message,
                type="rate_limit_error" if error.status == 429 else "invalid_request_error",
                param=error.param,
                code=error.code,
            )
        case CapacityError(status=429):
            return ErrorDetail(
                message=error.message, type="rate_limit_error", code="rate_limit_exceeded"
            )
        case CapacityError():
            return ErrorDetail(message=error.message, type="service_unavailable", code="overloaded")
        case TimeoutError():
            return ErrorDetail(
                message="The request did not finish in time.", type="server_error", code="timeout"
            )
        case PoisonedError():
            return ErrorDetail(message=error.message, type="server_error", code="poisoned")
        case EngineError() if not isinstance(error, ConfigError):
            return ErrorDetail(message=error.message, type="server_error")
    # Whatever else was raised may quote paths or prompts.
    return ErrorDetail(message="The server had an internal error.", type="server_error")
