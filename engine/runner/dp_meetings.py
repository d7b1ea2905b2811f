"""DP attention: how all ranks compute one step, which each of them finds from all ranks' plans.

    a graph   the same size on all ranks, whole or as two batches
    else      one batch, or two where that pays: each rank splits its rows (overlap/two_batches.py)

Both say how many rows every rank exchanges, of the step or of each half. A rank that cannot replay
the others' graph computes as that does: the same exchanges in the same order.
"""

from dataclasses import dataclass

from engine.layers.row_exchange import RowExchange
from engine.runner.dp_steps import DpStep, DpSteps
from engine.runner.graph_sizes import GraphSize
from engine.runner.graphs import StepGraphs
from engine.runner.inputs import InputBatch, count_rows
from engine.runner.overlap.batch_splits import BatchSplit
from engine.runner.overlap.split_decodes import split_of
from engine.runner.overlap.two_batches import TwoBatches
from engine.runner.step_graph_set import StepGraphSet
from kernels.attention.phased import Phases


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """How one rank takes part in a step of all."""

    # All ranks replay this graph, as far as they can; None = none is.
    graphs: StepGraphs | None
    size: GraphSize | None
    # of the step's rows; or of those of either half
    exchanges: tuple[RowExchange, ...]
    # Where the halves meet: of the graph, or of this rank's rows; None = it is one batch.
    split: BatchSplit | None

    def split_of(self, batch: InputBatch) -> BatchSplit | None:
        """Where the halves of this rank's rows meet, which replay no graph."""
        split = self.split
        if split is None or self.size is None:
            return split
        row = min(split.row, batch.num_rows)  # each has at most as many tokens as in the graph
        num_tokens = int(batch.attention.num_new_tokens[:row].sum())
        return BatchSplit(row=row, token=num_tokens, is_decode=split.is_decode)


class DpMeetings:
    """Decides for one rank as for all others."""

    def __init__(self, steps: DpSteps, graphs: StepGraphSet, attention: Phases) -> None:
        self._steps = steps
        self._graphs = graphs
        self._attention = attention

    def of(self, step: DpStep, two_batches: TwoBatches | None) -> Meeting:
        """two_batches: of the executor; None = no step is split."""
        graphs, size = self._graphs.choose_common(step)
        if size is None:
            return self.without_graph(step, two_batches)
        split = split_of(size) if self._graphs.is_split(graphs) else None
        num_rows = (
            (size.num_tokens,) if split is None else (split.token, size.num_tokens - split.token)
        )
        exchanges = tuple(map(self._steps.padded, num_rows))
        return Meeting(graphs=graphs, size=size, exchanges=exchanges, split=split)

    def without_graph(self, step: DpStep, two_batches: TwoBatches | None) -> Meeting:
        """As `of`, of a step that replays none."""
        splits = None
        if two_batches is not None and not self._may_reorder(step):
            few = self._attention.max_few_tokens
            splits = two_batches.split_ranks([count_rows(plan, few) for plan in step.plans])
        if splits is None:
            whole = self._steps.exchange(step, step.num_tokens)
            return Meeting(graphs=None, size=None, exchanges=(whole,), split=None)
        firsts = [max(split.token, 1) for split in splits]
        seconds = [
            max(plan.num_tokens - split.token, 1)
            for plan, split in zip(step.plans, splits, strict=True)
        ]
        return Meeting(
            graphs=None,
            size=None,
            exchanges=tuple(self._steps.exchange(step, half) for half in (firsts, seconds)),
            split=splits[self._steps.index],
        )

    def _may_reorder(self, step: DpStep) -> bool:
        """Whether a rank's rows may be in another order than others think.

        Rows are ordered by history, and of one planned ahead of its drafts this may be shorter.
        """
        return step.is_guessed and not self._attention.reads_lengths_on_device
