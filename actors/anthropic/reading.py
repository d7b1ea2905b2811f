"""Reads /v1/messages: its messages and options become the body of a chat, which is read as one.

A message may hold results of tools and text beside them; templates know them as messages of their
own. Raises RequestError naming the field at fault.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from actors.anthropic.bodies import (
    Block,
    CountBody,
    MessageParam,
    MessagesBody,
    OutputFormat,
    ToolChoiceParam,
    ToolParam,
)
from actors.anthropic.errors import THREAD_UNSUPPORTED
from actors.openai.answer_shapes import MessagesShape
from actors.openai.prompts import read_chat_prompt
from actors.openai.protocol import ParsedRequest, draw_seed, read_chat
from actors.openai.request_bodies import (
    ChatBody,
    FunctionCall,
    FunctionDefinition,
    FunctionName,
    JsonSchemaFormat,
    Message,
    ResponseFormat,
    Scalar,
    Tool,
    ToolCall,
    ToolChoice,
    decode_body,
    is_given,
)
from actors.openai.request_rules import check_length, missing, refused_as, unknown_kind
from actors.openai.served_model import ServedModel, check_model
from actors.openai.tool_rules import read_tool_use
from configs.schema import EdgeConfig
from engine.errors import RequestError
from engine.messages import TokenizeRequest

MAX_MESSAGES = 4096
# Field of a chat -> the field that it was made of.
_SOURCES = {
    "messages": "messages",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
}
_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


def parse_messages(
    body: bytes,
    limits: EdgeConfig,
    model: ServedModel,
    new_seed: Callable[[], int] = draw_seed,
) -> ParsedRequest:
    """A /v1/messages body."""
    asked = decode_body(body, MessagesBody)
    _check_is_whole(asked)
    config = asked.output_config
    chat = _as_chat(
        asked,
        max_tokens=asked.max_tokens,
        stream=asked.stream,
        stop=asked.stop_sequences,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        seed=asked.seed,
        priority=asked.priority,
        cache_salt=asked.cache_salt,
        response_format=_read_format(config.format if config is not None else asked.output_format),
        chat_template_kwargs=_variables(asked) | (asked.chat_template_kwargs or {}),
    )
    with refused_as(_SOURCES):
        return replace(read_chat(chat, limits, model, new_seed), shape=MessagesShape())


def parse_count_tokens(body: bytes, model: ServedModel) -> TokenizeRequest:
    """The prompt of a /v1/messages/count_tokens body."""
    asked = decode_body(body, CountBody)
    check_model(asked.model, model)
    chat = _as_chat(asked, chat_template_kwargs=_variables(asked))
    with refused_as(_SOURCES):
        tools = read_tool_use(chat, model, None)
        return read_chat_prompt(chat, model, None if tools is None else tools.definitions)


def _check_is_whole(asked: MessagesBody) -> None:
    """Refuses a thread: its later requests hold new messages alone, and none are kept here.

    The code makes clients send the whole conversation instead.
    """
    if asked.thread is not None:
        raise RequestError(
            "'thread' is not supported by this server: send the whole conversation without it.",
            param="thread",
            code=THREAD_UNSUPPORTED,
        )


def _as_chat(asked: CountBody, **options: object) -> ChatBody:
    check_length("messages", len(asked.messages), MAX_MESSAGES)
    choice = asked.tool_choice
    messages = [*_read_system(asked), *_read_messages(asked.messages)]
    fields: dict[str, object] = {
        "model": asked.model,
        "messages": messages,
        "continue_final_message": _is_begun_answer(messages[-1]),
        "tools": _read_tools(asked.tools),
        "tool_choice": _read_choice(choice),
        "parallel_tool_calls": not (choice is not None and choice.disable_parallel_tool_use),
    }
    return ChatBody(**fields, **options)  # type: ignore[arg-type] # checked by the structs they are of


def _is_begun_answer(last: Message) -> bool:
    """Whether the last message is text of the assistant, in which the answer then goes on."""
    has_text = isinstance(last.content, str) and bool(last.content.strip())
    return last.role == "assistant" and has_text and not last.tool_calls


def _variables(asked: CountBody) -> dict[str, Scalar]:
    """Tells the chat template whether to think; those that know no thinking ignore it."""
    if asked.thinking is None:
        return {}
    return {"enable_thinking": asked.thinking.type != "disabled"}


def _read_system(asked: CountBody) -> list[Message]:
    system = asked.system
    if not system:
        return []
    text = system if isinstance(system, str) else "\n".join(block.text for block in system)
    return [Message(role="system", content=text)]


def _read_messages(messages: Sequence[MessageParam]) -> list[Message]:
    read: list[Message] = []
    for position, message in enumerate(messages):
        param = f"messages[{position}]"
        if message.role not in ("user", "assistant", "system"):
            raise unknown_kind(f"{param}.role", message.role, ("user", "assistant"))
        if isinstance(message.content, str):
            read.append(Message(role=message.role, content=message.content))
        elif message.role == "assistant":
            read.append(_read_answer(message.content, f"{param}.content"))
        else:
            read += _read_asked(message.role, message.content, f"{param}.content")
    return read


def _read_answer(blocks: Sequence[Block], param: str) -> Message:
    """An assistant's text, thinking and calls as one message."""
    texts, thoughts, calls = [], [], []
    for position, block in enumerate(blocks):
        where = f"{param}[{position}]"
        match block.type:
            case "text":
                texts.append(_text_of(block, where))
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                pass  # another server's, and unreadable here
            case "tool_use":
                calls.append(_read_call(block, where))
            case _:
                raise unknown_kind(f"{where}.type", block.type, _BLOCKS[:4])
    return Message(
        role="assistant",
        content="".join(texts) or None,
        reasoning_content="".join(thoughts) or None,
        tool_calls=calls or None,
    )


def _read_asked(role: str, blocks: Sequence[Block], param: str) -> list[Message]:
    """A user's text, behind the results of tools that are in the same message."""
    results: list[Message] = []
    texts: list[str] = []
    for position, block in enumerate(blocks):
        where = f"{param}[{position}]"
        match block.type:
            case "text":
                texts.append(_text_of(block, where))
            case "tool_result":
                if block.tool_use_id is None:
                    raise missing(f"{where}.tool_use_id")
                text = _read_result(block.content, f"{where}.content")
                results.append(Message(role="tool", tool_call_id=block.tool_use_id, content=text))
            case _:
                raise unknown_kind(f"{where}.type", block.type, ("text", "tool_result"))
    asked = [Message(role=role, content="\n".join(texts))] if texts or not results else []
    return [*results, *asked]


def _read_result(content: str | list[Block] | None, param: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for position, block in enumerate(content):
        where = f"{param}[{position}]"
        if block.type != "text":
            raise unknown_kind(f"{where}.type", block.type, ("text",))
        texts.append(_text_of(block, where))
    return "\n".join(texts)


def _text_of(block: Block, where: str) -> str:
    if block.text is None:
        raise missing(f"{where}.text")
    return block.text


def _read_call(block: Block, where: str) -> ToolCall:
    if block.id is None:
        raise missing(f"{where}.id")
    if block.name is None:
        raise missing(f"{where}.name")
    return ToolCall(id=block.id, function=FunctionCall(name=block.name, arguments=block.input))


def _read_tools(tools: Sequence[ToolParam] | None) -> list[Tool] | None:
    if tools is None:
        return None
    return [_read_tool(tool, f"tools[{position}]") for position, tool in enumerate(tools)]


def _read_tool(tool: ToolParam, param: str) -> Tool:
    if tool.type not in (None, "custom"):
        raise unknown_kind(f"{param}.type", tool.type, ("custom",))
    definition = FunctionDefinition(
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema,
        strict=tool.strict,
    )
    return Tool(type="function", function=definition)


def _read_choice(choice: ToolChoiceParam | None) -> str | ToolChoice | None:
    match None if choice is None else choice.type:
        case "any":
            return "required"
        case "tool" if choice is not None:
            if choice.name is None:
                raise missing("tool_choice.name")
            return ToolChoice(type="function", function=FunctionName(name=choice.name))
        case kind:
            return kind


def _read_format(output_format: OutputFormat | None) -> ResponseFormat | None:
    if output_format is None:
        return None
    if output_format.type != "json_schema":
        raise unknown_kind("output_config.format.type", output_format.type, ("json_schema",))
    if not is_given(output_format.schema):
        raise missing("output_config.format.schema")
    described = JsonSchemaFormat(name="output", schema=output_format.schema)
    return ResponseFormat(type="json_schema", json_schema=described)
