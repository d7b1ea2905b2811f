"""Runs dummy steps before a worker is ready, so that no request pays for first-time set-up.

Libraries build or choose a kernel when they first see a new kind of work; on a GPU nothing may
compile later. The dummy rows write to blocks that nothing holds yet.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import msgspec

from engine.plan import NEWEST, RowAdmission, StepPlan, given
from engine.request import SamplingParams
from engine.runner.executor import Executor

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
# One of each kind of sampling; rows that draw are processed by other kernels than greedy ones.
SAMPLING_KINDS = (
    SamplingParams(max_tokens=1, temperature=1.0),
    SamplingParams(max_tokens=1, temperature=0.7, top_k=20, top_p=0.9, min_p=0.01),
    SamplingParams(max_tokens=1, temperature=0.0, logprobs=0),
    SamplingParams(max_tokens=1, temperature=1.0, logprobs=20),
    SamplingParams(max_tokens=0, temperature=0.0, label_token_ids=(0, 1)),
    SamplingParams(
        max_tokens=1,
        min_tokens=1,
        temperature=1.0,
        stop_token_ids=(0,),
        logit_bias={0: 1.0},
        presence_penalty=0.5,
        frequency_penalty=0.5,
        repetition_penalty=1.1,
    ),
)
# Numbers of tokens that between them run every form of `kernels.linear.medium`.
LINEAR_TOKENS = (40, 64, 96, 128)
# Enough positions for a full slice of prompt log-probabilities, and for more than one slice.
ASKED_PROMPT_TOKENS = 80
ASKS_PROMPT = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=20)


@dataclass(frozen=True, slots=True, kw_only=True)
class DummyRow:
    """A row of made-up tokens, the first of which count as computed before."""

    num_computed_tokens: int
    num_new_tokens: int
    params: SamplingParams = GREEDY

    @property
    def num_tokens(self) -> int:
        return self.num_computed_tokens + self.num_new_tokens


def warm_up(
    executor: Executor, *, num_rows: int, num_blocks: int, max_tokens: int, max_row_tokens: int
) -> None:
    """Run each kind of step once, within the given rows, blocks, and tokens per step and row."""
    block_size = executor.layout.block_size
    is_gpu = executor.model.device.type == "cuda"
    steps = _cpu_steps()
    if is_gpu:
        least_shared = executor.min_exchanged_tokens  # ranks exchange shares of it by other kernels
        shared = () if least_shared is None else (least_shared,)
        sizes = sorted({*executor.model.token_sizes, *LINEAR_TOKENS, *shared})
        chosen = (_prompts(size, max_row_tokens) for size in sizes if size < max_tokens)
        steps = chain(chosen, _gpu_steps(num_rows, max_tokens, max_row_tokens))
        if executor.attends_few_tokens_apart:
            steps = chain(steps, _short_chunks(num_rows))
    for rows in steps:
        needed_blocks = sum(-(-row.num_tokens // block_size) for row in rows)
        if (
            len(rows) <= num_rows
            and max(row.num_tokens for row in rows) <= max_row_tokens
            and needed_blocks <= num_blocks
            and sum(row.num_new_tokens for row in rows) <= max_tokens
        ):
            executor.launch(dummy_step(rows, block_size)).wait()
            executor.launch(release_step(len(rows))).wait()


def _cpu_steps() -> Iterator[list[DummyRow]]:
    """Shapes whose first run is slow: chunks of one row, and rows that decode together."""
    for num_tokens in (64, 16, 4, 1):
        yield [DummyRow(num_computed_tokens=0, num_new_tokens=num_tokens)]
    for num_rows in (2, 4, 8):
        yield [DummyRow(num_computed_tokens=0, num_new_tokens=1)] * num_rows


def _gpu_steps(num_rows: int, max_tokens: int, max_row_tokens: int) -> Iterator[list[DummyRow]]:
    """Step sizes in factors of two, every kind of batch, and every kind of sampling."""
    size = max_tokens
    while size > 1:
        yield _prompts(size, max_row_tokens)
        num_new_tokens = min(size // 2 + 1, max_row_tokens - 16)
        if num_new_tokens > 0:
            yield [DummyRow(num_computed_tokens=16, num_new_tokens=num_new_tokens)]
        size //= 2
    for count in (1, 2, 3, num_rows // 2, num_rows):
        if count > 0:
            yield [DummyRow(num_computed_tokens=3, num_new_tokens=1)] * count
    single = DummyRow(num_computed_tokens=40, num_new_tokens=1)
    chunk = DummyRow(num_computed_tokens=0, num_new_tokens=5)
    later_chunk = DummyRow(num_computed_tokens=33, num_new_tokens=7)
    yield [single, chunk]
    yield [single, single, chunk, later_chunk]
    for params in SAMPLING_KINDS:
        row = DummyRow(num_computed_tokens=0, num_new_tokens=2, params=params)
        yield [row]
        yield [row, row, chunk]
    # Ranks gather the logits of rows that draw: of so many maybe by another library.
    drawn = DummyRow(num_computed_tokens=3, num_new_tokens=1, params=SAMPLING_KINDS[0])
    yield [drawn] * num_rows
    asked = min(ASKED_PROMPT_TOKENS, max_row_tokens)
    yield [DummyRow(num_computed_tokens=0, num_new_tokens=asked, params=ASKS_PROMPT)]


def _short_chunks(num_rows: int) -> Iterator[list[DummyRow]]:
    """Rows of two tokens, as drafts are verified, alone and beside others."""
    short = DummyRow(num_computed_tokens=40, num_new_tokens=2)
    for count in sorted({1, 16, num_rows // 2, num_rows} - {0}):
        yield [short] * count
    single = DummyRow(num_computed_tokens=3, num_new_tokens=1)
    yield [single, short, DummyRow(num_computed_tokens=0, num_new_tokens=40)]


def _prompts(num_tokens: int, max_row_tokens: int) -> list[DummyRow]:
    """Rows of new prompts with `num_tokens` tokens together."""
    return [
        DummyRow(num_computed_tokens=0, num_new_tokens=min(max_row_tokens, num_tokens - start))
        for start in range(0, num_tokens, max_row_tokens)
    ]


def warm_up_ahead(
    executor: Executor, *, num_rows: int, max_tokens: int, max_row_tokens: int
) -> None:
    """Run steps with drafts, the second launched before those of the first are judged.

    Within the given rows, and tokens per step and row. Does nothing where these or the executor's
    blocks are too few.
    """
    for params in (GREEDY, *SAMPLING_KINDS[:2]):
        guessed, ahead = _steps_ahead(params, executor.layout.block_size)
        num_blocks = sum(len(admission.block_ids) for admission in guessed.admissions)
        if (
            num_rows < len(guessed.rows)
            or max_tokens < guessed.num_tokens
            or max_row_tokens < max(ahead.num_computed_tokens) + 2
            or executor.kv_store.num_blocks < num_blocks
        ):
            return
        pending = [executor.launch(guessed), executor.launch(ahead)]
        for step in pending:
            step.wait()
        executor.launch(release_step(num_rows=len(guessed.rows))).wait()


def _steps_ahead(params: SamplingParams, block_size: int) -> tuple[StepPlan, StepPlan]:
    """A row with a draft beside a chunk of a prompt; then the row with one that is looked up."""
    known = DummyRow(num_computed_tokens=2, num_new_tokens=1, params=params)
    # Rows of as many tokens as there are in the end, so that they have the blocks for them.
    chunk = DummyRow(num_computed_tokens=0, num_new_tokens=known.num_tokens + 3)
    step = dummy_step([chunk, chunk], block_size)
    admission = msgspec.structs.replace(
        step.admissions[0],
        token_ids=[0] * known.num_tokens,
        num_prompt_tokens=known.num_tokens,
        params=params,
    )
    guessed = msgspec.structs.replace(
        step,
        admissions=[admission, *step.admissions[1:]],
        num_new_tokens=[2, chunk.num_tokens],
        num_computed_tokens=[known.num_computed_tokens, 0],
        num_samples=[2, 0],
        drafts=[(0, [0])],
    )
    ahead = StepPlan(
        step=1,
        rows=[0],
        num_new_tokens=[2],
        num_computed_tokens=[known.num_tokens + 1],
        num_samples=[2],
        new_block_ids=[[]],
        drafts=[(0, [NEWEST, NEWEST, given(0)])],
        ahead=[0],
        texts=[(0, 0, [0] * known.num_tokens)],
    )
    return guessed, ahead


def dummy_step(rows: Sequence[DummyRow], block_size: int) -> StepPlan:
    """A step that admits `rows` on consecutive blocks, computes their new tokens and samples."""
    admissions = []
    next_block = 0
    for index, row in enumerate(rows):
        end_block = next_block - (-row.num_tokens // block_size)
        admissions.append(
            RowAdmission(
                row=index,
                token_ids=[0] * row.num_tokens,
                num_prompt_tokens=row.num_tokens,
                params=row.params,
                block_ids=list(range(next_block, end_block)),
            )
        )
        next_block = end_block
    return StepPlan(
        step=0,
        admissions=admissions,
        rows=list(range(len(rows))),
        num_new_tokens=[row.num_new_tokens for row in rows],
        num_computed_tokens=[row.num_computed_tokens for row in rows],
        num_samples=[1] * len(rows),
        new_block_ids=[[] for _ in rows],
    )


def release_step(num_rows: int) -> StepPlan:
    """A step that only releases the rows of a dummy step."""
    return StepPlan(
        step=0,
        released_rows=list(range(num_rows)),
        rows=[],
        num_new_tokens=[],
        num_computed_tokens=[],
        num_samples=[],
        new_block_ids=[],
    )
