"""Builds a model's vocabulary for the grammar library: the bytes of every id, and the special ids.

A special token has no text, so no grammar allows one where text is expected. The model's eos ids
are allowed where the output is complete, and a marker of a layout where the layout names it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import llguidance

from engine.text.tokenizing import load_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Vocabulary:
    """The vocabulary that grammars are compiled for.

    special_ids: text of a special token -> its id; without the eos ids
    """

    tokenizer: llguidance.LLTokenizer
    vocab_size: int  # bits of a mask: the size of the model's output layer
    eos_token_ids: tuple[int, ...]
    special_ids: Mapping[str, int]


def load_vocabulary(folder: Path, *, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Vocabulary:
    """The vocabulary of a Hugging Face model folder.

    `vocab_size`: size of the model's output layer, which may exceed the tokenizer's vocabulary.
    Raises ConfigError when the folder's tokenizer cannot be used.
    """
    token_bytes = load_tokenizer(folder).token_bytes
    pieces = [piece or b"" for piece in token_bytes.pieces[:vocab_size]]
    pieces += [b""] * (vocab_size - len(pieces))
    hidden_ids = sorted({i for i in token_bytes.special_ids if i < vocab_size} | {*eos_token_ids})
    tokens = _Tokens(pieces, hidden_ids, eos_token_ids[0])
    return Vocabulary(
        tokenizer=llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(tokens), eos_token=list(eos_token_ids)
        ),
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        special_ids={
            pieces[i].decode(): i for i in hidden_ids if pieces[i] and i not in eos_token_ids
        },
    )


class _Tokens:
    """A tokenizer as the library expects it; it defines the names."""

    bos_token_id = None

    def __init__(self, pieces: list[bytes], special_ids: list[int], eos_token_id: int) -> None:
        self.tokens = pieces
        self.special_token_ids = special_ids
        self.eos_token_id = eos_token_id
        self._id_of_byte = {piece[0]: i for i, piece in enumerate(pieces) if len(piece) == 1}

    def __call__(self, text: bytes) -> list[int]:
        """Encode byte by byte; the library calls this only for forced tokens, which are unused."""
        return [self._id_of_byte[byte] for byte in text if byte in self._id_of_byte]
