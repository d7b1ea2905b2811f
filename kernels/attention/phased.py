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
    CopyingAttention,
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

        prompt_graph: what attends prompts in graphs, and single tokens beside them; None = they
        cannot be captured.
        """
        assert graph is None or graph is decode, "a graph would compute with another backend"
        self._prefill = prefill
        self._decode = decode
        self._graph = graph
        self._prompt_graph = prompt_graph
        self._verify: StepPlanner | None = None
        self._verify_graph: GraphPlanner | None = prompt_graph
        self._max_few_tokens = 1

    def verify_with(
        self, backend: StepPlanner, max_tokens: int, graph: GraphPlanner | None = None
    ) -> None:
        """From now on `backend` attends rows of up to `max_tokens` new tokens, if some have two.

        graph: `backend` again if it can be captured, else None.
        """
        assert graph is None or graph is backend, "a graph would compute with another backend"
        self._verify, self._verify_graph, self._max_few_tokens = backend, graph, max_tokens

    @property
    def max_few_tokens(self) -> int:
        """New tokens of a row, up to which rows come before the longer ones in a step."""
        return self._max_few_tokens

    @property
    def reads_lengths_on_device(self) -> bool:
        """Whether steps may have other numbers of keys there than the host's, which are bounds.

        Rows that verify drafts, by a backend of their own, leave none for prompts' whose number the
        host does not know: all others of several tokens are prompts.
        """
        if self._verify is None:
            return _reads_lengths(self._prefill) and _reads_lengths(self._decode)
        decodes = _reads_lengths(self._decode) or _reads_single_lengths(self._decode)
        return decodes and _reads_lengths(self._verify)

    @property
    def can_capture_verification(self) -> bool:
        """Whether `open_verify_graph` may be called."""
        graph = self._verify_graph
        return graph is not None and (graph is self._verify or self.can_capture_prompts)

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

    def working_bytes(self, *, max_tokens: int, max_rows: int, max_row_keys: int) -> int:
        """At most what a step takes at once besides its operands; the phases run one by one."""
        return max(
            (
                backend.working_bytes(
                    max_tokens=max_tokens, max_rows=max_rows, max_row_keys=max_row_keys
                )
                for backend in (self._prefill, self._decode)
                if isinstance(backend, CopyingAttention)
            ),
            default=0,
        )

    def plan(self, step: AttentionStep) -> PhasedMetadata:
        num_single = step.num_single_rows
        if self._verify is not None:
            num_few = _num_leading(step, self._max_few_tokens)
            if num_few > num_single:
                return self._plan_verification(self._verify, step, num_few)
        if self._prefill is self._decode or num_single == 0:
            return PhasedMetadata(parts=(_plan_part(self._prefill, step, 0),))
        if num_single == step.num_rows:
            return PhasedMetadata(parts=(_plan_part(self._decode, step, 0),))
        singles, others = _split(step, num_single)
        return PhasedMetadata(
            parts=(
                _plan_part(self._decode, singles, 0),
                _plan_part(self._prefill, others, num_single),
            )
        )

    def _plan_verification(
        self, verify: StepPlanner, step: AttentionStep, num_few: int
    ) -> PhasedMetadata:
        """Of a step whose first `num_few` rows have few tokens, and some of them more than one."""
        if num_few == step.num_rows:
            return PhasedMetadata(parts=(_plan_part(verify, step, 0),))
        few, others = _split(step, num_few)
        parts = _plan_part(verify, few, 0), _plan_part(self._prefill, others, few.num_tokens)
        return PhasedMetadata(parts=parts)

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

    def open_verify_graph(
        self, rows: RowTensors, *, max_keys: int, max_tokens: int
    ) -> PhasedMetadata:
        """Of rows with few new tokens, `max_tokens` in all; see `verify_with`."""
        backend = self._verify_graph
        assert backend is not None, "the backend that verifies cannot be captured"
        metadata = backend.open_graph(rows, max_keys=max_keys, max_tokens=max_tokens)
        part = _Part(backend=backend, start=0, end=max_tokens, metadata=metadata)
        return PhasedMetadata(parts=(part,), graph=backend)

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


def _reads_lengths(backend: StepPlanner) -> bool:
    return getattr(backend, "reads_lengths_on_device", False)


def _reads_single_lengths(backend: StepPlanner) -> bool:
    return getattr(backend, "reads_single_lengths_on_device", False)


def _plan_part(backend: StepPlanner, step: AttentionStep, start: int) -> _Part:
    return _Part(
        backend=backend,
        start=start,
        end=start + step.num_tokens,
        metadata=backend.plan(step),
    )


def _num_leading(step: AttentionStep, max_tokens: int) -> int:
    """Rows before the first one with more than `max_tokens` new tokens."""
    is_longer = step.num_new_tokens > max_tokens
    return int(is_longer.argmax()) if is_longer.any() else step.num_rows


def _split(step: AttentionStep, num_first: int) -> tuple[AttentionStep, AttentionStep]:
    """The first rows, all single ones among them, and the others, each counted from its own first.

    Block ids are not copied: `cu_blocks` still counts from the step's start.
    """
    num_rows, num_tokens = step.num_rows, int(step.num_new_tokens[:num_first].sum())
    firsts = step.device_rows.part(0, num_first)
    others = step.device_rows.part(num_first, num_rows)
    return (
        AttentionStep(
            num_single_rows=step.num_single_rows,
            num_new_tokens=step.num_new_tokens[:num_first],
            num_computed_tokens=step.num_computed_tokens[:num_first],
            cu_blocks=step.cu_blocks[: num_first + 1],
            block_ids=step.block_ids,
            device_rows=firsts,
        ),
        AttentionStep(
            num_single_rows=0,
            num_new_tokens=step.num_new_tokens[num_first:],
            num_computed_tokens=step.num_computed_tokens[num_first:],
            cu_blocks=step.cu_blocks[num_first:],
            block_ids=step.block_ids,
            device_rows=RowTensors(
                cu_tokens=others.cu_tokens - num_tokens,
                num_keys=others.num_keys,
                cu_blocks=others.cu_blocks,
                block_ids=others.block_ids,
            ),
        ),
    )
