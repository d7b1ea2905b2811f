r"""Splits regular expressions that look ahead at their start into several without that.

A text matches `^(?=P)R` if it matches R, and P followed by anything. So it has to match a list of
patterns, all of them. The same goes for `(?!P)` where a pattern for the texts that P does not begin
can be written: where P has alternatives, each of which is

    abc   \d[a-z]   $       single characters and classes, with or without `$`
    [a-z]*$   \d+$          one repeated class, up to the end
    .*x   .*xy              one character or class, or two characters, anywhere

Lookaheads elsewhere, and lookbehinds, are refused by `pattern`. Knows no schemas.
"""

import re

from engine.constraints.pattern import ANYTHING, portable_pattern
from engine.errors import RequestError

_CLASS = r"\[\^?(?:\\.|[^\]\\])+\]"
_ATOM = re.compile(
    r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\u\{[0-9a-fA-F]{1,6}\}|\\.|"
    + _CLASS
    + r"|[^\\\[\](){}*+?|^$.]",
    re.DOTALL,
)
_SPLIT = re.compile(r"\\.|" + _CLASS + r"|[()|]|.", re.DOTALL)
_SOMETHING = ANYTHING.removesuffix("*") + "+"
_NO_LINE_END = r"[^\n]*"  # Python's '$' is also before a line end that ends the text
_NEGATED = {r"\d": r"\D", r"\w": r"\W", r"\s": r"\S", r"\D": r"\d", r"\W": r"\w", r"\S": r"\s"}


def portable_patterns(pattern: str, where: str, *, is_search: bool = False) -> list[str]:
    """Patterns as of `portable_pattern`, all of which a text has to match."""
    start = "^" if pattern.startswith("^") else ""
    heads, rest = _heads(pattern.removeprefix("^"))
    is_bound = bool(start) or not is_search
    if not heads or not is_bound or len(_alternatives(rest)) > 1:
        return [portable_pattern(pattern, where, is_search=is_search)]
    found = [portable_pattern(start + rest, where, is_search=is_search)]
    for is_negative, text in heads:
        if is_negative:
            for alternative in _alternatives(text):
                found += _without(alternative, where)
        else:
            found.append(portable_pattern(text, where, is_search=True, is_at_start=True))
    return list(dict.fromkeys(found))


def pattern_besides(text: str) -> str:
    """A pattern of all texts but `text`."""
    return _not_at_start([f"\\u{{{ord(char):X}}}" for char in text], "", has_end=True)


def _heads(pattern: str) -> tuple[list[tuple[bool, str]], str]:
    """The lookaheads at the start, negative or not, and what is behind them."""
    found: list[tuple[bool, str]] = []
    while pattern.startswith(("(?=", "(?!")):
        depth, place = 1, 3
        while depth > 0:
            part = _SPLIT.match(pattern, place)
            if part is None:
                return found, pattern  # it is not closed, which `portable_pattern` says
            depth += {"(": 1, ")": -1}.get(part[0], 0)
            place = part.end()
        found.append((pattern[2] == "!", pattern[3 : place - 1]))
        pattern = pattern[place:]
    return found, pattern


def _alternatives(pattern: str) -> list[str]:
    found, depth = [""], 0
    for part in _SPLIT.findall(pattern):
        depth += {"(": 1, ")": -1}.get(part, 0)
        if part == "|" and depth == 0:
            found.append("")
        else:
            found[-1] += part
    return found


def _without(text: str, where: str) -> list[str]:
    """Patterns that a text matches, all of them, if `text` does not match at its start."""
    body = text.removeprefix("^")
    has_end = body.endswith("$") and not body.endswith("\\$")
    body = body.removesuffix("$") if has_end else body
    is_anywhere = body.startswith(".*")
    atoms, mark = _atoms(body.removeprefix(".*") if is_anywhere else body)
    found: str | None = None
    if atoms is None or (is_anywhere and (has_end or mark)):
        pass
    elif is_anywhere:
        found = _nowhere(atoms, where)
    elif mark and has_end and len(atoms) == 1:
        other = portable_pattern(_negated(atoms[0]), where)
        found = f"{ANYTHING}{other}{ANYTHING}"
        found = f"(?:{found})?" if mark == "+" else found
    elif not mark and (atoms or has_end):
        found = _not_at_start(atoms, where, has_end=has_end)
    if found is None:
        raise RequestError(
            f"Invalid regular expression at '{where[:200]}': '(?!{text[:60]})' is not supported.",
            param=where[:200],
            code="invalid_value",
        )
    return [found, _NO_LINE_END] if has_end else [found]


def _atoms(body: str) -> tuple[list[str] | None, str]:
    """Single characters and classes; the mark is a '*' or '+' behind a single one of them."""
    mark = body[-1:] if body.endswith(("*", "+")) and not body.endswith(("\\*", "\\+")) else ""
    body = body.removesuffix(mark)
    found: list[str] = []
    place = 0
    while place < len(body):
        atom = _ATOM.match(body, place)
        if atom is None:
            return None, mark
        found.append(atom[0])
        place = atom.end()
    return (None if mark and len(found) != 1 else found), mark


def _not_at_start(atoms: list[str], where: str, *, has_end: bool) -> str:
    """Texts that end before all of `atoms` are there, or have something else in a place."""
    if not atoms:
        return _SOMETHING
    written = ""
    for i, atom in reversed(list(enumerate(atoms))):
        other = f"{portable_pattern(_negated(atom), where)}{ANYTHING}"
        is_last = i == len(atoms) - 1
        if is_last and not has_end:
            written = f"(?:{other})?"
        elif is_last:
            written = f"(?:{other}|{portable_pattern(atom, where)}{_SOMETHING})?"
        else:
            written = f"(?:{other}|{portable_pattern(atom, where)}{written})?"
    return written


def _nowhere(atoms: list[str], where: str) -> str | None:
    """Texts that have the atoms nowhere; None for more than can be written."""
    if len(atoms) == 1:
        return f"{portable_pattern(_negated(atoms[0]), where)}*"
    if len(atoms) != 2 or any(atom in _NEGATED or atom.startswith("[") for atom in atoms):
        return None
    first, second = (portable_pattern(atom, where) for atom in atoms)
    other = portable_pattern(_negated(atoms[0]), where)
    if first == second:
        return f"(?:{first}?{other})*{first}?"
    neither = portable_pattern(f"[^{_in_brackets(atoms[0])}{_in_brackets(atoms[1])}]", where)
    return f"(?:{other}|{first}+{neither})*{first}*"


def _negated(atom: str) -> str:
    """A class of all other characters."""
    if atom in _NEGATED:
        return _NEGATED[atom]
    if atom.startswith("[^"):
        return f"[{atom[2:]}"
    if atom.startswith("["):
        return f"[^{atom[1:]}"
    return f"[^{_in_brackets(atom)}]"


def _in_brackets(atom: str) -> str:
    return f"\\{atom}" if len(atom) == 1 and not atom.isalnum() else atom
