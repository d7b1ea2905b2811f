"""From a constraint's text to a compiled grammar. Bounds nothing: others bound time and memory."""

import xgrammar

from engine.errors import RequestError
from engine.request import Constraint, ConstraintKind

# Items on one line, as json.dumps writes them: free white space lets a model write it for ever.
_ON_ONE_LINE = False


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
            return compiler.compile_json_schema(constraint.text, any_whitespace=_ON_ONE_LINE)
        case ConstraintKind.REGEX:
            return compiler.compile_regex(constraint.text)
        case ConstraintKind.GRAMMAR:
            return compiler.compile_grammar(constraint.text)
    return compiler.compile_structural_tag(constraint.text)


def _reason(message: str) -> str:
    """The library's own words without where in its sources they come from."""
    line = message.strip().splitlines()[0] if message.strip() else "it is not valid"
    return line.split("] ", 1)[-1].split(": ", 1)[-1].strip()[:300]
