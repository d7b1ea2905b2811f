"""Responses of /v1/completions: one text_completion object, or a stream of them."""

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from actors.openai.logprob_objects import (
    TokenNames,
    completion_logprobs,
    echoed_logprobs,
    joined,
    prompt_logprobs,
)
from actors.openai.protocol import ParsedRequest
from actors.openai.response_objects import (
    SSE_DONE,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprobList,
    Usage,
    sse_event,
    to_json,
)
from actors.openai.response_parts import (
    PromptDelta,
    ResponseIdentity,
    StreamResponse,
    UnaryResponse,
)
from engine.messages import TokenizeRequest
from engine.request import PromptScores
from engine.text.output_text import OutputToken, TextDelta
from engine.text.tokenizing import Tokenizing


def _echo(
    parsed: ParsedRequest, choice_index: int, prompt_ids: Sequence[int], tokenizing: Tokenizing
) -> str:
    """Returns the prompt's text if it is echoed: as the client sent it, or decoded from ids."""
    if not parsed.echo:
        return ""
    prompt = parsed.prompts[choice_index // parsed.n]
    if isinstance(prompt, TokenizeRequest) and prompt.max_tokens is None:
        assert prompt.text is not None, "a completion's prompt is text or ids"
        return prompt.text
    return tokenizing.decode(prompt_ids, skip_special_tokens=False)


class _Logprobs:
    """`choices[].logprobs`: of output tokens, and before them of those of an echoed prompt."""

    def __init__(self, parsed: ParsedRequest, tokenizing: Tokenizing) -> None:
        self._num_best = parsed.sampling.logprobs
        self._echoes = parsed.echo
        self._names = TokenNames(tokenizing, parsed.names_tokens_by_id)

    def of_later(self, tokens: Sequence[OutputToken], echo: str) -> CompletionLogprobs | None:
        """Log-probabilities of output tokens after the echo; None unless the client asked."""
        if self._num_best is None:
            return None
        return completion_logprobs(tokens, self._names, len(echo))

    def of_first(
        self,
        tokens: Sequence[OutputToken],
        echo: str,
        prompt_ids: Sequence[int],
        scores: PromptScores | None,
    ) -> CompletionLogprobs | None:
        """Log-probabilities from the beginning of the choice: from the prompt's if it is echoed."""
        output = self.of_later(tokens, echo)
        if output is None or self._num_best is None or not self._echoes:
            return output
        prompt = echoed_logprobs(echo, prompt_ids, scores, self._num_best, self._names)
        return joined(prompt, output)


class CompletionUnary(UnaryResponse):
    """A text_completion object."""

    def __init__(
        self, parsed: ParsedRequest, identity: ResponseIdentity, tokenizing: Tokenizing
    ) -> None:
        super().__init__(parsed, identity, tokenizing)
        self._logprobs = _Logprobs(parsed, tokenizing)

    def finish(self) -> list[bytes]:
        body = Completion(
            id=f"cmpl-{self._identity.request_id}",
            created=self._identity.created_s,
            model=self._identity.model,
            choices=[self._choice(index) for index in range(self._parsed.num_choices)],
            usage=self._usage.usage(),
            service_tier=None,
            kv_transfer_params=None,
        )
        return [to_json(body)]

    def _choice(self, index: int) -> CompletionChoice:
        choice = self._choices[index]
        prompt_ids = self._prompt_ids[index // self._parsed.n]
        echo = _echo(self._parsed, index, prompt_ids, self._tokenizing)
        return CompletionChoice(
            index=index,
            text=echo + choice.text,
            logprobs=self._logprobs.of_first(choice.tokens, echo, prompt_ids, choice.prompt),
            finish_reason=self._finish_of(index),
            stop_reason=choice.stop_reason,
            token_ids=self._token_ids(index),
            prompt_token_ids=list(prompt_ids) if self._parsed.return_token_ids else None,
            prompt_logprobs=self._of_prompt(prompt_ids, choice.prompt),
        )

    def _of_prompt(
        self, prompt_ids: Sequence[int], scores: PromptScores | None
    ) -> PromptLogprobList | None:
        num_best = self._parsed.prompt_logprobs
        if num_best is None:
            return None
        return prompt_logprobs(prompt_ids, scores, num_best, self._tokenizing)


class CompletionStream(StreamResponse):
    """text_completion events; the last of a choice carries its finish_reason."""

    def __init__(
        self, parsed: ParsedRequest, identity: ResponseIdentity, tokenizing: Tokenizing
    ) -> None:
        super().__init__(parsed, identity, tokenizing)
        self._logprobs = _Logprobs(parsed, tokenizing)
        self._prompt_ids: Sequence[Sequence[int]] = ()
        self._echoes: Sequence[str] = ()  # per prompt
        self._started: set[int] = set()  # choices that have sent a chunk

    def start(self, prompt_ids: Sequence[Sequence[int]]) -> list[bytes]:
        self._prompt_ids = prompt_ids
        self._echoes = [
            _echo(self._parsed, prompt * self._parsed.n, ids, self._tokenizing)
            for prompt, ids in enumerate(prompt_ids)
        ]
        self._usage.start(prompt_ids)
        return []

    def delta(self, choice_index: int, delta: TextDelta) -> list[bytes]:
        self._count(choice_index, delta)
        is_first = choice_index not in self._started
        echo = self._echoes[choice_index // self._parsed.n]
        text = (echo if is_first else "") + delta.text
        if not text and not self._has_news(delta) and delta.finish is None:
            return []
        self._started.add(choice_index)
        choice = CompletionChoice(
            index=choice_index,
            text=text,
            logprobs=self._logprobs_of(choice_index, delta, is_first=is_first),
            finish_reason=None if delta.finish is None else delta.finish.value,
            stop_reason=UNSET if delta.finish is None else delta.stop_reason,
            token_ids=self._token_ids(delta),
            prompt_token_ids=self._ids_of_prompt(choice_index) if is_first else UNSET,
        )
        return [sse_event(self._chunk([choice], self._chunk_usage()))]

    def finish(self) -> list[bytes]:
        self._assert_complete()
        if not self._parsed.include_usage:
            return [SSE_DONE]
        return [sse_event(self._chunk([], self._usage.usage())), SSE_DONE]

    def _logprobs_of(
        self, choice_index: int, delta: TextDelta, *, is_first: bool
    ) -> CompletionLogprobs | None:
        echo = self._echoes[choice_index // self._parsed.n]
        if not is_first:
            return self._logprobs.of_later(delta.tokens, echo)
        prompt_ids = self._prompt_ids[choice_index // self._parsed.n]
        scores = delta.prompt if isinstance(delta, PromptDelta) else None
        return self._logprobs.of_first(delta.tokens, echo, prompt_ids, scores)

    def _ids_of_prompt(self, choice_index: int) -> list[int] | UnsetType:
        if not self._parsed.return_token_ids:
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
