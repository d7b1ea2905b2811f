"""Reads the prompts of both endpoints, as text to tokenise or as token ids, if they can fit.

Chat messages become what chat templates expect, or a refusal that names the part at fault. Refuses
by length before any work on the text. Knows no sampling parameters.
"""

from collections.abc import Sequence

import msgspec

from actors.openai.request_bodies import (
    ChatBody,
    CompletionBody,
    Message,
    ToolCall,
    is_given,
    unsupported,
)
from actors.openai.request_rules import (
    check_length,
    check_plain,
    check_token_ids,
    invalid,
    missing,
    read_template_kwargs,
    unknown_kind,
)
from actors.openai.served_model import ServedModel
from actors.openai.tool_rules import check_model_knows_tools, count_tool_chars
from configs.schema import EdgeConfig
from engine.errors import RequestError
from engine.messages import TokenizeRequest
from engine.text.chat_template import TOOLS

MAX_MESSAGES = 2048
MAX_TOOL_CALLS = 128  # in one message; OpenAI's limit
ROLES = ("system", "developer", "user", "assistant", "tool")


def read_messages(messages: Sequence[Message]) -> list[dict[str, object]]:
    """Reads the messages of a chat; a tool's answer must follow the call that it answers."""
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
    """Returns the index of the first message that needs a template with tools; else None."""
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


MAX_CHARS_PER_TOKEN = 16  # a prompt beyond it cannot fit, whatever the tokenizer makes of it

Prompt = TokenizeRequest | list[int]


def prompt_too_long(
    param: str, num_prompt_tokens: int, max_tokens: int | None, max_model_len: int
) -> RequestError:
    if max_tokens is None:
        used = f"your {param} resulted in {num_prompt_tokens} tokens"
        advice = f"reduce the length of the {param}"
    else:
        used = (
            f"you requested {num_prompt_tokens + max_tokens} tokens ({num_prompt_tokens} in the"
            f" {param}, {max_tokens} in the completion)"
        )
        advice = f"reduce the length of the {param} or completion"
    return _context_exceeded(param, max_model_len, used, advice)


def _context_exceeded(param: str, max_model_len: int, used: str, advice: str) -> RequestError:
    return RequestError(
        f"This model's maximum context length is {max_model_len} tokens. However, {used}. Please"
        f" {advice}.",
        param=param,
        code="context_length_exceeded",
    )


def check_prompt_chars(param: str, num_chars: int, model: ServedModel) -> None:
    """Refuses a prompt that cannot fit, before any work on its text."""
    if num_chars > MAX_CHARS_PER_TOKEN * model.max_model_len:
        raise _context_exceeded(
            param,
            model.max_model_len,
            f"your {param} resulted in far more ({num_chars} characters)",
            f"reduce the length of the {param}",
        )


def read_chat_prompt(
    chat: ChatBody, model: ServedModel, tools: list[dict[str, object]] | None
) -> TokenizeRequest:
    """The conversation for the chat template; `tools` are those that the model is told of."""
    # First, so that no work is done on what cannot fit.
    num_chars = sum(map(count_chars, chat.messages)) + count_tool_chars(chat.tools)
    check_length("messages", len(chat.messages), MAX_MESSAGES)
    check_prompt_chars("messages", num_chars, model)
    messages = read_messages(chat.messages)
    position = uses_tools(chat.messages)
    if position is not None:
        check_model_knows_tools(model, f"messages[{position}]")
    continues = bool(chat.continue_final_message)
    adds_prompt = chat.add_generation_prompt
    if continues and adds_prompt:
        raise invalid("continue_final_message", "cannot be combined with 'add_generation_prompt'.")
    if continues and messages[-1]["role"] != "assistant":
        raise invalid("continue_final_message", "the last message must be an assistant's.")
    return TokenizeRequest(
        messages=messages,
        # Chat templates write the special tokens themselves.
        add_special_tokens=bool(chat.add_special_tokens),
        add_generation_prompt=not continues if adds_prompt is None else adds_prompt,
        continue_final_message=continues,
        chat_template_kwargs=_template_variables(chat, model, tools),
    )


def _template_variables(
    chat: ChatBody, model: ServedModel, tools: list[dict[str, object]] | None
) -> dict[str, object]:
    variables = read_template_kwargs(chat.chat_template_kwargs)
    if chat.reasoning_effort is not None:
        if not model.dialect.knows_reasoning_effort:
            raise unsupported("reasoning_effort", " for this model: its chat template knows none")
        variables = {"reasoning_effort": chat.reasoning_effort} | variables
    return variables if tools is None else variables | {TOOLS: tools}


def read_completion_prompts(
    completion: CompletionBody, limits: EdgeConfig, model: ServedModel
) -> list[Prompt]:
    prompt = completion.prompt
    if isinstance(prompt, str):
        return [_text_prompt(prompt, "prompt", completion, model)]
    if prompt and isinstance(prompt[0], int):
        return [_ids_prompt(prompt, "prompt", model)]
    check_length("prompt", len(prompt), limits.max_prompts)
    kind = type(prompt[0])
    read: list[Prompt] = []
    for position, item in enumerate(prompt):
        where = f"prompt[{position}]"
        if type(item) is not kind:
            raise _mixed_prompt(where)
        if isinstance(item, str):
            read.append(_text_prompt(item, where, completion, model))
        elif isinstance(item, list):
            read.append(_ids_prompt(item, where, model))
    return read


def _mixed_prompt(param: str) -> RequestError:
    return RequestError(
        f"Invalid type for '{param}': a prompt is a string, or an array of only strings, only token"
        " ids or only arrays of token ids.",
        param=param,
        code="invalid_type",
    )


def _text_prompt(
    text: str, param: str, completion: CompletionBody, model: ServedModel
) -> TokenizeRequest:
    if not text:
        raise invalid(param, "empty string.", "empty_string")
    check_prompt_chars("prompt", len(text), model)
    adds = completion.add_special_tokens
    return TokenizeRequest(text=text, add_special_tokens=True if adds is None else adds)


def _ids_prompt(items: Sequence[object], param: str, model: ServedModel) -> list[int]:
    ids = [item for item in items if isinstance(item, int)]
    if len(ids) != len(items):
        raise _mixed_prompt(param)
    if len(ids) >= model.max_model_len:
        raise prompt_too_long("prompt", len(ids), None, model.max_model_len)
    check_length(param, len(ids), model.max_model_len)
    check_token_ids(param, ids, model.vocab_size)
    return ids
