"""Token ids to text, one token at a time, never emitting half a character.

Knows bytes, not models: what each id adds comes from `TokenBytes`. Knows nothing of stop strings.
"""

import codecs
from collections.abc import Iterable

from engine.token_bytes import TokenBytes


class Detokenizer:
    """The text of one choice so far; `push` for each token, `flush` once at the end.

    The concatenation of everything returned is the same for every way of calling, and equals the
    library's full decode whenever the bytes are valid UTF-8. Invalid bytes become U+FFFD, one per
    maximal invalid part (Unicode's recommended practice); a byte-fallback decoder of the library
    would instead discard the valid characters next to them, which a stream already sent.

    With `continues_text` the output follows a prompt in the same text (/v1/completions), so the
    decoder's rule for the start of a text does not apply to it and a leading space stays.
    """

    def __init__(
        self,
        token_bytes: TokenBytes,
        *,
        skip_special_tokens: bool = True,
        continues_text: bool = False,
    ) -> None:
        self._table = token_bytes
        self._skipped_ids = token_bytes.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_first = not continues_text
        self._num_strippable = 0 if continues_text else token_bytes.num_leading_spaces

    def push(self, token_id: int) -> str:
        """Text that is certain now; may be empty while a character is incomplete."""
        if token_id in self._skipped_ids:
            return ""
        piece = self._table.piece(token_id)
        if self._is_first and 0 <= token_id < self._table.vocab_size:
            self._is_first = False
            piece = self._table.first_pieces.get(token_id, piece)
        text = self._utf8.decode(piece)
        return self._strip(text) if self._num_strippable and text else text

    def flush(self) -> str:
        """What an incomplete last character leaves behind; ends the text."""
        return self._utf8.decode(b"", True)

    def _strip(self, text: str) -> str:
        kept = text.lstrip(" ")
        num_cut = min(len(text) - len(kept), self._num_strippable)
        # Once anything stays, the start of the text is over.
        self._num_strippable = self._num_strippable - num_cut if num_cut == len(text) else 0
        return text[num_cut:]


def decode(
    token_bytes: TokenBytes, token_ids: Iterable[int], *, skip_special_tokens: bool = True
) -> str:
    """The whole text of `token_ids`, equal to what a stream of them shows."""
    detokenizer = Detokenizer(token_bytes, skip_special_tokens=skip_special_tokens)
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    return "".join([*pieces, detokenizer.flush()])
