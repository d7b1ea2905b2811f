"""The OpenAPI document of this server, its schemas generated from the structs that do the work."""

from collections.abc import Mapping
from typing import Any

import msgspec

from actors.anthropic.bodies import CountBody, MessagesBody
from actors.anthropic.objects import MessageObject, TokenCount
from actors.openai.request_bodies import (
    ChatBatchBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    Invocation,
    RerankBody,
    ScoreBody,
    TokenizeBody,
    unsupported_fields,
)
from actors.openai.response_objects import (
    ChatCompletion,
    Completion,
    DetokenizeAnswer,
    EmbeddingList,
    ErrorBody,
    ModelCard,
    ModelList,
    NotReady,
    PairScoreAnswer,
    RerankAnswer,
    ScoreAnswer,
    TokenizeAnswer,
)
from actors.openai.responses.bodies import ResponsesBody
from actors.openai.responses.objects import ResponseObject

UNSUPPORTED_FIELD = "Not supported."  # the description of fields that are refused
OPENAPI_VERSION = "3.1.0"  # the first whose schemas are plain JSON schemas, as msgspec writes them

Answers = tuple[type[msgspec.Struct], ...]
SCORES: Answers = (ScoreAnswer, PairScoreAnswer)  # of labels; of pairs of texts, told by the body
ANY: Answers = (ChatCompletion, Completion, EmbeddingList, *SCORES, RerankAnswer)

# Path -> (what it is for, body, answers that are no stream: one of these).
POSTS: Mapping[str, tuple[str, type[msgspec.Struct], Answers]] = {
    "/v1/chat/completions": ("Answer a conversation", ChatBody, (ChatCompletion,)),
    "/v1/chat/completions/batch": (
        "Answer several conversations",
        ChatBatchBody,
        (ChatCompletion,),
    ),
    "/v1/completions": ("Continue a text", CompletionBody, (Completion,)),
    "/v1/responses": ("Answer a conversation, as items", ResponsesBody, (ResponseObject,)),
    "/v1/messages": ("Answer a conversation, as Anthropic has it", MessagesBody, (MessageObject,)),
    "/v1/messages/count_tokens": ("Count the tokens of a conversation", CountBody, (TokenCount,)),
    "/v1/embeddings": ("Vectors of prompts", EmbeddingBody, (EmbeddingList,)),
    "/invocations": ("Any of the above, told by its fields", Invocation, ANY),
    "/v1/score": ("How likely labels are, or how relevant texts", ScoreBody, SCORES),
    "/score": ("As /v1/score", ScoreBody, SCORES),
    "/v1/rerank": ("Documents by their relevance", RerankBody, (RerankAnswer,)),
    "/v2/rerank": ("As /v1/rerank", RerankBody, (RerankAnswer,)),
    "/rerank": ("As /v1/rerank", RerankBody, (RerankAnswer,)),
    "/tokenize": ("Token ids of a prompt", TokenizeBody, (TokenizeAnswer,)),
    "/detokenize": ("The text of token ids", DetokenizeBody, (DetokenizeAnswer,)),
}
STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
GETS: Mapping[str, tuple[str, type[msgspec.Struct] | None]] = {
    "/": ("Talk to the model, as a page", None),
    "/v1/models": ("The names that are served", ModelList),
    "/v1/models/{name}": ("One of these names", ModelCard),
    "/v1/responses/{name}": ("A stored response", ResponseObject),
    "/tokenizer_info": ("The tokenizer's configuration", None),
    "/load": ("Requests under way", None),
    "/docs": ("This document, as a page", None),
    "/health": ("This process answers", None),
    "/ping": ("As /health, without a body", None),
    "/ready": ("200 when every role can serve, else 503", None),
    "/metrics": ("Prometheus text", None),
    "/laps": ("Length-aware scheduling, as a page", None),
    "/laps_status": ("Length-aware scheduling, as JSON", None),
    "/version": ("Version and deployment", None),
}


def build_openapi(title: str, version: str) -> bytes:
    """The document as JSON."""
    answers = [answer for _, answer in GETS.values() if answer is not None]
    kinds: list[type[msgspec.Struct]] = [ErrorBody, NotReady, *answers]
    kinds += [kind for _, body, found in POSTS.values() for kind in (body, *found)]
    schemas, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    _mark_unsupported(components)
    ref = dict(zip(kinds, schemas, strict=True))
    paths = {path: {"post": _post(path, ref)} for path in POSTS}
    paths |= {path: {"get": _get(path, ref)} for path in GETS}
    paths["/ping"]["post"] = _get("/ping", ref)  # some probes send one, without a body
    document = {
        "openapi": OPENAPI_VERSION,
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {"schemas": components},
    }
    return msgspec.json.encode(document)


Schemas = Mapping[type[msgspec.Struct], dict[str, object]]


def _mark_unsupported(components: Mapping[str, dict[str, Any]]) -> None:
    """Says in the schemas of bodies which fields are refused, but for values without effect."""
    for _, body, _ in POSTS.values():
        if body is Invocation:  # read only to find the endpoint, which then refuses
            continue
        for name, allowed in unsupported_fields(body).items():
            schema = {"enum": [None, *allowed], "description": UNSUPPORTED_FIELD}
            components[body.__name__]["properties"][name] = schema


def _post(path: str, ref: Schemas) -> dict[str, object]:
    summary, body, found = POSTS[path]
    schema = ref[found[0]] if len(found) == 1 else {"anyOf": [ref[answer] for answer in found]}
    content: dict[str, object] = {"application/json": {"schema": schema}}
    if path in STREAMED:
        content["text/event-stream"] = {}  # events, each with a chunk: not one JSON value
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": ref[body]}}},
        "responses": {"200": {"description": summary, "content": content}} | _errors(ref),
    }


def _get(path: str, ref: Schemas) -> dict[str, object]:
    summary, answer = GETS[path]
    good: dict[str, object] = {"description": summary}
    if answer is not None:
        good["content"] = {"application/json": {"schema": ref[answer]}}
    responses: dict[str, object] = {"200": good} | _errors(ref)
    if path == "/ready":
        content = {"application/json": {"schema": ref[NotReady]}}
        responses["503"] = {"description": "A role has no worker", "content": content}
    operation: dict[str, object] = {"summary": summary, "responses": responses}
    if "{name}" in path:
        name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [name]
    return operation


def _errors(ref: Schemas) -> dict[str, object]:
    content = {"application/json": {"schema": ref[ErrorBody]}}
    return {"default": {"description": "An error, before any byte was sent", "content": content}}
