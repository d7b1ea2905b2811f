"""Text to token ids and back, from a model folder's tokenizer.json.

`tokenizers` does the encoding. Knows no chat templates (engine/chat_template.py) and no requests.
Safe to call from several threads: nothing changes after loading.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import tokenizers

from engine.detokenizing import Detokenizer, decode
from engine.errors import ConfigError, RequestError
from engine.token_bytes import TokenBytes, build_token_bytes, read_decoder

TOKENIZER_FILE = "tokenizer.json"


class _TokenizerFile(msgspec.Struct):
    """The one part of tokenizer.json that is read here; the library reads the rest."""

    decoder: dict[str, object] | None = None


class Tokenizing:
    """One model's vocabulary: `encode_batch` for prompts, `detokenizer` for outputs."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, source: str) -> None:
        """Raises ConfigError, naming `source`, when the decoder is of an unsupported kind."""
        # A training-time setting in the file must not cut or pad prompts silently.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        # The library writes defaults out, so that only one spelling has to be understood.
        decoder = msgspec.json.decode(tokenizer.to_str(), type=_TokenizerFile).decoder
        special_ids = frozenset(
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        self._token_bytes = build_token_bytes(
            tokenizer.get_vocab(), special_ids, read_decoder(decoder, source)
        )

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id, added tokens included."""
        return self._token_bytes.vocab_size

    @property
    def token_bytes(self) -> TokenBytes:
        return self._token_bytes

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool
    ) -> list[list[int] | RequestError]:
        """Ids per text, in one library call; a text that cannot be encoded fails alone."""
        try:
            encodings = self._tokenizer.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
        except Exception:  # noqa: BLE001 - the library raises bare Exception; each is retried below
            return [self._encode_alone(text, add_special_tokens) for text in texts]
        return [encoding.ids for encoding in encodings]

    def _encode_alone(self, text: str, add_special_tokens: bool) -> list[int] | RequestError:
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except Exception:  # noqa: BLE001 - as above; its text may quote the prompt
            return RequestError("The prompt is not valid text and cannot be tokenized.")

    def detokenizer(
        self, *, skip_special_tokens: bool = True, continues_text: bool = False
    ) -> Detokenizer:
        """A fresh detokenizer for one choice."""
        return Detokenizer(
            self._token_bytes,
            skip_special_tokens=skip_special_tokens,
            continues_text=continues_text,
        )

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        return decode(self._token_bytes, token_ids, skip_special_tokens=skip_special_tokens)

    def piece(self, token_id: int) -> bytes:
        """The bytes a token stands for, special tokens by name; b"" for an id without a token."""
        return self._token_bytes.piece(token_id)


def load_tokenizer(folder: Path) -> Tokenizing:
    """The tokenizer of a Hugging Face model folder.

    Raises ConfigError: no tokenizer.json, one the library cannot read, or an unsupported decoder.
    """
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise ConfigError(
            f"{path}: no such file; supported are Hugging Face folders with a {TOKENIZER_FILE}"
            " (convert a sentencepiece tokenizer.model with transformers first)"
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path}: not a tokenizer the library can read: {error}") from error
    return Tokenizing(tokenizer, str(path))
