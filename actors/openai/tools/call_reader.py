"""Reads tool calls that are JSON objects out of an answer's text, while it is being written.

    JsonScanner   one value, character by character, by RFC 8259; says where it stops being JSON
    CallReader    one call; passes its arguments on while they are written
    CallText      the answer: what is not understood yet, and the call being read

Text that is certainly no call goes back to the content. Each format has its own markers and order.
"""

import re
from collections.abc import Callable, Collection
from enum import Enum, auto

import msgspec

from actors.openai.tools.events import Event, EventSink, num_held_chars

MAX_DEPTH = 512  # nesting; JSON readers of clients have limits, too

_SPACES = " \t\n\r"
_WORD_CHARS = frozenset("+-.0123456789eEtrufalsn")
_WORD = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_ESCAPED = frozenset('"\\/bfnrtu')
_HEX = frozenset("0123456789abcdefABCDEF")


class _Next(Enum):
    """What may follow here, besides white space."""

    VALUE = auto()
    VALUE_OR_END = auto()  # after [
    KEY = auto()
    KEY_OR_END = auto()  # after {
    COLON = auto()
    COMMA_OR_END = auto()
    NOTHING = auto()  # the value is complete


class JsonScanner:
    """Scans one JSON value: `push` each character until it returns False or `is_done`."""

    def __init__(self) -> None:
        self._next = _Next.VALUE
        self._open: list[str] = []  # closing brackets that must follow
        self._word = ""  # a number or literal so far
        self._num_hex_owed = 0
        self._is_escape = False
        self._in_string = False

    @property
    def depth(self) -> int:
        """The number of open objects and arrays."""
        return len(self._open)

    @property
    def in_string(self) -> bool:
        return self._in_string

    @property
    def is_done(self) -> bool:
        """Whether the value is complete; never known of a bare number."""
        return self._next is _Next.NOTHING and not self._in_string and not self._word

    @property
    def expects_colon(self) -> bool:
        """Whether a key is complete."""
        return self._next is _Next.COLON

    def push(self, char: str) -> bool:
        """Takes a character; returns whether the text can still become one JSON value."""
        if self._in_string:
            return self._push_in_string(char)
        if self._word:
            if char in _WORD_CHARS:
                self._word += char
                return True
            if _WORD.fullmatch(self._word) is None:
                return False
            self._word = ""
        if char in _SPACES:
            return True
        return self._push_structure(char)

    def _push_structure(self, char: str) -> bool:
        match self._next:
            case _Next.COLON if char == ":":
                self._next = _Next.VALUE
            case _Next.COMMA_OR_END if char == "," and self._open:
                self._next = _Next.KEY if self._open[-1] == "}" else _Next.VALUE
            case _Next.COMMA_OR_END | _Next.KEY_OR_END | _Next.VALUE_OR_END if (
                self._open and char == self._open[-1]
            ):
                self._open.pop()
                self._end_value()
            case _Next.KEY | _Next.KEY_OR_END if char == '"':
                self._in_string = True
                self._next = _Next.COLON
            case _Next.VALUE | _Next.VALUE_OR_END:
                return self._begin_value(char)
            case _:
                return False
        return True

    def _begin_value(self, char: str) -> bool:
        if char in "{[":
            self._open.append("}" if char == "{" else "]")
            self._next = _Next.KEY_OR_END if char == "{" else _Next.VALUE_OR_END
            return len(self._open) <= MAX_DEPTH
        if char == '"':
            self._in_string = True
        elif char in _WORD_CHARS:
            self._word = char
        else:
            return False
        self._end_value()
        return True

    def _end_value(self) -> None:
        self._next = _Next.COMMA_OR_END if self._open else _Next.NOTHING

    def _push_in_string(self, char: str) -> bool:
        if self._num_hex_owed:
            self._num_hex_owed -= 1
            return char in _HEX
        if self._is_escape:
            self._is_escape = False
            self._num_hex_owed = 4 if char == "u" else 0
            return char in _ESCAPED
        if char == "\\":
            self._is_escape = True
        elif char == '"':
            self._in_string = False
        return char >= " "


ARGUMENT_KEYS = ("arguments", "parameters")


class Progress(Enum):
    READING = auto()
    COMPLETE = auto()
    REFUSED = auto()  # no call of an offered function, or broken JSON


class CallReader:
    """`{"name": ..., "arguments": {...}}`, keys in any order, or the arguments alone.

    A call starts once its name is known to be offered and its arguments have begun as an object;
    refused before that, `opening` and all that was read become content. Refused later, the call
    ends incomplete. The refused character itself is never consumed.
    """

    def __init__(
        self, sink: EventSink, names: Collection[str], opening: str, *, name: str | None = None
    ) -> None:
        """`opening`: the text before, which returns to the content if this is no call.

        With `name`, only the arguments follow.
        """
        self._sink = sink
        self._names = names
        self._scanner = JsonScanner()
        self._is_bare = name is not None
        self._name = name
        self._is_started = False
        self._raw = [opening]  # all that was read, until the call starts
        # Characters that are not passed on yet; None = no arguments have come.
        self._arguments: list[str] | None = None
        self._key: str | None = None  # of the member that is being read
        self._key_chars: list[str] = []
        self._name_chars: list[str] = []
        self.progress = Progress.READING

    def read(self, text: str) -> int:
        """Returns how many characters were consumed: all, unless `progress` says otherwise."""
        for position, char in enumerate(text):
            if not self._push(char):
                self._refuse()
                return position
            if self.progress is Progress.COMPLETE:
                return position + 1
        self._pass_on()
        return len(text)

    def finish(self, *, is_cut: bool) -> None:
        """Ends the text inside the call; `is_cut`: a call that has not started is dropped."""
        if is_cut:
            self._raw.clear()
        self._refuse()

    # ---- one character ----------------------------------------------------------------------

    def _push(self, char: str) -> bool:
        """Takes a character; returns False if it cannot belong to a call."""
        scanner = self._scanner
        was_in_string, old_depth, had_key = scanner.in_string, scanner.depth, scanner.expects_colon
        if old_depth == 0 and not char.isspace() and char != "{":
            return False
        if not scanner.push(char):
            return False
        between_members = old_depth == 1 and not was_in_string and not self._is_bare
        if between_members and char in ",}":
            is_call = self._end_member()
        elif between_members and had_key and char == ":":
            is_call = self._begin_member()
        else:
            is_call = self._add(char, old_depth)
        is_call = is_call and self._advance()
        if is_call and not self._is_started:
            self._raw.append(char)
        return is_call

    def _begin_member(self) -> bool:
        key = _decode_text("".join(self._key_chars))
        self._key = key
        self._key_chars.clear()
        is_repeated = (key == "name" and self._name is not None) or (
            key in ARGUMENT_KEYS and self._arguments is not None
        )
        return key is not None and not is_repeated

    def _add(self, char: str, depth: int) -> bool:
        if self._is_bare or self._key in ARGUMENT_KEYS:
            return self._add_to_arguments(char)
        if self._key == "name":
            self._name_chars.append(char)
        elif self._key is None and depth == 1:
            self._key_chars.append(char)
        return True

    def _add_to_arguments(self, char: str) -> bool:
        if self._arguments is None:
            if char.isspace():
                return True
            self._arguments = []
            if char not in '{"':  # a string may hold the object, as OpenAI's own format does
                return False
        elif char.isspace() and self._is_after_arguments():
            return True
        self._arguments.append(char)
        return True

    def _is_after_arguments(self) -> bool:
        return not self._is_bare and self._scanner.depth == 1 and not self._scanner.in_string

    def _end_member(self) -> bool:
        if self._key == "name":
            self._name = _decode_text("".join(self._name_chars))
            if self._name not in self._names:
                return False
        self._key = None
        return True

    # ---- the call ---------------------------------------------------------------------------

    def _advance(self) -> bool:
        """Starts and ends the call when it can; returns False if it is no call."""
        if not self._is_started and self._name is not None and self._has_object():
            self._start(self._name)
        if not self._scanner.is_done:
            return True
        if not self._is_started:
            arguments = "{}" if self._arguments is None else _object_in(self._arguments)
            if self._name is None or arguments is None:
                return False
            self._arguments = [arguments]
            self._start(self._name)
        self._pass_on()
        self._sink.end_call(is_complete=True)
        self.progress = Progress.COMPLETE
        return True

    def _has_object(self) -> bool:
        """The arguments' bracket and one character more: what is no JSON mostly shows there."""
        if self._arguments is None or self._arguments[0] != "{":
            return False
        return len(self._arguments) > 1 and not self._arguments[-1].isspace()

    def _start(self, name: str) -> None:
        self._is_started = True
        self._raw.clear()
        self._sink.start_call(name)

    def _pass_on(self) -> None:
        if self._is_started and self._arguments:
            self._sink.arguments("".join(self._arguments))
            self._arguments.clear()

    def _refuse(self) -> None:
        if self._is_started:
            self._pass_on()
            self._sink.end_call(is_complete=False)
        else:
            self._sink.content("".join(self._raw))
        self.progress = Progress.REFUSED


def _decode_text(raw: str) -> str | None:
    """The string that a JSON text holds; None when it holds something else."""
    try:
        return msgspec.json.decode(raw, type=str)
    except (msgspec.DecodeError, UnicodeError):
        return None


def _object_in(chars: list[str]) -> str | None:
    """The text of a JSON object that is written as a JSON string; None when it is not one."""
    text = _decode_text("".join(chars))
    if text is None:
        return None
    scanner = JsonScanner()
    is_object = text.lstrip().startswith("{") and all(map(scanner.push, text))
    return text if is_object and scanner.is_done else None


class CallText:
    """Turns text into events; the parser of a format decides what is a call."""

    def __init__(self, names: Collection[str]) -> None:
        """names: of the functions that are offered."""
        self.names = names
        self.rest = ""  # not yet understood
        self._sink = EventSink()
        self._call: CallReader | None = None

    def push(self, text: str, advance: Callable[[], bool]) -> list[Event]:
        """Takes text; `advance` reads a stretch of `rest`, False if it needs more text."""
        self.rest += text
        while advance():
            pass
        return self._sink.take()

    def finish(
        self, *, unread: str = "", is_cut: bool = False, drops_rest: bool = False
    ) -> list[Event]:
        """Ends the text; `unread` was taken from it and is no call.

        is_cut: a call that has not started is dropped. drops_rest: what is not understood is, too.
        """
        if self._call is not None:
            self._call.finish(is_cut=is_cut)
        if not drops_rest:
            self._sink.content(unread + self.rest)
        self.rest = ""
        return self._sink.finish()

    def content(self, text: str) -> None:
        """Passes on `text`, taken from `rest` before, as content."""
        self._sink.content(text)

    def skip_to(self, marker: str) -> bool:
        """Passes on what comes before `marker` and takes it; False = it has not come whole."""
        before, found, after = self.rest.partition(marker)
        num_sent = len(before) - (0 if found else num_held_chars(before, (marker,)))
        self._sink.content(before[:num_sent])
        self.rest = after if found else before[num_sent:]
        return bool(found)

    def begin_call(self, opening: str, rest: str, *, name: str | None = None) -> None:
        """`rest` begins a call; `opening` led to it. With `name`, only the arguments follow."""
        self.rest = rest
        self._call = CallReader(self._sink, self.names, opening, name=name)

    def read_call(self) -> Progress:
        """Reads one call as far as the text goes."""
        assert self._call is not None, "no call has begun"
        self.rest = self.rest[self._call.read(self.rest) :]
        progress = self._call.progress
        if progress is not Progress.READING:
            self._call = None
        return progress
