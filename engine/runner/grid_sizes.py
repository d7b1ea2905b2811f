"""The grid form of prompt graphs: R rows of up to L tokens, each at the end of a span of L tokens.

    span   [ padding ........ | the row's new tokens ]

Attention lets a row's last query see its last key and aligns the others before it. A row that
began its span would have its first tokens' keys counted from the span's end and see too few; at
the end of the span every token sees what it should, on top of any history. It is the form that
LAPS describes; `ragged` pads less and is the default.
"""

from collections.abc import Sequence

from engine.runner.graph_sizes import GraphSize, PromptSizes


def grid_sizes(
    batch_sizes: Sequence[int], row_lengths: Sequence[int], *, max_row_tokens: int
) -> PromptSizes:
    """Returns a size for every number of rows with every length.

    max_row_tokens: rows with more new tokens use no grid graph; at least the longest length.
    """
    sizes = [
        GraphSize(num_rows=num_rows, num_tokens=num_rows * length, span_tokens=length)
        for num_rows in batch_sizes
        for length in row_lengths
    ]
    # Of sizes with as many tokens the one with fewer rows has less logits to compute.
    sizes.sort(key=lambda size: (size.num_tokens, size.num_rows))
    return PromptSizes(
        form="grid",
        sizes=tuple(sizes),
        max_tokens=sizes[-1].num_tokens,
        max_row_tokens=max_row_tokens,
    )
