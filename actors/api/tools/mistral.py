"""Tool calls as Mistral's models write them, in the older and the newer form.

[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]
[TOOL_CALLS]name[ARGS]{...}[TOOL_CALLS]name[ARGS]{...}      (or name[CALL_ID]id[ARGS]{...})
"""

import re
from collections.abc import Collection
from enum import Enum, auto

from actors.api.tools.call_reader import CallReader, Progress
from actors.api.tools.events import Event, EventSink, num_held_chars

TOOL_CALLS = "[TOOL_CALLS]"
ARGS = "[ARGS]"
CALL_ID = "[CALL_ID]"
MARKERS = (TOOL_CALLS, ARGS, CALL_ID)

# Bounded, because it is tried again for every piece of text until it matches or cannot.
_SPACE = r"\s{0,16}"
_NAMED = re.compile(
    rf"{_SPACE}([\w.-]{{1,64}}){_SPACE}(?:\[CALL_ID\]{_SPACE}[\w-]{{1,64}}{_SPACE})?"
    rf"(?:\[ARGS\]{_SPACE})?(?=\{{)"
)
_MAY_BE_NAMED = re.compile(
    rf"{_SPACE}[\w.-]{{0,64}}{_SPACE}(?:\[[A-Z_]{{0,7}}\]?[\w\s-]{{0,96}}(?:\[[A-Z]{{0,4}}\]?{_SPACE})?)?"
)


class _Mode(Enum):
    CONTENT = auto()
    HEAD = auto()  # after the marker: an array, an object or a name
    CALL = auto()
    BETWEEN = auto()  # after an object of an array


class MistralParser:
    """A `ToolParser`."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._sink = EventSink()
        self._mode = _Mode.CONTENT
        self._rest = ""  # not yet understood
        self._call = CallReader(self._sink, names, "")
        self._in_array = False

    def push(self, text: str) -> list[Event]:
        self._rest += text
        while self._advance():
            pass
        return self._sink.take()

    def finish(self) -> list[Event]:
        if self._mode is _Mode.CALL:
            self._call.finish()
        if self._mode is _Mode.HEAD:
            self._sink.content(TOOL_CALLS)
        self._sink.content(self._rest)
        self._rest = ""
        return self._sink.finish()

    def _advance(self) -> bool:
        """One stretch of text; False when more text has to come first."""
        match self._mode:
            case _Mode.CONTENT:
                return self._read_content()
            case _Mode.HEAD:
                return self._read_head()
            case _Mode.CALL:
                return self._read_call()
        return self._read_between()

    def _read_content(self) -> bool:
        before, marker, after = self._rest.partition(TOOL_CALLS)
        if marker:
            self._sink.content(before)
            self._rest = after
            self._mode = _Mode.HEAD
            return True
        num_sent = len(before) - num_held_chars(before, (TOOL_CALLS,))
        self._sink.content(before[:num_sent])
        self._rest = before[num_sent:]
        return False

    def _read_head(self) -> bool:
        rest = self._rest.lstrip()
        if not rest:
            return False
        if rest.startswith("["):
            spaces = self._rest[: -len(rest)]
            self._begin_call(TOOL_CALLS + spaces + "[", rest[1:], in_array=True)
        elif rest.startswith("{"):
            self._begin_call(TOOL_CALLS, self._rest, in_array=False)
        elif named := _NAMED.match(self._rest):
            return self._begin_named(named)
        elif _MAY_BE_NAMED.fullmatch(self._rest):
            return False
        else:
            self._sink.content(TOOL_CALLS)
            self._mode = _Mode.CONTENT
        return True

    def _begin_named(self, named: re.Match[str]) -> bool:
        if named[1] in self._names:
            rest = self._rest[named.end() :]
            self._begin_call(TOOL_CALLS + named[0], rest, in_array=False, name=named[1])
        else:
            self._sink.content(TOOL_CALLS)
            self._mode = _Mode.CONTENT
        return True

    def _begin_call(
        self, opening: str, rest: str, *, in_array: bool, name: str | None = None
    ) -> None:
        self._rest = rest
        self._in_array = in_array
        self._call = CallReader(self._sink, self._names, opening, name=name)
        self._mode = _Mode.CALL

    def _read_call(self) -> bool:
        self._rest = self._rest[self._call.read(self._rest) :]
        if self._call.progress is Progress.READING:
            return False
        is_followed = self._call.progress is Progress.COMPLETE and self._in_array
        self._mode = _Mode.BETWEEN if is_followed else _Mode.CONTENT
        return True

    def _read_between(self) -> bool:
        rest = self._rest.lstrip()
        if not rest:
            return False
        if rest.startswith(","):
            self._begin_call(",", rest[1:], in_array=True)
            return True
        self._rest = rest.removeprefix("]")
        self._mode = _Mode.CONTENT
        return True
