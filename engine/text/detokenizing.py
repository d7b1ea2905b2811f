"""Converts token ids to text, one token at a time, without emitting incomplete characters.

`TokenBytes` holds the bytes that each token adds to the output, read once from the tokenizer's
vocabulary and decoder. So streaming is exact and takes O(1) per token, without library calls. It
covers the decoders of today's causal language models and refuses others at start-up:

    ByteLevel                                     GPT-2, Llama 3, Qwen, Mistral-Nemo, DeepSeek
    Replace(x -> " "), ByteFallback, Fuse, Strip  Llama 2, Mistral, Gemma, Phi-3
    Metaspace, alone or with the above            T5-like sentencepiece conversions

Formats: the `decoder` object of Hugging Face's tokenizer.json. Knows no requests, no stop strings
and no text encoding except UTF-8.
"""

import codecs
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from engine.errors import ConfigError

_SUPPORTED = "ByteLevel; Replace/ByteFallback/Fuse/Strip; Metaspace"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderRules:
    """How token strings become bytes."""

    byte_level: bool = False  # each character stands for one byte (GPT-2's alphabet)
    space: str | None = None  # this string stands for a space
    byte_fallback: bool = False  # "<0xE4>" stands for that byte
    num_leading_spaces: int = 0  # maximum number of spaces cut from the start of a whole text
    drops_first_space: bool = False  # Metaspace: `space` is removed from a text's first token


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenBytes:
    """The bytes of every id.

    pieces:        [vocabulary] None where the vocabulary has no such id
    first_pieces:  id -> bytes at the start of a text, only where these differ
    """

    pieces: Sequence[bytes | None]
    first_pieces: Mapping[int, bytes]
    special_ids: frozenset[int]
    num_leading_spaces: int

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return len(self.pieces)

    def piece(self, token_id: int) -> bytes:
        """Bytes of `token_id` inside a text; empty for an id the vocabulary lacks.

        Models pad their output layer beyond the vocabulary, so such an id can be sampled.
        """
        if 0 <= token_id < len(self.pieces):
            return self.pieces[token_id] or b""
        return b""


def build_token_bytes(
    vocab: Mapping[str, int], special_ids: frozenset[int], rules: DecoderRules
) -> TokenBytes:
    """`vocab` maps token strings, added tokens included, to ids."""
    pieces: list[bytes | None] = [None] * (max(vocab.values(), default=-1) + 1)
    first_pieces: dict[int, bytes] = {}
    for token, token_id in vocab.items():
        pieces[token_id] = _token_to_bytes(token, rules)
        if rules.drops_first_space and rules.space and rules.space in token:
            first_pieces[token_id] = token.replace(rules.space, "").encode()
    return TokenBytes(
        pieces=pieces,
        first_pieces=first_pieces,
        special_ids=special_ids,
        num_leading_spaces=rules.num_leading_spaces,
    )


def read_decoder(decoder: Mapping[str, object] | None, source: str) -> DecoderRules:
    """Rules of a tokenizer.json `decoder`; raises ConfigError naming `source` for other kinds."""
    if decoder is None:
        raise ConfigError(f"{source}: no decoder; supported: {_SUPPORTED}")
    rules: dict[str, object] = {}
    is_fused = False
    for step in _steps(decoder):
        match step:
            case {"type": "ByteLevel"}:
                rules["byte_level"] = True
            case {"type": "Replace", "pattern": {"String": str(space)}, "content": " "}:
                rules["space"] = space
            case {"type": "Metaspace", "replacement": str(space), "prepend_scheme": scheme}:
                rules |= {"space": space, "drops_first_space": scheme != "never"}
            case {"type": "ByteFallback"}:
                rules["byte_fallback"] = True
            case {"type": "Fuse"}:
                is_fused = True
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if is_fused:
                rules["num_leading_spaces"] = start
            case _:
                raise ConfigError(f"{source}: decoder step {step}; supported: {_SUPPORTED}")
    if not rules or (rules.get("byte_level") and len(rules) > 1):
        raise ConfigError(f"{source}: decoder {dict(decoder)}; supported: {_SUPPORTED}")
    return DecoderRules(**rules)  # type: ignore[arg-type]  # names and types as matched above


def _steps(decoder: Mapping[str, object]) -> list[object]:
    inner = decoder.get("decoders")
    return inner if isinstance(inner, list) else [decoder]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's character for each byte: printable Latin-1 maps to itself, the rest from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF_CHAR = _byte_alphabet()


def _token_to_bytes(token: str, rules: DecoderRules) -> bytes:
    if rules.byte_level:
        values = [_BYTE_OF_CHAR.get(char) for char in token]
        # Added tokens are written as plain text; one character outside the alphabet shows that.
        known = [value for value in values if value is not None]
        return bytes(known) if len(known) == len(values) else token.encode()
    if rules.byte_fallback:
        value = _fallback_byte(token)
        if value is not None:
            return bytes([value])
    return (token.replace(rules.space, " ") if rules.space else token).encode()


def _fallback_byte(token: str) -> int | None:
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    digits = token[3:5]
    return int(digits, 16) if all(d in "0123456789abcdefABCDEF" for d in digits) else None


class Detokenizer:
    """The text of one choice so far; `push` for each token, `flush` once at the end.

    The concatenation of all results does not depend on how the calls are made, and equals the
    library's full decode whenever the bytes are valid UTF-8. Invalid bytes become U+FFFD, one per
    maximal invalid part (Unicode's recommended practice). A byte-fallback decoder of the library
    would instead discard the valid characters next to them, which a stream has already sent.

    With `continues_text` the output follows a prompt in the same text (/v1/completions). Then the
    decoder's rule for the start of a text does not apply, and a leading space stays.
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
        """Text that is final now; may be empty while a character is incomplete."""
        if token_id in self._skipped_ids:
            return ""
        piece = self._table.piece(token_id)
        if self._is_first and 0 <= token_id < self._table.vocab_size:
            self._is_first = False
            piece = self._table.first_pieces.get(token_id, piece)
        text = self._utf8.decode(piece)
        return self._strip(text) if self._num_strippable and text else text

    def flush(self) -> str:
        """Text of an incomplete last character; ends the text."""
        return self._utf8.decode(b"", True)

    def _strip(self, text: str) -> str:
        kept = text.lstrip(" ")
        num_cut = min(len(text) - len(kept), self._num_strippable)
        # After the first character that stays, no more spaces are stripped.
        self._num_strippable = self._num_strippable - num_cut if num_cut == len(text) else 0
        return text[num_cut:]


def decode(
    token_bytes: TokenBytes, token_ids: Iterable[int], *, skip_special_tokens: bool = True
) -> str:
    """The whole text of `token_ids`, equal to the concatenation of a stream of them."""
    detokenizer = Detokenizer(token_bytes, skip_special_tokens=skip_special_tokens)
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    return "".join([*pieces, detokenizer.flush()])
