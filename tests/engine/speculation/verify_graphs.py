"""Verify graphs on a CPU: attention over the graph's rows alone, and a recorder that counts."""

from collections.abc import Callable

import torch

from engine.engine import Engine
from engine.models.llama import attention_shape
from engine.runner.graph_sizes import verify_sizes
from engine.runner.graphs import GraphOutput
from engine.runner.overlap.rule import OverlapRule
from kernels.attention.phased import PhasedAttention
from kernels.attention.protocol import RowTensors
from tests.engine.runner.graph_story import RerunRecorder, RowTensorAttention


class ExactRows(RowTensorAttention):
    """On the grid of `exact_arithmetic`."""

    def _row(
        self,
        q: torch.Tensor,
        layer_store: torch.Tensor,
        rows: RowTensors,
        row: int,
        num_keys: int,
    ) -> torch.Tensor:
        found = super()._row(q.double(), layer_store.double(), rows, row, num_keys)
        return (torch.round(found * 8) / 8).float()


class CountingRecorder(RerunRecorder):
    """Counts the replays of all graphs."""

    def __init__(self) -> None:
        self.num_replays = 0

    def record(self, run: Callable[[], GraphOutput]) -> Callable[[], GraphOutput]:
        again = super().record(run)

        def replay() -> GraphOutput:
            self.num_replays += 1
            return again()

        return replay


def capture_verification(
    engine: Engine, max_tokens: int, *, split_from: int | None = None
) -> CountingRecorder:
    """Graphs for steps with drafts alone; their attention knows nothing but the graph's rows.

    split_from: tokens from which there are graphs of two batches, too; None = there are none.
    """
    executor, recorder = engine.executor, CountingRecorder()
    rows = ExactRows(attention_shape(executor.model.spec))
    attention = PhasedAttention(prefill=rows, decode=rows, graph=rows, prompt_graph=rows)
    attention.verify_with(rows, 9, graph=rows)
    executor._passes.attention = attention
    executor.capture_graphs(
        recorder, lambda _: None, prompts=None, verify=verify_sizes(6, max_tokens)
    )
    if split_from is not None:
        rule = OverlapRule(min_prompt_tokens=None, min_decode_rows=split_from)
        executor.overlap_two_batches(rule, threshold=0.48)
        executor.capture_split_verification(recorder, lambda _: None, min_tokens=split_from)
    executor._graphs.decode = executor._decode_run = None
    executor.kv_store.tensor.fill_(50.0)
    return recorder
