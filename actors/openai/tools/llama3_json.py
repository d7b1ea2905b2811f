"""Tool calls as Llama 3 writes them: the whole answer is `{"name": ..., "parameters": {...}}`.

The object may follow `<|python_tag|>`, and several objects may follow each other, with `;`
between them. An object anywhere else is content.
"""

from collections.abc import Collection
from enum import Enum, auto

from actors.openai.tools.call_reader import CallText, Progress
from actors.openai.tools.events import Event

TAG = "<|python_tag|>"
MARKERS = (TAG,)
_SEPARATORS = (";", ",")


class _Mode(Enum):
    START = auto()  # nothing but white space so far
    CONTENT = auto()
    CALL = auto()
    BETWEEN = auto()  # after a call


class Llama3JsonParser:
    """A `ToolParser`."""

    def __init__(self, names: Collection[str]) -> None:
        self._text = CallText(names)
        self._mode = _Mode.START
        self._is_certain = False  # that what is read is a call: a marker, or another call, says so

    def push(self, text: str) -> list[Event]:
        return self._text.push(text, self._advance)

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        # Half an object that nothing has announced may be any answer in JSON.
        is_call = is_cut and self._is_certain
        drops_rest = is_call or (is_cut and self._mode is _Mode.CONTENT)
        return self._text.finish(is_cut=is_call, drops_rest=drops_rest)

    def _advance(self) -> bool:
        """Reads one stretch of text; returns False if it needs more text."""
        match self._mode:
            case _Mode.START:
                return self._read_start()
            case _Mode.CONTENT:
                return self._read_content()
            case _Mode.CALL:
                return self._read_call()
        return self._read_between()

    def _begin_call(self, opening: str, rest: str, *, is_certain: bool) -> None:
        self._text.begin_call(opening, rest)
        self._is_certain = is_certain
        self._mode = _Mode.CALL

    def _read_start(self) -> bool:
        text = self._text.rest
        rest = text.lstrip()
        if not rest:
            return False
        if rest.startswith("{"):
            self._begin_call(text[: -len(rest)], rest, is_certain=False)
        else:
            self._mode = _Mode.CONTENT
        return True

    def _read_content(self) -> bool:
        if not self._text.skip_to(TAG):
            return False
        self._begin_call(TAG, self._text.rest, is_certain=True)
        return True

    def _read_call(self) -> bool:
        match self._text.read_call():
            case Progress.READING:
                return False
            case Progress.COMPLETE:
                self._mode = _Mode.BETWEEN
                self._is_certain = True
            case Progress.REFUSED:
                self._mode = _Mode.CONTENT
                self._is_certain = False
        return True

    def _read_between(self) -> bool:
        rest = self._text.rest.lstrip()
        after = rest[1:].lstrip() if rest.startswith(_SEPARATORS) else rest
        if not after:
            return False
        if after.startswith("{"):
            self._begin_call(rest[: -len(after)], after, is_certain=True)
        else:
            self._mode = _Mode.CONTENT
        return True
