"""From text deltas to response bytes, with the same verbs for every endpoint and mode.

    writer = build_writer(parsed, identity, tokenizing)
    writer.start(prompt_ids)          -> bytes to send first
    writer.delta(choice_index, delta) -> bytes to send now (none in unary mode)
    writer.finish()                   -> the rest: the whole body, or usage chunk and [DONE]

Choices are numbered prompt by prompt. Knows no HTTP, no workers and no stop strings.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import UNSET, UnsetType

from actors.api.logprob_objects import chat_logprobs, completion_logprobs
from actors.api.openai_objects import (
    SSE_DONE,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    Completion,
    CompletionChoice,
    FinishText,
    PromptTokensDetails,
    Usage,
    sse_event,
    to_json,
)
from actors.api.protocol import Endpoint, ParsedRequest
from engine.output_text import OutputText, OutputToken, TextDelta
from engine.stop_strings import StopStrings
from engine.tokenizing import Tokenizing


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseIdentity:
    """What every object of one response repeats."""

    request_id: str
    created_s: int  # Unix time
    model: str


class ResponseWriter(Protocol):
    """Bytes of one response; the four below differ in endpoint and mode only."""

    def start(self, prompt_ids: Sequence[Sequence[int]]) -> list[bytes]: ...

    def delta(self, choice_index: int, delta: TextDelta) -> list[bytes]: ...

    def finish(self) -> list[bytes]: ...


def build_writer(
    parsed: ParsedRequest, identity: ResponseIdentity, tokenizing: Tokenizing
) -> ResponseWriter:
    match parsed.endpoint, parsed.stream:
        case Endpoint.CHAT, True:
            return ChatStream(parsed, identity, tokenizing)
        case Endpoint.CHAT, False:
            return ChatUnary(parsed, identity, tokenizing)
        case Endpoint.COMPLETION, True:
            return CompletionStream(parsed, identity, tokenizing)
    return CompletionUnary(parsed, identity, tokenizing)


def build_output_text(parsed: ParsedRequest, tokenizing: Tokenizing) -> OutputText:
    """What turns one choice's token records into the deltas that `ResponseWriter.delta` takes."""
    sampling = parsed.base_sampling
    return OutputText(
        # A completion goes on in its prompt's text; a chat message is a text of its own.
        tokenizing.detokenizer(continues_text=parsed.endpoint is Endpoint.COMPLETION),
        StopStrings(parsed.stops, include=parsed.include_stop),
        min_tokens=sampling.min_tokens,
        client_stop_ids=sampling.stop_token_ids,
        include_stop=parsed.include_stop,
    )


class UsageCount:
    """Tokens of one response; each prompt counts once, however many choices it has."""

    def __init__(self, num_choices_per_prompt: int) -> None:
        self._n = num_choices_per_prompt
        self._num_prompt_tokens = 0
        self._num_completion_tokens = 0
        self._num_cached_by_prompt: dict[int, int] = {}

    def start(self, prompt_ids: Sequence[Sequence[int]]) -> None:
        self._num_prompt_tokens = sum(map(len, prompt_ids))

    def add(self, choice_index: int, delta: TextDelta) -> None:
        self._num_completion_tokens += len(delta.tokens)
        # Later choices find the first one's blocks, and a retry its own: only the first was paid.
        if delta.num_cached_tokens is not None and choice_index % self._n == 0:
            self._num_cached_by_prompt.setdefault(choice_index, delta.num_cached_tokens)

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_completion_tokens,
            total_tokens=self._num_prompt_tokens + self._num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=sum(self._num_cached_by_prompt.values())
            ),
        )


@dataclass(slots=True, kw_only=True, eq=False)
class _ChoiceSoFar:
    """What a unary response gathers of one choice."""

    texts: list[str] = field(default_factory=list)
    tokens: list[OutputToken] = field(default_factory=list)
    finish: FinishText | None = None
    stop_reason: str | int | None = None

    def add(self, delta: TextDelta) -> None:
        self.texts.append(delta.text)
        self.tokens.extend(delta.tokens)
        if delta.finish is not None:
            self.finish, self.stop_reason = delta.finish.value, delta.stop_reason

    @property
    def text(self) -> str:
        return "".join(self.texts)


class _Unary:
    """Gathers choices; the body is one object at the end."""

    def __init__(
        self, parsed: ParsedRequest, identity: ResponseIdentity, tokenizing: Tokenizing
    ) -> None:
        self._parsed = parsed
        self._identity = identity
        self._tokenizing = tokenizing
        self._has_logprobs = parsed.base_sampling.logprobs is not None
        self._usage = UsageCount(parsed.n)
        self._choices = [_ChoiceSoFar() for _ in range(parsed.num_choices)]
        self._prompt_ids: Sequence[Sequence[int]] = ()

    def start(self, prompt_ids: Sequence[Sequence[int]]) -> list[bytes]:
        self._prompt_ids = prompt_ids
        self._usage.start(prompt_ids)
        return []

    def delta(self, choice_index: int, delta: TextDelta) -> list[bytes]:
        self._usage.add(choice_index, delta)
        self._choices[choice_index].add(delta)
        return []

    def _finish_of(self, choice_index: int) -> FinishText:
        finish = self._choices[choice_index].finish
        assert finish is not None, f"choice {choice_index} is not finished"
        return finish

    def _token_ids(self, choice_index: int) -> list[int] | UnsetType:
        tokens = self._choices[choice_index].tokens
        return [t.token_id for t in tokens] if self._parsed.return_token_ids else UNSET


class ChatUnary(_Unary):
    """A chat.completion object."""

    def finish(self) -> list[bytes]:
        ids = list(self._prompt_ids[0]) if self._parsed.return_token_ids else UNSET
        body = ChatCompletion(
            id=f"chatcmpl-{self._identity.request_id}",
            created=self._identity.created_s,
            model=self._identity.model,
            choices=[self._choice(index) for index in range(self._parsed.num_choices)],
            usage=self._usage.usage(),
            prompt_token_ids=ids,
        )
        return [to_json(body)]

    def _choice(self, index: int) -> ChatChoice:
        choice = self._choices[index]
        return ChatChoice(
            index=index,
            message=ChatMessage(content=choice.text),
            logprobs=chat_logprobs(choice.tokens, self._tokenizing) if self._has_logprobs else None,
            finish_reason=self._finish_of(index),
            stop_reason=choice.stop_reason,
            token_ids=self._token_ids(index),
        )


class CompletionUnary(_Unary):
    """A text_completion object."""

    def finish(self) -> list[bytes]:
        body = Completion(
            id=f"cmpl-{self._identity.request_id}",
            created=self._identity.created_s,
            model=self._identity.model,
            choices=[self._choice(index) for index in range(self._parsed.num_choices)],
            usage=self._usage.usage(),
        )
        return [to_json(body)]

    def _choice(self, index: int) -> CompletionChoice:
        choice = self._choices[index]
        prompt_ids = self._prompt_ids[index // self._parsed.n]
        return CompletionChoice(
            index=index,
            text=choice.text,
            logprobs=(
                completion_logprobs(choice.tokens, self._tokenizing) if self._has_logprobs else None
            ),
            finish_reason=self._finish_of(index),
            stop_reason=choice.stop_reason,
            token_ids=self._token_ids(index),
            prompt_token_ids=list(prompt_ids) if self._parsed.return_token_ids else UNSET,
        )


class _Stream:
    """What both kinds of chunks share."""

    def __init__(
        self, parsed: ParsedRequest, identity: ResponseIdentity, tokenizing: Tokenizing
    ) -> None:
        self._parsed = parsed
        self._identity = identity
        self._tokenizing = tokenizing
        self._has_logprobs = parsed.base_sampling.logprobs is not None
        # Such tokens are reported even while their text is held back.
        self._reports_tokens = self._has_logprobs or parsed.return_token_ids
        self._usage = UsageCount(parsed.n)
        self._num_unfinished = parsed.num_choices

    def _count(self, choice_index: int, delta: TextDelta) -> None:
        self._usage.add(choice_index, delta)
        self._num_unfinished -= delta.finish is not None

    def _has_news(self, delta: TextDelta) -> bool:
        return bool(delta.text) or (self._reports_tokens and bool(delta.tokens))

    def _token_ids(self, delta: TextDelta) -> list[int] | UnsetType:
        return [t.token_id for t in delta.tokens] if self._parsed.return_token_ids else UNSET

    def _chunk_usage(self) -> Usage | UnsetType | None:
        """null on every chunk but the last once the client asked for usage, else no field."""
        if self._parsed.continuous_usage:
            return self._usage.usage()
        return None if self._parsed.include_usage else UNSET

    def _assert_complete(self) -> None:
        assert self._num_unfinished == 0, f"{self._num_unfinished} choices are not finished"


class ChatStream(_Stream):
    """chat.completion.chunk events: role, text, finish for each choice; then usage and [DONE]."""

    def start(self, prompt_ids: Sequence[Sequence[int]]) -> list[bytes]:
        self._usage.start(prompt_ids)
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
        events = []
        if self._has_news(delta):
            choice = ChatChunkChoice(
                index=choice_index,
                delta=ChatDelta(content=delta.text),
                logprobs=(
                    chat_logprobs(delta.tokens, self._tokenizing) if self._has_logprobs else None
                ),
                token_ids=self._token_ids(delta),
            )
            events.append(self._event(choice))
        if delta.finish is not None:
            choice = ChatChunkChoice(
                index=choice_index,
                delta=ChatDelta(),
                finish_reason=delta.finish.value,
                stop_reason=delta.stop_reason,
            )
            events.append(self._event(choice))
        return events

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


class CompletionStream(_Stream):
    """text_completion events; the last of a choice carries its finish_reason."""

    def __init__(
        self, parsed: ParsedRequest, identity: ResponseIdentity, tokenizing: Tokenizing
    ) -> None:
        super().__init__(parsed, identity, tokenizing)
        self._prompt_ids: Sequence[Sequence[int]] = ()
        self._started: set[int] = set()  # choices that have sent a chunk

    def start(self, prompt_ids: Sequence[Sequence[int]]) -> list[bytes]:
        self._prompt_ids = prompt_ids
        self._usage.start(prompt_ids)
        return []

    def delta(self, choice_index: int, delta: TextDelta) -> list[bytes]:
        self._count(choice_index, delta)
        if not self._has_news(delta) and delta.finish is None:
            return []
        choice = CompletionChoice(
            index=choice_index,
            text=delta.text,
            logprobs=(
                completion_logprobs(delta.tokens, self._tokenizing) if self._has_logprobs else None
            ),
            finish_reason=None if delta.finish is None else delta.finish.value,
            stop_reason=UNSET if delta.finish is None else delta.stop_reason,
            token_ids=self._token_ids(delta),
            prompt_token_ids=self._first_prompt_ids(choice_index),
        )
        return [sse_event(self._chunk([choice], self._chunk_usage()))]

    def finish(self) -> list[bytes]:
        self._assert_complete()
        if not self._parsed.include_usage:
            return [SSE_DONE]
        return [sse_event(self._chunk([], self._usage.usage())), SSE_DONE]

    def _first_prompt_ids(self, choice_index: int) -> list[int] | UnsetType:
        is_first = choice_index not in self._started
        self._started.add(choice_index)
        if not is_first or not self._parsed.return_token_ids:
            return UNSET
        return list(self._prompt_ids[choice_index // self._parsed.n])

    def _chunk(
        self, choices: list[CompletionChoice], usage: Usage | UnsetType | None
    ) -> Completion:
        return Completion(
            id=f"cmpl-{self._identity.request_id}",
            created=self._identity.created_s,
            model=self._identity.model,
            choices=choices,
            usage=usage,
        )
