"""Translates layouts, literal text around JSON values, to grammars: the notation of tool calls.

A layout is a JSON object of one of these types:

    const_string         `value`, a text
    plain_string         `value`, a text without special tokens
    any_text             any text without special tokens
    json_schema          a value of `json_schema`, on one line
    or                   one of `elements`
    tag                  `begin`, then `content` (a layout), then `end`
    sequence             `elements`, one after the other
    tags_with_separator  one of `tags`, or several with `separator` between them; only one with
                         `stop_after_first`
    triggered_tags       any text in which each of `triggers` begins one of `tags`

Where a literal text contains the text of a special token, the output must have that token there.
The notation is a subset of xgrammar's structural tags.
"""

import json
from collections.abc import Callable, Mapping
from typing import cast

Layout = dict[str, object]

# On one line, as json.dumps writes it: with free white space, a model could write it without end.
_JSON_STYLE: Mapping[str, object] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}


def on_one_line(schema: Mapping[str, object]) -> str:
    """The schema as JSON for the grammar library, with its options for the notation of values."""
    return json.dumps({**schema, "x-guidance": _JSON_STYLE})


def layout_grammar(layout: Layout, special_ids: Mapping[str, int]) -> str:
    """The grammar in Lark's notation. Raises ValueError for an invalid layout."""
    return _LayoutGrammar(special_ids).write(layout)


class _LayoutGrammar:
    """Collects the rules of one grammar."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = special_ids
        self._lines: list[str] = []

    def write(self, layout: Layout) -> str:
        start = self._expression(layout)
        return "\n".join(["%llguidance {}", f"start: {start}", *self._lines, ""])

    def _expression(self, layout: Layout) -> str:
        writers: dict[object, Callable[[Layout], str]] = {
            "const_string": lambda part: self._literal(str(part["value"])),
            "plain_string": lambda part: json.dumps(part["value"]),
            "any_text": lambda _: self._rule(r"/(.|\n)*/"),
            "json_schema": self._value,
            "tag": self._tag,
            "sequence": lambda part: " ".join(map(self._expression, _layouts(part, "elements"))),
            "or": lambda part: f"({' | '.join(map(self._expression, _layouts(part, 'elements')))})",
            "tags_with_separator": self._separated,
            "triggered_tags": self._triggered,
        }
        kind = layout.get("type")
        if kind not in writers:
            raise ValueError(f"a layout of type {kind!r}")
        return writers[kind](layout)

    def _rule(self, expression: str, options: str = "") -> str:
        """Add a rule and return its name."""
        name = f"part_{len(self._lines)}"
        self._lines.append(f"{name}{options}: {expression}")
        return name

    def _value(self, layout: Layout) -> str:
        return self._rule(f"%json {on_one_line(cast('Layout', layout['json_schema']))}")

    def _tag(self, layout: Layout, *, without: str = "") -> str:
        """`without`: the beginning of the tag that is written already."""
        begin = str(layout["begin"]).removeprefix(without)
        content = self._expression(cast("Layout", layout["content"]))
        return f"{self._literal(begin)} {content} {self._literal(str(layout['end']))}"

    def _separated(self, layout: Layout) -> str:
        tag = self._rule(" | ".join(map(self._tag, _layouts(layout, "tags"))))
        if layout["stop_after_first"]:
            return tag
        return f"{tag} ({self._literal(str(layout['separator']))} {tag})*"

    def _triggered(self, layout: Layout) -> str:
        """Lazy matching ends the text at the first trigger in it."""
        self._lines.append(r"TEXT: /(.|\n)*/")
        options = []
        for trigger in cast("list[str]", layout["triggers"]):
            tags = [tag for tag in _layouts(layout, "tags") if _begins_with(tag, trigger)]
            head = f"TEXT {self._literal(trigger)}"
            if trigger not in self._special_ids:
                head = self._rule(head, "[lazy]")
            rest = " | ".join(self._tag(tag, without=trigger) for tag in tags)
            options.append(self._rule(f"{head} ({rest})"))
        return f"({' | '.join(options)})* TEXT"

    def _literal(self, text: str) -> str:
        """The text with its special tokens by id."""
        parts = []
        while text:
            found = [(text.find(s), -len(s), s) for s in self._special_ids if s in text]
            place, _, special = min(found, default=(len(text), 0, ""))
            if place > 0:
                parts.append(json.dumps(text[:place]))
            if special:
                parts.append(f"<[{self._special_ids[special]}]>")
            text = text[place + len(special) :]
        return " ".join(parts) or '""'


def _layouts(layout: Layout, name: str) -> list[Layout]:
    return cast("list[Layout]", layout[name])


def _begins_with(tag: Layout, trigger: str) -> bool:
    return str(tag["begin"]).startswith(trigger)
