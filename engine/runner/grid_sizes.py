"""Defines the grid form of prompt graphs: R rows, each at the end of a span of L tokens.

    span   [ padding ........ | the row's new tokens ]

Attention aligns a row's last query with its last key. If a row stood at the start of its span, its
tokens would be aligned as if followed by the padding and see too few keys. At the end of the span
every token sees the right keys, after any history. This is the form that LAPS describes; `ragged`
pads less and is the default.
"""

from collections.abc import Sequence

from engine.runner.graph_sizes import GraphSize, PromptSizes


def grid_sizes(
    batch_sizes: Sequence[int], row_lengths: Sequence[int], *, max_row_tokens: int
) -> PromptSizes:
    """Every number of rows in `batch_sizes` with every length in `row_lengths`.

    max_row_tokens: rows with more new tokens do not use the grid; at least the longest length.
    """
    sizes = [
        GraphSize(num_rows=num_rows, num_tokens=num_rows * length, span_tokens=length)
        for num_rows in batch_sizes
        for length in row_lengths
    ]
    # Of sizes with equal tokens, the one with fewer rows computes fewer logits.
    sizes.sort(key=lambda size: (size.num_tokens, size.num_rows))
    return PromptSizes(
        form="grid",
        sizes=tuple(sizes),
        max_tokens=sizes[-1].num_tokens,
        max_row_tokens=max_row_tokens,
    )
