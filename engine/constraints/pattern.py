r"""Translates clients' regular expressions to a dialect that all regex engines read alike.

Clients write for ECMAScript, Python or Rust, and check outputs with one of these. Constructs that
the three read differently are rewritten to what all of them accept, or refused:

    \d \w \s             ASCII only; \D \W \S exclude whatever any of the three counts among these
    .                    no line ends (\n, \r, U+2028, U+2029)
    ^ and $              have no effect at the start or end of the whole or of an alternative,
                         because a match is always the whole text; refused elsewhere
    (?...)               groups only, named or not; no flags; `lookahead` has what looks ahead
    [ & ~ | in brackets  literal; no nested classes, no [:name:]
    *? +? {n}?           as without the mark, which does not affect whole matches

So a whole match here is a match in every dialect.
"""

import re

from engine.errors import RequestError

# A class escape -> the members that are allowed for it, between brackets.
_NARROW = {r"\d": "0-9", r"\w": "0-9A-Za-z_", r"\s": r" \t\n\x0B\x0C\r"}
# The same plus everything that any dialect counts among it: what its negation excludes. Beyond
# ASCII the ranges are simplified and too wide: U+0660 is the first digit there.
_WIDE = {
    r"\d": r"0-9\x{660}-\x{10FFFF}",
    r"\w": r"0-9A-Za-z_\x{80}-\x{10FFFF}",
    r"\s": r" \t\n\x0B\x0C\r\x1C-\x1F\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}"
    r"\x{202F}\x{205F}\x{3000}\x{FEFF}",
}
_NEGATED = {r"\D": r"\d", r"\W": r"\w", r"\S": r"\s"}
_ANY = r"[^\n\r\x{2028}\x{2029}]"
_CONTROLS = {r"\n": 10, r"\r": 13, r"\t": 9, r"\f": 12, r"\v": 11, r"\0": 0}
_MAX_COUNT = 10_000
ANYTHING = r"[\x{0}-\x{10FFFF}]*"

_PART = re.compile(
    r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\u\{[0-9a-fA-F]{1,6}\}|\\.|.",
    re.DOTALL,
)
_GROUP = re.compile(r"\(\?(?::|P?<[A-Za-z_][A-Za-z0-9_]*>)")
_COUNT = re.compile(r"\{([0-9]+)(?:(,)([0-9]*))?\}")


def portable_pattern(
    pattern: str, where: str, *, is_search: bool = False, is_at_start: bool = False
) -> str:
    """`pattern` in Rust's regex syntax, for whole matches. Raises RequestError naming `where`.

    is_search: it matches all texts in which it is found, from their start on if `is_at_start`.
    """
    return _Translation(pattern, where, is_search=is_search, is_at_start=is_at_start).write()


def literal_pattern(text: str) -> str:
    """A pattern that matches `text` only."""
    return "".join(_written_char(ord(char)) for char in text)


class _Translation:
    """Reads a pattern from left to right."""

    def __init__(self, pattern: str, where: str, *, is_search: bool, is_at_start: bool) -> None:
        self._pattern = pattern
        self._where = where
        self._is_search = is_search
        self._is_at_start = is_at_start
        self._has_start = self._has_end = False  # of the alternative that is read: '^', '$'
        self._alternative = 0  # where it begins in what is written
        self._place = 0
        self._depth = 0
        self._written: list[str] = []
        self._can_repeat = False  # whether the last written part can take a quantifier

    def write(self) -> str:
        while self._place < len(self._pattern):
            self._next()
        if self._depth > 0:
            raise self._refused("a '(' is not closed")
        self._end_alternative()
        return f"(?:{''.join(self._written)})"

    def _next(self) -> None:
        char = self._pattern[self._place]
        if char == "(":
            self._open()
        elif char == ")":
            self._close()
        elif char in "*+?{":
            self._quantify(char)
        elif char == "[":
            self._place += 1
            self._add(self._brackets())
        elif char in "^$":
            self._anchor(char)
        elif char == "|":
            if self._depth == 0:
                self._end_alternative()
            self._add("|", can_repeat=False)
            if self._depth == 0:
                self._alternative = len(self._written)
            self._place += 1
        elif char in "]}":
            raise self._refused(f"a '{char}' that closes nothing; write '\\{char}'")
        else:
            self._add(self._outside(self._part()))

    def _add(self, text: str, *, can_repeat: bool = True) -> None:
        self._written.append(text)
        self._can_repeat = can_repeat

    def _end_alternative(self) -> None:
        """Let any text stand where a search is not bound to the start or end."""
        if self._is_search:
            if not (self._has_start or self._is_at_start):
                self._written.insert(self._alternative, ANYTHING)
            if not self._has_end:
                self._written.append(ANYTHING)
        self._has_start = self._has_end = False

    def _part(self) -> str:
        """The next character or escape."""
        found = _PART.match(self._pattern, self._place)
        assert found is not None
        self._place = found.end()
        if found[0] == "\\":
            raise self._refused("it ends with a '\\'")
        return found[0]

    def _open(self) -> None:
        group = _GROUP.match(self._pattern, self._place)
        if group is None and self._pattern.startswith("(?", self._place):
            raise self._refused("of '(?...)' only groups are supported: '(?:...)', '(?<name>...)'")
        self._place = self._place + 1 if group is None else group.end()
        self._depth += 1
        self._add("(?:", can_repeat=False)

    def _close(self) -> None:
        if self._depth == 0:
            raise self._refused("a ')' closes nothing")
        self._depth -= 1
        self._place += 1
        self._add(")")

    def _quantify(self, char: str) -> None:
        if not self._can_repeat:
            raise self._refused(f"nothing stands before '{char}' that it could repeat")
        text = char
        if char == "{":
            text = self._count()
        self._place += len(text)
        self._add(text, can_repeat=False)
        if self._pattern.startswith("?", self._place):
            self._place += 1

    def _count(self) -> str:
        found = _COUNT.match(self._pattern, self._place)
        if found is None:
            raise self._refused("a '{' begins no count; write '\\{'")
        least, most = int(found[1]), int(found[3] or found[1])
        if max(least, most) > _MAX_COUNT or least > most:
            raise self._refused(f"'{found[0]}' is no count up to {_MAX_COUNT}")
        return found[0]

    def _anchor(self, char: str) -> None:
        pattern, place = self._pattern, self._place
        if char == "$":
            is_at_end = pattern[place + 1 : place + 2] in ("", "|")
        else:
            is_at_end = place == 0 or self._written[-1:] == ["|"]
        if self._depth > 0 or not is_at_end:
            raise self._refused(f"'{char}' is supported at its start or end only")
        self._has_start |= char == "^"
        self._has_end |= char == "$"
        self._place += 1
        self._can_repeat = False

    def _outside(self, part: str) -> str:
        if part == ".":
            return _ANY
        if part in _NARROW:
            return f"[{_NARROW[part]}]"
        if part in _NEGATED:
            return f"[^{_WIDE[_NEGATED[part]]}]"
        return self._literal(part)

    # ---- brackets -------------------------------------------------------------------------------

    def _brackets(self) -> str:
        """Translate a bracket expression; starts after its '[' and ends after its ']'."""
        is_negated = self._pattern.startswith("^", self._place)
        self._place += is_negated
        if self._pattern.startswith("]", self._place):
            raise self._refused("'[]' and '[^]' mean different things to different readers")
        members: list[str] = []
        while not self._pattern.startswith("]", self._place):
            if self._place >= len(self._pattern):
                raise self._refused("a '[' is not closed")
            members.append(self._member(is_negated=is_negated))
        self._place += 1
        return f"[{'^' if is_negated else ''}{''.join(members)}]"

    def _member(self, *, is_negated: bool) -> str:
        if self._pattern[self._place : self._place + 2] in ("[:", "[.", "[="):
            raise self._refused("'[:name:]' is not supported between brackets")
        part = self._part()
        is_range = (
            self._pattern.startswith("-", self._place)
            and self._pattern[self._place + 1 : self._place + 2] != "]"
        )
        if part in _NARROW or part in _NEGATED:
            if is_range:
                raise self._refused(f"'{part}-' begins a range; write '\\-'")
            return self._class_member(part, is_negated=is_negated)
        if not is_range:
            return self._literal(part)
        self._place += 1
        last = self._part()
        if last in _NARROW or last in _NEGATED:
            raise self._refused(f"'-{last}' ends a range; write '\\-'")
        if self._code(part) > self._code(last):
            raise self._refused(f"the range '{part}-{last}' is empty")
        return f"{self._literal(part)}-{self._literal(last)}"

    def _class_member(self, part: str, *, is_negated: bool) -> str:
        """Members of a class escape: the wide set where it is excluded, else the narrow one."""
        if part in _NARROW:
            return (_WIDE if is_negated else _NARROW)[part]
        return f"[^{(_NARROW if is_negated else _WIDE)[_NEGATED[part]]}]"

    # ---- characters -----------------------------------------------------------------------------

    def _literal(self, part: str) -> str:
        return _written_char(self._code(part))

    def _code(self, part: str) -> int:
        """Code point of the character that a part stands for."""
        code = ord(part[-1])
        if part == r"\0" and self._pattern[self._place : self._place + 1].isdigit():
            raise self._refused(r"'\0' before a digit means different things to different readers")
        if part in _CONTROLS:
            code = _CONTROLS[part]
        elif len(part) > 2:
            code = int(part[2:].strip("{}"), 16)
        elif len(part) == 2 and part[1].isalnum():
            raise self._refused(f"'{part}' is not supported")
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise self._refused(f"'{part}' is no character")
        return code

    def _refused(self, detail: str) -> RequestError:
        where = self._where[:200]
        return RequestError(
            f"Invalid regular expression at '{where}': {detail}.", param=where, code="invalid_value"
        )


def _written_char(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\x{{{code:X}}}"
