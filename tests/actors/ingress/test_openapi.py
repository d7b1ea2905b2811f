"""The OpenAPI document says what the structs accept: checked against bodies they judge."""

import json
from typing import Any

import pytest

from actors.anthropic.bodies import CountBody, MessagesBody
from actors.ingress.openapi import GETS, POSTS, build_openapi
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
)
from actors.openai.responses.bodies import ResponsesBody

DOCUMENT: dict[str, Any] = json.loads(build_openapi("name", "1.2.3"))
BODIES = {
    "/v1/chat/completions": ChatBody,
    "/v1/chat/completions/batch": ChatBatchBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountBody,
    "/v1/embeddings": EmbeddingBody,
    "/invocations": Invocation,
    "/v1/score": ScoreBody,
    "/score": ScoreBody,
    "/v1/rerank": RerankBody,
    "/v2/rerank": RerankBody,
    "/rerank": RerankBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}


def resolve(ref: dict[str, str]) -> dict[str, Any]:
    found: Any = DOCUMENT
    for part in ref["$ref"].removeprefix("#/").split("/"):
        found = found[part]
    assert isinstance(found, dict)
    return found


def references(value: object) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if "$ref" in value else []
        return own + [ref for item in value.values() for ref in references(item)]
    return [ref for item in value for ref in references(item)] if isinstance(value, list) else []


def test_the_document_names_itself_and_every_reference_leads_somewhere() -> None:
    assert DOCUMENT["openapi"] == "3.1.0"
    assert DOCUMENT["info"] == {"title": "name", "version": "1.2.3"}
    refs = references(DOCUMENT)
    assert len(refs) > 20
    assert all(resolve({"$ref": ref}) for ref in refs)


@pytest.mark.parametrize("path", BODIES)
def test_every_post_has_the_fields_of_its_struct_and_no_others(path: str) -> None:
    assert set(BODIES) == set(POSTS)
    operation = DOCUMENT["paths"][path]["post"]
    assert operation["requestBody"]["required"] is True
    schema = resolve(operation["requestBody"]["content"]["application/json"]["schema"])
    assert set(schema["properties"]) == set(BODIES[path].__struct_fields__)
    is_lenient = path.startswith("/v1/messages") or path == "/invocations"
    assert schema.get("additionalProperties", True) is is_lenient
    assert "200" in operation["responses"]
    error = operation["responses"]["default"]["content"]["application/json"]["schema"]
    assert set(resolve(error)["properties"]) == {"error"}


def test_required_fields_and_choices_are_told() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    assert set(schemas["ChatBody"]["required"]) == {"messages"}
    assert set(schemas["CompletionBody"]["required"]) == {"prompt"}
    assert schemas["DetokenizeBody"]["required"] == ["tokens"]
    tiers = schemas["ChatBody"]["properties"]["service_tier"]["anyOf"]
    assert {"auto", "default"} <= set(next(kind["enum"] for kind in tiers if "enum" in kind))


def test_every_get_is_there() -> None:
    assert {path for path, item in DOCUMENT["paths"].items() if "get" in item} == set(GETS)
    assert DOCUMENT["paths"]["/v1/models/{name}"]["get"]["parameters"][0]["name"] == "name"
