"""Masks the logits of constrained rows: tokens that would break a row's constraint become -inf.

The allowed tokens are computed on the host from every token that the row has. So a row may sample
only after its newest token was passed to `accept_token`. All constrained rows of a step share one
copy to the device and one launch there; a step without such rows costs nothing. Knows no constraint
languages: a matcher says which tokens may come next.
"""

import logging
from collections import deque
from collections.abc import Sequence
from enum import Enum, auto
from typing import Protocol

import torch
from torch import Tensor

from engine.request import Constraint, SamplingParams, Thinking
from engine.sampling.feature import Ahead, positions_of
from kernels.sampling.mask_words import TOKENS_PER_WORD, num_mask_words
from kernels.sampling.token_mask import ban_tokens

logger = logging.getLogger(__name__)


class Matcher(Protocol):
    """Follows one output, token by token."""

    def accept_token(self, token_id: int) -> bool:
        """Append a token to the output; False if it is not allowed: then nothing may follow."""
        ...

    def fill_next_token_bitmask(self, bitmask: Tensor, index: int = 0) -> bool:
        """Write line `index` of `bitmask` int32 [P, words]: bit i of word w allows 32 * w + i.

        The lines hold ones, so a line that allows every token need not be written. A line without
        any bit means that the output cannot be followed any more: its request ends with an error.
        """
        ...

    def fork(self) -> "Matcher":
        """A matcher of the same output so far, which goes its own way from here."""
        ...


class Matchers(Protocol):
    """A source of matchers."""

    def matcher(self, constraint: Constraint) -> Matcher:
        """A new matcher, for an output without tokens."""
        ...


class NoMatchers:
    """The source for a sampler without constrained rows."""

    def matcher(self, constraint: Constraint) -> Matcher:
        raise AssertionError(f"a {constraint.kind.value} constraint, and nothing compiles it here")


class Constraints:
    """Bans every token after which the output could not satisfy what its row asks of it."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        matchers: Matchers,
        device: torch.device,
    ) -> None:
        """On a GPU, compiles the kernel now, so that no constrained row has to wait for it."""
        self._num_words = num_mask_words(vocab_size)
        self._eos_token_ids = eos_token_ids
        self._source = matchers
        self._device = device
        self._matchers: dict[int, Matcher] = {}  # row -> matcher that has accepted all its tokens
        if device.type == "cuda":
            self._ban(torch.zeros((1, vocab_size), device=device), [0], self._new_packed(1))

    def add(
        self, row: int, params: SamplingParams, prompt_ids: list[int], output_ids: list[int]
    ) -> bool:
        parts = self._parts(params)
        if not parts:
            return False
        self._matchers[row] = parts[0] if len(parts) == 1 else AllOf(parts)
        for token_id in output_ids:
            self.accept_token(row, token_id)
        return True

    def _parts(self, params: SamplingParams) -> list[Matcher]:
        """New matchers of all that a request forbids; the constraint's writes its line first."""
        parts: list[Matcher] = []
        if params.constraint is not None:
            matcher = self._source.matcher(params.constraint)
            if params.thinking is not None:
                matcher = AfterThinking(matcher, params.thinking, self._eos_token_ids)
            parts.append(matcher)
        if params.allowed_token_ids:
            parts.append(OnlyTokens(params.allowed_token_ids, self._num_words))
        if params.banned_sequences:
            parts.append(WithoutSequences(params.banned_sequences))
        return parts

    def __contains__(self, row: object) -> bool:
        return row in self._matchers

    def remove(self, row: int) -> None:
        self._matchers.pop(row, None)

    def accept_token(self, row: int, token_id: int) -> None:
        """Append a token, sampled under the row's constraint, to the row's output.

        A matcher that rejects the token, although it allowed it before, has reached a limit of its
        own.
        """
        if not self._matchers[row].accept_token(token_id):
            logger.error("row %d: token %d cannot be followed", row, token_id)
            self._matchers[row] = NothingMayFollow()

    def apply(self, logits: Tensor, rows: list[int], ahead: Ahead | None = None) -> None:
        positions = positions_of(rows, self._matchers)
        if not positions:
            return
        packed = self._new_packed(len(positions))
        masks = self._masks(packed, len(positions))
        guesses: dict[int, _Guess] = {}
        for line, position in enumerate(positions):
            row = rows[position]
            matcher: Matcher | None = self._matchers[row]
            if ahead is not None and ahead[position]:
                guess = guesses.setdefault(row, _Guess(self._matchers[row]))
                matcher = guess.after(ahead[position])
            if matcher is not None:
                matcher.fill_next_token_bitmask(masks, line)
        self._ban(logits, positions, packed)

    def observe(self, rows: list[int], token_ids: Tensor) -> None:
        """Does nothing: `accept_token` is called once the ids are known on the host."""

    # packed int32:  [0 .... M) line numbers in the logits   [M .... M + M * words) their masks

    def _new_packed(self, num_lines: int) -> Tensor:
        """All ones. Page-locked for a GPU, so that the copy does not wait for earlier launches."""
        size = num_lines * (1 + self._num_words)
        is_pinned = self._device.type == "cuda"
        return torch.full((size,), -1, dtype=torch.int32, pin_memory=is_pinned)

    def _masks(self, packed: Tensor, num_lines: int) -> Tensor:
        return packed[num_lines:].view(num_lines, self._num_words)

    def _ban(self, logits: Tensor, positions: list[int], packed: Tensor) -> None:
        num_lines = len(positions)
        packed[:num_lines] = torch.tensor(positions, dtype=torch.int32)
        sent = packed.to(self._device, non_blocking=True)
        ban_tokens(logits, sent[:num_lines], self._masks(sent, num_lines))


class _Guess:
    """Follows one row's drafts for one step and leaves the row's own matcher as it is."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher: Matcher | None = matcher.fork()  # None = a draft was not allowed
        self._num_accepted = 0

    def after(self, drafts: Sequence[int]) -> Matcher | None:
        """The matcher after these drafts, which begin with those of the last call.

        None if one of them is not allowed: it is not sampled, so the line after it does not count.
        """
        for token_id in drafts[self._num_accepted :]:
            if self._matcher is not None and not self._matcher.accept_token(token_id):
                self._matcher = None
        self._num_accepted = len(drafts)
        return self._matcher


class AllOf:
    """Allows what each of several matchers allows. All but the first only clear bits of a line."""

    def __init__(self, parts: Sequence[Matcher]) -> None:
        self._parts = parts

    def accept_token(self, token_id: int) -> bool:
        is_allowed = True
        for part in self._parts:  # each of them follows the output
            is_allowed = part.accept_token(token_id) and is_allowed
        return is_allowed

    def fill_next_token_bitmask(self, bitmask: Tensor, index: int = 0) -> bool:
        for part in self._parts:
            part.fill_next_token_bitmask(bitmask, index)
        return True

    def fork(self) -> "AllOf":
        return AllOf([part.fork() for part in self._parts])


class OnlyTokens:
    """The matcher of an output that consists of some tokens only."""

    def __init__(self, token_ids: Sequence[int], num_words: int) -> None:
        self._line = torch.zeros(num_words, dtype=torch.int32)
        for token_id in token_ids:
            _set_bit(self._line, token_id, may_come=True)

    def accept_token(self, token_id: int) -> bool:
        return True

    def fill_next_token_bitmask(self, bitmask: Tensor, index: int = 0) -> bool:
        bitmask[index] &= self._line
        return True

    def fork(self) -> "OnlyTokens":
        return self  # it has no state


class WithoutSequences:
    """The matcher of an output in which none of some token sequences appears."""

    def __init__(self, sequences: Sequence[tuple[int, ...]]) -> None:
        """sequences: each of at least one token."""
        self._sequences = sequences
        longest = max(map(len, sequences))
        self._last: deque[int] = deque(maxlen=max(longest - 1, 1))  # tokens of the output

    def accept_token(self, token_id: int) -> bool:
        self._last.append(token_id)
        return True

    def fill_next_token_bitmask(self, bitmask: Tensor, index: int = 0) -> bool:
        last = tuple(self._last)
        line = bitmask[index]
        for *head, end in self._sequences:
            if not head or last[-len(head) :] == tuple(head):
                _set_bit(line, end, may_come=False)
        return True

    def fork(self) -> "WithoutSequences":
        forked = WithoutSequences(self._sequences)
        forked._last.extend(self._last)
        return forked


class NothingMayFollow:
    """The matcher of an output that cannot be followed any more; allows no token."""

    def accept_token(self, token_id: int) -> bool:
        return False

    def fill_next_token_bitmask(self, bitmask: Tensor, index: int = 0) -> bool:
        bitmask[index].zero_()
        return True

    def fork(self) -> "NothingMayFollow":
        return self  # it has no state


class _Phase(Enum):
    START = auto()  # no token yet: thinking or the answer may begin
    THINKING = auto()
    ANSWER = auto()


class AfterThinking:
    """A matcher that constrains the output only after the model's thinking, if there is any.

    While thinking, every token is allowed except eos, because there would be no answer.
    """

    def __init__(self, answer: Matcher, thinking: Thinking, eos_token_ids: tuple[int, ...]) -> None:
        """answer: a matcher for an output without tokens."""
        self._answer = answer
        self._thinking = thinking
        self._eos_token_ids = eos_token_ids
        self._phase = _Phase.THINKING if thinking.is_open else _Phase.START

    def accept_token(self, token_id: int) -> bool:
        if self._phase is _Phase.START and token_id == self._thinking.open_id:
            self._phase = _Phase.THINKING
            return True
        if self._phase is _Phase.THINKING:
            if token_id == self._thinking.close_id:
                self._phase = _Phase.ANSWER
            return token_id not in self._eos_token_ids
        if not self._answer.accept_token(token_id):
            return False
        self._phase = _Phase.ANSWER
        return True

    def fill_next_token_bitmask(self, bitmask: Tensor, index: int = 0) -> bool:
        line = bitmask[index]
        if self._phase is _Phase.THINKING:
            for token_id in self._eos_token_ids:
                _set_bit(line, token_id, may_come=False)
            return True
        needs_mask = self._answer.fill_next_token_bitmask(bitmask, index)
        if self._phase is _Phase.START:
            _set_bit(line, self._thinking.open_id, may_come=True)
        return needs_mask

    def fork(self) -> "AfterThinking":
        forked = AfterThinking(self._answer.fork(), self._thinking, self._eos_token_ids)
        forked._phase = self._phase
        return forked


def _set_bit(line: Tensor, token_id: int, *, may_come: bool) -> None:
    """line: int32 [words]."""
    words = line.numpy().view("uint32")
    bit = 1 << (token_id % TOKENS_PER_WORD)
    word = int(words[token_id // TOKENS_PER_WORD])
    words[token_id // TOKENS_PER_WORD] = word | bit if may_come else word & ~bit
