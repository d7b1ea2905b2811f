"""From a constraint's text to a compiled grammar. Bounds nothing: others bound time and memory."""

from dataclasses import dataclass
from typing import cast

import llguidance
import msgspec
from llguidance.gbnf_to_lark import any_to_lark

from engine.constraints.grammar_matcher import GrammarMatcher
from engine.constraints.pattern import portable_pattern
from engine.constraints.tag_layout import Layout, layout_grammar, on_one_line
from engine.constraints.vocabulary import Vocabulary
from engine.errors import RequestError
from engine.request import Constraint, ConstraintKind

_REASON_CHARS = 300


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompiledGrammar:
    """What matchers of one constraint begin with."""

    vocabulary: Vocabulary
    start: llguidance.LLMatcher  # before any token, and never moved on
    num_text_bytes: int  # of the grammar, from which its memory grows

    def matcher(self) -> GrammarMatcher:
        """A fresh one."""
        return GrammarMatcher(self.start.deep_copy(), self.vocabulary.vocab_size)


def compile_constraint(
    vocabulary: Vocabulary,
    constraint: Constraint,
    limits: llguidance.LLParserLimits | None = None,
) -> CompiledGrammar:
    """Lets other threads run while it computes. Raises RequestError for what is no constraint.

    limits: of the work for one token, beyond which a matcher allows nothing; None = the library's.
    """
    try:
        grammar = _grammar(vocabulary, constraint)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _refused(constraint, str(error)) from error
    start = llguidance.LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=limits)
    if start.is_error():
        raise _refused(constraint, start.get_error())
    return CompiledGrammar(vocabulary=vocabulary, start=start, num_text_bytes=len(grammar))


def _grammar(vocabulary: Vocabulary, constraint: Constraint) -> str:
    """In the library's own notation. Raises RequestError or ValueError."""
    text = constraint.text
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            schema = on_one_line(msgspec.json.decode(text, type=Layout))
            return llguidance.LLMatcher.grammar_from_json_schema(schema)
        case ConstraintKind.REGEX:
            pattern = portable_pattern(text, "structured_outputs.regex")
            return llguidance.LLMatcher.grammar_from_regex(pattern)
        case ConstraintKind.GRAMMAR:
            return llguidance.LLMatcher.grammar_from_lark(_lark(text))
    tag = msgspec.json.decode(text, type=Layout)
    lark = layout_grammar(cast("Layout", tag["format"]), vocabulary.special_ids)
    return llguidance.LLMatcher.grammar_from_lark(lark)


def _lark(text: str) -> str:
    """Of a grammar in GBNF or Lark already. Raises ValueError."""
    try:
        return any_to_lark(text)
    except Exception as error:
        raise ValueError(str(error)) from error


def _refused(constraint: Constraint, reason: str) -> RequestError:
    """The library's words are for who wrote in its language; of a schema it tells of rules."""
    kind = constraint.kind
    if kind in (ConstraintKind.JSON_SCHEMA, ConstraintKind.STRUCTURAL_TAG):
        is_empty = "unsatisfiable" in reason.lower()
        said = "no value can satisfy it" if is_empty else "it is too complex, or not valid"
    else:
        said = (reason.strip() or "it is not valid").splitlines()[0][:_REASON_CHARS]
    return RequestError(
        f"The constraint on the output ({kind.value}) cannot be compiled: {said}",
        code="invalid_value",
    )
