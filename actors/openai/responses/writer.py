"""Answers of /v1/responses: one response object, or a stream of events in OpenAI's order.

    response.created, response.in_progress
      for each item: response.output_item.added
        for its part:  response.content_part.added, ...delta, ...done, response.content_part.done
        for a call:    response.function_call_arguments.delta, ...done
      response.output_item.done
    response.completed, or response.incomplete

Both ways go through the same items, so that they say the same. Made of the events of a chat
(actors/openai/chat_text.py).
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET

from actors.openai.answer_shapes import ResponsesShape
from actors.openai.chat_text import ChatText, new_call_id
from actors.openai.chat_writers import chat_texts, read_delta
from actors.openai.logprob_objects import TokenNames, chat_logprobs
from actors.openai.protocol import ParsedRequest
from actors.openai.response_objects import TokenLogprob, error_detail
from actors.openai.response_parts import ResponseIdentity, UsageCount
from actors.openai.responses.objects import (
    ID_PREFIX,
    CallItem,
    IncompleteDetails,
    InputTokensDetails,
    Item,
    ItemStatus,
    MessageItem,
    OutputText,
    OutputTokensDetails,
    Part,
    RawMessage,
    ReasoningItem,
    ReasoningText,
    ResponseObject,
    ResponseUsage,
    response_json,
    sse_event,
)
from actors.openai.tools.events import (
    CallArguments,
    CallEnded,
    CallStarted,
    Content,
    Event,
    Reasoning,
)
from engine.request import FinishReason
from engine.text.output_text import TextDelta
from engine.text.tokenizing import Tokenizing

Fields = Mapping[str, object]


@dataclass(slots=True, kw_only=True, eq=False)
class _OpenItem:
    """The item that is being written."""

    kind: type[Reasoning] | type[Content] | type[CallStarted]
    id: str
    name: str = ""  # of a call, as the next
    call_id: str = ""
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def part(self, *, has_logprobs: bool) -> Part:
        if self.kind is Reasoning:
            return ReasoningText(text=self.text)
        return OutputText(text=self.text, logprobs=self.logprobs if has_logprobs else UNSET)

    def item(self, status: ItemStatus, *, has_logprobs: bool, is_begun: bool = False) -> Item:
        """`is_begun`: as it is announced, before anything is in it."""
        if self.kind is CallStarted:
            return CallItem(
                id=self.id,
                call_id=self.call_id,
                name=self.name,
                arguments=self.text,
                status=status,
            )
        parts = [] if is_begun else [self.part(has_logprobs=has_logprobs)]
        if self.kind is Reasoning:
            texts = [part for part in parts if isinstance(part, ReasoningText)]
            return ReasoningItem(id=self.id, content=texts, status=status)
        content = [part for part in parts if isinstance(part, OutputText)]
        return MessageItem(id=self.id, content=content, status=status)


class ResponsesWriter:
    """A `ResponseWriter`."""

    def __init__(
        self,
        parsed: ParsedRequest,
        identity: ResponseIdentity,
        tokenizing: Tokenizing,
        shape: ResponsesShape,
    ) -> None:
        self._parsed = parsed
        self._shape = shape
        self._tokenizing = tokenizing
        self._names = TokenNames(tokenizing)
        self._id = f"{ID_PREFIX}{identity.request_id}"
        self._created_s = identity.created_s
        self._model = identity.model
        self._usage = UsageCount(1)
        self._num_reasoning_tokens = 0
        self._prompt_ids: list[int] = []
        self._output_ids: list[int] = []
        self._text: ChatText | None = None  # from `start` on
        self._open: _OpenItem | None = None
        self._items: list[Item] = []  # finished
        self._finish: FinishReason | None = None
        self._pending: list[TokenLogprob] = []  # of tokens whose text is still held back
        self._sequence_number = 0

    def start(self, prompt_ids: Sequence[Sequence[int]]) -> list[bytes]:
        self._usage.start(prompt_ids)
        (self._prompt_ids,) = map(list, prompt_ids)
        (self._text,) = chat_texts(self._parsed, prompt_ids, self._tokenizing)
        response = self._response("in_progress")
        return self._streamed(
            ("response.created", {"response": response}),
            ("response.in_progress", {"response": response}),
        )

    def delta(self, choice_index: int, delta: TextDelta) -> list[bytes]:
        assert self._text is not None, "a delta before the start"
        self._usage.add(choice_index, delta)
        self._pending += self._logprobs(delta)
        self._output_ids += [token.token_id for token in delta.tokens]
        sent: list[bytes] = []
        for event in read_delta(self._text, delta):
            sent += self._write(event)
            self._pending = []
        if self._open is not None and self._open.kind is Reasoning:
            self._num_reasoning_tokens += len(delta.tokens)
        self._finish = delta.finish or self._finish
        return sent

    def finish(self) -> list[bytes]:
        assert self._finish is not None, "the response is not finished"
        is_cut = self._finish is FinishReason.LENGTH
        sent = self._close("incomplete" if is_cut else "completed")
        if not self._items:  # an answer without a token of text is an empty message
            sent += self._begin(_OpenItem(kind=Content, id=_new_id("msg")))
            sent += self._close("incomplete" if is_cut else "completed")
        response = self._response("incomplete" if is_cut else "completed")
        if self._shape.keep is not None:
            self._shape.keep(self._id, msgspec.json.encode(response), self._said())
        if not self._parsed.stream:
            return [msgspec.json.encode(response)]
        kind = "response.incomplete" if is_cut else "response.completed"
        return sent + self._streamed((kind, {"response": response}))

    def fail(self, error: Exception) -> bytes:
        """The last event of a stream that failed."""
        detail = error_detail(error)
        fields = {"code": detail.code, "message": detail.message, "param": detail.param}
        return self._streamed(("error", fields))[0]

    # ---- items ----------------------------------------------------------------------------------

    def _write(self, event: Event) -> list[bytes]:
        match event:
            case Reasoning(text):
                return self._reopen(Reasoning, "rs") + self._add(text, [])
            case Content(text):
                return self._reopen(Content, "msg") + self._add(text, self._pending)
            case CallStarted(name):
                call_id = new_call_id(self._parsed.tool_format)
                call = _OpenItem(kind=CallStarted, id=_new_id("fc"), name=name, call_id=call_id)
                return self._close("completed") + self._begin(call)
            case CallArguments(text):
                return self._add(text, [])
            case CallEnded(is_complete):
                return self._close("completed" if is_complete else "incomplete")

    def _reopen(self, kind: type[Reasoning] | type[Content], prefix: str) -> list[bytes]:
        """Goes on in the open item if it is of that kind, else begins one."""
        if self._open is not None and self._open.kind is kind:
            return []
        return self._close("completed") + self._begin(_OpenItem(kind=kind, id=_new_id(prefix)))

    def _begin(self, opened: _OpenItem) -> list[bytes]:
        self._open = opened
        item = opened.item("in_progress", has_logprobs=False, is_begun=True)
        added = ("response.output_item.added", {"output_index": len(self._items), "item": item})
        if opened.kind is CallStarted:
            return self._streamed(added)
        fields = self._at({"part": self._part(opened)})
        return self._streamed(added, ("response.content_part.added", fields))

    def _add(self, text: str, logprobs: list[TokenLogprob]) -> list[bytes]:
        opened = self._open
        assert opened is not None, "text of no item"
        opened.texts.append(text)
        opened.logprobs += logprobs
        if opened.kind is CallStarted:
            fields = self._at_item({"delta": text})
            return self._streamed(("response.function_call_arguments.delta", fields))
        if opened.kind is Reasoning:
            return self._streamed(("response.reasoning_text.delta", self._at({"delta": text})))
        fields = self._at({"delta": text, "logprobs": logprobs})
        return self._streamed(("response.output_text.delta", fields))

    def _close(self, status: ItemStatus) -> list[bytes]:
        opened = self._open
        if opened is None:
            return []
        item = opened.item(status, has_logprobs=self._shape.has_logprobs)
        done = ("response.output_item.done", {"output_index": len(self._items), "item": item})
        sent = self._streamed(*self._ends(opened), done)
        self._items.append(item)
        self._open = None
        return sent

    def _ends(self, opened: _OpenItem) -> list[tuple[str, Fields]]:
        """The events that end the content of an item."""
        if opened.kind is CallStarted:
            fields = self._at_item({"arguments": opened.text, "name": opened.name})
            return [("response.function_call_arguments.done", fields)]
        part = ("response.content_part.done", self._at({"part": self._part(opened)}))
        if opened.kind is Reasoning:
            return [("response.reasoning_text.done", self._at({"text": opened.text})), part]
        fields = self._at({"text": opened.text, "logprobs": opened.logprobs})
        return [("response.output_text.done", fields), part]

    def _part(self, opened: _OpenItem) -> Part:
        return opened.part(has_logprobs=self._shape.has_logprobs)

    def _at_item(self, fields: Fields) -> Fields:
        """The fields with the place of the open item."""
        assert self._open is not None, "no item is open"
        return {"item_id": self._open.id, "output_index": len(self._items), **fields}

    def _at(self, fields: Fields) -> Fields:
        """The fields with the place of the open item's only part."""
        return self._at_item({"content_index": 0, **fields})

    # ---- the response ---------------------------------------------------------------------------

    def _logprobs(self, delta: TextDelta) -> list[TokenLogprob]:
        if not self._shape.has_logprobs:
            return []
        return chat_logprobs(delta.tokens, self._names).content

    def _response(self, status: ItemStatus) -> dict[str, object]:
        is_over = status != "in_progress"
        response = ResponseObject(
            id=self._id,
            created_at=self._created_s,
            model=self._model,
            status=status,
            output=self._items if is_over else [],
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
            usage=self._response_usage() if is_over else None,
        )
        shown = self._raw_messages() if is_over and self._shape.shows_tokens else {}
        return response_json(response, self._shape.repeated) | shown

    def _raw_messages(self) -> dict[str, object]:
        """Returns vLLM's fields with the tokens that the model read and wrote."""
        shown = {"input_messages": self._prompt_ids, "output_messages": self._output_ids}
        decode = self._tokenizing.decode
        return {
            name: [RawMessage(message=decode(ids, skip_special_tokens=False), tokens=ids)]
            for name, ids in shown.items()
        }

    def _response_usage(self) -> ResponseUsage:
        usage = self._usage.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=cached),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=self._num_reasoning_tokens),
            total_tokens=usage.total_tokens,
        )

    def _said(self) -> list[dict[str, object]]:
        """The items as one message of a chat, which continues the conversation."""
        texts = [part.text for i in self._items if isinstance(i, MessageItem) for part in i.content]
        calls = [
            {"id": i.call_id, "function": {"name": i.name, "arguments": i.arguments}}
            for i in self._items
            if isinstance(i, CallItem) and i.status == "completed"
        ]
        said: dict[str, object] = {
            "role": "assistant",
            "content": "".join(texts),
            "tool_calls": calls or None,
        }
        if self._parsed.harmony is None or not calls:
            return [said]
        # The format wants what was thought before a call beside the call.
        thoughts = [
            part.text for i in self._items if isinstance(i, ReasoningItem) for part in i.content
        ]
        return [said | {"reasoning_content": "".join(thoughts)}]

    def _streamed(self, *events: tuple[str, Fields]) -> list[bytes]:
        """Encodes and numbers events; nothing is sent of an answer that is not streamed."""
        if not self._parsed.stream:
            return []
        sent = []
        for kind, fields in events:
            sent.append(sse_event(kind, {"sequence_number": self._sequence_number, **fields}))
            self._sequence_number += 1
        return sent


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"
