"""Reads the prompts of both endpoints, as text to tokenise or as token ids, if they can fit.

Chat messages become what chat templates expect, or a refusal that names the part at fault. Refuses
by length before any work on the text. Knows no sampling parameters.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from actors.openai.harmony_prompts import check_effort, harmony_messages, harmony_tools
from actors.openai.request_bodies import (
    ChatBody,
    ContentPart,
    EmbeddingBody,
    FunctionCall,
    GenerationBody,
    Message,
    ToolCall,
    is_given,
    unsupported,
)
from actors.openai.request_rules import (
    Bounds,
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
from engine.errors import RequestError
from engine.messages import TokenizeRequest
from engine.text.chat_template import TOOLS
from engine.text.tokenizing import cut

MAX_MESSAGES = 2048
MAX_TOOL_CALLS = 128  # in one message; OpenAI's limit
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# Part types that hold text: OpenAI's of chats and of responses.
_TEXT_PARTS = ("text", "input_text", "output_text")
# Parts that other servers' answers have and no prompt needs: their text is thinking.
_IGNORED_PARTS = ("thinking", "redacted_thinking", "reasoning")


def read_messages(messages: Sequence[Message]) -> list[dict[str, object]]:
    """Reads the messages of a chat; a tool's answer must follow the call that it answers."""
    call_ids: set[str] = set()
    read = []
    for position, message in enumerate(_with_tool_calls(messages)):
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


def _with_tool_calls(messages: Sequence[Message]) -> Iterator[Message]:
    """Yields the messages, those with a `function_call` or the role "function" in today's form."""
    call_id = ""
    for position, message in enumerate(messages):
        if message.function_call is not None and not message.tool_calls:
            call_id = f"call_{position}"
            call = ToolCall(id=call_id, function=message.function_call)
            yield msgspec.structs.replace(message, function_call=None, tool_calls=[call])
        elif message.role == "function":
            yield msgspec.structs.replace(message, role="tool", tool_call_id=call_id)
        else:
            yield message


def uses_tools(messages: Sequence[Message]) -> int | None:
    """Returns the index of the first message that needs a template with tools; else None."""
    for position, message in enumerate(messages):
        has_calls = message.tool_calls or message.function_call is not None
        if message.role in ("tool", "function") or has_calls:
            return position
    return None


def read_message(message: Message, param: str) -> dict[str, object]:
    """A message as chat templates expect it: text content, arguments of calls as objects.

    "developer" becomes "system", the name templates know for it.
    """
    if message.role not in ROLES:
        raise unknown_kind(f"{param}.role", message.role, ROLES)
    if is_given(message.audio):
        raise unsupported(f"{param}.audio")
    if message.role == "tool" and message.tool_call_id is None:
        raise missing(f"{param}.tool_call_id")
    plain: dict[str, object] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _read_content(message, param),
    }
    optional = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": _read_reasoning(message),
    }
    plain |= {name: value for name, value in optional.items() if value is not None}
    if message.tool_calls:
        if message.role != "assistant":
            raise invalid(f"{param}.tool_calls", "only an assistant's message has tool calls.")
        check_length(f"{param}.tool_calls", len(message.tool_calls), MAX_TOOL_CALLS)
        plain["tool_calls"] = [
            _read_tool_call(call, f"{param}.tool_calls[{position}]")
            for position, call in enumerate(message.tool_calls)
        ]
    return plain


def _read_reasoning(message: Message) -> str | None:
    if message.reasoning_content is not None or not is_given(message.reasoning):
        return message.reasoning_content
    try:
        return msgspec.json.decode(message.reasoning, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None  # an object of another server


def count_chars(message: Message) -> int:
    """Characters of everything in a message that can reach the prompt, or more."""
    texts = [message.name, message.tool_call_id, message.reasoning_content, message.refusal]
    if isinstance(message.content, str):
        texts.append(message.content)
    else:
        for part in message.content or ():
            texts += [part] if isinstance(part, str) else [part.text, part.refusal]
    num_chars = sum(len(text) for text in texts if text is not None)
    num_chars += len(bytes(message.reasoning))
    calls = [call.function for call in message.tool_calls or ()]
    calls += [] if message.function_call is None else [message.function_call]
    num_chars += sum(len(call.id) for call in message.tool_calls or ())
    return num_chars + sum(len(call.name) + _num_argument_chars(call) for call in calls)


def _num_argument_chars(call: FunctionCall) -> int:
    if isinstance(call.arguments, str):
        return len(call.arguments)
    return len(msgspec.json.encode(call.arguments))


def _read_content(message: Message, param: str) -> str | None:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None or (content == [] and message.role == "assistant"):
        return _absent_content(message, param)
    check_length(f"{param}.content", len(content), MAX_MESSAGES)
    texts = [
        _read_part(part, f"{param}.content[{position}]")
        for position, part in enumerate(content)
        if isinstance(part, str) or part.type not in _IGNORED_PARTS
    ]
    return "\n".join(texts)


def _absent_content(message: Message, param: str) -> str | None:
    """What stands for the null of an assistant, which has called, refused, or only thought."""
    if message.role == "assistant":
        return None if message.tool_calls else message.refusal or ""
    raise RequestError(
        f"Invalid value for '{param}.content': expected a string, got null.",
        param=f"{param}.content",
        code="invalid_type",
    )


def _read_part(part: ContentPart | str, where: str) -> str:
    if isinstance(part, str):
        return part
    if part.type == "refusal":
        return part.refusal or ""
    if part.type not in _TEXT_PARTS:
        raise unknown_kind(f"{where}.type", part.type, ("text",))
    if part.text is None:
        raise missing(f"{where}.text")
    return part.text


def _read_tool_call(call: ToolCall, param: str) -> dict[str, object]:
    if call.type not in (None, "function"):
        raise unknown_kind(f"{param}.type", call.type, ("function",))
    arguments = _read_arguments(call.function.arguments, f"{param}.function.arguments")
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }


def _read_arguments(given: str | dict[str, object] | None, where: str) -> dict[str, object]:
    """Arguments as an object; nothing at all is what clients send for a call without any."""
    if not given:
        return {}
    arguments: object = given
    if isinstance(given, str):
        try:
            arguments = msgspec.json.decode(given)
        except (msgspec.DecodeError, RecursionError) as error:
            raise invalid(where, "expected a JSON object as text.") from error
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise invalid(where, "expected a JSON object as text.")
    check_plain(arguments, where)
    return arguments


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """How a prompt that is too long is shortened."""

    max_tokens: int | None = None  # None = it is refused instead
    cuts_end: bool = False


def read_truncation(
    body: GenerationBody | EmbeddingBody, max_tokens: int | None, model: ServedModel
) -> Truncation:
    """Reads `truncate_prompt_tokens`; -1 leaves room for `max_tokens` in the context.

    Raises RequestError for a length that cannot fit.
    """
    limit = body.truncate_prompt_tokens
    if limit is None:
        return Truncation()
    most = model.max_model_len - max(max_tokens or 1, 1)
    Bounds(-1, max(most, 1)).check("truncate_prompt_tokens", limit)
    if limit == 0:
        raise invalid("truncate_prompt_tokens", "expected -1, or 1 and more, but got 0 instead.")
    return Truncation(
        max_tokens=most if limit == -1 else limit, cuts_end=body.truncation_side == "right"
    )


def read_chat_prompt(
    chat: ChatBody,
    model: ServedModel,
    tools: list[dict[str, object]] | None,
    truncation: Truncation = Truncation(),
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
    if model.dialect.harmony is not None:
        messages = harmony_messages(messages)
    return TokenizeRequest(
        messages=messages,
        # Chat templates write the special tokens themselves.
        add_special_tokens=bool(chat.add_special_tokens),
        add_generation_prompt=not continues if adds_prompt is None else adds_prompt,
        continue_final_message=continues,
        chat_template_kwargs=_template_variables(chat, model, tools),
        max_tokens=truncation.max_tokens,
        cuts_end=truncation.cuts_end,
    )


def _template_variables(
    chat: ChatBody, model: ServedModel, tools: list[dict[str, object]] | None
) -> dict[str, object]:
    """Those the client named, and `reasoning_effort` for templates that know a place for it.

    A template that can only switch thinking off does so for "none", as in vLLM; any other effort
    has no effect there.
    """
    variables = read_template_kwargs(chat.chat_template_kwargs)
    effort = chat.reasoning_effort
    if model.dialect.harmony is not None:
        check_effort(effort)
        tools = None if tools is None else harmony_tools(tools)
    if effort is not None and model.dialect.knows_reasoning_effort:
        variables = {"reasoning_effort": effort} | variables
    elif effort is not None and model.dialect.knows_enable_thinking:
        variables = {"enable_thinking": effort != "none"} | variables
    return variables if tools is None else variables | {TOOLS: tools}


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReader:
    """Reads a parameter that holds one or several prompts, as texts or as token ids."""

    param: str
    model: ServedModel
    max_prompts: int
    add_special_tokens: bool | None = None  # to texts; None = yes
    truncation: Truncation = Truncation()
    any_length: bool = False  # of texts: the caller bounds them

    def read(self, prompt: str | list[str | int | list[int]]) -> list[Prompt]:
        """Raises RequestError for what is too long, empty, of mixed kinds or outside the model."""
        if isinstance(prompt, str):
            return [self._text(prompt, self.param)]
        if prompt and isinstance(prompt[0], int):
            return [self._ids(prompt, self.param)]
        check_length(self.param, len(prompt), self.max_prompts)
        kind = type(prompt[0])
        read: list[Prompt] = []
        for position, item in enumerate(prompt):
            where = f"{self.param}[{position}]"
            if type(item) is not kind:
                raise _mixed_prompt(where)
            if isinstance(item, str):
                read.append(self._text(item, where))
            elif isinstance(item, list):
                read.append(self._ids(item, where))
        return read

    def _text(self, text: str, where: str) -> TokenizeRequest:
        if not text:
            raise invalid(where, "empty string.", "empty_string")
        if not self.any_length:
            check_prompt_chars(self.param, len(text), self.model)
        return TokenizeRequest(
            text=text,
            add_special_tokens=self.add_special_tokens is not False,
            max_tokens=self.truncation.max_tokens,
            cuts_end=self.truncation.cuts_end,
        )

    def _ids(self, items: Sequence[object], where: str) -> list[int]:
        ids = [item for item in items if isinstance(item, int)]
        if len(ids) != len(items):
            raise _mixed_prompt(where)
        truncation, max_model_len = self.truncation, self.model.max_model_len
        if truncation.max_tokens is not None:
            ids = cut(ids, truncation.max_tokens, cuts_end=truncation.cuts_end)
        if len(ids) >= max_model_len:
            raise prompt_too_long(self.param, len(ids), None, max_model_len)
        check_length(where, len(ids), max_model_len)
        check_token_ids(where, ids, self.model.vocab_size)
        return ids


def _mixed_prompt(param: str) -> RequestError:
    return RequestError(
        f"Invalid type for '{param}': a prompt is a string, or an array of only strings, only token"
        " ids or only arrays of token ids.",
        param=param,
        code="invalid_type",
    )
