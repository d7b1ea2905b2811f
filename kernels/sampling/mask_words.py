"""The layout of a mask of tokens: bit i of word w stands for token 32 * w + i."""

TOKENS_PER_WORD = 32


def num_mask_words(vocab_size: int) -> int:
    """Number of words of one line's mask."""
    return -(-vocab_size // TOKENS_PER_WORD)
