"""From who computes how many tokens to a `StepPlan`. Decides nothing and advances nobody."""

from itertools import repeat

from engine.request import Request
from engine.scheduling.decode_columns import DecodeColumns
from engine.scheduling.plan import StepPlan
from engine.scheduling.row_slots import RowSlots, row_of

Chunk = tuple[Request, int]  # who computes known tokens, and how many of them


def build_plan(
    step: int,
    decodes: DecodeColumns,
    chunks: list[Chunk],
    grown: dict[int, list[int]],
    zero_block_ids: list[int],
    row_slots: RowSlots,
) -> StepPlan:
    """The plan of step number `step`; takes from `row_slots` what the executor has to hear.

    `decodes`: who computes its newest token, and samples the next. `chunks`: who runs besides; it
    samples if it reaches the end of its tokens. `grown`: row -> blocks that it got since an earlier
    plan.
    """
    num_decodes = len(decodes)
    requests = [request for request, _ in chunks]
    reaches_end = [num_new == request.num_uncomputed_tokens for request, num_new in chunks]
    rows = decodes.rows + [request.row for request in requests if request.row is not None]
    num_rows = num_decodes + len(requests)
    assert len(rows) == num_rows, f"step {step}: a request of {num_rows} has no row"
    no_blocks: list[int] = []
    heard_tokens = [
        (row_of(request), request.tokens[-1])
        for request in decodes.constrained
        if not row_slots.is_entering(request)
    ]
    admissions, released_rows = row_slots.take_changes()
    return StepPlan(
        step=step,
        zero_block_ids=zero_block_ids,
        admissions=admissions,
        released_rows=released_rows,
        rows=rows,
        num_new_tokens=[1] * num_decodes + [num_new for _, num_new in chunks],
        num_computed_tokens=(
            decodes.num_computed_tokens + [request.num_computed_tokens for request in requests]
        ),
        num_logits=[1] * num_decodes + list(map(int, reaches_end)),
        samples=[True] * num_decodes + reaches_end,
        new_block_ids=(
            list(map(grown.get, rows, repeat(no_blocks))) if grown else [no_blocks] * num_rows
        ),
        heard_tokens=heard_tokens,
    )
