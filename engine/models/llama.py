"""The Llama architecture and its relatives (Mistral, Qwen, gpt-oss, Gemma).

    ids -> embedding -> [norm -> attention -> norm -> MLP] x layers -> norm -> head -> logits

An MLP may be a mixture of experts (mixture.py: Mixtral, Qwen2-MoE, Qwen3-MoE, gpt-oss, DeepSeek's),
and attention may be over latents (deepseek.py).

Differences between families (biases, QK-norm, tied embeddings, windows) are resolved to an object
or None by the builder, so the forward pass does not test for them. Knows no requests and keeps no
state of a step: the KV store and everything else of a step are in `ForwardContext`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.layers.attention import Attention, SelfAttention
from engine.layers.build_linear import build_linear
from engine.layers.context import SINGLE_RANK, Comm, ForwardContext
from engine.layers.decoder import DecoderLayer, OutputNormLayer
from engine.layers.head_order import HeadOrder
from engine.layers.linear import Gated, Identity, Linear, LinearWeight
from engine.layers.mlp import FeedForward, GatedMlp, build_mlp
from engine.layers.norm import RmsNorm
from engine.layers.operations import Flow, Op, run_in_order
from engine.layers.residual import add_and_norm, settle
from engine.layers.rope_spec import RopeSpec
from engine.layers.rotary import RotaryTable, RotaryTables, num_rotated
from engine.layers.token_exchange import gather_rows
from engine.layers.vocabulary import (
    CappedHead,
    Embedding,
    Head,
    ScaledEmbedding,
    WholeHead,
    build_embedding,
    build_head,
)
from engine.models.deepseek import build_latent_attention, latent_shape
from engine.models.mixture import build_mixture
from engine.models.spec import Activation, ModelSpec
from engine.models.weights import LayerWeights, ModelWeights
from engine.ranks.rank import WHOLE_MODEL, Rank
from kernels.attention.latent import LatentShape
from kernels.attention.masks import MaskFunction
from kernels.attention.protocol import AttentionShape
from kernels.ops import HeadNorms, Ops
from kernels.sampling.choices import GreedyChoice


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardResult:
    """The outputs of a forward pass besides K and V."""

    # [S, hidden]  the stream after the final norm
    hidden: Tensor
    # [T] bool  whether all that a token writes to the store is finite; None = not checked
    is_finite: Tensor | None
    # [T, any], or [S, any] of the stream after the last layer; None = the model exports nothing
    exported: Tensor | None = None


class FinalStream(Enum):
    """Of which tokens the stream after the final norm is exported."""

    CHOSEN = "those whose hidden state is asked for"
    ALL = "every token, so that the last layer leaves none out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What else a forward pass returns: the streams that enter some layers, side by side."""

    # Ascending or not; the number of layers itself is the stream after the last one.
    layers: tuple[int, ...] = ()
    final: FinalStream | None = None  # beside them
    # [T, layers * hidden] -> [T, any]; None = as they are
    project: Linear | None = None


class CausalLM:
    """Token ids in, logits out; the KV store and the rest of a step are in `ForwardContext`."""

    def __init__(
        self,
        *,
        spec: ModelSpec,
        embedding: Embedding,
        layers: list[DecoderLayer],
        final_norm: RmsNorm,
        head: Head,
        rotary: RotaryTables,
    ) -> None:
        """spec: of the part that this rank computes."""
        self.spec = spec
        self.layers = layers
        self.rotary = rotary
        *earlier_layers, last_layer = layers
        has_dp_attention = spec.has_dp_attention
        # The forward pass, layer by layer; `flow`s go through it in order, or as a schedule has it.
        self._layer_operations: Sequence[tuple[Op, ...]] = (
            *(layer.operations() for layer in earlier_layers),
            last_layer.dp_last_operations() if has_dp_attention else last_layer.last_operations(),
        )
        self.operations: Sequence[tuple[Op, ...]] = self._layer_operations
        self._embedding = embedding
        self._final_norm = final_norm
        self._head = head
        self._export: Export | None = None

    def export(self, export: Export | None) -> None:
        """From now on `ForwardResult.exported` is that; graphs captured before do not have it."""
        self._export = export
        self.operations = self._with_exports(self._layer_operations)
        self.__dict__.pop("exchange_operations", None)  # made anew when it is read

    @property
    def embedding(self) -> Embedding:
        return self._embedding

    @property
    def head(self) -> Head:
        return self._head

    @cached_property
    def exchange_operations(self) -> Sequence[tuple[Op, ...]]:
        """`operations` of ranks that share out tokens between attention and attention.

        Not where ranks have a part of each expert. The last layer has all tokens again, on every
        rank.
        """
        first, *others = self.layers[:-1]
        operations = (
            first.exchange_operations(is_first=True),
            *(layer.exchange_operations() for layer in others),
            self.layers[-1].last_operations(gathers=True),
        )
        return self._with_exports(operations, is_shared_out=True)

    def _with_exports(
        self, operations: Sequence[tuple[Op, ...]], *, is_shared_out: bool = False
    ) -> Sequence[tuple[Op, ...]]:
        """The same, with what keeps the streams that are exported before the layers they enter.

        is_shared_out: between layers, each rank has its rows of the stream.
        """
        kept = () if self._export is None else self._export.layers
        return tuple(
            (_keep_entering(layer, is_shared_out=is_shared_out and layer > 0), *ops)
            if layer in kept
            else ops
            for layer, ops in enumerate(operations)
        )

    @property
    def can_exchange(self) -> bool:
        """Whether there are `exchange_operations`."""
        mixture = self.spec.mixture
        if len(self.layers) == 1:
            return False
        return mixture is None or (mixture.held is not None and mixture.may_share_tokens)

    @property
    def can_capture_exchange(self) -> bool:
        """Whether `exchange_operations` may be captured: their sizes do not depend on routes."""
        mixture = self.spec.mixture
        return self.can_exchange and (mixture is None or mixture.sharing == "gathered")

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        return self._embedding.weight.device

    @property
    def can_skip_queries(self) -> bool:
        """Whether `forward` accepts a context with `last`."""
        if self.spec.has_dp_attention:
            return False  # ranks exchange as many rows in the last layer as in the others
        return self.layers[-1].can_store_alone and not self.exports_all

    @property
    def exports_all(self) -> bool:
        """Whether the stream after the final norm is exported of every token: chosen or not."""
        return self._export is not None and self._export.final is FinalStream.ALL

    @property
    def token_sizes(self) -> tuple[int, ...]:
        """Numbers of tokens to compute before ready, so that every kernel is compiled."""
        return tuple(sorted({size for layer in self.layers for size in layer.mlp.token_sizes}))

    def rotary_at(self, positions: Tensor) -> tuple[Any, ...]:
        """positions: [T] int32; returns the `rotary` of a step's `ForwardContext`."""
        return self.rotary.angles(positions)

    def forward(
        self,
        input_ids: Tensor,
        ctx: ForwardContext,
        logit_indices: Tensor | None = None,
        *,
        checks_finite: bool = False,
    ) -> ForwardResult:
        """Compute the hidden states of a step; writes ctx.kv_store at the step's tokens.

        input_ids: [T] integer. logit_indices: [S] integer, the tokens whose hidden state is wanted;
        None = all, or those of `ctx.last`. The part of the last layer after its attention is
        computed for these only; with `ctx.last`, its queries and attention too.
        checks_finite: check the residual stream at the start of the last layer, which shows every
        earlier error, and that layer's K and V. A later error is stored nowhere and shows in the
        hidden states.
        """
        chosen = None if self.exports_all else logit_indices
        flow = self.begin(input_ids, ctx, chosen, checks_finite=checks_finite)
        for ops in self.exchange_operations if ctx.exchanges else self.operations:
            run_in_order(ops, flow)
        return self.exporting(self.result(flow), logit_indices, flow.entering)

    def begin(
        self,
        input_ids: Tensor,
        ctx: ForwardContext,
        logit_indices: Tensor | None = None,
        *,
        checks_finite: bool = False,
    ) -> Flow:
        """What goes through `operations`, by `forward` or by a schedule; then `result` is read."""
        x = self._embedding(input_ids, ctx.comm)
        flow = Flow(ctx=ctx, x=x, slots=ctx.slots, chosen=logit_indices)
        flow.checks_finite = checks_finite
        return flow

    def embed(self, input_ids: Tensor, comm: Comm) -> Tensor:
        """input_ids: [T] integer; returns [T, hidden], what the first layer begins with."""
        return self._embedding(input_ids, comm)

    def result(self, flow: Flow) -> ForwardResult:
        """What a flow holds after the last operation."""
        if self._export is not None and len(self.layers) in self._export.layers:
            flow.entering[len(self.layers)] = flow.x[:0] if flow.has_ended else _stream(flow)
        sums = flow.finite_sums
        is_finite = None if sums is None else flow.ctx.comm.all_reduce(sums).isfinite()
        if flow.has_ended:
            return ForwardResult(hidden=flow.x[:0], is_finite=is_finite)
        add_and_norm(flow, self._final_norm)
        return ForwardResult(hidden=flow.x, is_finite=is_finite)

    def exporting(
        self,
        result: ForwardResult,
        logit_indices: Tensor | None,
        entering: Mapping[int, Tensor],
    ) -> ForwardResult:
        """`result`, of all tokens where the model exports those, with what it exports.

        logit_indices: as of `forward`. entering: `Flow.entering` of the step's tokens.
        """
        if self._export is None:
            return result
        hidden, exported = result.hidden, _side_by_side(self._export, entering, result.hidden)
        if self.exports_all and logit_indices is not None:
            hidden = hidden.index_select(0, logit_indices)
        return replace(result, hidden=hidden, exported=exported)

    def logits(self, hidden: Tensor, comm: Comm = SINGLE_RANK) -> Tensor:
        """`whole_logits` of `own_logits`."""
        return self.whole_logits(self.own_logits(hidden), comm)

    def own_logits(self, hidden: Tensor) -> Tensor:
        """hidden: [S, hidden], rows of `ForwardResult.hidden`; returns [S, ids] in its dtype.

        Those of the ids whose rows of the head this rank holds. A model that makes embeddings has
        no head: it returns `hidden`.
        """
        return self._head.own_logits(hidden)

    def whole_logits(self, own: Tensor, comm: Comm = SINGLE_RANK) -> Tensor:
        """own: of `own_logits` on every rank; returns [S, vocab] on every rank.

        comm: as in the context of `forward`.
        """
        return self._head.whole_logits(own, comm)

    def best_tokens(self, own: Tensor, comm: Comm = SINGLE_RANK) -> GreedyChoice:
        """The best token of each line, for which no rank needs another's logits; as above."""
        return self._head.best_tokens(own, comm)


def _side_by_side(export: Export, entering: Mapping[int, Tensor], final: Tensor) -> Tensor:
    streams = [entering[layer] for layer in export.layers]
    streams += [] if export.final is None else [final]
    joined = torch.cat(streams, dim=-1)
    return joined if export.project is None else export.project(joined)


def _keep_entering(layer: int, *, is_shared_out: bool) -> Op:
    def keep(flow: Flow) -> None:
        flow.entering[layer] = _stream(flow, is_shared_out=is_shared_out)

    return Op("export", keep)


def _stream(flow: Flow, *, is_shared_out: bool = False) -> Tensor:
    """A copy [T, hidden] of the residual stream, between two layers.

    is_shared_out: the flow has this rank's rows of it.
    """
    settle(flow)
    stream = flow.x.clone() if flow.residual is None else flow.x + flow.residual
    return gather_rows(stream, len(flow.ctx.slots), flow.ctx.comm) if is_shared_out else stream


def attention_shape(
    spec: ModelSpec,
    mask_function: MaskFunction | None = None,
    *,
    num_layers_before: int = 0,
    num_layers_behind: int = 0,
) -> AttentionShape | LatentShape:
    """What an attention backend has to compute; spec: of one rank.

    num_layers_before, num_layers_behind: of the store's layout. No attention runs there, but they
    count when a backend finds a block of a layer. Raises ConfigError for a mask function and latent
    attention.
    """
    if spec.latent is not None:
        if mask_function is not None:
            raise ConfigError("model.attention.mask: latent attention has none; leave it out")
        shape = latent_shape(spec, spec.latent)
        return replace(shape, num_layers=shape.num_layers + num_layers_behind)
    first, last = spec.layer_windows[:1], spec.layer_windows[-1:]
    return AttentionShape(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        layer_windows=first * num_layers_before + spec.layer_windows + last * num_layers_behind,
        query_scale=spec.query_scale,
        softcap=spec.attention_softcap,
        has_sinks=spec.has_sinks,
        mask_function=mask_function,
    )


def build_decoder(
    spec: ModelSpec,
    weights: ModelWeights,
    *,
    max_model_len: int,
    ops: Ops,
    is_deterministic: bool = False,
    rank: Rank = WHOLE_MODEL,
) -> CausalLM:
    """Build the model; positions below `max_model_len` get rotary angles.

    spec: of the whole model; weights: of `rank`.

    Empties `weights.layers` while building: a reordered copy of a weight replaces the published
    one layer by layer, so peak memory does not double.
    """
    part = spec.of_rank(rank)
    ends = WHOLE_MODEL if spec.has_dp_attention else rank
    layers: list[DecoderLayer] = []
    while weights.layers:
        layer_weights = weights.layers.pop(0)
        layers.append(_build_layer(part, len(layers), layer_weights, ops, is_deterministic))
    return CausalLM(
        spec=part,
        embedding=_build_embedding(spec, weights, ends),
        layers=layers,
        final_norm=build_norm(spec, weights.final_norm, ops),
        head=_build_head(spec, weights, is_deterministic, ends),
        rotary=build_rotary(spec, max_model_len, weights.embedding.device, ops),
    )


def build_rotary(spec: ModelSpec, max_tokens: int, device: torch.device, ops: Ops) -> RotaryTables:
    def table(rope: RopeSpec) -> RotaryTable:
        return RotaryTable(
            rope, head_dim=spec.rotary_dim, max_tokens=max_tokens, device=device, ops=ops
        )

    ropes = (spec.rope,) if spec.local_rope is None else (spec.rope, spec.local_rope)
    return RotaryTables(*map(table, ropes))


def _build_embedding(spec: ModelSpec, weights: ModelWeights, rank: Rank) -> Embedding:
    embedding = build_embedding(weights.embedding, spec.vocab_size, rank)
    if spec.embedding_scale is None:
        return embedding
    return ScaledEmbedding(embedding, spec.embedding_scale)


def _norm_weight(spec: ModelSpec, weight: Tensor) -> Tensor:
    """In fp32 where something is added: in 16 bits 1 + w would lose most of w."""
    return weight.float() + spec.norm_offset if spec.norm_offset else weight


def build_norm(spec: ModelSpec, weight: Tensor, ops: Ops) -> RmsNorm:
    return RmsNorm(_norm_weight(spec, weight), spec.rms_norm_eps, ops)


def _build_head(spec: ModelSpec, weights: ModelWeights, is_deterministic: bool, rank: Rank) -> Head:
    if spec.pooling is not None:
        return WholeHead(Identity())
    linear = build_linear(LinearWeight(weights.head), is_deterministic=is_deterministic)
    head = build_head(linear, spec.vocab_size, rank)
    return head if spec.logit_softcap is None else CappedHead(head, spec.logit_softcap)


def _build_layer(
    spec: ModelSpec, layer: int, weights: LayerWeights, ops: Ops, is_deterministic: bool
) -> DecoderLayer:
    attention = build_self_attention(spec, layer, weights, ops, is_deterministic)
    norm = partial(build_norm, spec, ops=ops)
    mlp = build_feed_forward(spec, layer, weights, ops, is_deterministic)
    before = {"attention_norm": norm(weights.input_norm), "mlp_norm": norm(weights.post_norm)}
    after_attention, after_mlp = weights.attention_output_norm, weights.mlp_output_norm
    if after_attention is None or after_mlp is None:
        return DecoderLayer(attention=attention, mlp=mlp, **before)
    return OutputNormLayer(
        attention=attention,
        mlp=mlp,
        attention_output_norm=norm(after_attention),
        mlp_output_norm=norm(after_mlp),
        **before,
    )


def build_self_attention(
    spec: ModelSpec, layer: int, weights: LayerWeights, ops: Ops, is_deterministic: bool
) -> SelfAttention:
    if spec.latent is not None:
        return build_latent_attention(
            spec, spec.latent, layer, weights, ops, is_deterministic=is_deterministic
        )
    linear = partial(build_linear, is_deterministic=is_deterministic)
    is_last = layer == spec.num_layers - 1
    head_norms, rotated = _head_norms(spec, weights), num_rotated(spec.rope, spec.head_dim)
    if rotated < spec.head_dim:
        order = HeadOrder(spec.head_dim, rotated)
        qkv = order.of_rows(weights.qkv, spec.num_heads + spec.num_kv_heads)
        weights = replace(weights, qkv=qkv)
        head_norms = order.of_norms(head_norms)
    return Attention(
        layer=layer,
        head_dim=spec.head_dim,
        qkv=linear(weights.qkv),
        # In deterministic mode K and V always come from the same product as the queries.
        kv=_kv_linear(spec, weights) if is_last and not is_deterministic else None,
        out=linear(weights.output),
        head_norms=head_norms,
        ops=ops,
        rope=0 if spec.local_rope is None or spec.layer_windows[layer] is None else 1,
        sinks=weights.sinks,
    )


def build_feed_forward(
    spec: ModelSpec, layer: int, weights: LayerWeights, ops: Ops, is_deterministic: bool
) -> FeedForward:
    mixture = spec.mixture_at(layer)
    if mixture is not None:
        return build_mixture(mixture, weights, ops, is_deterministic=is_deterministic)
    if spec.activation is Activation.SILU:
        return build_mlp(weights.gate_up, weights.down, ops, is_deterministic=is_deterministic)
    gate_up = build_linear(weights.gate_up, is_deterministic=is_deterministic)
    down = build_linear(weights.down, is_deterministic=is_deterministic)
    return GatedMlp(gated=Gated(gate_up, ops.gelu_mul), down=down)


def _kv_linear(spec: ModelSpec, weights: LayerWeights) -> Linear:
    """hidden -> [k | v], a view of the qkv weight."""
    return build_linear(weights.qkv.rows(spec.num_heads * spec.head_dim))


def _head_norms(spec: ModelSpec, weights: LayerWeights) -> HeadNorms | None:
    if weights.q_norm is None or weights.k_norm is None:
        return None
    q_weight, k_weight = _norm_weight(spec, weights.q_norm), _norm_weight(spec, weights.k_norm)
    return HeadNorms(q_weight=q_weight, k_weight=k_weight, eps=spec.rms_norm_eps)
