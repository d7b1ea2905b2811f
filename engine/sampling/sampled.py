"""The interface that an executor needs of sampling, and the records that sampling returns.

The records hold device tensors that may still be being computed. Knows neither how a token was
chosen nor when it is read.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

import msgspec
from torch import Tensor

from engine.plan import TokenLogprobs
from engine.request import SamplingParams
from kernels.sampling.choices import GreedyChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobTensors:
    """Log-probabilities of the P lines that asked for them."""

    positions: list[int]  # [P]  lines of the batch, ascending
    limits: list[int]  # [P]  number of best or named tokens that each asked for, at most K
    chosen: Tensor  # fp32 [P]  NaN where nothing could be drawn
    # int64 [P, K]  best first, lower id among equals; or those that the row named, in their order
    top_ids: Tensor
    top_values: Tensor  # fp32 [P, K]
    num_finite: Tensor  # int64 [P]  leading entries that may be listed; K where the row named them

    def map(self, copy: Callable[[Tensor], Tensor]) -> "LogprobTensors":
        """A copy with `copy` applied to every tensor, for example to bring them to the host."""
        return LogprobTensors(
            positions=self.positions,
            limits=self.limits,
            chosen=copy(self.chosen),
            top_ids=copy(self.top_ids),
            top_values=copy(self.top_values),
            num_finite=copy(self.num_finite),
        )

    def records(self, num_lines: int) -> list[TokenLogprobs | None]:
        """[num_lines]  None for lines that did not ask or drew nothing. Reads the tensors.

        num_lines: S of the batch they were made for.
        """
        found: list[TokenLogprobs | None] = [None] * num_lines
        chosen: list[float] = self.chosen.tolist()
        top_ids, top_values = self.top_ids.tolist(), self.top_values.tolist()
        for p, num_finite in enumerate(self.num_finite.tolist()):
            if not math.isnan(chosen[p]):
                # A token that the model itself rules out (-inf) is not listed.
                k = min(self.limits[p], num_finite)
                record = TokenLogprobs(chosen[p], top_ids[p][:k], top_values[p][:k])
                found[self.positions[p]] = record
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelTensors:
    """Log-probabilities of the labels of P prompt-only lines, which draw no token; L labels."""

    positions: list[int]  # [P]  lines of the batch, ascending
    counts: list[int]  # [P]  number of labels of each
    values: Tensor  # fp32 [L]  line by line

    def map(self, copy: Callable[[Tensor], Tensor]) -> "LabelTensors":
        """A copy with `copy` applied to the tensor."""
        return replace(self, values=copy(self.values))

    def by_line(self) -> dict[int, list[float]]:
        """Position -> its labels' log-probabilities. Reads the tensor."""
        values: Iterator[float] = iter(self.values.tolist())
        return {
            position: list(islice(values, count))
            for position, count in zip(self.positions, self.counts, strict=True)
        }


class SampledTensors(msgspec.Struct, frozen=True, kw_only=True):
    """What was drawn, in the order of the rows passed to `sample`."""

    token_ids: Tensor  # int64 [S]  0 where not finite: must not be used
    is_finite: Tensor  # bool [S]  False = nothing could be drawn
    # bool [S]  nothing of finite logits was allowed; None = every row allows something
    allows_nothing: Tensor | None = None
    logprobs: LogprobTensors | None  # None = no row asked
    # Of prompt-only rows, whose token must not be used.
    labels: LabelTensors | None = None
    embeddings: Tensor | None = None  # fp32 [S, hidden], from a model that makes them

    def is_choice(self, choice: GreedyChoice) -> bool:
        """Whether the tokens are the tensors of `choice` itself, without log-probabilities."""
        return (
            self.token_ids is choice.token_ids
            and self.is_finite is choice.is_finite
            and self.logprobs is None
        )


class RowSampler(Protocol):
    """Keeps each row's sampling state; `sample` and `accept_token` advance it and queue work."""

    def add(
        self, row: int, params: SamplingParams, prompt_ids: list[int], output_ids: list[int]
    ) -> None: ...

    def remove(self, row: int) -> None: ...

    def accept_token(self, row: int, token_id: int) -> None: ...

    def append(self, tokens_of_rows: Sequence[tuple[int, list[int]]]) -> None: ...

    def is_plain(self, rows: list[int]) -> bool:
        """Whether the best token of each row's logits is all that `rows` need."""
        ...

    def take(self, rows: list[int], best: GreedyChoice) -> SampledTensors:
        """`best` as what was drawn for `rows`, which are plain: as `sample` would."""
        ...

    def sample(
        self,
        logits: Tensor,
        rows: list[int],
        greedy: GreedyChoice | None = None,
        drafts: Mapping[int, Sequence[int]] | None = None,
        behind: Tensor | None = None,
    ) -> SampledTensors:
        """logits: of the model, one line for each of `rows`; `greedy`: their argmax, if known.

        drafts: by row; such a row may have several lines, and its state does not advance. behind:
        int32 [S]  so many fewer tokens precede a line than its drafts say; None = they are right.
        """
        ...
