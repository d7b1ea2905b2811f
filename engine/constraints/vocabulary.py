"""A model's vocabulary as the grammar library takes it: the bytes of every id, and what ends text.

A special token stands for no text, so no grammar allows one where text is asked for: the model's
eos ids may come where the output is complete, and a marker of a layout where it is named.
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
    vocab_size: int  # lines of a mask: the size of the model's output layer
    eos_token_ids: tuple[int, ...]
    special_ids: Mapping[str, int]


def load_vocabulary(folder: Path, *, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Vocabulary:
    """Loads the vocabulary of a Hugging Face folder.

    vocab_size: rows of the output layer, which may be more than the tokenizer has.

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
    """The library's view of a tokenizer; the names are its own."""

    bos_token_id = None

    def __init__(self, pieces: list[bytes], special_ids: list[int], eos_token_id: int) -> None:
        self.tokens = pieces
        self.special_token_ids = special_ids
        self.eos_token_id = eos_token_id
        self._id_of_byte = {piece[0]: i for i, piece in enumerate(pieces) if len(piece) == 1}

    def __call__(self, text: bytes) -> list[int]:
        """Only for tokens that a grammar forces, which nobody here asks for: byte by byte."""
        return [self._id_of_byte[byte] for byte in text if byte in self._id_of_byte]
