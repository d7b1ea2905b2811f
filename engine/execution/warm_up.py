"""Dummy steps before a worker says it is ready, so that no request pays for first-time set-up.

Libraries build a kernel for each new shape the first time they see it. What the dummy rows write
lands in blocks that nobody holds yet.
"""

from engine.execution.executor import Executor
from engine.request import SamplingParams
from engine.scheduling.plan import RowAdmission, StepPlan

CHUNK_TOKENS = (64, 16, 4, 1)  # lengths of one row's chunk
BATCH_ROWS = (2, 4, 8)  # rows that decode together


def warm_up(executor: Executor, *, num_rows: int, num_blocks: int, max_tokens: int) -> None:
    """Run each shape once, within `num_rows` rows, `num_blocks` blocks and `max_tokens` a step."""
    block_size = executor.layout.block_size
    for num_tokens in CHUNK_TOKENS:
        if num_tokens <= min(max_tokens, num_blocks * block_size):
            executor.launch(_plan(1, num_tokens, block_size)).wait()
            executor.launch(_release(1)).wait()
    for rows in BATCH_ROWS:
        if rows <= min(num_rows, num_blocks, max_tokens):
            executor.launch(_plan(rows, 1, block_size)).wait()
            executor.launch(_release(rows)).wait()


def _plan(num_rows: int, num_tokens: int, block_size: int) -> StepPlan:
    """`num_rows` rows that each compute a prompt of `num_tokens` zeros and sample."""
    num_blocks = -(-num_tokens // block_size)
    return StepPlan(
        step=0,
        admissions=[
            RowAdmission(
                row=row,
                token_ids=[0] * num_tokens,
                num_prompt_tokens=num_tokens,
                params=SamplingParams(max_tokens=1, temperature=0.0),
                block_ids=list(range(row * num_blocks, (row + 1) * num_blocks)),
            )
            for row in range(num_rows)
        ],
        rows=list(range(num_rows)),
        num_new_tokens=[num_tokens] * num_rows,
        num_computed_tokens=[0] * num_rows,
        num_logits=[1] * num_rows,
        samples=[True] * num_rows,
        new_block_ids=[[] for _ in range(num_rows)],
    )


def _release(num_rows: int) -> StepPlan:
    return StepPlan(
        step=0,
        released_rows=list(range(num_rows)),
        rows=[],
        num_new_tokens=[],
        num_computed_tokens=[],
        num_logits=[],
        samples=[],
        new_block_ids=[],
    )
