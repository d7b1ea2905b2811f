"""Tool calls as Hermes and Qwen write them, each an object in markers of its own.

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>

White space may stand anywhere between.
"""

from collections.abc import Collection
from enum import Enum, auto

from actors.openai.tools.call_reader import CallText, Progress
from actors.openai.tools.events import Event

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
        self._text = CallText(names)
        self._mode = _Mode.CONTENT

    def push(self, text: str) -> list[Event]:
        return self._text.push(text, self._advance)

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        # What waits behind a call is the beginning of its closing marker; before one, it may be
        # that of an opening one.
        drops_rest = is_cut or self._mode is _Mode.CLOSING
        return self._text.finish(is_cut=is_cut, drops_rest=drops_rest)

    def _advance(self) -> bool:
        """Reads one stretch of text; returns False if it needs more text."""
        match self._mode:
            case _Mode.CONTENT:
                return self._read_content()
            case _Mode.CALL:
                return self._read_call()
        return self._read_closing()

    def _read_content(self) -> bool:
        if not self._text.skip_to(OPEN):
            return False
        self._text.begin_call(OPEN, self._text.rest)
        self._mode = _Mode.CALL
        return True

    def _read_call(self) -> bool:
        match self._text.read_call():
            case Progress.READING:
                return False
            case Progress.COMPLETE:
                self._mode = _Mode.CLOSING
            case Progress.REFUSED:
                self._mode = _Mode.CONTENT
        return True

    def _read_closing(self) -> bool:
        rest = self._text.rest.lstrip()
        if CLOSE.startswith(rest) and rest != CLOSE:
            return False
        if rest.startswith(CLOSE):
            self._text.rest = rest.removeprefix(CLOSE)
        self._mode = _Mode.CONTENT
        return True
