"""Defines what the step graphs compute: from inputs at fixed addresses to each row's best token.

    ids -> model -> logits -> best token, kept as the row's newest one

A decode graph computes one token of each row; a prompt graph any number of each; a verify graph a
few of each, and the best token after every one. Decode and verify graphs compute one batch or two
(overlap/split_decodes.py). Knows no plan.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from engine.layers.context import Comm, ForwardContext
from engine.models.llama import CausalLM, ForwardResult
from engine.runner.graph_sizes import GraphSize
from engine.runner.graphs import GraphOutput, StepGraphs
from engine.runner.overlap.split_decodes import MakeContext, SplitDecodes
from engine.runner.overlap.two_batches import TwoBatches
from engine.runner.shared_stream import SharedExpertStream
from engine.runner.step_buffers import StepBuffers, row_tensors
from kernels.attention.phased import Phases
from kernels.attention.protocol import AttentionStep
from kernels.input_ids import keep_last_tokens, resolve_input_ids


class CapturedSteps:
    """Builds the graphs of one executor."""

    def __init__(
        self,
        model: CausalLM,
        attention: Phases,
        *,
        last_tokens: Tensor,
        max_model_len: int,
        make_context: MakeContext,
        comm: Comm,
        exchanges: Callable[[int], bool] | None = None,
        shared_stream: SharedExpertStream | None = None,
    ) -> None:
        """last_tokens: [(1 + entries) * (rows + 1)]  as `TokenTable.flat`: first the newest tokens.

        exchanges: whether ranks share out a step of so many tokens; None = none. Steps of two
        batches do not.
        shared_stream: computes the steps that it covers; None = none.
        """
        self._model = model
        self._attention = attention
        self._last_tokens = last_tokens
        self._max_model_len = max_model_len
        self._make_context = make_context
        self._comm = comm
        self._exchanges = exchanges
        self._shared_stream = shared_stream

    def decode_graphs(self, sizes: Sequence[GraphSize], buffers: StepBuffers) -> StepGraphs:
        """Decode graphs, not captured yet; the decode backend must support capture."""
        assert self._attention.can_capture, "the decode backend cannot be captured"
        return self._graphs("decode", sizes, buffers, self._decode)

    def split_decode_graphs(
        self, sizes: Sequence[GraphSize], buffers: StepBuffers, two_batches: TwoBatches
    ) -> StepGraphs:
        """Decode graphs of two rows or more that compute as two batches, not captured yet."""
        assert self._attention.can_capture, "the decode backend cannot be captured"

        def output(size: GraphSize, result: ForwardResult) -> GraphOutput:
            return self._output(buffers, size, result.hidden, None, None)

        return self._split_graphs("split decode", sizes, buffers, two_batches, output)

    def split_verify_graphs(
        self, sizes: Sequence[GraphSize], buffers: StepBuffers, two_batches: TwoBatches
    ) -> StepGraphs:
        """The same of steps with drafts, whose rows lie in spans."""
        assert self._attention.can_capture_verification, "verification cannot be captured"

        def output(size: GraphSize, result: ForwardResult) -> GraphOutput:
            lines = buffers.on_device("logit_indices", size.num_lines)
            hidden = result.hidden.index_select(0, lines)
            _, slots = _places(buffers, size)
            is_finite = _of_tokens(result.is_finite, size, slots)
            return self._output(buffers, size, hidden, is_finite, None)

        return self._split_graphs("split verify", sizes, buffers, two_batches, output)

    def _split_graphs(
        self,
        kind: str,
        sizes: Sequence[GraphSize],
        buffers: StepBuffers,
        two_batches: TwoBatches,
        output: Callable[[GraphSize, ForwardResult], GraphOutput],
    ) -> StepGraphs:
        halves = SplitDecodes(
            two_batches,
            self._attention,
            max_model_len=self._max_model_len,
            make_context=self._make_context,
        )

        def run(size: GraphSize, metadata: Any) -> GraphOutput:  # noqa: ANN401
            ids = self._ids(buffers, size)
            return output(size, halves.forward(size, ids, *_places(buffers, size), metadata))

        return StepGraphs(
            kind,
            sizes,
            buffers,
            open_attention=lambda size: halves.open_attention(
                size, row_tensors(buffers, size.num_rows)
            ),
            refresh_attention=halves.refresh,
            compute=run,
        )

    def prompt_graphs(self, sizes: Sequence[GraphSize], buffers: StepBuffers) -> StepGraphs:
        """Prompt graphs, not captured yet; the prefill backend must support capture."""
        assert self._attention.can_capture_prompts, "the prefill backend cannot be captured"
        return self._graphs("prompt", sizes, buffers, self._prompt)

    def verify_graphs(self, sizes: Sequence[GraphSize], buffers: StepBuffers) -> StepGraphs:
        """Graphs of steps with drafts, not captured yet; their backend must support capture."""
        assert self._attention.can_capture_verification, "verification cannot be captured"
        return self._graphs("verify", sizes, buffers, self._prompt)

    def _graphs(
        self,
        kind: str,
        sizes: Sequence[GraphSize],
        buffers: StepBuffers,
        compute: Callable[[StepBuffers, GraphSize, ForwardContext], GraphOutput],
    ) -> StepGraphs:
        def open_attention(size: GraphSize) -> Any:  # noqa: ANN401
            if kind == "verify":
                return self._attention.open_verify_graph(
                    row_tensors(buffers, size.num_rows),
                    max_keys=self._max_model_len,
                    max_tokens=size.num_tokens,
                )
            return self._attention.open_graph(
                row_tensors(buffers, size.num_rows),
                max_keys=self._max_model_len,
                max_tokens=size.num_tokens if kind == "prompt" else None,
                max_row_tokens=size.span_tokens,
            )

        def run(size: GraphSize, metadata: Any) -> GraphOutput:  # noqa: ANN401
            self._attention.begin(metadata)
            ctx = self._make_context(*_places(buffers, size), metadata)
            if self._exchanges is not None:
                ctx = replace(ctx, exchanges=self._exchanges(size.num_tokens))
            return compute(buffers, size, ctx)

        def refresh(size: GraphSize, metadata: Any, step: AttentionStep) -> None:  # noqa: ANN401
            self._attention.refresh(metadata, step)

        return StepGraphs(
            kind,
            sizes,
            buffers,
            open_attention=open_attention,
            refresh_attention=refresh,
            compute=run,
        )

    def _decode(self, buffers: StepBuffers, size: GraphSize, ctx: ForwardContext) -> GraphOutput:
        """One token for each of the first rows of `buffers`."""
        result = self._forward(size)(self._ids(buffers, size), ctx)
        return self._output(buffers, size, result.hidden, None, result.exported)

    def _prompt(self, buffers: StepBuffers, size: GraphSize, ctx: ForwardContext) -> GraphOutput:
        """Any number of tokens for each of the first rows of `buffers`; one line of logits each."""
        indices = buffers.on_device("logit_indices", size.num_lines)
        forward = self._forward(size)
        result = forward(self._ids(buffers, size), ctx, indices, checks_finite=True)
        is_finite = _of_tokens(result.is_finite, size, ctx.slots)
        return self._output(buffers, size, result.hidden, is_finite, result.exported)

    def _forward(self, size: GraphSize) -> Callable[..., ForwardResult]:
        """`CausalLM.forward`, or the same in two streams."""
        dual = self._shared_stream
        if dual is not None and dual.covers(size.num_tokens):
            return dual.forward
        return self._model.forward

    def _output(
        self,
        buffers: StepBuffers,
        size: GraphSize,
        hidden: Tensor,
        is_finite_token: Tensor | None,
        exported: Tensor | None,
    ) -> GraphOutput:
        """Store each line's best token as its row's newest; a different choice overwrites it."""
        own_logits = self._model.own_logits(hidden)
        choice = self._model.best_tokens(own_logits, self._comm)
        rows = buffers.on_device("sampled_rows", size.num_lines)
        drawn = keep_last_tokens(choice.token_ids, choice.is_finite, rows, self._last_tokens)
        return GraphOutput(
            own_logits=own_logits,
            greedy=choice,
            drawn=drawn,
            is_finite_token=is_finite_token,
            exported=exported,
        )

    def _ids(self, buffers: StepBuffers, size: GraphSize) -> Tensor:
        ids = buffers.on_device("input_ids", size.num_tokens)
        return resolve_input_ids(ids, self._last_tokens)


def _places(buffers: StepBuffers, size: GraphSize) -> tuple[Tensor, Tensor]:
    """Positions and slots of a step, [T] each."""
    positions = buffers.on_device("positions", size.num_tokens)
    return positions, buffers.on_device("slots", size.num_tokens)


def _of_tokens(is_finite: Tensor | None, size: GraphSize, slots: Tensor) -> Tensor | None:
    """Flags of a step; the padding before a row in a span has no slot, and does not matter."""
    if is_finite is None or size.span_tokens is None:
        return is_finite
    return is_finite | (slots < 0)
