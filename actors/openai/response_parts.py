"""The parts that all response writers share: identity, usage, and the two modes.

`UnaryResponse` gathers and answers once; `StreamResponse` counts what it passes on. A `PromptDelta`
has the scores of a prompt; it comes with its choice's first delta, the only one if no output was
asked for. Knows neither endpoint's objects.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from msgspec import UNSET, UnsetType

from actors.openai.protocol import ParsedRequest
from actors.openai.response_objects import (
    FinishText,
    PromptTokensDetails,
    Usage,
    error_reply,
    sse_error,
)
from engine.messages import TokenRecord
from engine.request import FinishReason, PromptScores
from engine.text.output_text import OutputText, OutputToken, TextDelta
from engine.text.tokenizing import Tokenizing


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDelta(TextDelta):
    """A delta with scores of the prompt."""

    prompt: PromptScores


def read_records(records: Sequence[TokenRecord], output: OutputText) -> TextDelta:
    """The delta of tokens that came together, up to the one that ends the choice."""
    delta = _read_record(records[0], output)
    if len(records) == 1:
        return delta
    deltas = [delta]
    for record in records[1:]:
        if deltas[-1].finish is not None:
            break
        deltas.append(_read_record(record, output))
    last = deltas[-1]
    return replace(
        delta,  # the first: what is known of the prompt comes with it
        text="".join([one.text for one in deltas]),
        tokens=[token for one in deltas for token in one.tokens],
        finish=last.finish,
        stop_reason=last.stop_reason,
    )


def _read_record(record: TokenRecord, output: OutputText) -> TextDelta:
    """The next delta of the choice whose text is `output`; no text is made of a prompt's token."""
    delta = output.push(record) if record.is_output else _end_of_prompt(record)
    if record.prompt is None:
        return delta
    return PromptDelta(
        text=delta.text,
        tokens=delta.tokens,
        finish=delta.finish,
        stop_reason=delta.stop_reason,
        num_cached_tokens=delta.num_cached_tokens,
        prompt=record.prompt,
    )


def _end_of_prompt(record: TokenRecord) -> TextDelta:
    assert record.finish is not None, f"{record.key} asked for no token and goes on"
    finish = FinishReason(record.finish)
    return TextDelta(text="", finish=finish, num_cached_tokens=record.num_cached_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseIdentity:
    """The fields that every object of one response repeats."""

    request_id: str
    created_s: int  # Unix time
    model: str


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
class ChoiceSoFar:
    """One choice of an unstreamed response, gathered from its deltas."""

    texts: list[str] = field(default_factory=list)
    tokens: list[OutputToken] = field(default_factory=list)
    finish: FinishText | None = None
    stop_reason: str | int | None = None
    prompt: PromptScores | None = None  # None = nothing was asked of it, or it has one token

    def add(self, delta: TextDelta) -> None:
        if isinstance(delta, PromptDelta):
            self.prompt = delta.prompt
        self.texts.append(delta.text)
        self.tokens.extend(delta.tokens)
        if delta.finish is not None:
            self.finish, self.stop_reason = delta.finish.value, delta.stop_reason

    @property
    def text(self) -> str:
        return "".join(self.texts)


class UnaryResponse:
    """Gathers choices; the body is one object at the end."""

    def __init__(
        self, parsed: ParsedRequest, identity: ResponseIdentity, tokenizing: Tokenizing
    ) -> None:
        self._parsed = parsed
        self._identity = identity
        self._tokenizing = tokenizing
        self._has_logprobs = parsed.sampling.logprobs is not None
        self._usage = UsageCount(parsed.n)
        self._choices = [ChoiceSoFar() for _ in range(parsed.num_choices)]
        self._prompt_ids: Sequence[Sequence[int]] = ()

    def start(self, prompt_ids: Sequence[Sequence[int]]) -> list[bytes]:
        self._prompt_ids = prompt_ids
        self._usage.start(prompt_ids)
        return []

    def delta(self, choice_index: int, delta: TextDelta) -> list[bytes]:
        self._usage.add(choice_index, delta)
        self._choices[choice_index].add(delta)
        return []

    def fail(self, error: Exception) -> bytes:
        return error_reply(error).body

    def _finish_of(self, choice_index: int) -> FinishText:
        finish = self._choices[choice_index].finish
        assert finish is not None, f"choice {choice_index} is not finished"
        return finish

    def _token_ids(self, choice_index: int) -> list[int] | None:
        tokens = self._choices[choice_index].tokens
        return [t.token_id for t in tokens] if self._parsed.return_token_ids else None


class StreamResponse:
    """What chunks of completions and of chats share."""

    def __init__(
        self, parsed: ParsedRequest, identity: ResponseIdentity, tokenizing: Tokenizing
    ) -> None:
        self._parsed = parsed
        self._identity = identity
        self._tokenizing = tokenizing
        self._has_logprobs = parsed.sampling.logprobs is not None
        # Such tokens are reported even while their text is held back.
        self._reports_tokens = self._has_logprobs or parsed.return_token_ids
        self._usage = UsageCount(parsed.n)
        self._num_unfinished = parsed.num_choices

    def fail(self, error: Exception) -> bytes:
        return sse_error(error)

    def _count(self, choice_index: int, delta: TextDelta) -> None:
        self._usage.add(choice_index, delta)
        self._num_unfinished -= delta.finish is not None

    def _has_news(self, delta: TextDelta) -> bool:
        return bool(delta.text) or (self._reports_tokens and bool(delta.tokens))

    def _token_ids(self, delta: TextDelta) -> list[int] | UnsetType:
        return [t.token_id for t in delta.tokens] if self._parsed.return_token_ids else UNSET

    def _chunk_usage(self) -> Usage | UnsetType | None:
        """Usage of a chunk: null on all but the last if the client wants usage, else absent."""
        if self._parsed.continuous_usage:
            return self._usage.usage()
        return None if self._parsed.include_usage else UNSET

    def _assert_complete(self) -> None:
        assert self._num_unfinished == 0, f"{self._num_unfinished} choices are not finished"
