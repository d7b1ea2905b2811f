"""Tool calls as Mistral's models write them, in the older and the newer form.

[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]
[TOOL_CALLS]name[ARGS]{...}[TOOL_CALLS]name[ARGS]{...}      (or name[CALL_ID]id[ARGS]{...})
"""

import re
from collections.abc import Collection
from enum import Enum, auto

from actors.openai.tools.call_reader import CallText, Progress
from actors.openai.tools.events import Event

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
        self._text = CallText(names)
        self._mode = _Mode.CONTENT
        self._in_array = False

    def push(self, text: str) -> list[Event]:
        return self._text.push(text, self._advance)

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        unread = TOOL_CALLS if self._mode is _Mode.HEAD else ""
        return self._text.finish(unread=unread, is_cut=is_cut, drops_rest=is_cut)

    def _advance(self) -> bool:
        """Reads one stretch of text; returns False if it needs more text."""
        match self._mode:
            case _Mode.CONTENT:
                return self._read_content()
            case _Mode.HEAD:
                return self._read_head()
            case _Mode.CALL:
                return self._read_call()
        return self._read_between()

    def _read_content(self) -> bool:
        if not self._text.skip_to(TOOL_CALLS):
            return False
        self._mode = _Mode.HEAD
        return True

    def _read_head(self) -> bool:
        text = self._text.rest
        rest = text.lstrip()
        if not rest:
            return False
        if rest.startswith("["):
            spaces = text[: -len(rest)]
            self._begin_call(TOOL_CALLS + spaces + "[", rest[1:], in_array=True)
        elif rest.startswith("{"):
            self._begin_call(TOOL_CALLS, text, in_array=False)
        elif named := _NAMED.match(text):
            return self._begin_named(named)
        elif _MAY_BE_NAMED.fullmatch(text):
            return False
        else:
            self._text.content(TOOL_CALLS)
            self._mode = _Mode.CONTENT
        return True

    def _begin_named(self, named: re.Match[str]) -> bool:
        if named[1] in self._text.names:
            rest = self._text.rest[named.end() :]
            self._begin_call(TOOL_CALLS + named[0], rest, in_array=False, name=named[1])
        else:
            self._text.content(TOOL_CALLS)
            self._mode = _Mode.CONTENT
        return True

    def _begin_call(
        self, opening: str, rest: str, *, in_array: bool, name: str | None = None
    ) -> None:
        self._text.begin_call(opening, rest, name=name)
        self._in_array = in_array
        self._mode = _Mode.CALL

    def _read_call(self) -> bool:
        progress = self._text.read_call()
        if progress is Progress.READING:
            return False
        is_followed = progress is Progress.COMPLETE and self._in_array
        self._mode = _Mode.BETWEEN if is_followed else _Mode.CONTENT
        return True

    def _read_between(self) -> bool:
        rest = self._text.rest.lstrip()
        if not rest:
            return False
        if rest.startswith(","):
            self._begin_call(",", rest[1:], in_array=True)
            return True
        self._text.rest = rest.removeprefix("]")
        self._mode = _Mode.CONTENT
        return True
