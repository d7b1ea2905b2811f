"""Reads the constraints on an output: `response_format` and `structured_outputs`.

Checks what the text of a constraint shows; whether it compiles is checked elsewhere, within bounds.
"""

from collections.abc import Mapping, Sequence

import msgspec

from actors.openai.request_bodies import (
    GenerationBody,
    JsonSchemaFormat,
    ResponseFormat,
    StructuredOutputs,
    is_given,
)
from actors.openai.request_rules import (
    check_chars,
    check_length,
    check_plain,
    invalid,
    missing,
    unknown_kind,
)
from engine.constraints.json_schema import restrict
from engine.constraints.keywords import Schema
from engine.constraints.pattern import portable_pattern
from engine.errors import RequestError
from engine.request import Constraint, ConstraintKind

MAX_CONSTRAINT_CHARS = 64 * 1024
MAX_CHOICES = 1000
# What may hold an output -> its parameter in a request, as vLLM and as SGLang have it.
_VLLM = {name: f"structured_outputs.{name}" for name in ("json", "regex", "choice", "grammar")}
_SGLANG = {"json": "json_schema", "regex": "regex", "grammar": "ebnf"}
_FORMATS = ("text", "json_object", "json_schema")
_FORMAT_NAME_CHARS = 64


def read_constraint(body: GenerationBody) -> Constraint | None:
    """Reads the constraint on the output; None if there is none. Raises RequestError."""
    by_format = _read_format(body.response_format)
    asked = [
        (by_format, "response_format"),
        (_read_outputs(body.structured_outputs, _VLLM), "structured_outputs"),
        (_read_outputs(_sglang_outputs(body), _SGLANG), "regex"),
    ]
    found = [(constraint, param) for constraint, param in asked if constraint is not None]
    if len(found) > 1:
        (_, other), (_, param) = found[:2]
        raise invalid(param, f"cannot be combined with '{other}'.")
    return found[0][0] if found else None


def _sglang_outputs(body: GenerationBody) -> StructuredOutputs | None:
    """Returns SGLang's fields as vLLM's; None if there are none."""
    is_absent = body.regex is None and body.ebnf is None and not is_given(body.json_schema)
    if is_absent:
        return None
    return StructuredOutputs(json=body.json_schema, regex=body.regex, grammar=body.ebnf)


def check_can_end(body: GenerationBody, constraint: Constraint | None) -> None:
    """Refuses parameters that forbid the end where the constraint allows nothing else."""
    if constraint is None:
        return
    if body.ignore_eos:
        raise invalid("ignore_eos", "cannot be combined with an output that must have a format.")
    if body.min_tokens:
        raise invalid("min_tokens", "cannot be combined with an output that must have a format.")


def schema_constraint(schema: object, param: str) -> Constraint:
    """An output that is one JSON value of a schema."""
    check_plain(schema, param)
    return _constraint(ConstraintKind.JSON_SCHEMA, _as_text(restrict(schema, param)), param)


def tag_constraint(layout: object, param: str) -> Constraint:
    """An output of literal text and schemas, in the compiler's own notation."""
    text = _as_text({"type": "structural_tag", "format": layout})
    return _constraint(ConstraintKind.STRUCTURAL_TAG, text, param)


def decode_schema(raw: msgspec.Raw, param: str) -> Schema:
    """Raises RequestError unless it is a JSON object of bounded depth."""
    try:
        schema = msgspec.json.decode(raw, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(
            f"Invalid type for '{param}': expected an object with a JSON schema.",
            param=param,
            code="invalid_type",
        ) from error
    check_plain(schema, param)
    return schema


def _read_format(response_format: ResponseFormat | None) -> Constraint | None:
    if response_format is None:
        return None
    kind, described = response_format.type, response_format.json_schema
    if kind not in _FORMATS:
        raise unknown_kind("response_format.type", kind, _FORMATS)
    if kind == "json_schema":
        if described is None:
            raise missing("response_format.json_schema")
        return _read_described(described)
    if described is not None:
        raise invalid("response_format.json_schema", "only allowed when 'type' is 'json_schema'.")
    if kind == "text":
        return None
    return schema_constraint({"type": "object"}, "response_format")


def _read_described(described: JsonSchemaFormat) -> Constraint:
    """Held to the schema whether `strict` or not: what it promises costs nothing here."""
    check_chars("response_format.json_schema.name", described.name, _FORMAT_NAME_CHARS)
    param = "response_format.json_schema.schema"
    if not is_given(described.schema):
        raise missing(param)
    return schema_constraint(decode_schema(described.schema, param), param)


def _read_outputs(
    outputs: StructuredOutputs | None, params: Mapping[str, str]
) -> Constraint | None:
    """params: what may be given -> the parameter that a refusal names."""
    if outputs is None:
        return None
    given = [name for name in _VLLM if _is_present(outputs, name)]
    if len(given) != 1:
        kinds = ", ".join(f"'{param.rpartition('.')[2]}'" for param in params.values())
        where = params["regex"].partition(".")[0]
        raise invalid(where, f"exactly one of {kinds} is needed, got {len(given)}.")
    (name,) = given
    param = params[name]
    if name == "json":
        return schema_constraint(_read_json(outputs.json, param), param)
    if outputs.choice is not None:
        return _read_choice(outputs.choice, param)
    if outputs.regex is not None:
        check_chars(param, outputs.regex, MAX_CONSTRAINT_CHARS)
        portable_pattern(outputs.regex, param)  # refused by its place, before anything is compiled
        return _constraint(ConstraintKind.REGEX, outputs.regex, param)
    return _constraint(ConstraintKind.GRAMMAR, outputs.grammar or "", param)


def _is_present(outputs: StructuredOutputs, name: str) -> bool:
    value = getattr(outputs, name)
    return is_given(value) if isinstance(value, msgspec.Raw) else value is not None


def _read_json(raw: msgspec.Raw, param: str) -> Schema:
    """A schema, or the text of one."""
    try:
        text = msgspec.json.decode(raw, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return decode_schema(raw, param)
    return decode_schema(msgspec.Raw(text.encode()), param)


def _read_choice(choices: Sequence[str], param: str) -> Constraint:
    check_length(param, len(choices), MAX_CHOICES)
    for position, choice in enumerate(choices):
        check_chars(f"{param}[{position}]", choice, MAX_CONSTRAINT_CHARS)
    elements = [{"type": "plain_string", "value": choice} for choice in dict.fromkeys(choices)]
    return tag_constraint({"type": "or", "elements": elements}, param)


def _constraint(kind: ConstraintKind, text: str, param: str) -> Constraint:
    check_chars(param, text, MAX_CONSTRAINT_CHARS)
    return Constraint(kind, text)


def _as_text(value: object) -> str:
    return str(msgspec.json.encode(value), "utf-8")
