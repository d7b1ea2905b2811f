"""Answers of /v1/messages: one message object, or a stream of events in Anthropic's order.

    message_start
      for each block: content_block_start, content_block_delta ..., content_block_stop
    message_delta (stop reason and usage), message_stop

Both ways go through the same blocks, so that they say the same. Made of the events of a chat
(actors/openai/chat_text.py). Source of the shapes: Anthropic's API reference.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from actors.anthropic.errors import error_body
from actors.anthropic.objects import MessageObject, MessageUsage
from actors.openai.chat_text import ChatText
from actors.openai.chat_writers import chat_texts, read_delta
from actors.openai.protocol import ParsedRequest
from actors.openai.response_parts import ResponseIdentity, UsageCount
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

Json = dict[str, Any]


class MessagesWriter:
    """A `ResponseWriter`."""

    def __init__(
        self, parsed: ParsedRequest, identity: ResponseIdentity, tokenizing: Tokenizing
    ) -> None:
        self._parsed = parsed
        self._identity = identity
        self._tokenizing = tokenizing
        self._usage = UsageCount(1)
        self._text: ChatText | None = None  # from `start` on
        self._has_started = False
        self._blocks: list[Json] = []
        self._is_open = False  # whether the last block is being written
        self._arguments: list[str] = []  # of the call that is being written
        self._finish: FinishReason | None = None
        self._stop: str | None = None  # the client's stop sequence that ended the answer

    def start(self, prompt_ids: Sequence[Sequence[int]]) -> list[bytes]:
        """Sends nothing: how much of the prompt was cached is known with the first delta."""
        self._usage.start(prompt_ids)
        (self._text,) = chat_texts(self._parsed, prompt_ids, self._tokenizing)
        return []

    def delta(self, choice_index: int, delta: TextDelta) -> list[bytes]:
        assert self._text is not None, "a delta before the start"
        self._usage.add(choice_index, delta)
        sent: list[bytes] = []
        if not self._has_started:
            self._has_started = True
            begun = self._message(None)
            begun = replace(begun, usage=replace(begun.usage, output_tokens=0))
            sent += self._streamed({"type": "message_start", "message": begun})
        for event in read_delta(self._text, delta):
            sent += self._write(event)
        if delta.finish is not None:
            self._finish = delta.finish
            self._stop = delta.stop_reason if isinstance(delta.stop_reason, str) else None
        return sent

    def finish(self) -> list[bytes]:
        sent = self._close()
        reason = self._stop_reason()
        if not self._parsed.stream:
            return [msgspec.json.encode(self._message(reason))]
        delta = {"stop_reason": reason, "stop_sequence": self._stop}
        end = {"type": "message_delta", "delta": delta, "usage": self._usage_object()}
        return sent + self._streamed(end) + self._streamed({"type": "message_stop"})

    def fail(self, error: Exception) -> bytes:
        """The last event of a stream that failed."""
        return b"event: error\ndata: " + error_body(error) + b"\n\n"

    # ---- blocks ---------------------------------------------------------------------------------

    def _write(self, event: Event) -> list[bytes]:
        match event:
            case Reasoning(text):
                block = {"type": "thinking", "thinking": "", "signature": ""}
                return self._add_text(block, "thinking", text)
            case Content(text):
                return self._add_text({"type": "text", "text": ""}, "text", text)
            case CallStarted(name):
                call_id = f"toolu_{secrets.token_hex(12)}"
                self._arguments = []
                return self._begin({"type": "tool_use", "id": call_id, "name": name, "input": {}})
            case CallArguments(text):
                self._arguments.append(text)
                return self._delta({"type": "input_json_delta", "partial_json": text})
            case CallEnded(is_complete):
                if is_complete:
                    self._blocks[-1]["input"] = msgspec.json.decode("".join(self._arguments))
                return self._close()

    def _add_text(self, block: Json, kind: str, text: str) -> list[bytes]:
        """Adds text to the open block if it is of the kind, else begins `block`."""
        sent = []
        if not self._is_open or self._blocks[-1]["type"] != block["type"]:
            sent = self._begin(block)
        self._blocks[-1][kind] += text
        return sent + self._delta({"type": f"{kind}_delta", kind: text})

    def _begin(self, block: Json) -> list[bytes]:
        sent = self._close()
        self._blocks.append(block)
        self._is_open = True
        start = {
            "type": "content_block_start",
            "index": len(self._blocks) - 1,
            "content_block": block,
        }
        return sent + self._streamed(start)

    def _delta(self, delta: Json) -> list[bytes]:
        index = len(self._blocks) - 1
        return self._streamed({"type": "content_block_delta", "index": index, "delta": delta})

    def _close(self) -> list[bytes]:
        if not self._is_open:
            return []
        self._is_open = False
        return self._streamed({"type": "content_block_stop", "index": len(self._blocks) - 1})

    # ---- the message ----------------------------------------------------------------------------

    def _stop_reason(self) -> str:
        assert self._text is not None, "the end of an answer that never started"
        assert self._finish is not None, "the message is not finished"
        if self._finish is FinishReason.LENGTH:
            return "max_tokens"
        if self._text.has_calls:
            return "tool_use"
        return "end_turn" if self._stop is None else "stop_sequence"

    def _message(self, stop_reason: str | None) -> MessageObject:
        return MessageObject(
            id=f"msg_{self._identity.request_id}",
            model=self._identity.model,
            content=self._blocks,
            stop_reason=stop_reason,
            stop_sequence=self._stop,
            usage=self._usage_object(),
        )

    def _usage_object(self) -> MessageUsage:
        usage = self._usage.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return MessageUsage(
            input_tokens=usage.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
        )

    def _streamed(self, event: Mapping[str, object]) -> list[bytes]:
        """Encodes an event; nothing is sent of an answer that is not streamed."""
        if not self._parsed.stream:
            return []
        kind = str(event["type"]).encode()
        return [b"event: " + kind + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"]
