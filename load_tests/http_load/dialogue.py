"""What a client says: the pieces of a schedule as token ids, as text or as chat messages.

Ids are exact. Text is made of common words; how many tokens that is, a server's tokenizer decides,
and here it is an estimate. One salt gives the same content for the same piece; each run draws its
own, or the second would find the prompts of the first in the server's prefix cache.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np

from load_tests.http_load.schedule import Piece
from load_tests.prompts import FIRST_TOKEN_ID

Message = dict[str, str]  # role and content
Prompt = list[int] | str | list[Message]

_WORDS = (
    "time year people way day man thing woman life child world school state family student group"
    " country problem hand part place case week company system program question work government"
    " number night point home water room mother area money story fact month lot right study book"
    " eye job word business issue side kind head house service friend father power hour game line"
    " end member law car city community name president team minute idea kid body information"
)
WORDS = _WORDS.split()


class PromptStyle(Enum):
    """How prompts are sent."""

    IDS = "ids"
    TEXT = "text"
    CHAT = "chat"


class Dialogue(Protocol):
    """One client's side of a session."""

    def ask(self, pieces: Sequence[Piece]) -> Prompt:
        """What was said so far, and these pieces. Remembers them."""

    def hear(self, text: str, token_ids: Sequence[int], stand_in: Piece) -> None:
        """Remembers an answer; an empty one (it failed) is remembered as `stand_in`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """Tokens of pieces: random, and the same for one name and one salt."""

    salt: int
    vocab_size: int  # ids are drawn below it
    tokens_per_word: float = 1.0

    def ids(self, piece: Piece) -> list[int]:
        drawn = self._rng(piece).integers(FIRST_TOKEN_ID, self.vocab_size, size=piece.num_tokens)
        return [int(token_id) for token_id in drawn.tolist()]

    def text(self, piece: Piece) -> str:
        num_words = max(1, round(piece.num_tokens / self.tokens_per_word))
        drawn = self._rng(piece).integers(len(WORDS), size=num_words)
        return " ".join(WORDS[index] for index in drawn)

    def _rng(self, piece: Piece) -> np.random.Generator:
        digest = hashlib.blake2b(f"{self.salt} {piece.name}".encode(), digest_size=8).digest()
        return np.random.default_rng(int.from_bytes(digest, "little"))


class IdDialogue:
    """Token ids; an answer whose ids the server does not tell is replaced by its stand-in."""

    def __init__(self, content: Content) -> None:
        self._content = content
        self._said: list[int] = []

    def ask(self, pieces: Sequence[Piece]) -> Prompt:
        for piece in pieces:
            self._said += self._content.ids(piece)
        return list(self._said)

    def hear(self, text: str, token_ids: Sequence[int], stand_in: Piece) -> None:
        self._said += token_ids or self._content.ids(stand_in)


class TextDialogue:
    """Plain text for /v1/completions."""

    def __init__(self, content: Content) -> None:
        self._content = content
        self._said = ""

    def ask(self, pieces: Sequence[Piece]) -> Prompt:
        self._said += " ".join(self._content.text(piece) for piece in pieces)
        return self._said

    def hear(self, text: str, token_ids: Sequence[int], stand_in: Piece) -> None:
        self._said += (text or " " + self._content.text(stand_in)) + "\n"


class ChatDialogue:
    """Messages for /v1/chat/completions; the system piece is part of the first question."""

    def __init__(self, content: Content) -> None:
        self._content = content
        self._said: list[Message] = []

    def ask(self, pieces: Sequence[Piece]) -> Prompt:
        question = " ".join(self._content.text(piece) for piece in pieces)
        self._said.append({"role": "user", "content": question})
        return list(self._said)

    def hear(self, text: str, token_ids: Sequence[int], stand_in: Piece) -> None:
        answer = text or self._content.text(stand_in)
        self._said.append({"role": "assistant", "content": answer})


def dialogue_maker(style: PromptStyle, content: Content) -> Callable[[], Dialogue]:
    """Makes one dialogue a session."""
    match style:
        case PromptStyle.IDS:
            return lambda: IdDialogue(content)
        case PromptStyle.TEXT:
            return lambda: TextDialogue(content)
        case PromptStyle.CHAT:
            return lambda: ChatDialogue(content)
