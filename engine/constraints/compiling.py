"""Compiles a constraint's text to a grammar, and follows one output through it.

Compilation is not limited here: `checks` limits its time and memory. The library limits the work
for one token (`llguidance.LLParserLimits`). Beyond these limits, and after a token that the grammar
does not allow, a matcher stays in an error state: every bit of a mask is zero, nothing can be
drawn, and the request ends with an error instead of an output that only looks complete.
"""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import llguidance
import msgspec
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark

from engine.constraints.pattern import portable_pattern
from engine.constraints.tag_layout import Layout, layout_grammar, on_one_line
from engine.constraints.vocabulary import Vocabulary
from engine.errors import RequestError
from engine.request import Constraint, ConstraintKind
from kernels.sampling.mask_words import num_mask_words

if TYPE_CHECKING:
    from torch import Tensor  # imported by nobody who only checks constraints

_DEAD_END = "NoExtension"  # the library's name for a point where no token may follow
logger = logging.getLogger(__name__)


class GrammarMatcher:
    """See `engine.sampling.constraint.Matcher`. For one thread at a time."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        """matcher: not shared with other objects, before any token."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._num_words = num_mask_words(vocab_size)

    def accept_token(self, token_id: int) -> bool:
        """Append a token to the output; False if the grammar does not allow it."""
        is_accepted: bool = self._matcher.consume_token(token_id)
        return is_accepted

    def fill_next_token_bitmask(self, bitmask: "Tensor", index: int = 0) -> bool:
        """Write line `index` of `bitmask` int32 [P, words]: bit i of word w allows 32 * w + i."""
        line: np.ndarray[tuple[int], np.dtype[np.int32]] = bitmask[index].numpy()  # its memory
        self.fill_next_token_words(line)
        return True

    def fill_next_token_words(self, words: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> None:
        """Write one line of a mask; see `fill_next_token_bitmask`."""
        assert words.flags.c_contiguous, "a line of a mask has its words side by side"
        assert words.dtype == np.int32, words.dtype
        assert len(words) == self._num_words, f"{len(words)} words, {self._num_words} expected"
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            logger.error("a constraint cannot be followed: %s", self.error)
            words.fill(0)

    def fork(self) -> "GrammarMatcher":
        """See `engine.sampling.constraint.Matcher`."""
        return GrammarMatcher(self._matcher.deep_copy(), self._vocab_size)

    @property
    def is_complete(self) -> bool:
        """Whether the output may end here."""
        return bool(self._matcher.is_accepting()) and not self._matcher.is_error()

    @property
    def is_beyond_limits(self) -> bool:
        """Whether the matcher stopped because a limit of the library was exceeded."""
        return bool(self._matcher.is_error()) and not self.error.startswith(_DEAD_END)

    @property
    def error(self) -> str:
        """Why no token may follow; "" = no error."""
        message: str = self._matcher.get_error()
        return message.strip().partition("\n")[0]


_REASON_CHARS = 300


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompiledGrammar:
    """A constraint's grammar, from which matchers are copied."""

    vocabulary: Vocabulary
    start: llguidance.LLMatcher  # before any token; never advanced
    num_text_bytes: int  # of the grammar; determines its memory

    def matcher(self) -> GrammarMatcher:
        """A new matcher, before any token."""
        return GrammarMatcher(self.start.deep_copy(), self.vocabulary.vocab_size)


def compile_constraint(
    vocabulary: Vocabulary,
    constraint: Constraint,
    limits: llguidance.LLParserLimits | None = None,
) -> CompiledGrammar:
    """Compile a constraint; other threads can run meanwhile. RequestError if it is invalid.

    limits: on the work for one token, beyond which a matcher allows nothing; None = the library's.
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
    """The constraint in the library's own notation. Raises RequestError or ValueError."""
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
    """A grammar in GBNF or Lark, as Lark. Raises ValueError."""
    try:
        return any_to_lark(text)
    except Exception as error:
        raise ValueError(str(error)) from error


def _refused(constraint: Constraint, reason: str) -> RequestError:
    """The library's message is shown only for languages that clients write themselves."""
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
