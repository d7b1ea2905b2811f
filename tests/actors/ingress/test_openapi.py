"""The OpenAPI document says what the structs accept: checked against bodies they judge."""

import json
from typing import Any

import pytest
from msgspec import Struct

from actors.anthropic.bodies import CountBody, MessagesBody
from actors.ingress.docs_page import docs_page
from actors.ingress.openapi import GETS, POSTS, UNSUPPORTED_FIELD, build_openapi
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
    decode_body,
    unsupported_fields,
)
from actors.openai.responses.bodies import ResponsesBody
from engine.errors import RequestError

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


def test_fields_that_are_refused_are_told_with_the_values_that_are_not() -> None:
    """A client that reads the document must not think that a server takes what it refuses."""
    for kind in (ChatBody, ChatBatchBody, CompletionBody, ResponsesBody):
        fields = DOCUMENT["components"]["schemas"][kind.__name__]["properties"]
        told = {
            name for name, field in fields.items() if field.get("description") == UNSUPPORTED_FIELD
        }
        assert told == set(unsupported_fields(kind))
        assert told, kind
        for name in told:
            for value in fields[name]["enum"]:
                decode_body(_body_with(kind, name, value), kind)
            with pytest.raises(RequestError, match=f"'{name}' is not supported"):
                decode_body(_body_with(kind, name, "another value"), kind)
    assert (
        "description"
        not in DOCUMENT["components"]["schemas"]["ScoreBody"]["properties"]["documents"]
    )


def _body_with(kind: type[Struct], name: str, value: object) -> bytes:
    """A body of one kind with its required fields and one more."""
    schema = DOCUMENT["components"]["schemas"][kind.__name__]
    values = {"messages": [], "prompt": "text", "input": "text"}
    given = {field: values[field] for field in schema.get("required", [])}
    return json.dumps(given | {name: value}).encode()


def test_the_page_shows_refused_fields_last() -> None:
    page = docs_page()
    table = page[: page.index("<h4>Answer")]  # of the first path: chats
    assert table.index("chat_template_kwargs") < table.index("guided_json")
    after = table[table.index("<code>use_beam_search") :]
    assert after.startswith(
        "<code>use_beam_search</code></td><td>not supported: refused unless null or false</td>"
    )
    assert "any JSON" not in table.replace("json_schema</code></td><td>any JSON", "")


@pytest.mark.parametrize(
    ("kind", "name", "note"),
    [
        ("ChatBody", "user", "string. No effect."),
        ("ChatBody", "metadata", "object. No effect."),
        ("ChatBody", "store", "boolean. No effect."),
        ("CompletionBody", "length_penalty", "number. No effect."),
        ("EmbeddingBody", "user", "string. No effect."),
        ("ResponsesBody", "metadata", "object. No effect: the answer repeats it."),
        ("ResponsesBody", "store", "boolean"),  # this endpoint keeps what it has answered
        ("ChatBody", "seed", "integer"),
    ],
)
def test_the_page_tells_fields_without_effect_from_those_with_one(
    kind: str, name: str, note: str
) -> None:
    page = docs_page()
    table = page[page.index(f'<h4 id="{kind}">') :]
    assert f"<code>{name}</code></td><td>{note}</td>" in table[: table.index("</table>")]
