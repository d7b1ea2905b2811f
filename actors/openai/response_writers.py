"""From text deltas to response bytes, with the same verbs for every endpoint and mode.

    writer = build_writer(parsed, identity, tokenizing)
    writer.start(prompt_ids)          -> bytes to send first
    writer.delta(choice_index, delta) -> bytes to send now (none in unary mode)
    writer.finish()                   -> the rest: the whole body, or usage chunk and [DONE]
    writer.fail(error)                -> the last event of a stream that cannot go on

Choices are numbered prompt by prompt. Knows no HTTP, no workers and no stop strings.
"""

from collections.abc import Sequence
from typing import Protocol

from actors.openai.answer_shapes import ResponsesShape
from actors.openai.chat_writers import ChatStream, ChatUnary
from actors.openai.completion_writers import CompletionStream, CompletionUnary
from actors.openai.embeddings import EmbeddingUnary
from actors.openai.prompt_only import Embedding
from actors.openai.protocol import Endpoint, ParsedRequest
from actors.openai.response_parts import ResponseIdentity
from actors.openai.responses.writer import ResponsesWriter
from actors.openai.scores import ScoreUnary
from engine.text.output_text import OutputText, TextDelta
from engine.text.stop_strings import StopStrings
from engine.text.tokenizing import Tokenizing


class ResponseWriter(Protocol):
    """Bytes of one response; those below differ in endpoint and mode only."""

    def start(self, prompt_ids: Sequence[Sequence[int]]) -> list[bytes]: ...

    def delta(self, choice_index: int, delta: TextDelta) -> list[bytes]: ...

    def finish(self) -> list[bytes]: ...

    def fail(self, error: Exception) -> bytes: ...


def build_writer(
    parsed: ParsedRequest, identity: ResponseIdentity, tokenizing: Tokenizing
) -> ResponseWriter:
    if isinstance(parsed.shape, ResponsesShape):
        return ResponsesWriter(parsed, identity, tokenizing, parsed.shape)
    if isinstance(parsed.prompt_only, Embedding):
        return EmbeddingUnary(parsed, identity, parsed.prompt_only)
    if parsed.prompt_only is not None:
        return ScoreUnary(parsed, identity, parsed.prompt_only)
    match parsed.endpoint, parsed.stream:
        case Endpoint.CHAT, True:
            return ChatStream(parsed, identity, tokenizing)
        case Endpoint.CHAT, False:
            return ChatUnary(parsed, identity, tokenizing)
        case Endpoint.COMPLETION, True:
            return CompletionStream(parsed, identity, tokenizing)
    return CompletionUnary(parsed, identity, tokenizing)


def build_output_text(parsed: ParsedRequest, tokenizing: Tokenizing) -> OutputText:
    """Builds what turns a choice's token records into deltas for `ResponseWriter.delta`."""
    sampling = parsed.sampling
    return OutputText(
        tokenizing.detokenizer(
            skip_special_tokens=parsed.skips_special_tokens,
            continues_text=_continues_text(parsed),
        ),
        StopStrings(parsed.stops, include=parsed.include_stop),
        min_tokens=sampling.min_tokens,
        client_stop_ids=_client_stop_ids(parsed),
        include_stop=parsed.include_stop,
        markers=parsed.markers,
    )


def _client_stop_ids(parsed: ParsedRequest) -> list[int]:
    """The ids that an answer names as the reason of its end."""
    of_format = () if parsed.harmony is None else parsed.harmony.stop_ids
    return [stop_id for stop_id in parsed.sampling.stop_token_ids if stop_id not in of_format]


def _continues_text(parsed: ParsedRequest) -> bool:
    """Whether the output goes on in its prompt's text; a chat's answer is a text of its own."""
    if parsed.endpoint is Endpoint.COMPLETION:
        return True
    return any(
        not isinstance(prompt, list) and prompt.continue_final_message for prompt in parsed.prompts
    )
