"""A decoder layer as operations: attention and feed-forward, each after a norm.

Knows no family of models: what a layer is made of is in its constructor.
"""

from dataclasses import replace

from torch import Tensor

from engine.layers.attention import ProjectedTokens, SelfAttention, StoredTokens
from engine.layers.context import LastTokens
from engine.layers.linear import form_of
from engine.layers.mlp import FeedForward
from engine.layers.moe import Mixture
from engine.layers.norm import RmsNorm
from engine.layers.operations import Flow, Lane, Op, wait
from engine.layers.residual import (
    add_and_norm,
    gather_flow,
    keep_chosen,
    scatter_flow,
    settle,
    sum_over_ranks,
)
from engine.layers.token_exchange import gather_rows, own_rows


class DecoderLayer:
    """Pre-norm attention and feed-forward, as operations that schedules may order.

    Each of the two parts adds the output of the part before to the residual stream, normalises and
    computes, and communicates only at its end. `operations` is the layer's one definition.
    """

    __slots__ = ("_attention", "_attention_norm", "_mlp", "_mlp_norm")

    def __init__(
        self,
        *,
        attention_norm: RmsNorm,
        attention: SelfAttention,
        mlp_norm: RmsNorm,
        mlp: FeedForward,
    ) -> None:
        self._attention_norm = attention_norm
        self._attention = attention
        self._mlp_norm = mlp_norm
        self._mlp = mlp

    def operations(self) -> tuple[Op, ...]:
        """See `engine.layers.operations`."""
        return (
            Op("prepare", self._prepare),
            Op("core", self._core, needs=("prepare",)),
            *self._after_attention(),
        )

    def last_operations(self, *, gathers: bool = False) -> tuple[Op, ...]:
        """`operations` of the model's last layer, which also leaves out what nobody asks for.

        gathers: it begins with this rank's rows.
        """
        return (
            Op("prepare", self._gather_and_prepare_last if gathers else self._prepare_last),
            Op("core", self._core_last, needs=("prepare",)),
            *self._after_attention(),
        )

    def dp_last_operations(self) -> tuple[Op, ...]:
        """`last_operations` with DP attention: only the output leaves out what nobody asks for.

        Every rank exchanges all of its rows, whose numbers the others know.
        """
        return (
            Op("prepare", self._prepare_and_check),
            Op("core", self._core, needs=("prepare",)),
            *self._after_attention(),
            Op("output", keep_chosen, needs=("combine_b",)),
        )

    def exchange_operations(self, *, is_first: bool = False) -> tuple[Op, ...]:
        """`operations` that take and leave this rank's rows; is_first: they begin with all."""
        sent, mlp = "comm_prepare_mlp_a", self._mlp
        feed_forward = (
            mlp.exchange_operations() if isinstance(mlp, Mixture) else self._gathered_mlp()
        )
        return (
            Op("prepare", self._prepare_first_rows if is_first else self._prepare_rows),
            Op("core", self._core, needs=("prepare",)),
            Op(sent, scatter_flow, lane=Lane.SEND, needs=("core",)),
            Op("comm_prepare_mlp_b", self._prepare_mlp, waits=(Lane.SEND,), needs=(sent,)),
            *feed_forward,
        )

    def _gathered_mlp(self) -> tuple[Op, ...]:
        """A dense feed-forward part, of which each rank has some units of every token."""
        sent, back = "dispatch_a", "combine_a"
        (mlp,) = self._mlp.operations()
        return (
            Op(sent, gather_flow, lane=Lane.SEND, needs=("comm_prepare_mlp_b",)),
            Op("dispatch_b", wait, waits=(Lane.SEND,), needs=(sent,)),
            replace(mlp, needs=("dispatch_b",)),
            Op(back, scatter_flow, lane=Lane.SEND, needs=(mlp.name,)),
            Op("combine_b", self._finish_mlp, waits=(Lane.SEND,), needs=(back,)),
        )

    def _prepare_first_rows(self, flow: Flow) -> None:
        comm = flow.ctx.comm
        flow.x = own_rows(flow.x, comm)
        flow.own_slots = own_rows(flow.ctx.slots, comm, fill=-1)
        self._prepare_rows(flow)

    def _prepare_rows(self, flow: Flow) -> None:
        """`_prepare` from this rank's rows, of which the residual stream stays."""
        residual = add_and_norm(flow, self._attention_norm)
        x = gather_rows(flow.x, len(flow.ctx.slots), flow.ctx.comm)
        q, k, v = self._attention.project(x, flow.ctx)
        flow.leave(tokens=ProjectedTokens(q=q, k=k, v=v, residual=residual))

    def _gather_and_prepare_last(self, flow: Flow) -> None:
        settle(flow)
        num_tokens, comm, residual = len(flow.ctx.slots), flow.ctx.comm, flow.residual
        assert residual is not None, "the first layer has begun the stream"
        flow.x, flow.residual = (gather_rows(t, num_tokens, comm) for t in (flow.x, residual))
        self._prepare_last(flow)

    def _after_attention(self) -> tuple[Op, ...]:
        sent, feed_forward = "comm_prepare_mlp_a", self._mlp.operations()
        attended = (
            Op(sent, sum_over_ranks, lane=Lane.SEND, needs=("core",)),
            Op("comm_prepare_mlp_b", self._prepare_mlp, waits=(Lane.SEND,), needs=(sent,)),
        )
        if isinstance(self._mlp, Mixture) and self._mlp.has_dp_attention:
            return (*attended, *feed_forward)  # which add up over the ranks
        return (
            *attended,
            *feed_forward,
            Op("combine_a", sum_over_ranks, lane=Lane.SEND, needs=(feed_forward[-1].name,)),
            Op("combine_b", self._finish_mlp, waits=(Lane.SEND,), needs=("combine_a",)),
        )

    def _prepare(self, flow: Flow) -> None:
        """Writes ctx.kv_store."""
        form = self._attention.form(len(flow.x))
        residual = add_and_norm(flow, self._attention_norm, form)
        x, flow.coded = flow.x if flow.coded is None else flow.coded, None
        q, k, v = self._attention.project(x, flow.ctx)
        flow.leave(tokens=ProjectedTokens(q=q, k=k, v=v, residual=residual))

    def _prepare_and_check(self, flow: Flow) -> None:
        self._prepare(flow)
        assert flow.tokens is not None
        if flow.checks_finite:
            flow.finite_sums = flow.tokens.finite_sums()

    def _prepare_last(self, flow: Flow) -> None:
        """`_prepare`; then only the tokens stay whose logits are asked for, if they are known."""
        last = flow.ctx.last
        if last is None:
            self._prepare(flow)
            stored: StoredTokens | None = flow.tokens
        else:
            assert flow.chosen is None, "the context has chosen already"
            stored = self._store(flow)
        assert stored is not None
        if flow.checks_finite:
            flow.finite_sums = stored.finite_sums()
        if last is not None:
            flow.leave(tokens=self._project_last(flow.x, stored, last))
            flow.ctx = last.ctx
        elif flow.chosen is not None:
            flow.has_ended = len(flow.chosen) == 0
        if last is not None or flow.chosen is not None:
            flow.slots = None  # the chosen are no padding

    @property
    def can_store_alone(self) -> bool:
        """Whether the last layer may compute K and V of all tokens, and queries of some."""
        return self._attention.can_store_alone

    def _store(self, flow: Flow) -> StoredTokens:
        """`_prepare` without queries; writes ctx.kv_store."""
        residual = add_and_norm(flow, self._attention_norm)
        k, v = self._attention.store(flow.x, flow.ctx)
        return StoredTokens(k=k, v=v, residual=residual)

    def _project_last(
        self, normed: Tensor, stored: StoredTokens, last: LastTokens
    ) -> ProjectedTokens:
        """Project the queries that `_store` left out, for each row's last token only; [R]."""
        x = normed.index_select(0, last.indices)
        q, k, v = self._attention.project(x, last.ctx)
        residual = stored.residual.index_select(0, last.indices)
        return ProjectedTokens(q=q, k=k, v=v, residual=residual)

    def _core(self, flow: Flow) -> None:
        self._attend(flow, None)

    def _core_last(self, flow: Flow) -> None:
        self._attend(flow, flow.chosen)

    def _attend(self, flow: Flow, chosen: Tensor | None) -> None:
        """chosen: as of `Flow`."""
        tokens, flow.tokens = flow.tokens, None
        assert tokens is not None
        attended, residual = self._attention.attend(tokens, flow.ctx), tokens.residual
        if chosen is not None:
            attended, residual = (t.index_select(0, chosen) for t in (attended, residual))
        flow.x, flow.residual = self._attention.output(attended, flow.ctx), residual

    def _prepare_mlp(self, flow: Flow) -> None:
        # Tokens travel as they are.
        form = None if flow.ctx.exchanges else form_of(self._mlp, len(flow.x))
        add_and_norm(flow, self._mlp_norm, form)

    def _finish_mlp(self, flow: Flow) -> None:
        """What comes after the sum over the ranks: nothing here."""

    @property
    def mlp(self) -> FeedForward:
        return self._mlp


class OutputNormLayer(DecoderLayer):
    """A layer that also normalises what its two parts return (Gemma)."""

    __slots__ = ("_attention_output_norm", "_mlp_output_norm")

    def __init__(
        self,
        *,
        attention_norm: RmsNorm,
        attention: SelfAttention,
        attention_output_norm: RmsNorm,
        mlp_norm: RmsNorm,
        mlp: FeedForward,
        mlp_output_norm: RmsNorm,
    ) -> None:
        super().__init__(
            attention_norm=attention_norm, attention=attention, mlp_norm=mlp_norm, mlp=mlp
        )
        self._attention_output_norm = attention_output_norm
        self._mlp_output_norm = mlp_output_norm

    def _prepare_mlp(self, flow: Flow) -> None:
        settle(flow)
        flow.x = self._attention_output_norm(flow.x)
        super()._prepare_mlp(flow)

    def _finish_mlp(self, flow: Flow) -> None:
        settle(flow)
        flow.x = self._mlp_output_norm(flow.x)
