"""From a constraint's text to a compiled grammar. Bounds nothing: others bound time and memory."""

import json
from typing import cast

import msgspec
import xgrammar

from engine.constraints.schema_grammar import schema_grammar
from engine.errors import RequestError
from engine.request import Constraint, ConstraintKind

_Layout = dict[str, object]


def compile_constraint(
    compiler: xgrammar.GrammarCompiler, constraint: Constraint
) -> xgrammar.CompiledGrammar:
    """Lets other threads run while it computes. Raises RequestError for what is no constraint."""
    try:
        return _compile(compiler, constraint)
    except (RuntimeError, ValueError) as error:
        raise RequestError(
            f"The constraint on the output ({constraint.kind.value}) cannot be compiled:"
            f" {_reason(str(error))}",
            code="invalid_value",
        ) from error


def _compile(
    compiler: xgrammar.GrammarCompiler, constraint: Constraint
) -> xgrammar.CompiledGrammar:
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            return compiler.compile_grammar(schema_grammar(constraint.text))
        case ConstraintKind.REGEX:
            return compiler.compile_regex(constraint.text)
        case ConstraintKind.GRAMMAR:
            return compiler.compile_grammar(constraint.text)
    tag = msgspec.json.decode(constraint.text, type=_Layout)
    if "format" in tag:
        _write_grammars(cast("_Layout", tag["format"]))
    return compiler.compile_structural_tag(json.dumps(tag))


def _write_grammars(layout: _Layout) -> None:
    """In place of the schemas in a layout: for their numbers, and to have them on one line too."""
    if layout["type"] == "json_schema":
        schema = str(msgspec.json.encode(layout.pop("json_schema")), "utf-8")
        layout |= {"type": "grammar", "grammar": str(schema_grammar(schema))}
    for name in ("elements", "tags"):
        for part in cast("list[_Layout]", layout.get(name, [])):
            _write_grammars(part)
    if "content" in layout:
        _write_grammars(cast("_Layout", layout["content"]))


def _reason(message: str) -> str:
    """The library's own words without where in its sources they come from."""
    line = message.strip().splitlines()[0] if message.strip() else "it is not valid"
    return line.split("] ", 1)[-1].split(": ", 1)[-1].strip()[:300]
