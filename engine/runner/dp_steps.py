"""DP attention: what a rank does in a step follows from all ranks' plans, which each of them has.

Every rank has rows, blocks and tables of its own, and computes its own plan; in each layer with
experts it exchanges rows with all others (engine/layers/row_exchange.py). So a rank without rows
takes part, too, with one row of padding. Whether a graph is replayed, and of which size, is one
decision for all ranks, because it says how many rows each of them exchanges. Where one of them has
prompts, that is a graph of prompts on all: a step waits for the longest rank anyway. Knows no
tables.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.layers.context import Comm
from engine.layers.row_exchange import RowExchange
from engine.plan import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class DpStep:
    """One step as a rank sees it."""

    own: StepPlan
    plans: Sequence[StepPlan]  # of all ranks
    num_tokens: tuple[int, ...]  # of each rank; 1 = also of one without rows
    max_rows: int  # of any rank, likewise
    max_lines: int  # of logits of any rank, where each row has at least one
    has_drafts: bool  # of any rank
    longest_row: int  # new tokens of a row of any rank
    is_decode: bool  # all ranks that have rows decode
    is_idle: bool  # no rank has rows
    is_guessed: bool  # rows of some rank are planned as if all their drafts were right

    @property
    def max_tokens(self) -> int:
        return max(self.num_tokens)


class DpSteps:
    """Reads the plans of all ranks for one of them."""

    def __init__(self, comm: Comm, *, is_ordered: bool = False) -> None:
        """is_ordered: as of `RowExchange`."""
        self._comm = comm
        self._is_ordered = is_ordered

    def of(self, plan: StepPlan) -> DpStep:
        """plan: of all ranks (`of_ranks`); or of one, if every rank has the same."""
        rank = self._comm.rank
        plans = plan.of_ranks or [plan] * rank.size
        assert len(plans) == rank.size, f"step {plan.step}: {len(plans)} plans, {rank.size} ranks"
        busy = [one for one in plans if one.rows]
        return DpStep(
            own=plans[rank.index],
            plans=plans,
            num_tokens=tuple([max(one.num_tokens, 1) for one in plans]),
            max_rows=max([len(one.rows) for one in busy], default=1),
            max_lines=max(map(_num_lines, busy), default=1),
            has_drafts=any(one.drafts for one in busy),
            longest_row=max([max(one.num_new_tokens) for one in busy], default=1),
            is_decode=all(one.is_decode for one in busy),
            is_idle=not busy,
            is_guessed=any(one.ahead or one.open_ended for one in busy),
        )

    @property
    def index(self) -> int:
        """Of this rank."""
        return self._comm.rank.index

    def exchange(self, step: DpStep, num_rows: Sequence[int]) -> RowExchange:
        """num_rows: of each rank, in a step that replays no graph, or in a half of it."""
        return RowExchange.of_rows(
            self._comm, num_rows, has_prompts=not step.is_decode, is_ordered=self._is_ordered
        )

    def padded(self, num_rows: int) -> RowExchange:
        """Of a graph of so many tokens."""
        return RowExchange.padded(self._comm, num_rows, is_ordered=self._is_ordered)


def _num_lines(plan: StepPlan) -> int:
    """Rows of a graph that has a line of logits for each."""
    return max(len(plan.rows), sum(plan.num_samples)) if plan.drafts else len(plan.rows)
