"""Responses of /v1/chat/completions: one chat.completion object, or a stream of chunks.

Both are made of the same events (actors/openai/chat_text.py), so that they say the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType

from actors.openai.chat_text import ChatText, ends_thinking_open, new_call_id
from actors.openai.logprob_objects import TokenNames, chat_logprobs, prompt_logprobs
from actors.openai.protocol import ParsedRequest
from actors.openai.response_objects import (
    SSE_DONE,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    FinishText,
    FunctionPiece,
    FunctionText,
    PromptLogprobList,
    ToolCallObject,
    ToolCallPiece,
    Usage,
    sse_event,
    to_json,
)
from actors.openai.response_parts import ResponseIdentity, StreamResponse, UnaryResponse
from actors.openai.tools.events import (
    CallArguments,
    CallEnded,
    CallStarted,
    Content,
    Event,
    Reasoning,
)
from engine.messages import TokenizeRequest
from engine.request import FinishReason
from engine.text.output_text import OutputToken, TextDelta
from engine.text.tokenizing import Tokenizing


def chat_texts(
    parsed: ParsedRequest, prompt_ids: Sequence[Sequence[int]], tokenizing: Tokenizing
) -> list[ChatText]:
    """Builds the reader of each choice's text. Several prompts are a batch, which echoes none."""
    opening = _echo(parsed)
    starts_thinking = [
        parsed.splits_reasoning and ends_thinking_open(ids, tokenizing) for ids in prompt_ids
    ]
    harmony = parsed.harmony
    so_far = [
        "" if harmony is None else harmony.message_so_far(ids, tokenizing) for ids in prompt_ids
    ]
    return [
        ChatText(
            parsed,
            starts_thinking=starts_thinking[index // parsed.n],
            opening=opening,
            message_so_far=so_far[index // parsed.n],
        )
        for index in range(parsed.num_choices)
    ]


def _echo(parsed: ParsedRequest) -> str:
    """The text of the last message where an echo is wanted and the answer is of the same role."""
    if not parsed.echo:
        return ""
    prompt = parsed.prompts[0]
    assert isinstance(prompt, TokenizeRequest), "a chat's prompt is messages"
    assert prompt.messages, "a chat's prompt is messages"
    last = prompt.messages[-1]
    if prompt.add_generation_prompt and last["role"] != "assistant":
        return ""
    return str(last["content"] or "")


def read_delta(text: ChatText, delta: TextDelta) -> list[Event]:
    """Returns what a delta adds to its choice, and at the choice's end what was held back."""
    events = text.push(delta.text)
    if delta.finish is None:
        return events
    return events + text.finish(is_cut=delta.finish is FinishReason.LENGTH)


def _finish_text(finish: FinishText, text: ChatText) -> FinishText:
    """Returns the finish reason: `tool_calls` if the choice ended by itself after calls."""
    return "tool_calls" if finish == "stop" and text.has_calls else finish


def _logprobs(
    parsed: ParsedRequest, tokens: Sequence[OutputToken], token_names: TokenNames
) -> ChatLogprobs:
    lists_chosen = bool(parsed.sampling.logprob_token_ids)
    return chat_logprobs(tokens, token_names, lists_chosen=lists_chosen)


@dataclass(slots=True, eq=False)
class _MessageSoFar:
    """The message of one choice of an unstreamed answer, built from its events."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # per call
    arguments: list[list[str]] = field(default_factory=list)  # likewise

    def add(self, event: Event) -> None:
        match event:
            case Content(text):
                self.content.append(text)
            case Reasoning(text):
                self.reasoning.append(text)
            case CallStarted(name):
                self.names.append(name)
                self.arguments.append([])
            case CallArguments(text):
                self.arguments[-1].append(text)
            case CallEnded():
                pass

    def message(self, parsed: ParsedRequest) -> ChatMessage:
        calls = [
            ToolCallObject(
                id=new_call_id(parsed.tool_format),
                function=FunctionText(name=name, arguments="".join(pieces)),
            )
            for name, pieces in zip(self.names, self.arguments, strict=True)
        ]
        has_more = bool(calls or self.reasoning)
        content, reasoning = "".join(self.content), "".join(self.reasoning)
        return ChatMessage(
            content=content if content or not has_more else None,
            reasoning_content=reasoning or UNSET,
            reasoning=reasoning or None,
            tool_calls=calls or UNSET,
        )


class ChatUnary(UnaryResponse):
    """A chat.completion object."""

    def __init__(
        self, parsed: ParsedRequest, identity: ResponseIdentity, tokenizing: Tokenizing
    ) -> None:
        super().__init__(parsed, identity, tokenizing)
        self._token_names = TokenNames(tokenizing, parsed.names_tokens_by_id)
        self._texts: list[ChatText] = []  # per choice, from `start` on
        self._messages = [_MessageSoFar() for _ in range(parsed.num_choices)]

    def start(self, prompt_ids: Sequence[Sequence[int]]) -> list[bytes]:
        self._texts = chat_texts(self._parsed, prompt_ids, self._tokenizing)
        return super().start(prompt_ids)

    def delta(self, choice_index: int, delta: TextDelta) -> list[bytes]:
        for event in read_delta(self._texts[choice_index], delta):
            self._messages[choice_index].add(event)
        return super().delta(choice_index, delta)

    def finish(self) -> list[bytes]:
        has_one = len(self._prompt_ids) == 1  # a batch has no place for the ids of each prompt
        ids = list(self._prompt_ids[0]) if self._parsed.return_token_ids and has_one else None
        body = ChatCompletion(
            id=f"chatcmpl-{self._identity.request_id}",
            created=self._identity.created_s,
            model=self._identity.model,
            choices=[self._choice(index) for index in range(self._parsed.num_choices)],
            usage=self._usage.usage(),
            prompt_token_ids=ids,
            prompt_logprobs=self._of_prompt(),
        )
        return [to_json(body)]

    def _of_prompt(self) -> PromptLogprobList | None:
        """The same for all choices."""
        num_best = self._parsed.prompt_logprobs
        if num_best is None:
            return None
        scores = self._choices[0].prompt
        return prompt_logprobs(self._prompt_ids[0], scores, num_best, self._tokenizing)

    def _choice(self, index: int) -> ChatChoice:
        choice = self._choices[index]
        return ChatChoice(
            index=index,
            message=self._messages[index].message(self._parsed),
            logprobs=_logprobs(self._parsed, choice.tokens, self._token_names)
            if self._has_logprobs
            else None,
            finish_reason=_finish_text(self._finish_of(index), self._texts[index]),
            stop_reason=choice.stop_reason,
            token_ids=self._token_ids(index),
        )


class ChatStream(StreamResponse):
    """chat.completion.chunk events: role, text, finish for each choice; then usage and [DONE]."""

    def __init__(
        self, parsed: ParsedRequest, identity: ResponseIdentity, tokenizing: Tokenizing
    ) -> None:
        super().__init__(parsed, identity, tokenizing)
        self._token_names = TokenNames(tokenizing, parsed.names_tokens_by_id)
        self._texts: list[ChatText] = []  # per choice, from `start` on
        self._num_calls = [0] * parsed.num_choices

    def start(self, prompt_ids: Sequence[Sequence[int]]) -> list[bytes]:
        self._usage.start(prompt_ids)
        self._texts = chat_texts(self._parsed, prompt_ids, self._tokenizing)
        ids = list(prompt_ids[0]) if self._parsed.return_token_ids else UNSET
        return [
            self._event(
                ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content="")),
                prompt_token_ids=ids,
            )
            for index in range(self._parsed.num_choices)
        ]

    def delta(self, choice_index: int, delta: TextDelta) -> list[bytes]:
        self._count(choice_index, delta)
        read = read_delta(self._texts[choice_index], delta)
        pieces = [
            piece for event in read if (piece := self._piece(choice_index, event)) is not None
        ]
        # Tokens are reported when they come, even while their text is held back.
        reports = not pieces and self._reports_tokens and bool(delta.tokens)
        if reports or (not pieces and delta.finish is not None):
            pieces = [ChatDelta(content="") if reports else ChatDelta()]
        return [
            self._event(self._choice(choice_index, piece, delta, position, len(pieces)))
            for position, piece in enumerate(pieces)
        ]

    def _choice(
        self, index: int, piece: ChatDelta, delta: TextDelta, position: int, num_pieces: int
    ) -> ChatChunkChoice:
        """One of a delta's pieces: tokens go with the first, the end with the last."""
        is_first, is_end = position == 0, position == num_pieces - 1 and delta.finish is not None
        finish = None
        if is_end and delta.finish is not None:
            finish = _finish_text(delta.finish.value, self._texts[index])
        has_logprobs = is_first and self._has_logprobs and bool(delta.tokens)
        return ChatChunkChoice(
            index=index,
            delta=piece,
            logprobs=_logprobs(self._parsed, delta.tokens, self._token_names)
            if has_logprobs
            else None,
            token_ids=self._token_ids(delta) if is_first else UNSET,
            finish_reason=finish,
            stop_reason=delta.stop_reason if is_end else UNSET,
        )

    def _piece(self, choice_index: int, event: Event) -> ChatDelta | None:
        """Returns the chunk of an event; None for the end of a call, which is not sent."""
        match event:
            case Content(text):
                return ChatDelta(content=text)
            case Reasoning(text):
                return ChatDelta(reasoning_content=text, reasoning=text)
            case CallStarted(name):
                call = ToolCallPiece(
                    index=self._num_calls[choice_index],
                    id=new_call_id(self._parsed.tool_format),
                    type="function",
                    function=FunctionPiece(name=name, arguments=""),
                )
                self._num_calls[choice_index] += 1
                return ChatDelta(tool_calls=[call])
            case CallArguments(text):
                call = ToolCallPiece(
                    index=self._num_calls[choice_index] - 1, function=FunctionPiece(arguments=text)
                )
                return ChatDelta(tool_calls=[call])
        return None

    def finish(self) -> list[bytes]:
        self._assert_complete()
        if not self._parsed.include_usage:
            return [SSE_DONE]
        return [sse_event(self._chunk([], self._usage.usage(), UNSET)), SSE_DONE]

    def _event(
        self, choice: ChatChunkChoice, prompt_token_ids: list[int] | UnsetType = UNSET
    ) -> bytes:
        return sse_event(self._chunk([choice], self._chunk_usage(), prompt_token_ids))

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        usage: Usage | UnsetType | None,
        prompt_token_ids: list[int] | UnsetType,
    ) -> ChatChunk:
        return ChatChunk(
            id=f"chatcmpl-{self._identity.request_id}",
            created=self._identity.created_s,
            model=self._identity.model,
            choices=choices,
            usage=usage,
            prompt_token_ids=prompt_token_ids,
        )
