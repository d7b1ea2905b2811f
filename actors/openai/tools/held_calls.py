"""Layouts that hold an output to tool calls, in the notation of each format.

    hermes        <tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>   one a line
    llama3_json   {"name": ..., "parameters": {...}}                             with `; ` between
    mistral       [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]
    harmony       one message to a function, perhaps behind one of reasoning

Layouts are the grammar compiler's structural tags. The format's parser reads exactly these.
"""

from collections.abc import Mapping

from actors.openai.tools import harmony, hermes, mistral

Layout = dict[str, object]
Schemas = Mapping[str, Mapping[str, object]]  # name of a function -> schema of its arguments


def hermes_calls(schemas: Schemas, *, only_first: bool) -> Layout:
    """Builds the layout of an output that is one or more calls and nothing else."""
    return _calls(_hermes_tags(schemas), "\n", only_first=only_first)


def hermes_text_with_calls(schemas: Schemas) -> Layout:
    """Any text, where each opening marker begins a call."""
    return {"type": "triggered_tags", "triggers": [hermes.OPEN], "tags": _hermes_tags(schemas)}


def llama3_json_calls(schemas: Schemas, *, only_first: bool) -> Layout:
    """Builds the layout of an output that is one or more calls and nothing else.

    A call is written as a schema: beside an answer that is an object too, the grammar library could
    not tell a literal text that begins with a brace from that object.
    """
    tags = [_tag("", _llama3_call(name, schemas[name]), "") for name in schemas]
    return _calls(tags, "; ", only_first=only_first)


def _llama3_call(name: str, arguments: Mapping[str, object]) -> Layout:
    """The schema of a call; definitions of its arguments' schema move to its root."""
    inner = {key: value for key, value in arguments.items() if key != "$defs"}
    definitions = {"$defs": arguments["$defs"]} if "$defs" in arguments else {}
    return {
        "type": "object",
        "properties": {"name": {"enum": [name]}, "parameters": inner},
        "required": ["name", "parameters"],
        "additionalProperties": False,
        **definitions,
    }


def mistral_calls(schemas: Schemas, *, only_first: bool) -> Layout:
    """Builds the layout of an output that is an array of calls and nothing else."""
    tags = [_tag(_head(name, "arguments"), schemas[name], "}") for name in schemas]
    elements = [
        {"type": "const_string", "value": f"{mistral.TOOL_CALLS}["},
        _calls(tags, ", ", only_first=only_first),
        {"type": "const_string", "value": "]"},
    ]
    return {"type": "sequence", "elements": elements}


ANY_TEXT: Layout = {"type": "any_text"}
_REASONING = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")


def harmony_answer(final: Layout | None, schemas: Schemas | None = None) -> Layout:
    """Builds the layout of an answer in the harmony format: reasoning or none, then one message.

    final: of what is in the channel `final`; None = it has to be a call. schemas: of the functions
    that may be called instead. A call ends an answer, so that there is never a second.
    """
    thought: Layout = {"type": "tag", "begin": _REASONING[0], "content": ANY_TEXT}
    nothing: Layout = {"type": "const_string", "value": ""}
    ends = [
        _tag(f"<|channel|>commentary to={harmony.FUNCTIONS}{name} <|constrain|>json<|message|>", s)
        for name, s in (schemas or {}).items()
    ]
    if final is not None:
        begin = "<|channel|>final<|message|>"
        ends.append({"type": "tag", "begin": begin, "content": final, "end": ""})
    elements = [
        {"type": "or", "elements": [nothing, thought | {"end": _REASONING[1]}]},
        {"type": "or", "elements": ends},
    ]
    return {"type": "sequence", "elements": elements}


def _hermes_tags(schemas: Schemas) -> list[Layout]:
    return [
        _tag(f"{hermes.OPEN}\n{_head(name, 'arguments')}", schemas[name], f"}}\n{hermes.CLOSE}")
        for name in schemas
    ]


def _head(name: str, key: str) -> str:
    """Returns the text before the arguments; names need no escapes."""
    return f'{{"name": "{name}", "{key}": '


def _tag(begin: str, schema: object, end: str = "") -> Layout:
    content = {"type": "json_schema", "json_schema": schema}
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _calls(tags: list[Layout], separator: str, *, only_first: bool) -> Layout:
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": only_first,
    }
