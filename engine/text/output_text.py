"""Produces the visible output of one choice: tokens in, text out, cut at stop strings.

Combines detokenizer and stop strings and decides how a choice ends as the client sees it. Knows
nothing of HTTP, JSON or which worker made the tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.messages import TokenRecord
from engine.plan import TokenLogprobs
from engine.request import FinishReason
from engine.text.detokenizing import Detokenizer
from engine.text.stop_strings import StopStrings


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputToken:
    """A generated token as a response reports it."""

    token_id: int
    text_offset: int  # characters of the choice's text that came before it
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """The output that one token adds to a choice, or several that came together."""

    text: str  # empty for an incomplete character or text that may become a stop string
    tokens: Sequence[OutputToken] = ()
    finish: FinishReason | None = None  # the choice is complete
    stop_reason: str | int | None = None  # the client's stop string or id that ended it
    num_cached_tokens: int | None = None  # of the prompt, once known


class OutputText:
    """One choice; `push` for every token in order until a delta has `finish` set.

    If a stop string ended the choice, the worker does not know it: the caller must abort the
    request there.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop_strings: StopStrings,
        *,
        min_tokens: int = 0,
        client_stop_ids: Sequence[int] = (),
        include_stop: bool = False,
        markers: Mapping[int, str] | None = None,
    ) -> None:
        """`markers`: special tokens, id -> text, that are shown even if others are skipped."""
        self._detokenizer = detokenizer
        self._stop_strings = stop_strings
        self._min_tokens = min_tokens
        self._client_stop_ids = frozenset(client_stop_ids)
        self._include_stop = include_stop
        self._markers = {} if markers is None else markers
        self._num_tokens = 0
        self._num_chars = 0
        self._is_finished = False

    @property
    def is_finished(self) -> bool:
        return self._is_finished

    def push(self, record: TokenRecord) -> TextDelta:
        assert not self._is_finished, f"{record.key}: token {record.index} after the finish"
        self._num_tokens += 1
        token = OutputToken(
            token_id=record.token_id, text_offset=self._num_chars, logprobs=record.logprobs
        )
        emitted, matched = self._search(self._new_text(record))
        if matched is None and record.finish is not None:
            emitted += self._stop_strings.flush()
        self._is_finished = matched is not None or record.finish is not None
        return TextDelta(
            text=emitted,
            tokens=(token,),
            finish=self._finish(record, matched),
            stop_reason=self._stop_reason(record, matched),
            num_cached_tokens=record.num_cached_tokens,
        )

    def _new_text(self, record: TokenRecord) -> str:
        """Raw text of the token. A token that stops the request is shown only if asked for."""
        is_hidden = record.stop_token_id is not None and not self._include_stop
        text = "" if is_hidden else self._push(record.token_id)
        if record.finish is not None:
            text += self._detokenizer.flush()
        self._num_chars += len(text)
        return text

    def _push(self, token_id: int) -> str:
        marker = self._markers.get(token_id)
        if marker is None:
            return self._detokenizer.push(token_id)
        return self._detokenizer.flush() + marker  # an incomplete character before it stays so

    def _search(self, text: str) -> tuple[str, str | None]:
        # From token number min_tokens on, a stop string may end the choice, wherever it began.
        return self._stop_strings.push(text, may_stop=self._num_tokens >= self._min_tokens)

    def _finish(self, record: TokenRecord, matched: str | None) -> FinishReason | None:
        if matched is not None:
            return FinishReason.STOP
        return None if record.finish is None else FinishReason(record.finish)

    def _stop_reason(self, record: TokenRecord, matched: str | None) -> str | int | None:
        """The client's string or id that ended the choice; None for the model's own eos."""
        if matched is not None:
            return matched
        is_clients = record.stop_token_id in self._client_stop_ids
        return record.stop_token_id if is_clients else None
