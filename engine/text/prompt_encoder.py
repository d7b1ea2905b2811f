"""Turns prompts of any kind (text, chat messages, ids) into token ids, for one model.

Blocks while it works; thread-safe, as its parts are. Knows no batching and no block hashes.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from engine.errors import RequestError
from engine.messages import TokenizeRequest
from engine.text.chat_template import ChatTemplate, load_chat_template
from engine.text.tokenizing import Tokenizing, cut, load_tokenizer

NUM_RENDERINGS = 3
SAMPLE = TokenizeRequest(messages=[{"role": "user", "content": "Good morning."}])

Encoded = list[int] | RequestError


class PromptEncoder:
    """A model's tokenizer and chat template; they raise ConfigError when they are loaded."""

    def __init__(self, tokenizing: Tokenizing, chat_template: ChatTemplate) -> None:
        self.tokenizing = tokenizing
        self._chat_template = chat_template

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template.is_present

    def rendering_s(self) -> float | None:
        """Measures how long a short conversation takes to render, at best.

        None if the template refuses it.
        """
        durations_s = []
        for _ in range(NUM_RENDERINGS):
            started_s = time.perf_counter()
            try:
                self._chat_template.render(SAMPLE)
            except RequestError:
                return None
            durations_s.append(time.perf_counter() - started_s)
        return min(durations_s)

    def encode(self, request: TokenizeRequest) -> list[int]:
        """Returns a prompt's ids. Raises RequestError for one that has none."""
        (encoded,) = self.encode_batch([request])
        if isinstance(encoded, RequestError):
            raise encoded
        return encoded

    def encode_batch(self, requests: Sequence[TokenizeRequest]) -> list[Encoded]:
        """Returns ids or the prompt's own error, in order. One library call per way to encode."""
        texts = [self._render(request) for request in requests]
        found: list[Encoded] = [[] if isinstance(text, str) else text for text in texts]
        ways: dict[tuple[bool, int | None, bool], list[tuple[int, str]]] = {}
        for index, (request, text) in enumerate(zip(requests, texts, strict=True)):
            if isinstance(text, str):
                way = request.add_special_tokens, request.max_tokens, request.cuts_end
                ways.setdefault(way, []).append((index, text))
        for (adds, max_tokens, cuts_end), where in ways.items():
            encoded = self.tokenizing.encode_batch(
                [text for _, text in where],
                add_special_tokens=adds,
                max_tokens=max_tokens,
                cuts_end=cuts_end,
            )
            for (index, _), item in zip(where, encoded, strict=True):
                found[index] = item
        return [_cut(*pair) for pair in zip(requests, found, strict=True)]

    def _render(self, request: TokenizeRequest) -> str | Encoded:
        """Returns the text to encode, or the ids that the request came with."""
        if request.token_ids is not None:
            return request.token_ids
        if request.messages is None:
            assert request.text is not None, "neither text, messages nor ids"
            return request.text
        try:
            return self._chat_template.render(request)
        except RequestError as error:
            return error


def _cut(request: TokenizeRequest, encoded: Encoded) -> Encoded:
    """Cuts what is still too long: it is no text, or special tokens alone are too many."""
    if request.max_tokens is None or isinstance(encoded, RequestError):
        return encoded
    return cut(encoded, request.max_tokens, cuts_end=request.cuts_end)


def load_prompt_encoder(folder: Path, num_embeddings: int | None = None) -> PromptEncoder:
    """num_embeddings: of the model; see `Tokenizing`. Raises ConfigError."""
    return PromptEncoder(load_tokenizer(folder, num_embeddings), load_chat_template(folder))
