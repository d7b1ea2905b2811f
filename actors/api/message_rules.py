"""Chat messages as chat templates expect them, or a refusal that names the part at fault."""

from collections.abc import Sequence

import msgspec

from actors.api.openai_requests import Message, ToolCall, is_given, unsupported
from actors.api.request_rules import check_length, check_plain, invalid, missing, unknown_kind
from engine.errors import RequestError

MAX_MESSAGES = 2048
MAX_TOOL_CALLS = 128  # in one message; OpenAI's limit
ROLES = ("system", "developer", "user", "assistant", "tool")


def read_messages(messages: Sequence[Message]) -> list[dict[str, object]]:
    """All messages of a chat; a tool's answer must follow the call that it answers."""
    call_ids: set[str] = set()
    read = []
    for position, message in enumerate(messages):
        param = f"messages[{position}]"
        read.append(read_message(message, param))
        if message.role == "tool" and message.tool_call_id not in call_ids:
            raise invalid(
                f"{param}.role" if not call_ids else f"{param}.tool_call_id",
                "messages with role 'tool' must be a response to a preceding message with"
                " 'tool_calls'.",
            )
        call_ids |= {call.id for call in message.tool_calls or ()}
    return read


def uses_tools(messages: Sequence[Message]) -> int | None:
    """Position of the first message that only a template with tools can render; else None."""
    for position, message in enumerate(messages):
        if message.role == "tool" or message.tool_calls:
            return position
    return None


def read_message(message: Message, param: str) -> dict[str, object]:
    """A message as chat templates expect it: text content, arguments of calls as objects.

    "developer" becomes "system", the name templates know for it.
    """
    if message.role not in ROLES:
        raise unknown_kind(f"{param}.role", message.role, ROLES)
    if message.refusal is not None:
        raise unsupported(f"{param}.refusal")
    for name, raw in (("audio", message.audio), ("function_call", message.function_call)):
        if is_given(raw):
            raise unsupported(f"{param}.{name}")
    if message.role == "tool" and message.tool_call_id is None:
        raise missing(f"{param}.tool_call_id")
    plain: dict[str, object] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _read_content(message, param),
    }
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            plain[name] = value
    if message.tool_calls:
        if message.role != "assistant":
            raise invalid(f"{param}.tool_calls", "only an assistant's message has tool calls.")
        check_length(f"{param}.tool_calls", len(message.tool_calls), MAX_TOOL_CALLS)
        plain["tool_calls"] = [
            _read_tool_call(call, f"{param}.tool_calls[{position}]")
            for position, call in enumerate(message.tool_calls)
        ]
    return plain


def count_chars(message: Message) -> int:
    """Characters of everything in a message that can reach the prompt."""
    texts = [message.name, message.tool_call_id, message.reasoning_content]
    if isinstance(message.content, str):
        texts.append(message.content)
    else:
        texts += [part.text for part in message.content or ()]
    for call in message.tool_calls or ():
        texts += [call.id, call.function.name, call.function.arguments]
    return sum(len(text) for text in texts if text is not None)


def _read_content(message: Message, param: str) -> str | None:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role == "assistant" and message.tool_calls:
            return None
        raise RequestError(
            f"Invalid value for '{param}.content': expected a string, got null.",
            param=f"{param}.content",
            code="invalid_type",
        )
    texts = []
    for position, part in enumerate(content):
        where = f"{param}.content[{position}]"
        if part.type != "text":
            raise unknown_kind(f"{where}.type", part.type, ("text",))
        if part.text is None:
            raise missing(f"{where}.text")
        texts.append(part.text)
    check_length(f"{param}.content", len(texts), MAX_MESSAGES)
    return "\n".join(texts)


def _read_tool_call(call: ToolCall, param: str) -> dict[str, object]:
    if call.type != "function":
        raise unknown_kind(f"{param}.type", call.type, ("function",))
    where = f"{param}.function.arguments"
    try:
        arguments = msgspec.json.decode(call.function.arguments, type=dict[str, object])
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(where, "expected a JSON object as text.") from error
    check_plain(arguments, where)
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }
