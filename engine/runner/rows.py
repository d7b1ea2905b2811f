"""The state of the device rows: applies a plan's admissions, releases and new blocks to it.

A row's state is its known tokens, its blocks, its sampling parameters, and whether its prompt's
log-probabilities are asked for. Knows no requests; the plan decides whose row it is.
"""

from collections.abc import Sequence
from itertools import chain, compress

from engine.kv.tables import BlockTables
from engine.plan import RowAdmission, StepPlan
from engine.runner.prompt_logprobs import PromptLogprobRows
from engine.runner.request_rows import RequestRows
from engine.sampling.sampled import RowSampler


class Rows:
    """The state of all rows."""

    def __init__(
        self,
        *,
        tokens: RequestRows,
        blocks: BlockTables,
        sampler: RowSampler,
        prompt_logprobs: PromptLogprobRows,
        num_blocks: int,
    ) -> None:
        """num_blocks: size of the store; block ids must be below it."""
        self.tokens = tokens
        self.blocks = blocks
        self.sampler = sampler
        self.prompt_logprobs = prompt_logprobs
        self._num_blocks = num_blocks

    def apply(self, plan: StepPlan) -> None:
        """Release rows, admit rows, append blocks and tokens, and write drafts."""
        for row in plan.released_rows:
            self._release(row)
        for admission in plan.admissions:
            self._admit(admission)
        assert len(plan.new_block_ids) == len(plan.rows), f"step {plan.step} is ragged"
        block_ids = list(filter(None, plan.new_block_ids))
        if block_ids:
            self._append_blocks(list(compress(plan.rows, plan.new_block_ids)), block_ids)
        for row, token_id in plan.accepted_tokens:
            self.sampler.accept_token(row, token_id)
        if plan.verified_tokens:
            rows, token_ids = zip(*plan.verified_tokens, strict=True)
            self.tokens.append(rows, token_ids)
            self.sampler.append(plan.verified_tokens)
        if plan.drafts:
            places, drafts = zip(*plan.drafts, strict=True)
            self.tokens.put_drafts([plan.rows[place] for place in places], drafts)

    def accept(self, rows: Sequence[int], token_ids: Sequence[int]) -> None:
        """Pass constrained rows the tokens that they drew; one below 0 was not drawn.

        Such a row ends with an error, and so does what it samples meanwhile.
        """
        for row, token_id in zip(rows, token_ids, strict=True):
            if token_id >= 0:
                self.sampler.accept_token(row, token_id)

    def _admit(self, admission: RowAdmission) -> None:
        row, num_prompt = admission.row, admission.num_prompt_tokens
        if self.tokens.is_occupied(row):
            self._release(row)
        self.tokens.add(row, admission.token_ids, admission.num_computed_tokens)
        self._append_blocks([row], [admission.block_ids])
        self.prompt_logprobs.add(admission)
        self.sampler.add(
            row,
            admission.params,
            admission.token_ids[:num_prompt],
            admission.token_ids[num_prompt:],
        )

    def _release(self, row: int) -> None:
        self.tokens.remove(row)
        self.blocks.clear(row)
        self.prompt_logprobs.remove(row)
        self.sampler.remove(row)

    def _append_blocks(self, rows: Sequence[int], block_ids: Sequence[Sequence[int]]) -> None:
        """block_ids: [R], a list for each row."""
        ids = list(chain.from_iterable(block_ids))
        is_known = not ids or (min(ids) >= 0 and max(ids) < self._num_blocks)
        assert is_known, f"rows {rows}: block ids {ids} for a store of {self._num_blocks}"
        self.blocks.append(rows, [len(of_row) for of_row in block_ids], ids)
