"""Rows that are planned before the host knows how many tokens their last step with drafts gave.

    target    verify n ------------------------------------> accept ---> verify n + 1, moved
    drafter                                                    passes for n + 1, moved --^
    host      plan n + 1 and launch all of this            wait n, correct the books

The plan takes all drafts of step n for right. What it is wrong by, each row's shortfall, is on the
device when the passes and step n + 1 run. Where the device computes at once, as a CPU does, the
plan is made true before its inputs are written; else the written inputs are moved on the device,
which needs attention that reads lengths there.

The states of the target's rows are shared: its executor writes them, that of the model that drafts
reads them, and leaves its drafts in the target's table of tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kv.tables import concat_ranges
from engine.plan import StepPlan
from engine.runner.inputs import InputBatch
from engine.runner.results import StepTensors
from engine.runner.step_buffers import StepBuffers
from engine.sampling.staging import Staging
from kernels.attention.phased import Phases
from kernels.guessed_steps import GuessedLines, PlannedStep, RowMoves, RowStates
from kernels.guesses import accept, following, move


class TokenTable:
    """int32 [1 + entries, max_rows + 1]: each row's newest token, then what another executor left.

    The last row is for padding.
    """

    def __init__(self, max_rows: int, num_entries: int, device: torch.device) -> None:
        shape = (1 + num_entries, max_rows + 1)
        self._lines = torch.zeros(shape, dtype=torch.int32, device=device)

    @property
    def flat(self) -> Tensor:
        """All of it, as ids of a step's input are looked up."""
        return self._lines.view(-1)

    @property
    def newest(self) -> Tensor:
        """[max_rows + 1]"""
        return self._lines[0]

    @property
    def entries(self) -> Tensor:
        """[entries, max_rows + 1]"""
        return self._lines[1:]


class GuessedRows:
    """The states of a target's rows on its device."""

    def __init__(self, table: TokenTable, max_samples: int) -> None:
        """table: of the target. max_samples: of a row in a step."""
        newest = table.newest
        self._states = RowStates(
            shortfalls=torch.zeros_like(newest),
            samples=newest.new_zeros((max_samples, len(newest))),
            newest=newest,
        )
        self._staging = Staging(newest.device)
        # Changes samples [S] before they are judged by what follows them [S]; for measurements.
        self.overrule: Callable[[Tensor, Tensor, GuessedLines], None] | None = None

    @property
    def samples(self) -> Tensor:
        """[max_samples, max_rows + 1]  as of `RowStates`."""
        return self._states.samples

    @property
    def shortfalls(self) -> Tensor:
        """[max_rows + 1]  as of `RowStates`."""
        return self._states.shortfalls

    def true_plan(self, plan: StepPlan) -> StepPlan:
        """The plan with true numbers; waits for the device."""
        if not (plan.ahead or plan.open_ended):
            return plan
        shortfalls = self._states.shortfalls.tolist()
        behind = [shortfalls[row] for row in plan.rows]
        num_computed, num_new = list(plan.num_computed_tokens), list(plan.num_new_tokens)
        drafts = dict(plan.drafts)
        for index in plan.ahead:
            num_computed[index] -= behind[index]
            drafts[index] = drafts[index][behind[index] :]
        for index in plan.open_ended:
            num_new[index] -= behind[index]
            drafts[index] = drafts[index][: num_new[index]]
        return msgspec.structs.replace(
            plan,
            num_computed_tokens=num_computed,
            num_new_tokens=num_new,
            drafts=list(drafts.items()),
            ahead=[],
            open_ended=[],
        )

    def move(
        self, plan: StepPlan, batch: InputBatch, buffers: StepBuffers, block_size: int
    ) -> InputBatch:
        """Queue that `batch`, just written to `buffers` for `plan`, is moved to true positions."""
        if not (plan.ahead or plan.open_ended):
            return batch
        shortfalls = self._states.shortfalls
        no_row = len(shortfalls) - 1
        is_open = _is_among(batch.plan_rows, plan.open_ended)
        is_guessed = is_open | _is_among(batch.plan_rows, plan.ahead)
        moving = np.where(is_guessed & ~is_open, batch.rows, no_row)  # [R]
        num_new = batch.attention.num_new_tokens
        sent = self._staging.send(
            moving,
            np.where(is_guessed, batch.rows, no_row)[batch.sampling],
            np.where(is_open, batch.rows, no_row)[batch.sampling],
            concat_ranges(batch.first_tokens, num_new),
            np.repeat(np.arange(batch.num_rows), num_new),
        )
        of_rows, of_lines, ends, places, token_rows = sent
        rows = batch.attention.device_rows
        planned = PlannedStep(
            num_keys=rows.num_keys,
            positions=batch.positions,
            slots=batch.slots,
            lines=buffers.on_device("logit_indices", len(ends)) if plan.open_ended else None,
            cu_blocks=rows.cu_blocks,
            block_ids=rows.block_ids,
        )
        moves = RowMoves(
            rows=of_rows, lines=of_lines, ends=ends, places=places, token_rows=token_rows
        )
        return msgspec.structs.replace(batch, behind=move(planned, moves, shortfalls, block_size))

    def accept(self, plan: StepPlan, batch: InputBatch, drawn: Tensor, table: Tensor) -> Tensor:
        """Queue what a step with drafts makes of its rows; returns what follows each line, [S].

        drawn: [S]. table: which the step's input ids were looked up in.
        """
        follows = following(batch.input_ids, batch.logit_indices, len(drawn), table)
        guessed = self._lines_of(plan, batch)
        if self.overrule is not None:
            self.overrule(drawn, follows, guessed)
        accept(drawn, follows, guessed, self._states)
        return follows

    def _lines_of(self, plan: StepPlan, batch: InputBatch) -> GuessedLines:
        is_guessed = _is_among(batch.plan_rows, [index for index, _ in plan.drafts])
        (chosen,) = np.nonzero(is_guessed)
        nums = np.bincount(batch.sampling, minlength=batch.num_rows)
        ends, counts = nums.cumsum()[chosen], nums[chosen]
        within = np.minimum(np.arange(len(self.samples)), counts[:, None] - 1)
        lines = (ends - counts)[:, None] + within
        rows, on_device, num_lines = self._staging.send(batch.rows[chosen], lines, counts)
        return GuessedLines(rows=rows, lines=on_device, counts=num_lines)


def _is_among(plan_rows: NDArray[np.int64], indices: Sequence[int]) -> NDArray[np.bool_]:
    """[R]  whether each row of a batch is one of these in the plan; faster than `np.isin`."""
    is_one = np.zeros(len(plan_rows), dtype=np.bool_)
    is_one[list(indices)] = True
    return is_one[plan_rows]


class StepGuesses:
    """What one executor's steps read and leave of the rows' guesses."""

    def __init__(
        self,
        rows: GuessedRows,
        table: TokenTable,
        attention: Phases,
        *,
        drafts_for: TokenTable | None = None,
        look_up: Callable[[StepPlan], None] | None = None,
    ) -> None:
        """table: of this executor. drafts_for: the target's table; None = this is the target.

        look_up: as of `engine.runner.row_texts`; None = no draft is looked up.
        """
        self.rows = rows
        self._table = table
        self._attention = attention
        self._drafts_for = drafts_for
        self._look_up = look_up

    def fetch(self, plan: StepPlan) -> StepPlan:
        """The plan to run, after what the target left of its step in flight was fetched."""
        if self._look_up is not None:
            self._look_up(plan)
        if plan.open_ended:
            self._table.entries.copy_(self.rows.samples)
        return plan if self._attention.reads_lengths_on_device else self.rows.true_plan(plan)

    def move(
        self, plan: StepPlan, batch: InputBatch, buffers: StepBuffers, block_size: int
    ) -> InputBatch:
        """As `GuessedRows.move`."""
        return self.rows.move(plan, batch, buffers, block_size)

    def settle(self, plan: StepPlan, batch: InputBatch, left: StepTensors) -> StepTensors:
        """Decide which of the target's drafts count, so that who is launched next may read it."""
        if not plan.drafts or self._drafts_for is not None:
            return left
        assert left.drawn is not None, "rows with drafts sample"
        follows = self.rows.accept(plan, batch, left.drawn, self._table.flat)
        return replace(left, following=follows)

    def give(self, place: int) -> None:
        """See `Executor.give_drafts`."""
        assert self._drafts_for is not None, "a target drafts for nobody"
        self._drafts_for.entries[place].copy_(self._table.newest)
