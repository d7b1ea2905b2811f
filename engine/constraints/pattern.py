"""Regular expressions inside JSON strings: what would need an escape in the string is left out.

The compiler writes what a `pattern` matches between the quotes as it is. So a quote, a backslash or
a control character in it would end or break the string: they are taken out of every class that has
them by being wide (`.`, `\\S`, `[^a]`), and refused where they are asked for by name.
"""

import re

from engine.errors import RequestError

_UNWRITABLE = r'"\\\x00-\x1f'
# Outside of brackets: what stands for a class, with the unwritable ones taken out.
_WIDE = {
    ".": f"[^{_UNWRITABLE}]",
    r"\s": " ",
    r"\S": rf"[^\s{_UNWRITABLE}]",
    r"\D": f"[^0-9{_UNWRITABLE}]",
    r"\W": f"[^a-zA-Z0-9_{_UNWRITABLE}]",
}
_WIDE_INSIDE = (r"\S", r"\D", r"\W")
_ANCHORS = ("^", "$", r"\b", r"\B")
_NAMED_CONTROLS = (r"\n", r"\r", r"\t", r"\f", r"\v", r"\0")
_PART = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)|.", re.DOTALL)


def writable_pattern(pattern: str, where: str) -> str:
    """What of `pattern` may stand in a JSON string as it is. Raises RequestError naming `where`."""
    written: list[str] = []
    # What it matches is all that the string holds, so that the outer anchors say nothing new.
    parts = _PART.findall(pattern)
    parts = parts[1:] if parts[:1] == ["^"] else parts
    parts = parts[:-1] if parts[-1:] == ["$"] else parts
    position = 0
    while position < len(parts):
        if parts[position] == "[":
            end = _class_end(parts, position, where)
            written.append(_class(parts[position + 1 : end], where))
            position = end
        else:
            written.append(_WIDE.get(parts[position]) or _plain(parts[position], where))
        position += 1
    return f"(?:{''.join(written)})"


def _class_end(parts: list[str], start: int, where: str) -> int:
    try:
        return parts.index("]", start + 2)
    except ValueError:
        raise _refused(where, "a '[' is not closed") from None


def _class(parts: list[str], where: str) -> str:
    is_negated = parts[:1] == ["^"]
    items = parts[1:] if is_negated else parts
    if is_negated:
        # A dash at the end is itself; before what is added here it would begin a range.
        end = r"\-" if items[-1:] == ["-"] else "".join(items[-1:])
        return f"[^{''.join(items[:-1])}{end}{_UNWRITABLE}]"
    if any(item in _WIDE_INSIDE for item in items):
        raise _refused(where, f"'{_WIDE_INSIDE}' may not stand between brackets")
    for low, dash, high in zip(items, items[1:], items[2:], strict=False):
        if dash == "-" and any(_code(low) <= code <= _code(high) for code in _CODES):
            raise _refused(where, f"the range '{low}-{high}' has characters that need an escape")
    return f"[{''.join(_inside(item, where) for item in items)}]"


_CODES = (*range(0x20), ord('"'), ord("\\"))


def _inside(part: str, where: str) -> str:
    """One part of a class; anchors are characters like others there."""
    if part == r"\s":
        return _WIDE[part]
    return part if part in ("^", "$") else _plain(part, where)


def _plain(part: str, where: str) -> str:
    if part in _ANCHORS:
        raise _refused(where, f"'{part}' is supported at its start or end only")
    if part in _NAMED_CONTROLS or (not _is_shorthand(part) and _code(part) in _CODES):
        raise _refused(where, f"it asks for a character that needs an escape in a string: '{part}'")
    return part


def _is_shorthand(part: str) -> bool:
    """A letter or digit after a backslash that stands for no character of its own."""
    return len(part) == 2 and part[0] == "\\" and part[1].isalnum()


def _code(part: str) -> int:
    """Of the character that a part stands for."""
    if len(part) > 2:
        return int(part[2:], 16)
    return ord(part[-1])


def _refused(where: str, detail: str) -> RequestError:
    return RequestError(
        f"Invalid schema at '{where[:200]}': {detail}.", param=where[:200], code="invalid_value"
    )
