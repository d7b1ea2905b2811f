"""Reads /v1/responses: its items and options become the body of a chat, which is then read as one.

Items in a row that are an assistant's (reasoning, text, calls) become one message, as chat
templates know them. Raises RequestError naming the field at fault.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
from msgspec import UNSET

from actors.openai.answer_shapes import Keep, ResponsesShape
from actors.openai.protocol import ParsedRequest, draw_seed, read_chat
from actors.openai.request_bodies import (
    AllowedTool,
    AllowedTools,
    ChatBody,
    FunctionCall,
    FunctionDefinition,
    FunctionName,
    JsonSchemaFormat,
    Message,
    ResponseFormat,
    Tool,
    ToolCall,
    ToolChoice,
    decode_body,
    is_given,
    unsupported,
)
from actors.openai.request_rules import (
    check_chars,
    check_length,
    check_metadata,
    invalid,
    missing,
    refused_as,
    unknown_kind,
)
from actors.openai.responses.bodies import (
    FunctionTool,
    InputItem,
    InputPart,
    ResponsesBody,
    TextFormat,
)
from actors.openai.responses.objects import ID_PREFIX
from actors.openai.responses.stored import MAX_ID_CHARS, OwnResponses, StoredResponse
from actors.openai.served_model import ServedModel
from configs.schema import EdgeConfig

MAX_ITEMS = 4096
# Fields that a chat has under the same name and meaning.
_SAME = (
    *("model", "temperature", "top_p", "stream", "parallel_tool_calls", "user", "metadata"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "stop", "top_k"),
    *("min_p", "logit_bias", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"),
    *("structured_outputs", "chat_template_kwargs", "include_reasoning", "priority"),
    "cache_salt",
)
# Field of a chat -> the field that it was made of.
_SOURCES = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
_LOGPROBS = "message.output_text.logprobs"
# What else may be asked to be included: parts that no answer here has.
_INCLUDABLE = (
    _LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)


def parse_responses(
    body: bytes,
    limits: EdgeConfig,
    model: ServedModel,
    stored: OwnResponses,
    new_seed: Callable[[], int] = draw_seed,
    *,
    before: StoredResponse | None = None,
) -> ParsedRequest:
    """A /v1/responses body. `stored`: what `previous_response_id` and `store` refer to.

    before: what `previous_response_id` names, where it is not among `stored`.
    """
    asked = decode_body(body, ResponsesBody)
    check_metadata(asked.metadata)
    messages = _conversation(asked, stored, before)
    chat = _as_chat(asked, _with_instructions(asked, messages))
    with refused_as(_SOURCES):
        parsed = read_chat(chat, limits, model, new_seed)
    keep = _keeping(stored, messages) if asked.store is not False and stored.is_on else None
    shape = ResponsesShape(
        repeated=_repeated(asked, parsed, is_stored=keep is not None),
        has_logprobs=chat.logprobs is True,
        shows_tokens=asked.enable_response_messages is True,
        keep=keep,
    )
    return replace(parsed, shape=shape)


def _conversation(
    asked: ResponsesBody, stored: OwnResponses, before: StoredResponse | None
) -> list[Message]:
    """The messages so far: those of the previous response, then the input."""
    previous = asked.previous_response_id
    earlier: list[Message] = []
    if previous is not None:
        check_chars("previous_response_id", previous, MAX_ID_CHARS)
        if not previous.startswith(ID_PREFIX):
            where = "previous_response_id"
            raise invalid(where, f"expected an id that begins with '{ID_PREFIX}'.")
        earlier = before.messages if before is not None else stored.conversation(previous)
    if isinstance(asked.input, str):
        check_chars("input", asked.input, 2**31)
        return [*earlier, Message(role="user", content=asked.input)]
    check_length("input", len(asked.input), MAX_ITEMS)
    return [*earlier, *_read_items(asked.input)]


def _with_instructions(asked: ResponsesBody, messages: list[Message]) -> list[Message]:
    """Instructions are of this request alone: a response that goes on from it has its own."""
    if not asked.instructions:
        return messages
    return [Message(role="system", content=asked.instructions), *messages]


def _keeping(stored: OwnResponses, messages: list[Message]) -> Keep:
    def keep(response_id: str, body: bytes, said: list[dict[str, object]]) -> None:
        answer = msgspec.convert(said, list[Message])
        stored.keep(response_id, body, [*messages, *answer])

    return keep


# ---- items of the input -------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _AnswerSoFar:
    """Items in a row that are an assistant's."""

    reasoning: list[str]
    texts: list[str]
    calls: list[ToolCall]

    def message(self) -> Message | None:
        if not (self.reasoning or self.texts or self.calls):
            return None
        return Message(
            role="assistant",
            content="".join(self.texts) or None,
            reasoning_content="".join(self.reasoning) or None,
            tool_calls=self.calls or None,
        )


def _read_items(items: Sequence[InputItem]) -> list[Message]:
    messages: list[Message] = []
    answer = _AnswerSoFar(reasoning=[], texts=[], calls=[])
    for position, item in enumerate(items):
        param = f"input[{position}]"
        if not _add_to_answer(answer, item, param):
            messages += [message] if (message := answer.message()) is not None else []
            answer = _AnswerSoFar(reasoning=[], texts=[], calls=[])
            messages.append(_read_item(item, param))
    return messages + ([message] if (message := answer.message()) is not None else [])


def _add_to_answer(answer: _AnswerSoFar, item: InputItem, param: str) -> bool:
    """Adds an item that is an assistant's; returns whether it was one."""
    match item.type:
        case "reasoning":
            content = item.content if isinstance(item.content, list) else None
            answer.reasoning += [part.text or "" for part in content or item.summary or ()]
        case "function_call":
            if item.call_id is None:
                raise missing(f"{param}.call_id")
            if item.name is None:
                raise missing(f"{param}.name")
            call = FunctionCall(name=item.name, arguments=item.arguments)
            answer.calls.append(ToolCall(id=item.call_id, function=call))
        case None | "message" if item.role == "assistant":
            if answer.calls:
                return False  # text behind a call begins another message
            answer.texts.append(_read_text(item.content, f"{param}.content"))
        case _:
            return False
    return True


def _read_item(item: InputItem, param: str) -> Message:
    if item.type == "function_call_output":
        if item.call_id is None:
            raise missing(f"{param}.call_id")
        text = _read_text(item.output, f"{param}.output")
        return Message(role="tool", tool_call_id=item.call_id, content=text)
    if item.type not in (None, "message"):
        kinds = ("message", "function_call", "function_call_output", "reasoning")
        raise unknown_kind(f"{param}.type", item.type or "", kinds)
    if item.role is None:
        raise missing(f"{param}.role")
    return Message(role=item.role, content=_read_text(item.content, f"{param}.content"))


def _read_text(content: str | list[InputPart] | None, param: str) -> str:
    if content is None:
        raise missing(param)
    if isinstance(content, str):
        return content
    texts = []
    for position, part in enumerate(content):
        where = f"{param}[{position}]"
        if part.type not in ("input_text", "output_text", "text", "refusal"):
            raise unknown_kind(f"{where}.type", part.type, ("input_text", "output_text"))
        text = part.refusal if part.type == "refusal" else part.text
        if text is None:
            raise missing(f"{where}.text")
        texts.append(text)
    return "\n".join(texts)


# ---- options ------------------------------------------------------------------------------------


def _as_chat(asked: ResponsesBody, messages: list[Message]) -> ChatBody:
    same = {name: getattr(asked, name) for name in _SAME}
    wants_logprobs = _read_include(asked.include)
    if asked.text is not None and asked.text.verbosity not in (None, "medium"):
        raise unsupported("text.verbosity", ', except as "medium"')
    return ChatBody(
        **same,
        messages=messages,
        max_completion_tokens=asked.max_output_tokens,
        tools=_read_tools(asked.tools),
        tool_choice=_read_choice(asked),
        response_format=_read_format(None if asked.text is None else asked.text.format),
        reasoning_effort=None if asked.reasoning is None else asked.reasoning.effort,
        logprobs=wants_logprobs or None,
        top_logprobs=asked.top_logprobs if wants_logprobs else None,
        truncate_prompt_tokens=-1 if asked.truncation == "auto" else None,
    )


def _read_include(include: Sequence[str] | None) -> bool:
    """Whether the text's log-probabilities are wanted."""
    for position, name in enumerate(include or ()):
        if name not in _INCLUDABLE:
            raise unknown_kind(f"include[{position}]", name, _INCLUDABLE)
    return _LOGPROBS in (include or ())


def _read_tools(tools: Sequence[FunctionTool] | None) -> list[Tool] | None:
    if tools is None:
        return None
    return [_read_tool(tool, f"tools[{position}]") for position, tool in enumerate(tools)]


def _read_tool(tool: FunctionTool, param: str) -> Tool:
    if tool.type != "function":
        raise unknown_kind(f"{param}.type", tool.type, ("function",))
    if tool.name is None:
        raise missing(f"{param}.name")
    definition = FunctionDefinition(
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters,
        strict=tool.strict,
    )
    return Tool(type="function", function=definition)


def _read_choice(asked: ResponsesBody) -> str | ToolChoice | None:
    choice = asked.tool_choice
    if not asked.tools and choice in ("auto", "none"):
        return None  # what OpenAI's responses repeat of a request without tools
    if choice is None or isinstance(choice, str):
        return choice
    if choice.type == "function":
        if choice.name is None:
            raise missing("tool_choice.name")
        return ToolChoice(type="function", function=FunctionName(name=choice.name))
    if choice.type != "allowed_tools":
        raise unknown_kind("tool_choice.type", choice.type, ("function", "allowed_tools"))
    tools = [
        AllowedTool(type=tool.type, function=FunctionName(name=tool.name or ""))
        for tool in choice.tools or ()
    ]
    return ToolChoice(
        type="allowed_tools",
        allowed_tools=AllowedTools(mode=choice.mode or "auto", tools=tools),
    )


def _read_format(text_format: TextFormat | None) -> ResponseFormat | None:
    if text_format is None:
        return None
    if text_format.type != "json_schema":
        return ResponseFormat(type=text_format.type)
    if not is_given(text_format.schema):
        raise missing("text.format.schema")
    if text_format.name is None:
        raise missing("text.format.name")
    described = JsonSchemaFormat(name=text_format.name, schema=text_format.schema)
    return ResponseFormat(type="json_schema", json_schema=described)


# ---- what the response repeats ------------------------------------------------------------------


def _repeated(
    asked: ResponsesBody, parsed: ParsedRequest, *, is_stored: bool
) -> Mapping[str, object]:
    effort = None if asked.reasoning is None else asked.reasoning.effort
    return {
        "background": False,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": asked.max_tool_calls,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "prompt_cache_key": asked.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": None},
        "safety_identifier": asked.safety_identifier,
        "service_tier": "default",
        "store": is_stored,
        "temperature": parsed.sampling.temperature,
        "text": {"format": _repeated_format(asked), "verbosity": "medium"},
        "tool_choice": asked.tool_choice or "auto",
        "tools": _repeated_tools(asked.tools or ()),
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": parsed.sampling.top_p,
        "truncation": asked.truncation or "disabled",
        "user": asked.user,
    }


def _repeated_format(asked: ResponsesBody) -> object:
    text_format = None if asked.text is None else asked.text.format
    if text_format is None:
        return {"type": "text"}
    return _given(text_format, ("type", "name", "description", "schema", "strict"))


def _repeated_tools(tools: Iterable[FunctionTool]) -> list[object]:
    return [
        {"strict": None, "parameters": None}
        | _given(tool, ("type", "name", "description", "parameters", "strict"))
        for tool in tools
    ]


def _given(record: msgspec.Struct, names: Sequence[str]) -> dict[str, object]:
    """The named fields that are neither null nor absent."""
    values = {name: getattr(record, name, UNSET) for name in names}
    return {
        name: value
        for name, value in values.items()
        if value is not None and not (isinstance(value, msgspec.Raw) and not is_given(value))
    }
