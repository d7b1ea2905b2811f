"""Checks what a chat request says about tools, and prepares it for the chat template."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from actors.openai.chat_dialect import ToolFormat
from actors.openai.output_rules import decode_schema, tag_constraint
from actors.openai.request_bodies import ChatBody, Tool, ToolChoice, is_given, unsupported
from actors.openai.request_rules import check_length, invalid, missing, unknown_kind
from actors.openai.served_model import ServedModel
from actors.openai.tools import held_calls
from actors.openai.tools.held_calls import Layout
from engine.constraints.json_schema import restrict
from engine.request import Constraint

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


def read_tool_use(chat: ChatBody, model: ServedModel) -> ToolUse | None:
    """Reads how tools may be used; None if the answer cannot call any. Raises RequestError."""
    if chat.tools is None:
        _check_nothing_needs_tools(chat)
        return None
    check_model_knows_tools(model, "tools")
    definitions = read_tools(chat.tools)
    names = [tool.function.name for tool in chat.tools if tool.function is not None]
    _check_choice(chat.tool_choice, names)
    if chat.tool_choice == "none":  # a model that is not told of tools calls none
        return None
    if model.dialect.tool_format is None:
        raise unsupported(
            "tools",
            " for this model: nothing here reads the calls it writes (the server's api.tool_parser"
            " names what can be read)",
        )
    return ToolUse(
        definitions=definitions,
        names=frozenset(names),
        constraint=_read_constraint(chat, chat.tools, model.dialect.tool_format),
        must_call=chat.tool_choice == "required" or isinstance(chat.tool_choice, ToolChoice),
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


def _check_nothing_needs_tools(chat: ChatBody) -> None:
    if chat.tool_choice not in (None, "none"):
        raise invalid("tool_choice", "only allowed when 'tools' are specified.")
    if chat.parallel_tool_calls is not None:
        raise invalid("parallel_tool_calls", "only allowed when 'tools' are specified.")


def _check_choice(choice: str | ToolChoice | None, names: Sequence[str]) -> None:
    if choice is None or choice in _CHOICES:
        return
    if isinstance(choice, str):
        raise unknown_kind("tool_choice", choice, _CHOICES)
    if choice.type == "allowed_tools":
        raise unsupported("tool_choice", ', except as "auto" or "none"')
    if choice.type != "function":
        raise unknown_kind("tool_choice.type", choice.type, ("function",))
    if choice.function is None:
        raise missing("tool_choice.function")
    if choice.function.name not in names:
        raise invalid("tool_choice", "it names a function that is not among 'tools'.")


# ---- calls that the output is held to -----------------------------------------------------------


def _read_constraint(
    chat: ChatBody, tools: Sequence[Tool], tool_format: ToolFormat
) -> Constraint | None:
    """Returns the constraint of required calls or `strict` arguments; None = neither."""
    choice = chat.tool_choice
    if isinstance(choice, ToolChoice) and choice.function is not None:
        schemas = _held_schemas(tools, only=choice.function.name)
        return tag_constraint(_calls(tool_format, schemas, only_first=True), "tools")
    if choice == "required":
        only_first = chat.parallel_tool_calls is False
        layout = _calls(tool_format, _held_schemas(tools), only_first=only_first)
        return tag_constraint(layout, "tools")
    strict = [position for position, tool in enumerate(tools) if _is_strict(tool)]
    if not strict:
        return None
    if tool_format is not ToolFormat.HERMES:
        raise unsupported(
            f"tools[{strict[0]}].function.strict",
            " for this model, except with 'tool_choice' as \"required\" or a function's name:"
            " nothing in its output tells for certain where a call begins",
        )
    layout = held_calls.hermes_text_with_calls(_held_schemas(tools, loosens_others=True))
    return tag_constraint(layout, "tools")


def _calls(tool_format: ToolFormat, schemas: held_calls.Schemas, *, only_first: bool) -> Layout:
    match tool_format:
        case ToolFormat.HERMES:
            return held_calls.hermes_calls(schemas, only_first=only_first)
        case ToolFormat.LLAMA3_JSON:
            return held_calls.llama3_json_calls(schemas, only_first=only_first)
    return held_calls.mistral_calls(schemas, only_first=only_first)


def _held_schemas(
    tools: Sequence[Tool], *, only: str | None = None, loosens_others: bool = False
) -> held_calls.Schemas:
    """Returns the schemas of arguments by function name.

    `only`: of this function alone. `loosens_others`: functions that are not `strict` take any.
    """
    schemas: dict[str, object] = {}
    for position, tool in enumerate(tools):
        function = tool.function
        if function is None or only not in (None, function.name):
            continue
        param = f"tools[{position}].function.parameters"
        is_any = loosens_others and not function.strict
        schema = ANY_PARAMETERS if is_any else _read_parameters(function.parameters, param)
        schemas[function.name] = restrict(schema, param, only_objects=True)
    return schemas


def _is_strict(tool: Tool) -> bool:
    return tool.function is not None and tool.function.strict is True
