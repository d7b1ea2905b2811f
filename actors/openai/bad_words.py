"""The token sequences that `bad_words` bans, by vLLM's rule.

A word is banned as it stands, and as it stands after a space where that makes another first token
and no more tokens. So " red" is found for "red", and the text can still appear in other tokens.
"""

from collections.abc import Sequence

from engine.errors import RequestError
from engine.text.tokenizing import Tokenizing


def banned_sequences(words: Sequence[str], tokenizing: Tokenizing) -> tuple[tuple[int, ...], ...]:
    """Returns the sequences, each of at least one token. Raises RequestError for a bad word."""
    if not words:
        return ()
    texts = [word.lstrip() or word for word in words]
    alone = tokenizing.encode_batch(texts, add_special_tokens=False)
    spaced = tokenizing.encode_batch([f" {text}" for text in texts], add_special_tokens=False)
    sequences: dict[tuple[int, ...], None] = {}
    for position, (plain, after_space) in enumerate(zip(alone, spaced, strict=True)):
        ids = _ids(plain, position)
        sequences[ids] = None
        other = _ids(after_space, position)
        if len(other) == len(ids) and other[0] != ids[0]:
            sequences[other] = None
    return tuple(sequences)


def _ids(encoded: list[int] | RequestError, position: int) -> tuple[int, ...]:
    param = f"bad_words[{position}]"
    if isinstance(encoded, RequestError):
        raise RequestError(encoded.message, param=param, code="invalid_value")
    if not encoded:
        raise RequestError(
            f"Invalid '{param}': it has no tokens.", param=param, code="invalid_value"
        )
    return tuple(encoded)
