"""From who computes how many tokens to a `StepPlan`. Decides nothing and advances nobody."""

from collections.abc import Sequence

from engine.request import Request
from engine.scheduling.plan import StepPlan
from engine.scheduling.row_slots import RowSlots, row_of


def build_plan(
    step: int,
    requests: Sequence[Request],
    num_new_tokens: list[int],
    grown: dict[int, list[int]],
    zero_block_ids: list[int],
    row_slots: RowSlots,
) -> StepPlan:
    """The plan of step number `step`; takes from `row_slots` what the executor has to hear.

    `requests`: who runs, in the plan's order. `grown`: row -> blocks that it got since an earlier
    plan. A row samples if it reaches the end of its tokens.
    """
    counts = zip(requests, num_new_tokens, strict=True)
    reaches_end = [num_new == request.num_uncomputed_tokens for request, num_new in counts]
    rows = [row_of(request) for request in requests]
    no_blocks: list[int] = []
    admissions, released_rows = row_slots.take_changes()
    return StepPlan(
        step=step,
        zero_block_ids=zero_block_ids,
        admissions=admissions,
        released_rows=released_rows,
        rows=rows,
        num_new_tokens=num_new_tokens,
        num_computed_tokens=[request.num_computed_tokens for request in requests],
        num_logits=list(map(int, reaches_end)),
        samples=reaches_end,
        new_block_ids=[grown.get(row, no_blocks) for row in rows],
    )
