"""The texts of rows on the device, where drafts are looked up behind tokens that no host has seen.

    quoted    of another text, before index 0
    told      what the host knew when it planned      [0, told)
    in flight what the last step gave                 samples [told, told + given)

What is quoted is searched as if it were the beginning of the row's text: its longest match counts,
and that in the row's own text of equal ones. Each rank does so for itself, from the plan and from
what its own last step left.
"""

from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from engine.kv.tables import concat_ranges
from engine.plan import NEWEST, StepPlan
from engine.runner.guessed_rows import GuessedRows, TokenTable
from engine.sampling.staging import Staging
from engine.speculation.ngram import END, NgramRules
from kernels.guessed_steps import RowEnds
from kernels.ngrams import look_up


def text_bytes(max_rows: int, max_len: int, rules: NgramRules) -> int:
    """Memory for the texts of so many rows of so many tokens."""
    return 4 * (max_rows + 1) * (rules.quote_tokens + max_len)


class RowTexts:
    """Texts of a target's rows, and the lookups of its own drafts in them."""

    def __init__(
        self, rows: GuessedRows, table: TokenTable, *, max_len: int, rules: NgramRules
    ) -> None:
        """table: gets the drafts. max_len: tokens of a row."""
        device = table.flat.device
        self._num_quoted = rules.quote_tokens
        shape = len(table.newest), self._num_quoted + max_len
        self._texts = torch.full(shape, END, dtype=torch.int32, device=device)
        self._rows = rows
        self._drafts = table.entries
        self._match = {"min_match": rules.min_match, "max_match": rules.max_match}
        self._staging = Staging(device)

    def look_up(self, plan: StepPlan) -> None:
        """Queue the lookups of the rows in `plan` whose drafts are `given`.

        plan: as the host made it; what it is behind is known on the device.
        """
        found = [(index, its) for index, its in plan.drafts if its and its[-1] < NEWEST]
        if not found:
            return
        of_plan = [index for index, _ in found]
        rows = np.array(plan.rows, dtype=np.int64)[of_plan]
        lengths = np.array(plan.num_computed_tokens, dtype=np.int64)[of_plan] + 1
        lengths += self._num_quoted
        in_flight = np.array([its.count(NEWEST) for _, its in found], dtype=np.int64)
        within = concat_ranges(np.zeros_like(in_flight), in_flight)
        sampling = np.repeat(rows, in_flight)
        owners, places, told = self._told(plan)
        owners = np.concatenate([owners, sampling])
        places = np.concatenate([places, np.repeat(lengths - in_flight, in_flight) + within])
        # One copy for all: each takes longer than what it copies.
        sent = self._staging.send(rows, lengths, owners, places, told, sampling, within)
        device_rows, ends, of_tokens, positions, tokens, of_samples, samples = sent
        tokens = torch.cat([tokens, self._rows.samples[samples, of_samples]])
        self._texts[of_tokens, positions] = tokens
        row_ends = RowEnds(rows=device_rows, lengths=ends, shortfalls=self._rows.shortfalls)
        look_up(self._texts, row_ends, self._drafts, **self._match)

    def _told(
        self, plan: StepPlan
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
        """Row, place in its text and id of each token in `plan.texts`."""
        counts = np.array([len(token_ids) for _, _, token_ids in plan.texts], dtype=np.int64)
        starts = np.array([start for _, start, _ in plan.texts], dtype=np.int64) + self._num_quoted
        owners = np.repeat(np.array([row for row, _, _ in plan.texts], dtype=np.int64), counts)
        ids = list(chain.from_iterable([token_ids for _, _, token_ids in plan.texts]))
        return owners, concat_ranges(starts, counts), np.array(ids, dtype=np.int32)
