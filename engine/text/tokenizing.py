"""Converts text to token ids and back, from a model folder's tokenizer.json.

`tokenizers` does the encoding. Knows no chat templates (engine/text/chat_template.py) and no
requests. Thread-safe: nothing changes after loading.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import tokenizers

from engine.errors import ConfigError, RequestError
from engine.file_checks import check_file
from engine.text.detokenizing import (
    Detokenizer,
    TokenBytes,
    build_token_bytes,
    decode,
    read_decoder,
)

TOKENIZER_FILE = "tokenizer.json"


class _TokenizerFile(msgspec.Struct):
    """The part of tokenizer.json that is read here; the library reads the rest."""

    decoder: dict[str, object] | None = None


class Tokenizing:
    """One model's vocabulary: `encode_batch` for prompts, `detokenizer` for outputs.

    beyond_model: id -> text of tokens for which the model has no embedding; prompts with one are
    refused
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, source: str, num_embeddings: int | None = None
    ) -> None:
        """`num_embeddings`: of the model; None = at least as many as there are tokens.

        Raises ConfigError, naming `source`, when the decoder is of an unsupported kind.
        """
        # A training-time setting in the file must not truncate or pad prompts silently.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        # The library writes defaults out, so only one form has to be parsed.
        decoder = msgspec.json.decode(tokenizer.to_str(), type=_TokenizerFile).decoder
        special_ids = frozenset(
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        self._num_embeddings = num_embeddings
        vocab = tokenizer.get_vocab()
        self.beyond_model: dict[int, str] = {}
        if num_embeddings is not None:
            beyond = sorted((i, token) for token, i in vocab.items() if i >= num_embeddings)
            self.beyond_model = dict(beyond)
            for token in self.beyond_model.values():
                del vocab[token]
        self._token_bytes = build_token_bytes(
            vocab, special_ids - self.beyond_model.keys(), read_decoder(decoder, source)
        )

    @property
    def vocab_size(self) -> int:
        """One more than the largest id of a token for which the model has an embedding."""
        return self._token_bytes.vocab_size

    @property
    def token_bytes(self) -> TokenBytes:
        return self._token_bytes

    def encode_batch(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool,
        max_tokens: int | None = None,
        cuts_end: bool = False,
    ) -> list[list[int] | RequestError]:
        """Ids per text, in one library call; a text that cannot be encoded fails alone.

        max_tokens: a longer text is cut, so that all special tokens fit too; None = never.
        cuts_end: it is cut at its end, else at its beginning.
        """
        adds = add_special_tokens and max_tokens is None
        try:
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=adds)
        except Exception:  # noqa: BLE001 - the library raises bare Exception; each is retried below
            if len(texts) == 1:  # its error may quote the prompt
                return [RequestError("The prompt is not valid text and cannot be tokenized.")]
            alone = [
                self.encode_batch(
                    [text],
                    add_special_tokens=add_special_tokens,
                    max_tokens=max_tokens,
                    cuts_end=cuts_end,
                )
                for text in texts
            ]
            return [found for (found,) in alone]
        if max_tokens is not None:
            num_special = self._tokenizer.num_special_tokens_to_add(False)
            num_kept = max(0, max_tokens - num_special * add_special_tokens)
            for encoding in encodings:
                encoding.truncate(num_kept, direction="right" if cuts_end else "left")
            process = self._tokenizer.post_process
            encodings = [process(encoding, None, add_special_tokens) for encoding in encodings]
        return [self._within_model(encoding.ids) for encoding in encodings]

    def _within_model(self, ids: list[int]) -> list[int] | RequestError:
        """Checks ids against the model; a post-processor may add ids outside the vocabulary."""
        if self._num_embeddings is None or max(ids, default=0) < self._num_embeddings:
            return ids
        token_id = next(i for i in ids if i >= self._num_embeddings)
        name = repr(self.beyond_model[token_id]) if token_id in self.beyond_model else "of its own"
        return RequestError(
            f"The prompt holds a token {name} (id {token_id}), which this model does not know: its"
            f" ids end at {self._num_embeddings - 1}. Leave it out."
        )

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
        """The bytes of a token, special tokens by name; b"" for an id without a token."""
        return self._token_bytes.piece(token_id)


def cut(token_ids: list[int], max_tokens: int, *, cuts_end: bool) -> list[int]:
    """At most `max_tokens` >= 1 of a prompt's ids: its first with `cuts_end`, else its last."""
    return token_ids[:max_tokens] if cuts_end else token_ids[-max_tokens:]


def load_tokenizer(folder: Path, num_embeddings: int | None = None) -> Tokenizing:
    """The tokenizer of a Hugging Face model folder; for `num_embeddings` see `Tokenizing`.

    Raises ConfigError if there is no tokenizer.json, the library cannot read it, or the decoder is
    unsupported.
    """
    path = folder / TOKENIZER_FILE
    if not path.exists():
        raise ConfigError(
            f"{path}: no such file; supported are Hugging Face folders with a {TOKENIZER_FILE}"
            " (convert a sentencepiece tokenizer.model with transformers first)"
        )
    check_file(path)
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path}: not a tokenizer the library can read: {error}") from error
    return Tokenizing(tokenizer, str(path), num_embeddings)
