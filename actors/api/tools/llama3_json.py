"""Tool calls as Llama 3 writes them: the whole answer is `{"name": ..., "parameters": {...}}`.

The object may follow `<|python_tag|>`, and several objects may follow each other, with `;`
between them. An object anywhere else is content.
"""

from collections.abc import Collection
from enum import Enum, auto

from actors.api.tools.call_reader import CallReader, Progress
from actors.api.tools.events import Event, EventSink, num_held_chars

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
        self._names = names
        self._sink = EventSink()
        self._mode = _Mode.START
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
            case _Mode.START:
                return self._read_start()
            case _Mode.CONTENT:
                return self._read_content()
            case _Mode.CALL:
                return self._read_call()
        return self._read_between()

    def _begin_call(self, opening: str, rest: str) -> None:
        self._rest = rest
        self._call = CallReader(self._sink, self._names, opening)
        self._mode = _Mode.CALL

    def _read_start(self) -> bool:
        rest = self._rest.lstrip()
        if not rest:
            return False
        if rest.startswith("{"):
            self._begin_call(self._rest[: -len(rest)], rest)
        else:
            self._mode = _Mode.CONTENT
        return True

    def _read_content(self) -> bool:
        before, tag, after = self._rest.partition(TAG)
        if tag:
            self._sink.content(before)
            self._begin_call(TAG, after)
            return True
        num_sent = len(before) - num_held_chars(before, (TAG,))
        self._sink.content(before[:num_sent])
        self._rest = before[num_sent:]
        return False

    def _read_call(self) -> bool:
        self._rest = self._rest[self._call.read(self._rest) :]
        match self._call.progress:
            case Progress.READING:
                return False
            case Progress.COMPLETE:
                self._mode = _Mode.BETWEEN
            case Progress.REFUSED:
                self._mode = _Mode.CONTENT
        return True

    def _read_between(self) -> bool:
        rest = self._rest.lstrip()
        after = rest[1:].lstrip() if rest.startswith(_SEPARATORS) else rest
        if not after:
            return False
        if after.startswith("{"):
            self._begin_call(rest[: -len(after)], after)
        else:
            self._mode = _Mode.CONTENT
        return True
