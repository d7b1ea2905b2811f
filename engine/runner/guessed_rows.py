"""Rows that are planned before the host knows how many tokens their last step with drafts gave.

    target    verify n ------------------------------------> judge ----> verify n + 1, moved
    drafter                                                    passes for n + 1, moved --^
    host      plan n + 1 and launch all of this            wait n, correct the books

The plan takes all drafts of step n for right. What it is wrong by, each row's shortfall, is on the
device when the passes and step n + 1 run. Where the device computes at once, as a CPU does, the
plan is made true before its inputs are written; else the written inputs are moved on the device,
which needs attention that reads lengths there.

The states of the target's rows are shared: its executor writes them, that of the model that drafts
reads them, and leaves its drafts in the target's table of tokens.
"""

from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.plan import StepPlan
from engine.runner.inputs import InputBatch
from engine.runner.results import StepTensors
from engine.runner.row_texts import PackedChanges, RowTexts
from engine.runner.step_buffers import StepBuffers
from kernels.attention.phased import Phases
from kernels.guessed_steps import PlannedStep, RowStates
from kernels.guesses import judge, move


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
        self.states = RowStates(
            shortfalls=torch.zeros_like(newest),
            samples=newest.new_zeros((max_samples, len(newest))),
            newest=newest,
        )
        # Changes samples [S] of a batch, whose input ids are looked up in a table, before they are
        # judged; for measurements.
        self.overrule: Callable[[Tensor, InputBatch, Tensor], None] | None = None

    def true_plan(self, plan: StepPlan) -> StepPlan:
        """The plan with true numbers; waits for the device."""
        if not (plan.ahead or plan.open_ended):
            return plan
        shortfalls = self.states.shortfalls.tolist()
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
        assert batch.guessed is not None, "written with every step that has such rows"
        rows = batch.attention.device_rows
        planned = PlannedStep(
            num_keys=rows.num_keys,
            positions=batch.positions,
            slots=batch.slots,
            lines=buffers.on_device("logit_indices", batch.guessed.num_lines),
            cu_blocks=rows.cu_blocks,
            block_ids=rows.block_ids,
        )
        behind = move(planned, batch.guessed, self.states.shortfalls, block_size)
        return msgspec.structs.replace(batch, behind=behind)

    def judge(self, batch: InputBatch, drawn: Tensor, table: Tensor) -> Tensor:
        """Queue what a step with drafts makes of its rows; returns [2, S] as `kernels.guesses`.

        drawn: [S]. table: which the step's input ids were looked up in.
        """
        assert batch.guessed is not None, "written with every step that has drafts"
        if self.overrule is not None:
            self.overrule(drawn, batch, table)
        ids, lines = batch.input_ids, batch.logit_indices
        return judge(drawn, ids, lines, table, batch.guessed, self.states)


class StepGuesses:
    """What one executor's steps read and leave of the rows' guesses."""

    def __init__(
        self,
        rows: GuessedRows,
        table: TokenTable,
        attention: Phases,
        *,
        drafts_for: TokenTable | None = None,
        texts: RowTexts | None = None,
    ) -> None:
        """table: of this executor. drafts_for: the target's table; None = this is the target.

        texts: where drafts are looked up; None = none is.
        """
        self.rows = rows
        self._table = table
        self._attention = attention
        self._drafts_for = drafts_for
        self._texts = texts
        self._changes: PackedChanges | None = (
            None  # of the step that is launched; None = nothing to send
        )

    def fetch(self, plan: StepPlan) -> StepPlan:
        """The plan to run, after what the target left of its step in flight was fetched."""
        self._changes = self._texts.changes_of(plan) if self._texts is not None else None
        if plan.open_ended:
            self._table.entries.copy_(self.rows.states.samples)
        return plan if self._attention.reads_lengths_on_device else self.rows.true_plan(plan)

    @property
    def to_send(self) -> NDArray[np.int32] | None:
        """What has to reach the device with the inputs of the step; None = nothing."""
        return None if self._changes is None else self._changes.packed

    def prepare(
        self, plan: StepPlan, batch: InputBatch, buffers: StepBuffers, block_size: int
    ) -> InputBatch:
        """Queue lookups of drafts, and that `batch`, just sent, is moved to true positions."""
        if self._changes is not None and self._texts is not None:
            assert batch.extra is not None, "sent with the batch"
            self._texts.look_up(self._changes.on_device(batch.extra))
            self._changes = None
        return self.rows.move(plan, batch, buffers, block_size)

    def settle(self, plan: StepPlan, batch: InputBatch, left: StepTensors) -> StepTensors:
        """Decide which of the target's drafts count, so that who is launched next may read it."""
        if not plan.drafts or self._drafts_for is not None:
            return left
        assert left.drawn is not None, "rows with drafts sample"
        return replace(left, judged=self.rows.judge(batch, left.drawn, self._table.flat))

    def give(self, place: int) -> None:
        """See `Executor.give_drafts`."""
        assert self._drafts_for is not None, "a target drafts for nobody"
        self._drafts_for.entries[place].copy_(self._table.newest)
