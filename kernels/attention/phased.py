"""Combines two backends: one for single-token rows, one for rows with more new tokens.

    tokens   [ single rows: decode ............ | rows with two or more: prefill ............ ]

Knows neither backend: if both phases are the same object, it plans the step as a whole. `Phases`
plans and captures for attention of any kind; `PhasedAttention` runs that over K and V.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.attention.protocol import (
    AttentionStep,
    GraphPlanner,
    PreparedAttention,
    RowTensors,
    StepPlanner,
)
from kernels.kv.scales import KvScales


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Tokens [start, end) of the step and the backend that computes their attention."""

    backend: StepPlanner
    start: int
    end: int
    metadata: Any

    @property
    def run(self) -> Callable[..., Tensor]:
        """The backend's `run`, whose arguments depend on the kind of attention."""
        run: Callable[..., Tensor] = self.backend.run  # type: ignore[attr-defined]
        return run


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasedMetadata:
    """One part for each phase of the step, in token order; in a graph one part for all."""

    parts: tuple[_Part, ...]
    graph: GraphPlanner | None = None  # the backend that prepares a replay


class Phases:
    """Plans a step by two backends, and what a CUDA graph needs; `can_capture` tells if it can."""

    def __init__(
        self,
        *,
        prefill: StepPlanner,
        decode: StepPlanner,
        graph: GraphPlanner | None,
        prompt_graph: GraphPlanner | None = None,
    ) -> None:
        """graph: `decode` again if it can be captured in a CUDA graph, else None.

        prompt_graph: likewise for `prefill`; in a graph it also attends single tokens.
        """
        assert graph is None or graph is decode, "a graph would compute with another backend"
        assert prompt_graph is None or prompt_graph is prefill, "likewise"
        self._prefill = prefill
        self._decode = decode
        self._graph = graph
        self._prompt_graph = prompt_graph

    @property
    def can_capture(self) -> bool:
        """Whether the graph methods may be called for rows of one new token."""
        return self._graph is not None

    @property
    def can_capture_prompts(self) -> bool:
        """Whether the graph methods may be called for rows of any number of new tokens."""
        return self._prompt_graph is not None and self._prompt_graph.can_capture_prompts

    def prepare(self, *, max_rows: int, max_row_tokens: int, max_row_keys: int) -> None:
        """Let each backend that compiles kernels do so, for steps within these limits.

        max_row_tokens: new tokens of one row; max_row_keys: those and its history.
        """
        for backend in dict.fromkeys((self._prefill, self._decode)):
            if isinstance(backend, PreparedAttention):
                backend.prepare(
                    max_rows=max_rows, max_row_tokens=max_row_tokens, max_row_keys=max_row_keys
                )

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

    # ---- in a CUDA graph ------------------------------------------------------------------------

    def open_graph(
        self,
        rows: RowTensors,
        *,
        max_keys: int,
        max_tokens: int | None = None,
        max_row_tokens: int | None = None,
    ) -> PhasedMetadata:
        backend = self._graph if max_tokens is None else self._prompt_graph
        assert backend is not None, "this phase's backend cannot be captured"
        metadata = backend.open_graph(
            rows, max_keys=max_keys, max_tokens=max_tokens, max_row_tokens=max_row_tokens
        )
        num_tokens = max_tokens or len(rows.num_keys)
        return PhasedMetadata(
            parts=(_Part(backend=backend, start=0, end=num_tokens, metadata=metadata),),
            graph=backend,
        )

    def begin(self, metadata: PhasedMetadata) -> None:
        assert metadata.graph is not None, "metadata of no graph"
        metadata.graph.begin(metadata.parts[0].metadata)

    def refresh(self, metadata: PhasedMetadata, step: AttentionStep) -> None:
        assert metadata.graph is not None, "metadata of no graph"
        metadata.graph.refresh(metadata.parts[0].metadata, step)


class PhasedAttention(Phases):
    """A `GraphAttention` if its decode backend is one; `can_capture` tells."""

    def run(
        self,
        q: Tensor,
        k_new: Tensor,
        v_new: Tensor,
        layer: int,
        store: Tensor,
        metadata: PhasedMetadata,
        out: Tensor | None = None,
        sinks: Tensor | None = None,
        scales: KvScales | None = None,
    ) -> Tensor:
        if len(metadata.parts) == 1:
            part = metadata.parts[0]
            return part.run(q, k_new, v_new, layer, store, part.metadata, out, sinks, scales)
        if out is None:
            out = torch.empty((len(q), q.shape[1] * q.shape[2]), dtype=q.dtype, device=q.device)
        for part in metadata.parts:
            tokens = slice(part.start, part.end)
            part.run(
                q[tokens],
                k_new[tokens],
                v_new[tokens],
                layer,
                store,
                part.metadata,
                out[tokens],
                sinks,
                scales,
            )
        return out


def _plan_part(backend: StepPlanner, step: AttentionStep, start: int) -> _Part:
    return _Part(
        backend=backend,
        start=start,
        end=start + step.num_tokens,
        metadata=backend.plan(step),
    )


def _split(step: AttentionStep) -> tuple[AttentionStep, AttentionStep]:
    """The single-token rows and the others, each with tokens counted from its own first.

    Block ids are not copied: `cu_blocks` still counts from the step's start.
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
