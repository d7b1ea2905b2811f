"""Tool calls as Hermes and Qwen write them, each an object in markers of its own.

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>

White space may stand anywhere between.
"""

from collections.abc import Collection
from enum import Enum, auto

from actors.api.tools.call_reader import CallReader, Progress
from actors.api.tools.events import Event, EventSink, num_held_chars

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
MARKERS = (OPEN, CLOSE)


class _Mode(Enum):
    CONTENT = auto()
    CALL = auto()
    CLOSING = auto()  # the object is complete, its marker is due


class HermesParser:
    """A `ToolParser`; a call whose closing marker is missing counts nevertheless."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._sink = EventSink()
        self._mode = _Mode.CONTENT
        self._rest = ""  # not yet understood
        self._call = CallReader(self._sink, names, "")

    def push(self, text: str) -> list[Event]:
        self._rest += text
        while self._advance():
            pass
        return self._sink.take()

    def finish(self) -> list[Event]:
        if self._mode is _Mode.CALL:
            self._call.finish()
        self._sink.content(self._rest)
        self._rest = ""
        return self._sink.finish()

    def _advance(self) -> bool:
        """One stretch of text; False when more text has to come first."""
        match self._mode:
            case _Mode.CONTENT:
                return self._read_content()
            case _Mode.CALL:
                return self._read_call()
        return self._read_closing()

    def _read_content(self) -> bool:
        before, opening, after = self._rest.partition(OPEN)
        if opening:
            self._sink.content(before)
            self._rest = after
            self._call = CallReader(self._sink, self._names, OPEN)
            self._mode = _Mode.CALL
            return True
        num_sent = len(before) - num_held_chars(before, (OPEN,))
        self._sink.content(before[:num_sent])
        self._rest = before[num_sent:]
        return False

    def _read_call(self) -> bool:
        self._rest = self._rest[self._call.read(self._rest) :]
        match self._call.progress:
            case Progress.READING:
                return False
            case Progress.COMPLETE:
                self._mode = _Mode.CLOSING
            case Progress.REFUSED:
                self._mode = _Mode.CONTENT
        return True

    def _read_closing(self) -> bool:
        rest = self._rest.lstrip()
        if CLOSE.startswith(rest) and rest != CLOSE:
            return False
        if rest.startswith(CLOSE):
            self._rest = rest.removeprefix(CLOSE)
        self._mode = _Mode.CONTENT
        return True
