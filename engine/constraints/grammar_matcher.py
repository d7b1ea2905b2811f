"""Follows one output through a compiled grammar. An error of the library allows no token at all.

The library bounds what one token may cost (`llguidance.LLParserLimits`). Beyond these bounds, and
after a token that the grammar does not have, its matcher stays in an error state. Then every bit of
a mask is zero: nothing can be drawn, and the request ends with an error instead of with an output
that only looks complete.
"""

import logging

import llguidance
import torch
from torch import Tensor

from kernels.token_mask import num_mask_words

_DEAD_END = "NoExtension"  # what the library calls a point where no token may follow
logger = logging.getLogger(__name__)


class GrammarMatcher:
    """See `engine.sampling.constraint.Matcher`. For one thread at a time."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        """matcher: this object's own, before any token."""
        self._matcher = matcher
        self._num_words = num_mask_words(vocab_size)

    def accept_token(self, token_id: int) -> bool:
        """The output goes on with this token; False when the grammar does not allow it."""
        is_accepted: bool = self._matcher.consume_token(token_id)
        return is_accepted

    def fill_next_token_bitmask(self, bitmask: Tensor, index: int = 0) -> bool:
        """Write line `index` of `bitmask` int32 [P, words]: bit i of word w says 32 * w + i may."""
        line = bitmask[index]
        assert line.is_contiguous(), "a line of a mask has its words side by side"
        assert line.dtype == torch.int32, line.dtype
        assert len(line) == self._num_words, f"{len(line)} words, {self._num_words} expected"
        self._matcher.unsafe_compute_mask_ptr(line.data_ptr(), line.nbytes)
        if self._matcher.is_error():
            logger.error("a constraint cannot be followed: %s", self.error)
            line.zero_()
        return True

    @property
    def is_complete(self) -> bool:
        """Whether the output may end here."""
        return bool(self._matcher.is_accepting()) and not self._matcher.is_error()

    @property
    def is_beyond_limits(self) -> bool:
        """Whether it ended because the library would not spend more on it."""
        return bool(self._matcher.is_error()) and not self.error.startswith(_DEAD_END)

    @property
    def error(self) -> str:
        """Why nothing may follow any more; "" = no error."""
        message: str = self._matcher.get_error()
        return message.strip().partition("\n")[0]
