"""The demonstration model's tokenizer for a vocabulary as large as another model's."""

import json
from pathlib import Path

TOKENIZER_FOLDER = Path(__file__).resolve().parents[2] / "demo_model" / "laps-demo"


def padded_tokenizer(vocab_size: int) -> dict[str, object]:
    """The demonstration model's tokenizer.json with texts for all ids below `vocab_size`.

    No merge makes the added ones, so text is encoded as before. Raises ValueError if it has more.
    """
    tokenizer = json.loads((TOKENIZER_FOLDER / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    if len(vocab) > vocab_size:
        raise ValueError(f"a vocabulary of {vocab_size} is too small: the texts are {len(vocab)}")
    for token_id in range(len(vocab), vocab_size):
        vocab[f"~{token_id}~"] = token_id
    if len(vocab) != vocab_size:
        raise ValueError("a text of the tokenizer reads like an added one")
    return dict(tokenizer)
