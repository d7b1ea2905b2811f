"""Decides which samples of a row with drafts are its tokens: those of the same row without drafts.

    history h | newest t | drafts     d1   d2   d3
    samples after:  t -> s0   d1 -> s1   d2 -> s2   d3 -> s3

The sampler is a function of logits, history, seed and output index (`engine/sampling/draw.py` names
the noise by the last two). So s0 is the row's next token whatever was guessed. If d1 equals it, s1
was sampled after the row's true history, and so on. The first sample that differs from its draft is
the row's token in the draft's place, and the sample after the last draft comes on top. No draft can
change an answer, only how many steps it takes: there are no probabilities to compare, nothing to
sample again, and nothing to know about where the drafts come from. With other batch sizes logits
differ in their last bits unless `model.deterministic` is set; so they do with drafts.

See "Coupling without Communication and Drafter-Invariant Speculative Decoding" (arXiv 2408.07978).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

NO_DRAFT = -1  # in place of one; equal to no sample that counts


def accepted(samples: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """The row's new tokens: at least one, unless nothing could be sampled in its first place.

    samples: of the row's last positions, negative where nothing could be sampled. The last of them
    follows all of `drafts`, the one before all but the last, and so on. A negative sample ends the
    tokens before it; the row's next step finds out why.
    """
    num_before = len(drafts) - (len(samples) - 1)
    assert num_before >= 0, f"{len(samples)} samples for {len(drafts)} drafts"
    tokens: list[int] = []
    for sample, draft in zip(samples, [*drafts[num_before:], None], strict=True):
        if sample < 0:
            break
        tokens.append(sample)
        if sample != draft:
            break
    return tokens


def count_accepted(
    samples: NDArray[Any], drafts: NDArray[Any], starts: NDArray[Any], nums: NDArray[Any]
) -> NDArray[np.int64]:
    """How many tokens `accepted` gives each row, [R]: its first samples.

    samples, drafts: [S] of all rows, and the draft after each of the samples; a row's last sample
    has none after it, and what is in its place does not matter. starts, nums: [R] of each row's
    samples, at least one, side by side.
    """
    is_last = (samples < 0) | (samples != drafts)
    is_last[starts + nums - 1] = True
    (lasts,) = is_last.nonzero()
    last = lasts[lasts.searchsorted(starts)]
    counts: NDArray[np.int64] = last - starts + (samples[last] >= 0)
    return counts
