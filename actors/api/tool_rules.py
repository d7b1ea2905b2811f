"""What a chat request says about tools: checked, and as the chat template takes it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from actors.api.openai_requests import ChatBody, Tool, ToolChoice, is_given, unsupported
from actors.api.request_rules import check_length, check_plain, invalid, missing, unknown_kind
from actors.api.served_model import ServedModel
from engine.errors import RequestError

MAX_TOOLS = 128  # OpenAI's limit
NO_PARAMETERS: dict[str, object] = {"type": "object", "properties": {}}

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """Tools that the model is told of."""

    definitions: list[dict[str, object]]  # for the template, in OpenAI's shape
    names: frozenset[str]


def read_tool_use(chat: ChatBody, model: ServedModel) -> ToolUse | None:
    """None when the answer cannot call tools; raises RequestError."""
    if chat.tools is None:
        _check_nothing_needs_tools(chat)
        return None
    check_model_knows_tools(model, "tools")
    definitions = read_tools(chat.tools)
    names = [tool.function.name for tool in chat.tools if tool.function is not None]
    _check_choice(chat.tool_choice, names)
    if chat.tool_choice == "none":  # a model that is not told of tools calls none
        return None
    refuse_constrained(chat)
    if model.dialect.tool_format is None:
        raise unsupported(
            "tools",
            " for this model: nothing here reads the calls it writes (the server's api.tool_parser"
            " names what can be read)",
        )
    return ToolUse(definitions=definitions, names=frozenset(names))


def check_model_knows_tools(model: ServedModel, param: str) -> None:
    """Raises RequestError unless the model's chat template has a place for tools."""
    if not model.dialect.knows_tools:
        raise unsupported(param, " for this model: its chat template knows no tools")


def refuse_constrained(chat: ChatBody) -> None:
    """Refuses what only output held to a grammar can promise."""
    choice = chat.tool_choice
    if choice == "required" or isinstance(choice, ToolChoice):
        raise unsupported("tool_choice", ', except as "auto" or "none"')
    for position, tool in enumerate(chat.tools or ()):
        if tool.function is not None and tool.function.strict:
            raise unsupported(f"tools[{position}].function.strict", ", except as false")


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
    try:
        schema = msgspec.json.decode(raw, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(
            f"Invalid type for '{param}': expected an object with a JSON schema.",
            param=param,
            code="invalid_type",
        ) from error
    check_plain(schema, param)
    return schema


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
