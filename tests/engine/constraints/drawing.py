"""Draws outputs at random under a schema's masks, from the shipped model's vocabulary."""

import json
import random
from collections.abc import Sequence
from typing import Any

from engine.constraints.compiling import compile_constraint
from engine.constraints.json_schema import restrict
from engine.request import Constraint, ConstraintKind
from tests.engine.constraints.following import allowed_ids, demo_vocabulary

VOCABULARY = demo_vocabulary()
PIECES = [VOCABULARY.tokenizer.decode_bytes([i]) for i in range(VOCABULARY.vocab_size)]
CONTROLS = [i for i, piece in enumerate(PIECES) if piece and max(piece) < 32]
STRUCTURE = [i for i, piece in enumerate(PIECES) if piece and set(piece) <= set(b'"\\{}[],:')]
NUMBERS = [i for i, piece in enumerate(PIECES) if piece and set(piece) <= set(b"0123456789.eE+-")]
CLOSING = [i for i, piece in enumerate(PIECES) if piece[:1] in (b'"', b"}", b"]")]
NUM_TOKENS = 160


def schema_constraint(schema: Any) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(restrict(schema, "schema")))


def draw_output(constraint: Constraint, draw: random.Random) -> bytes | None:
    """Tokens drawn as if some were pushed by a logit bias.

    None when it does not end in time, or at a limit of the matcher's own.
    """
    matcher = compile_constraint(VOCABULARY, constraint).matcher()
    pushed = draw.choice([CONTROLS, STRUCTURE, NUMBERS, VOCABULARY.eos_token_ids, range(256)])
    share = draw.choice([0.3, 0.8, 0.97])
    ids: list[int] = []
    while len(ids) < NUM_TOKENS:
        allowed = allowed_ids(matcher, VOCABULARY)
        assert allowed, f"nothing may follow: {matcher.error}"
        wanted: Sequence[int] = pushed if draw.random() < share else allowed
        if len(ids) > NUM_TOKENS // 2:
            wanted = [*CLOSING, *VOCABULARY.eos_token_ids]
        wanted = sorted(set(allowed) & set(wanted)) or allowed
        ids.append(draw.choice(wanted))
        if ids[-1] in VOCABULARY.eos_token_ids:
            return b"".join(PIECES[i] for i in ids[:-1])
        if not matcher.accept_token(ids[-1]):  # an engine ends such a row with an error
            assert "limit" in matcher.error, matcher.error
            return None
    return None
