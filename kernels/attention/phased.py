"""Two backends as one: single-token rows go to one, rows with more new tokens to the other.

    tokens   [ single rows: decode ............ | rows with two or more: prefill ............ ]

Knows neither backend: where both phases are the same object, it plans the step as a whole.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.attention.protocol import (
    AttentionBackend,
    AttentionStep,
    GraphAttention,
    RowTensors,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Tokens [start, end) of the step and the backend that attends them."""

    backend: AttentionBackend
    start: int
    end: int
    metadata: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasedMetadata:
    """One part for each phase a step has, in token order."""

    parts: tuple[_Part, ...]


class PhasedAttention:
    """A `GraphAttention` where its backend of single tokens is one; `can_capture` says so."""

    def __init__(
        self,
        *,
        prefill: AttentionBackend,
        decode: AttentionBackend,
        graph: GraphAttention | None,
    ) -> None:
        """graph: `decode` once more where it can be captured in a CUDA graph, else None."""
        assert graph is None or graph is decode, "a graph would compute with another backend"
        self._prefill = prefill
        self._decode = decode
        self._graph = graph

    @property
    def can_capture(self) -> bool:
        """Whether the graph verbs may be called."""
        return self._graph is not None

    def plan(self, step: AttentionStep) -> PhasedMetadata:
        num_single = step.num_single_rows
        if self._prefill is self._decode or num_single == 0:
            return PhasedMetadata(parts=(_plan_part(self._prefill, step, 0),))
        if num_single == step.num_rows:
            return PhasedMetadata(parts=(_plan_part(self._decode, step, 0),))
        singles, others = _split(step)
        return PhasedMetadata(
            parts=(
                _plan_part(self._decode, singles, 0),
                _plan_part(self._prefill, others, num_single),
            )
        )

    def run(
        self,
        q: Tensor,
        k_new: Tensor,
        v_new: Tensor,
        layer: int,
        store: Tensor,
        metadata: PhasedMetadata,
    ) -> Tensor:
        if len(metadata.parts) == 1:
            part = metadata.parts[0]
            return part.backend.run(q, k_new, v_new, layer, store, part.metadata)
        outputs = []
        for part in metadata.parts:
            tokens = slice(part.start, part.end)
            outputs.append(
                part.backend.run(
                    q[tokens], k_new[tokens], v_new[tokens], layer, store, part.metadata
                )
            )
        return torch.cat(outputs)

    # ---- in a CUDA graph ------------------------------------------------------------------------

    def open_graph(self, rows: RowTensors, max_keys: int) -> PhasedMetadata:
        graph = self._capturable()
        num_rows = len(rows.num_keys)
        metadata = graph.open_graph(rows, max_keys)
        return PhasedMetadata(
            parts=(_Part(backend=graph, start=0, end=num_rows, metadata=metadata),)
        )

    def begin(self, metadata: PhasedMetadata) -> None:
        self._capturable().begin(metadata.parts[0].metadata)

    def refresh(self, metadata: PhasedMetadata, step: AttentionStep) -> None:
        self._capturable().refresh(metadata.parts[0].metadata, step)

    def _capturable(self) -> GraphAttention:
        assert self._graph is not None, f"{type(self._decode).__name__} cannot be captured"
        return self._graph


def _plan_part(backend: AttentionBackend, step: AttentionStep, start: int) -> _Part:
    return _Part(
        backend=backend,
        start=start,
        end=start + step.num_tokens,
        metadata=backend.plan(step),
    )


def _split(step: AttentionStep) -> tuple[AttentionStep, AttentionStep]:
    """The single-token rows and the others, each with its tokens counted from its own first.

    Block ids stay where they are: `cu_blocks` keeps counting from the step's start.
    """
    num_single, num_rows = step.num_single_rows, step.num_rows
    singles = step.device_rows.part(0, num_single)
    others = step.device_rows.part(num_single, num_rows)
    return (
        AttentionStep(
            num_single_rows=num_single,
            num_new_tokens=step.num_new_tokens[:num_single],
            num_computed_tokens=step.num_computed_tokens[:num_single],
            cu_blocks=step.cu_blocks[: num_single + 1],
            block_ids=step.block_ids,
            device_rows=singles,
        ),
        AttentionStep(
            num_single_rows=0,
            num_new_tokens=step.num_new_tokens[num_single:],
            num_computed_tokens=step.num_computed_tokens[num_single:],
            cu_blocks=step.cu_blocks[num_single:],
            block_ids=step.block_ids,
            device_rows=RowTensors(
                cu_tokens=others.cu_tokens - num_single,
                num_keys=others.num_keys,
                cu_blocks=others.cu_blocks,
                block_ids=others.block_ids,
            ),
        ),
    )
