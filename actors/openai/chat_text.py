"""One choice of a chat: text deltas in, events out; separates reasoning, tool calls and content.

Streamed and whole answers both use it. Knows no JSON objects of the protocol.
"""

import secrets
import string
from collections.abc import Sequence

import msgspec

from actors.openai import reasoning
from actors.openai.chat_dialect import ToolFormat, build_tool_parser
from actors.openai.protocol import ParsedRequest
from actors.openai.reasoning import ReasoningSplitter
from actors.openai.tools.events import (
    CallArguments,
    CallEnded,
    CallStarted,
    Content,
    Event,
    Reasoning,
    ToolParser,
)
from actors.openai.tools.harmony import HarmonyParser, begins_answer
from engine.errors import RequestError
from engine.request import SamplingParams
from engine.text.tokenizing import Tokenizing

_NUM_TAIL_TOKENS = 16  # enough to hold the opening marker and white space after it
_MISTRAL_ID_CHARS = string.ascii_letters + string.digits


def new_call_id(tool_format: ToolFormat | None) -> str:
    """An id for a call; Mistral's templates take only nine letters or digits back."""
    if tool_format is ToolFormat.MISTRAL:
        return "".join(secrets.choice(_MISTRAL_ID_CHARS) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


def ends_thinking_open(prompt_ids: Sequence[int], tokenizing: Tokenizing) -> bool:
    """Whether the prompt's last text is the marker after which the model thinks."""
    tail = tokenizing.decode(prompt_ids[-_NUM_TAIL_TOKENS:], skip_special_tokens=False)
    return tail.rstrip().endswith(reasoning.OPEN)


def hold_behind_thinking(
    sampling: SamplingParams,
    parsed: ParsedRequest,
    prompt_ids: Sequence[int],
    tokenizing: Tokenizing,
) -> SamplingParams:
    """Applies a constraint to the answer alone, after thinking that the prompt began.

    Raises RequestError if the end of that thinking cannot be recognised, or if the constraint is on
    whole messages and the prompt has begun one.
    """
    if sampling.constraint is not None and parsed.harmony is not None:
        if not begins_answer(parsed.harmony.message_so_far(prompt_ids, tokenizing)):
            raise RequestError(
                "An output that must have a format is not supported for this model where the prompt"
                " has begun the answer, or has no place for one: end 'messages' with one that is"
                " not the assistant's, or leave out 'continue_final_message' and"
                " 'add_generation_prompt'.",
                code="unsupported_parameter",
            )
        return sampling
    is_held = sampling.constraint is not None and parsed.splits_reasoning
    if not is_held or not ends_thinking_open(prompt_ids, tokenizing):
        return sampling
    if sampling.thinking is None:
        raise RequestError(
            "An output that must have a format is not supported where the prompt begins this"
            f" model's thinking: '{reasoning.CLOSE}' is not one of its tokens.",
            code="unsupported_parameter",
        )
    thinking = msgspec.structs.replace(sampling.thinking, is_open=True)
    return msgspec.structs.replace(sampling, thinking=thinking)


class ChatText:
    """Events of one choice, without those the client did not want."""

    def __init__(
        self,
        parsed: ParsedRequest,
        *,
        starts_thinking: bool,
        opening: str = "",
        message_so_far: str = "",
    ) -> None:
        """opening: content that comes before what the model writes.

        message_so_far: see `HarmonyParser`.
        """
        self._opening = [Content(opening)] if opening else []
        self._splitter = (
            ReasoningSplitter(starts_inside=starts_thinking) if parsed.splits_reasoning else None
        )
        self._parser: ToolParser | None = None
        if parsed.harmony is not None:
            self._parser = HarmonyParser(parsed.tool_names, message_so_far)
        elif parsed.tool_format is not None:
            self._parser = build_tool_parser(parsed.tool_format, parsed.tool_names)
        self._holds_calls = parsed.holds_calls
        self._include_reasoning = parsed.include_reasoning
        self._max_calls = None if parsed.parallel_tool_calls else 1
        self._num_calls = 0
        self._num_complete = 0

    @property
    def has_calls(self) -> bool:
        """Whether at least one tool call is complete."""
        return self._num_complete > 0

    def push(self, text: str) -> list[Event]:
        if not text:
            return self._open()
        pieces = [Content(text)] if self._splitter is None else self._splitter.push(text)
        return self._open() + self._keep(self._parse(pieces))

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        """Ends the choice; returns what was held back. `is_cut`: it ended by its length."""
        events: list[Event] = []
        if self._splitter is not None:
            events += self._parse(self._splitter.finish(is_cut=is_cut))
        if self._parser is not None:
            events += self._parser.finish(is_cut=is_cut)
        return self._open() + self._keep(events)

    def _open(self) -> list[Event]:
        """The opening, once."""
        opening: list[Event] = [*self._opening]
        self._opening = []
        return opening

    def _parse(self, pieces: Sequence[Event]) -> list[Event]:
        events: list[Event] = []
        for piece in pieces:
            if isinstance(piece, Content) and self._parser is not None:
                events += self._parser.push(piece.text)
            else:
                events.append(piece)
        return events

    def _keep(self, events: Sequence[Event]) -> list[Event]:
        return [event for event in events if self._is_wanted(event)]

    def _is_wanted(self, event: Event) -> bool:
        match event:
            case Reasoning():
                return self._include_reasoning
            case CallStarted():
                self._num_calls += 1
            case CallArguments() | CallEnded():
                pass
            case Content() if self._holds_calls:
                # An output that must be calls has none: what looks like some is a part of a call
                # that was cut, or nests deeper than is read.
                return False
            case _:
                return True
        is_wanted = self._max_calls is None or self._num_calls <= self._max_calls
        if is_wanted and isinstance(event, CallEnded):
            self._num_complete += event.is_complete
        return is_wanted
