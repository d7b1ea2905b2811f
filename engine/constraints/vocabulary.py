"""A model's vocabulary as the grammar compiler takes it: the bytes of every id, and what ends text.

Special tokens stand for no text here, so that no constraint ever allows one besides the model's
own eos ids, and those only where the text is complete.
"""

from pathlib import Path

import xgrammar

from engine.tokenizing import load_tokenizer


def load_vocabulary(
    folder: Path, *, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> xgrammar.TokenizerInfo:
    """Of a Hugging Face model folder. `vocab_size`: of its output layer, which may be larger.

    Raises ConfigError when the folder's tokenizer cannot be used.
    """
    token_bytes = load_tokenizer(folder).token_bytes
    pieces = [
        b"" if piece is None or token_id in token_bytes.special_ids else piece
        for token_id, piece in enumerate(token_bytes.pieces)
    ]
    return xgrammar.TokenizerInfo(
        pieces[:vocab_size],
        xgrammar.VocabType.RAW,
        vocab_size=vocab_size,
        stop_token_ids=list(eos_token_ids),
    )
