"""The page at `/docs`: every path of the OpenAPI document with its fields, as plain HTML.

Made on the server from the document itself, so it runs no script and loads nothing.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from html import escape
from typing import Any

import msgspec

from actors.ingress.openapi import UNSUPPORTED_FIELD, build_openapi
from actors.lifecycle.deployment import VERSION

Json = Mapping[str, Any]

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } a { color: inherit } summary { cursor: pointer; padding: .4rem 0 }
details { border-top: 1px solid #ccc } table { border-collapse: collapse; margin: .5rem 0 1rem }
td, th { text-align: left; padding: .15rem 1rem .15rem 0; vertical-align: top }
code { font-family: ui-monospace, monospace } .method { display: inline-block; width: 4.5rem }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd } }
"""


@cache
def docs_page() -> str:
    """The page, made once: every path, then the structures that bodies are made of."""
    document = msgspec.json.decode(build_openapi("LAPS engine", VERSION))
    schemas = document["components"]["schemas"]
    rows = [
        line
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        for line in _operation(method, path, operation, schemas)
    ]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8"><title>API of this server</title>',
            f"<style>{_STYLE}</style></head><body>",
            f"<h1>{escape(document['info']['title'])} {escape(document['info']['version'])}</h1>",
            '<p>Made from <a href="openapi.json"><code>openapi.json</code></a>. Fields in bold are'
            " required; the others may be left out or null.</p>",
            *rows,
            "<h2>Structures</h2>",
            *(line for name in sorted(schemas) for line in _structure(name, schemas)),
            "</body></html>",
        ]
    )


def _operation(method: str, path: str, operation: Json, schemas: Json) -> Iterator[str]:
    yield "<details><summary>"
    yield f'<code><span class="method">{method.upper()}</span>{escape(path)}</code>'
    yield f" {escape(operation['summary'])}</summary>"
    body = operation.get("requestBody")
    if body is not None:
        yield "<h4>Request</h4>"
        yield from _fields(_name(body["content"]["application/json"]["schema"]), schemas)
    answer = operation["responses"]["200"].get("content", {}).get("application/json")
    if answer is not None:
        kinds = answer["schema"].get("anyOf", [answer["schema"]])
        for kind in kinds:
            yield "<h4>Answer</h4>" if len(kinds) == 1 else f"<h4>Answer: {_kind(kind)}</h4>"
            yield from _fields(_name(kind), schemas)
    yield "</details>"


def _structure(name: str, schemas: Json) -> Iterator[str]:
    """A structure under its name, to which the fields of that type lead."""
    yield f'<h4 id="{escape(name)}">{escape(name)}</h4>'
    yield from _fields(name, schemas)


def _fields(structure: str, schemas: Json) -> Iterator[str]:
    """A table of a structure's fields: required ones first, those that are refused last."""
    schema = schemas[structure]
    fields, required = schema.get("properties", {}), schema.get("required", [])
    yield "<table>"
    for name in sorted(
        fields, key=lambda name: (_is_unsupported(fields[name]), name not in required)
    ):
        shown = f"<code>{escape(name)}</code>"
        bold = f"<b>{shown}</b>" if name in required else shown
        yield f"<tr><td>{bold}</td><td>{_kind(fields[name])}{_note(fields[name])}</td></tr>"
    yield "</table>"


def _name(schema: Json) -> str:
    """The structure that a reference names."""
    return str(schema["$ref"].rpartition("/")[2])


def _is_unsupported(field: Json) -> bool:
    return field.get("description") == UNSUPPORTED_FIELD


def _note(field: Json) -> str:
    """What the document says of a field beside its type, as HTML behind the type."""
    if _is_unsupported(field) or "description" not in field:
        return ""
    return f". {escape(field['description'])}"


def _kind(field: Json) -> str:
    """The type of a field in words, as HTML."""
    if _is_unsupported(field):
        values = " or ".join(str(msgspec.json.encode(value), "utf-8") for value in field["enum"])
        return escape(f"not supported: refused unless {values}")
    if "$ref" in field:
        name = escape(_name(field))
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in field:
        kinds = [_kind(option) for option in field["anyOf"]]
        return " or ".join(kind for kind in kinds if kind != "null")
    if "enum" in field:
        return " or ".join(escape(f'"{value}"') for value in field["enum"])
    kind = escape(str(field.get("type", "any JSON")))
    if kind == "array" and isinstance(field.get("items"), Mapping) and field["items"]:
        return f"array of {_kind(field['items'])}"
    return kind
