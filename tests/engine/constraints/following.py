"""Whether a constraint lets a text through, asked of the shipped model's vocabulary."""

from pathlib import Path

import torch

from engine.constraints.compiling import GrammarMatcher, compile_constraint
from engine.constraints.vocabulary import Vocabulary, load_vocabulary
from engine.models.spec import load_spec
from engine.request import Constraint
from kernels.sampling.mask_words import num_mask_words

MODEL = Path(__file__).parents[3] / "demo_model" / "laps-demo"


def demo_vocabulary() -> Vocabulary:
    spec = load_spec(MODEL)
    return load_vocabulary(MODEL, vocab_size=spec.vocab_size, eos_token_ids=spec.eos_token_ids)


def accepts_text(matcher: GrammarMatcher, vocabulary: Vocabulary, text: str | bytes) -> bool:
    """Whether the output may go on with `text`, and end behind it."""
    data = text.encode() if isinstance(text, str) else text
    ids = vocabulary.tokenizer.tokenize_bytes(data)
    return all(matcher.accept_token(token_id) for token_id in ids) and matcher.is_complete


def allows(vocabulary: Vocabulary, constraint: Constraint, text: str | bytes) -> bool:
    return accepts_text(compile_constraint(vocabulary, constraint).matcher(), vocabulary, text)


def allowed_ids(matcher: GrammarMatcher, vocabulary: Vocabulary) -> list[int]:
    """Tokens that may come next, as the mask says."""
    mask = torch.full((1, num_mask_words(vocabulary.vocab_size)), -1, dtype=torch.int32)
    matcher.fill_next_token_bitmask(mask)
    words = mask[0].tolist()
    return [i for i in range(vocabulary.vocab_size) if words[i // 32] >> (i % 32) & 1]
