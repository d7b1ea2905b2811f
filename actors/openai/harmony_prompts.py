"""Chats as gpt-oss's template of the harmony format reads them.

The template takes one call a message and names a tool's answer after the last call before it; it
has `thinking` where others have `reasoning_content`, fails at a content that is null and at a
function without a description, and leaves out a system message that is not the first. Here such
chats become ones that it renders whole, or are refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile

from actors.openai.request_rules import invalid
from engine.errors import RequestError

EFFORTS = ("low", "medium", "high")  # that the models were trained with
_GAP = "\n\n"

Message = dict[str, object]


def harmony_messages(messages: Sequence[Message]) -> list[Message]:
    """The messages for the template, from `prompts.read_messages`. Raises RequestError."""
    first = list(takewhile(lambda message: message["role"] == "system", messages))
    rest = messages[len(first) :]
    for position, message in enumerate(rest, len(first)):
        if message["role"] == "system":
            raise invalid(
                f"messages[{position}].role",
                "this model reads a system or developer message only before all others.",
            )
    said: list[Message] = []
    if first:
        said = [{"role": "system", "content": _joined([m["content"] for m in first])}]
    return [*said, *_split_calls(rest)]


def harmony_tools(definitions: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Definitions of functions, each with a description."""
    return [
        {**tool, "function": {"description": "", **function}}
        for tool in definitions
        if isinstance(function := tool["function"], Mapping)
    ]


def check_effort(effort: str | None) -> None:
    if effort is not None and effort not in EFFORTS:
        expected = ", ".join(f"'{known}'" for known in EFFORTS)
        raise invalid("reasoning_effort", f"this model knows {expected}, got '{effort}'.")


def _split_calls(messages: Sequence[Message]) -> Iterator[Message]:
    """Yields messages with one call each, its answer behind it.

    Answers that follow a message with several calls go with their calls, in the calls' order.
    """
    waiting = list(reversed(messages))
    while waiting:
        message = waiting.pop()
        calls = message.get("tool_calls")
        if message["role"] == "tool":
            raise _misplaced(message)
        if not isinstance(calls, list):
            yield _plain(message)
            continue
        answers: list[Message] = []
        while waiting and waiting[-1]["role"] == "tool":
            answers.append(waiting.pop())
        yield from _one_by_one(message, calls, answers)


def _one_by_one(
    message: Message, calls: Sequence[Mapping[str, object]], answers: Sequence[Message]
) -> Iterator[Message]:
    """Yields each call with its answers; what was thought and said before goes with the first."""
    by_id: dict[object, list[Message]] = {call["id"]: [] for call in calls}
    for answer in answers:
        if answer["tool_call_id"] not in by_id:
            raise _misplaced(answer)
        by_id[answer["tool_call_id"]].append(answer)
    thought = _joined((message.get("reasoning_content"), message["content"]))
    for index, call in enumerate(calls):
        thinking = {"thinking": thought} if thought and index == 0 else {}
        yield {"role": "assistant", **thinking, "tool_calls": [call]}
        yield from by_id.pop(call["id"], ())


def _misplaced(answer: Message) -> RequestError:
    return invalid(
        "messages",
        f"the tool's answer to '{answer['tool_call_id']}' does not follow its call; this model"
        " reads answers right behind the message with their calls.",
    )


def _plain(message: Message) -> Message:
    """A message without calls. The template leaves its thinking out unless it is continued."""
    plain = {name: value for name, value in message.items() if name != "reasoning_content"}
    thought = message.get("reasoning_content")
    return plain | {"thinking": thought} if thought else plain


def _joined(texts: Sequence[object]) -> str:
    return _GAP.join(str(text) for text in texts if text)
