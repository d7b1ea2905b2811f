"""Defines the step sizes that are captured in CUDA graphs, and which steps fit a size.

    decode   R rows of one new token each
    ragged   T tokens of up to R rows, packed without gaps: prompts, chunks, single tokens
    verify   T tokens of up to T rows likewise, each row with drafts: logits after every token
    split    R rows with drafts, each in a span of as many tokens as a row has at most
    grid     R rows of up to L tokens, each in a span of L tokens (grid_sizes.py)

Knows no graphs.
"""

from dataclasses import dataclass
from typing import Literal

PromptForm = Literal["ragged", "grid"]

# Rows of a ragged graph. Each row costs a line of logits, whether or not a step uses it. If graphs
# are to hold more rows, steps of up to this number keep separate graphs.
FEW_ROWS = 128
# Beyond 1,024 tokens a graph saves no device time. But launching a step kernel by kernel occupies
# the host, which delays the tokens of the previous step.
_MAX_RAGGED_TOKENS = 4096
# Of models with latent attention, which graphs compute token by token: beyond, making keys and
# values costs less than a graph saves. Of these sizes each also keeps memory for every token.
MAX_LATENT_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSize:
    """The size of a graph: the largest step that it holds."""

    num_rows: int
    num_tokens: int
    # Length of each row's span; None = rows follow each other without gaps.
    span_tokens: int | None = None
    has_line_per_token: bool = False  # of logits; else one a row

    def __post_init__(self) -> None:
        is_grid = self.span_tokens is not None
        assert not is_grid or self.num_tokens == self.num_rows * (self.span_tokens or 0), (
            f"{self.num_tokens} tokens for {self.num_rows} spans of {self.span_tokens}"
        )

    @property
    def num_lines(self) -> int:
        """Lines of logits."""
        return self.num_tokens if self.has_line_per_token else self.num_rows

    def holds(self, num_rows: int, num_tokens: int, longest_row: int) -> bool:
        """Whether a step fits; `longest_row`: the largest number of new tokens of a row."""
        if num_rows > self.num_rows:
            return False
        if self.span_tokens is None:
            return num_tokens <= self.num_tokens
        return longest_row <= self.span_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSizes:
    """The sizes captured for prompt steps, and the limits of the steps they are meant for."""

    form: PromptForm
    # ascending by tokens
    sizes: tuple[GraphSize, ...]
    max_tokens: int  # of a step
    max_row_tokens: int

    @property
    def graph_token_sizes(self) -> tuple[int, ...]:
        """Tokens of the steps that need no padding tokens; () for a grid, where rows matter too."""
        if self.form != "ragged":
            return ()
        return tuple(dict.fromkeys(size.num_tokens for size in self.sizes))

    def is_eligible(self, num_tokens: int, longest_row: int) -> bool:
        """Whether a step is within the token limits; it may still have too many rows."""
        return num_tokens <= self.max_tokens and longest_row <= self.max_row_tokens


def decode_sizes(max_rows: int) -> list[GraphSize]:
    """Sizes up to exactly `max_rows` rows; padding stays below 8 rows or an eighth."""
    return [GraphSize(num_rows=count, num_tokens=count) for count in _finely(max_rows)]


def verify_sizes(max_rows: int, max_tokens: int) -> list[GraphSize]:
    """Sizes of 2 to exactly `max_tokens` tokens, padded as those of decode steps."""
    return [
        GraphSize(num_rows=min(count, max_rows), num_tokens=count, has_line_per_token=True)
        for count in _finely(max_tokens)[1:]
    ]


def split_verify_sizes(max_rows: int, row_tokens: int, max_tokens: int) -> list[GraphSize]:
    """Sizes of two rows or more, in spans of `row_tokens`: half of the rows is half of the tokens.

    At most `max_rows` rows and `max_tokens` tokens.
    """
    return [
        GraphSize(
            num_rows=count,
            num_tokens=count * row_tokens,
            span_tokens=row_tokens,
            has_line_per_token=True,
        )
        for count in _finely(min(max_rows, max_tokens // row_tokens))[1:]
    ]


def _finely(most: int) -> list[int]:
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most + 1, 32)]
    return [*(count for count in steps if count < most), most]


def ragged_sizes(max_rows: int, max_tokens: int, *, max_graph_rows: int = FEW_ROWS) -> PromptSizes:
    """Sizes up to `max_tokens` tokens, at most 4096; padding stays below 64 tokens or an eighth.

    max_rows: rows of a worker. max_graph_rows: upper limit of rows of a graph.
    """
    limit = min(max_tokens, _MAX_RAGGED_TOKENS)
    steps = [16, 32, *range(64, 512, 64), *range(512, 1536, 128), *range(1536, limit, 256)]
    counts = [*(count for count in steps if count < limit), limit]
    most = min(max_rows, max_graph_rows)
    sizes = tuple(
        GraphSize(num_rows=num_rows, num_tokens=count)
        for count in counts
        for num_rows in dict.fromkeys((min(count, most, FEW_ROWS), min(count, most)))
    )
    return PromptSizes(form="ragged", sizes=sizes, max_tokens=limit, max_row_tokens=limit)
