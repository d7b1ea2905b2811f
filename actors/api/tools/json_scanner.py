"""Reads one JSON value character by character and says at once where it stops being JSON.

Follows RFC 8259 to the letter, with a bound on the depth. Keeps no values: whoever needs one
keeps the characters.
"""

import re
from enum import Enum, auto

MAX_DEPTH = 512  # of what a model nests: readers of JSON have bounds, too

_SPACES = " \t\n\r"
_WORD_CHARS = frozenset("+-.0123456789eEtrufalsn")
_WORD = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_ESCAPED = frozenset('"\\/bfnrtu')
_HEX = frozenset("0123456789abcdefABCDEF")


class _Next(Enum):
    """What may stand at this place, beside white space."""

    VALUE = auto()
    VALUE_OR_END = auto()  # after [
    KEY = auto()
    KEY_OR_END = auto()  # after {
    COLON = auto()
    COMMA_OR_END = auto()
    NOTHING = auto()  # the value is complete


class JsonScanner:
    """One value; `push` each character until it returns False or `is_done`."""

    def __init__(self) -> None:
        self._next = _Next.VALUE
        self._open: list[str] = []  # closing brackets that are owed
        self._word = ""  # a number or literal so far
        self._num_hex_owed = 0
        self._is_escape = False
        self._in_string = False

    @property
    def depth(self) -> int:
        """How many objects and arrays are open."""
        return len(self._open)

    @property
    def in_string(self) -> bool:
        return self._in_string

    @property
    def is_done(self) -> bool:
        """The value is complete; of a bare number nobody can know."""
        return self._next is _Next.NOTHING and not self._in_string and not self._word

    @property
    def expects_colon(self) -> bool:
        """A key is complete."""
        return self._next is _Next.COLON

    def push(self, char: str) -> bool:
        """Whether what was pushed so far can still become one JSON value."""
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
