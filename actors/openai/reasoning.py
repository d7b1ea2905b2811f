"""Splits what a model thinks, `<think>...</think>` before its answer, from the answer itself.

Thinking is recognised where models put it: at the start of the output, its opening marker
written by the model or already by the prompt. Anywhere else the markers are content.
"""

from enum import Enum, auto

from actors.openai.tools.events import Content, Event, Reasoning, num_held_chars

OPEN = "<think>"
CLOSE = "</think>"
MARKERS = (OPEN, CLOSE)


class _Mode(Enum):
    START = auto()  # nothing but white space so far
    REASONING = auto()
    ANSWER = auto()


class ReasoningSplitter:
    """Splits the text of one choice; drops line breaks right after a marker."""

    def __init__(self, *, starts_inside: bool) -> None:
        """`starts_inside`: the prompt ends with the opening marker."""
        self._mode = _Mode.REASONING if starts_inside else _Mode.START
        self._rest = ""  # may still be part of a marker
        self._skips_breaks = starts_inside

    def push(self, text: str) -> list[Event]:
        self._rest += text
        events: list[Event] = []
        if self._mode is _Mode.START:
            self._read_start()
        if self._mode is _Mode.REASONING:
            events += self._read_reasoning()
        if self._mode is _Mode.ANSWER:
            answer = self._take(self._rest)
            self._rest = ""
            events += [Content(answer)] if answer else []
        return events

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        """Ends the text; returns what was held back. `is_cut` (by length): drops half a marker."""
        rest, self._rest = self._take(self._rest), ""
        if not rest or (is_cut and rest.strip()):
            return []
        return [Reasoning(rest) if self._mode is _Mode.REASONING else Content(rest)]

    def _read_start(self) -> None:
        begun = self._rest.lstrip()
        if begun.startswith(OPEN):
            self._rest = begun.removeprefix(OPEN)
            self._mode = _Mode.REASONING
            self._skips_breaks = True
        elif not OPEN.startswith(begun):
            self._mode = _Mode.ANSWER

    def _read_reasoning(self) -> list[Event]:
        thought, close, after = self._rest.partition(CLOSE)
        num_sent = len(thought) - (0 if close else num_held_chars(thought, (CLOSE,)))
        self._rest = after if close else thought[num_sent:]
        sent = self._take(thought[:num_sent])
        if close:
            self._mode = _Mode.ANSWER
            self._skips_breaks = True
        return [Reasoning(sent)] if sent else []

    def _take(self, text: str) -> str:
        if not self._skips_breaks:
            return text
        kept = text.lstrip("\r\n")
        self._skips_breaks = not kept
        return kept
