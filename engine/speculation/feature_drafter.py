"""Drafts by a head that reads the target's hidden states: EAGLE-3, or an MTP layer.

    entry t    the target's vector of token t, at its slot    token t + 1    -> token t + 2

    pass 0     entries that have a vector and a next token, up to the newest token -> d1
    pass 1     d1 beside what pass 0 made of the newest token, which stands in for its vector -> d2

The target's steps write a vector for each token beside its KV (`engine/kv/features.py`), so where a
request's KV is, its vectors are: of prefixes found in the cache, after a preemption, and on a
decode worker to which a prompt was handed over. The head's own KV is made of them on first need,
one layer for the whole prompt. Pass p leaves its output as the vector of the next slot; the step
that verifies computes the true one there. So after each step the entries since the last one are
computed anew.

The last entry of a block depends on the first token of the next one. So does the block's hash here
(`engine/kv/hashes.py`), and requests share a block only if they also share that token. A text that
parts from a cached one in the midst of a block is not affected, one that parts at its end has the
block before computed anew: one token a prefix hit, on average. SGLang keys its cache by pairs of
tokens to the same end; vLLM computes the last block of every hit anew.
"""

from engine.speculation.draft_model import DraftModel


class FeatureDrafter(DraftModel):
    """A `DraftModel` whose executor runs such a head."""

    num_skipped_tokens = 1
    keeps_drafts = False
