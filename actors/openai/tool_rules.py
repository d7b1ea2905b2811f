"""Checks what a chat request says about tools, and prepares it for the chat template."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from actors.openai.chat_dialect import ChatDialect, ToolFormat
from actors.openai.output_rules import decode_schema, tag_constraint
from actors.openai.request_bodies import AllowedTools, ChatBody, Tool, is_given, unsupported
from actors.openai.request_rules import check_length, invalid, missing, unknown_kind
from actors.openai.served_model import ServedModel
from actors.openai.tools import held_calls
from actors.openai.tools.held_calls import Layout
from engine.constraints.json_schema import restrict
from engine.request import Constraint, ConstraintKind

MAX_TOOLS = 128  # OpenAI's limit
NO_PARAMETERS: dict[str, object] = {"type": "object", "properties": {}}
ANY_PARAMETERS: dict[str, object] = {"type": "object"}

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools that a prompt offers to the model."""

    definitions: list[dict[str, object]]  # for the template, in OpenAI's shape
    names: frozenset[str]
    constraint: Constraint | None  # None = the model may write what it likes
    must_call: bool  # the output is calls and nothing else


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """What `tool_choice` says."""

    offered: Sequence[Tool]  # the model is told of these
    held: Mapping[int, Tool]  # position in `tools` -> one that a held output may call
    must_call: bool
    is_single: bool  # one call and no more


def read_tool_use(chat: ChatBody, model: ServedModel, answer: Constraint | None) -> ToolUse | None:
    """Reads how tools may be used; None if the answer cannot call any. Raises RequestError.

    answer: the constraint on an output that calls nothing; None = any text.
    """
    if not chat.tools:
        if chat.tool_choice not in (None, "none"):
            raise invalid("tool_choice", "only allowed when 'tools' are specified.")
        return None
    check_model_knows_tools(model, "tools")
    read_tools(chat.tools)  # all of them, before any is left out
    choice = _read_choice(chat, chat.tools)
    if choice is None:  # a model that is not told of tools calls none
        return None
    if not model.dialect.can_call:
        raise unsupported(
            "tools",
            " for this model: nothing here reads the calls it writes (the server's api.tool_parser"
            " names what can be read)",
        )
    return ToolUse(
        definitions=read_tools(choice.offered),
        names=frozenset(_names_of(choice.offered)),
        constraint=_read_constraint(choice, model.dialect, answer),
        must_call=choice.must_call,
    )


def check_model_knows_tools(model: ServedModel, param: str) -> None:
    """Raises RequestError unless the model's chat template has a place for tools."""
    if not model.dialect.knows_tools:
        raise unsupported(param, " for this model: its chat template knows no tools")


def count_tool_chars(tools: Sequence[Tool] | None) -> int:
    """Characters, or a few more, of everything in `tools` that can reach the prompt."""
    functions = [tool.function for tool in tools or () if tool.function is not None]
    return sum(len(f.name) + len(f.description or "") + len(bytes(f.parameters)) for f in functions)


def read_tools(tools: Sequence[Tool]) -> list[dict[str, object]]:
    """Definitions for the chat template; raises RequestError for one that is malformed."""
    check_length("tools", len(tools), MAX_TOOLS)
    return [_read_tool(tool, f"tools[{position}]") for position, tool in enumerate(tools)]


def _read_tool(tool: Tool, param: str) -> dict[str, object]:
    if tool.type != "function":
        raise unknown_kind(f"{param}.type", tool.type, ("function",))
    function = tool.function
    if function is None:
        raise missing(f"{param}.function")
    if not _NAME.fullmatch(function.name):
        raise invalid(
            f"{param}.function.name",
            "string does not match pattern. Expected a string that matches the pattern"
            " '^[a-zA-Z0-9_-]{1,64}$'.",
        )
    description = {} if function.description is None else {"description": function.description}
    definition: dict[str, object] = {
        "name": function.name,
        **description,
        "parameters": _read_parameters(function.parameters, f"{param}.function.parameters"),
    }
    return {"type": "function", "function": definition}


def _read_parameters(raw: msgspec.Raw, param: str) -> dict[str, object]:
    """A schema as the template writes it; nothing here interprets it."""
    if not is_given(raw):
        return NO_PARAMETERS
    return decode_schema(raw, param)


def _read_choice(chat: ChatBody, tools: Sequence[Tool]) -> _Choice | None:
    """Reads `tool_choice`; None = no tool may be called."""
    choice, is_single = chat.tool_choice, chat.parallel_tool_calls is False
    if choice == "none":
        return None
    if choice is None or isinstance(choice, str):
        if choice not in (None, *_CHOICES):
            raise unknown_kind("tool_choice", choice or "", _CHOICES)
        return _Choice(
            offered=tools,
            held=dict(enumerate(tools)),
            must_call=choice == "required",
            is_single=is_single,
        )
    if choice.type == "allowed_tools":
        return _read_allowed(choice.allowed_tools, tools, is_single=is_single)
    if choice.type != "function":
        raise unknown_kind("tool_choice.type", choice.type, ("function", "allowed_tools"))
    if choice.function is None:
        raise missing("tool_choice.function")
    held = _find({choice.function.name: "tool_choice"}, tools)
    # The model is told of all tools; the output is held to the one.
    return _Choice(offered=tools, held=held, must_call=True, is_single=True)


def _read_allowed(
    allowed: AllowedTools | None, tools: Sequence[Tool], *, is_single: bool
) -> _Choice:
    """The model is told only of the tools that it may call."""
    param = "tool_choice.allowed_tools"
    if allowed is None:
        raise missing(param)
    check_length(f"{param}.tools", len(allowed.tools), MAX_TOOLS)
    wheres = {}
    for position, tool in enumerate(allowed.tools):
        where = f"{param}.tools[{position}]"
        if tool.type != "function":
            raise unknown_kind(f"{where}.type", tool.type, ("function",))
        if tool.function is None:
            raise missing(f"{where}.function")
        wheres[tool.function.name] = where
    held = _find(wheres, tools)
    return _Choice(
        offered=list(held.values()),
        held=held,
        must_call=allowed.mode == "required",
        is_single=is_single,
    )


def _find(wheres: Mapping[str, str], tools: Sequence[Tool]) -> dict[int, Tool]:
    """Returns the named tools by position. `wheres`: name -> the parameter that names it."""
    known = _names_of(tools)
    for name, where in wheres.items():
        if name not in known:
            raise invalid(where, "it names a function that is not among 'tools'.")
    return {
        position: tool
        for position, tool in enumerate(tools)
        if tool.function is not None and tool.function.name in wheres
    }


def _names_of(tools: Sequence[Tool]) -> list[str]:
    return [tool.function.name for tool in tools if tool.function is not None]


# ---- calls that the output is held to -----------------------------------------------------------


def hold_harmony(answer: Constraint) -> Constraint:
    """Holds the final message of an answer in the harmony format. Raises RequestError."""
    layout = held_calls.harmony_answer(_layout_of(answer, "for this model"))
    return tag_constraint(layout, "response_format")


def _hold_harmony_calls(choice: _Choice, answer: Constraint | None) -> Constraint | None:
    """As `_read_constraint`, in the harmony format: reasoning, then one call or an answer."""
    if choice.must_call:
        layout = held_calls.harmony_answer(None, _held_schemas(choice.held))
        return tag_constraint(layout, "tools")
    if answer is None and not any(map(_is_strict, choice.held.values())):
        return None
    schemas = _held_schemas(choice.held, loosens_others=True)
    held = held_calls.ANY_TEXT if answer is None else _layout_of(answer)
    return tag_constraint(held_calls.harmony_answer(held, schemas), "tools")


def _read_constraint(
    choice: _Choice, dialect: ChatDialect, answer: Constraint | None
) -> Constraint | None:
    """Returns what the output is held to: calls, calls or an answer; None = any text with calls."""
    tool_format = dialect.tool_format
    if tool_format is None:
        return _hold_harmony_calls(choice, answer)
    if choice.must_call:
        return tag_constraint(_calls(tool_format, choice, _held_schemas(choice.held)), "tools")
    if answer is not None:
        schemas = _held_schemas(choice.held, loosens_others=True)
        elements = [_layout_of(answer), _calls(tool_format, choice, schemas)]
        return tag_constraint({"type": "or", "elements": elements}, "tools")
    strict = [position for position, tool in choice.held.items() if _is_strict(tool)]
    if not strict:
        return None
    if tool_format is not ToolFormat.HERMES:
        raise unsupported(
            f"tools[{strict[0]}].function.strict",
            " for this model, except with 'tool_choice' as \"required\" or a function's name:"
            " nothing in its output tells for certain where a call begins",
        )
    schemas = _held_schemas(choice.held, loosens_others=True)
    return tag_constraint(held_calls.hermes_text_with_calls(schemas), "tools")


def _layout_of(answer: Constraint, where: str = "with 'tools'") -> Layout:
    """The constraint as a part of a layout. Raises RequestError for one that cannot be a part."""
    match answer.kind:
        case ConstraintKind.JSON_SCHEMA:
            return {"type": "json_schema", "json_schema": msgspec.json.decode(answer.text)}
        case ConstraintKind.STRUCTURAL_TAG:
            layout: Layout = msgspec.json.decode(answer.text)["format"]
            return layout
    raise invalid(
        "structured_outputs",
        f"{where}, only 'json' and 'choice' are supported: a regular expression or a grammar"
        " cannot be a part of what the model writes.",
    )


def _calls(tool_format: ToolFormat, choice: _Choice, schemas: held_calls.Schemas) -> Layout:
    only_first = choice.is_single
    match tool_format:
        case ToolFormat.HERMES:
            return held_calls.hermes_calls(schemas, only_first=only_first)
        case ToolFormat.LLAMA3_JSON:
            return held_calls.llama3_json_calls(schemas, only_first=only_first)
    return held_calls.mistral_calls(schemas, only_first=only_first)


def _held_schemas(tools: Mapping[int, Tool], *, loosens_others: bool = False) -> held_calls.Schemas:
    """Returns the schemas of arguments by function name.

    tools: by position. `loosens_others`: functions that are not `strict` take any object.
    """
    schemas: dict[str, Mapping[str, object]] = {}
    for position, tool in tools.items():
        function = tool.function
        assert function is not None, "tools were read before"
        param = f"tools[{position}].function.parameters"
        is_any = loosens_others and not function.strict
        schema = ANY_PARAMETERS if is_any else _read_parameters(function.parameters, param)
        schemas[function.name] = restrict(schema, param, only_objects=True)
    return schemas


def _is_strict(tool: Tool) -> bool:
    return tool.function is not None and tool.function.strict is True
