"""A decoder-only language model, composed from a spec and its weights.

What a family has or lacks (biases, QK-norm, tied embeddings) became an object or a None while it
was built; nothing here asks again. Knows no requests and keeps no state of a step.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the field's own spelling)
from torch import Tensor

from engine.layers.context import ForwardContext
from engine.layers.decoder_layer import Attention, DecoderLayer, GatedMlp
from engine.layers.linear import Linear, build_gated, build_linear
from engine.layers.norm import RmsNorm
from engine.layers.rotary import RotaryTable
from engine.models.spec import ModelSpec
from engine.models.weights import LayerWeights, ModelWeights
from kernels.ops import HeadNorms, Ops


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardResult:
    """What one pass leaves besides K and V."""

    # [S, hidden]  the stream after the final norm
    hidden: Tensor
    # [T] bool  whether all that a token leaves in the store is a number; None = not looked at
    is_finite: Tensor | None


class CausalLM:
    """Token ids in, logits out; the KV store and all else of a step come in `ForwardContext`."""

    def __init__(
        self,
        *,
        spec: ModelSpec,
        embedding: Tensor,
        layers: list[DecoderLayer],
        final_norm: RmsNorm,
        head: Linear,
        rotary: RotaryTable,
    ) -> None:
        """embedding: [vocab, hidden]."""
        self.spec = spec
        self.layers = layers
        self.rotary = rotary
        self._embedding = embedding
        self._final_norm = final_norm
        self._head = head

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def can_skip_queries(self) -> bool:
        """Whether `forward` takes a context with `last`."""
        return self.layers[-1].can_store_alone

    def rotary_at(self, positions: Tensor) -> Any:  # noqa: ANN401
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
        """input_ids: [T] integer; mutates ctx.kv_store at the step's tokens.

        logit_indices: [S] integer, the tokens whose hidden state is wanted; None = all, or those of
        `ctx.last`. What the last layer does past its attention is done for these alone; with
        `ctx.last` its queries and its attention, too.
        checks_finite: looks at the stream where the last layer begins, which holds whatever went
        wrong earlier, and at that layer's K and V. What breaks later is kept nowhere and shows in
        the hidden states.
        """
        x, residual = F.embedding(input_ids, self._embedding), None
        *earlier_layers, last_layer = self.layers
        for layer in earlier_layers:
            x, residual = layer.attention_part(x, residual, ctx)
            x, residual = layer.mlp_part(x, residual, ctx)
        if ctx.last is None:
            tokens = last_layer.project(x, residual, ctx)
            is_finite = tokens.is_finite() if checks_finite else None
            if logit_indices is not None and len(logit_indices) == 0:
                return ForwardResult(hidden=tokens.residual[:0], is_finite=is_finite)
            x, residual = last_layer.attend(tokens, ctx, chosen=logit_indices)
        else:
            assert logit_indices is None, "the context has chosen already"
            stored = last_layer.store(x, residual, ctx)
            is_finite = stored.is_finite() if checks_finite else None
            tokens = last_layer.project_last(stored, ctx.last)
            x, residual = last_layer.attend(tokens, ctx.last.ctx)
        x, residual = last_layer.mlp_part(x, residual, ctx)
        hidden, _ = self._final_norm.add(x, residual)
        return ForwardResult(hidden=hidden, is_finite=is_finite)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [S, hidden], rows of what `forward` returned; returns [S, vocab] in its dtype."""
        return self._head(hidden)


def build_decoder(
    spec: ModelSpec,
    weights: ModelWeights,
    *,
    max_model_len: int,
    ops: Ops,
    is_deterministic: bool = False,
) -> CausalLM:
    """Compose the model; positions below `max_model_len` get rotary angles.

    Empties `weights.layers` as it goes, so that a reordered copy of a weight replaces the
    published one layer by layer instead of doubling the peak.
    """
    layers: list[DecoderLayer] = []
    while weights.layers:
        layer_weights = weights.layers.pop(0)
        layers.append(_build_layer(spec, len(layers), layer_weights, ops, is_deterministic))
    return CausalLM(
        spec=spec,
        embedding=weights.embedding,
        layers=layers,
        final_norm=RmsNorm(weights.final_norm, spec.rms_norm_eps, ops),
        head=build_linear(weights.head, None, is_deterministic=is_deterministic),
        rotary=RotaryTable(
            spec.rope,
            head_dim=spec.head_dim,
            max_tokens=max_model_len,
            device=weights.embedding.device,
            ops=ops,
        ),
    )


def _build_layer(
    spec: ModelSpec, layer: int, weights: LayerWeights, ops: Ops, is_deterministic: bool
) -> DecoderLayer:
    linear = partial(build_linear, is_deterministic=is_deterministic)
    is_last = layer == spec.num_layers - 1
    return DecoderLayer(
        attention_norm=RmsNorm(weights.input_norm, spec.rms_norm_eps, ops),
        attention=Attention(
            layer=layer,
            head_dim=spec.head_dim,
            qkv=linear(weights.qkv, weights.qkv_bias),
            # In deterministic mode K and V come from one product, whatever else is wanted of it.
            kv=_kv_linear(spec, weights) if is_last and not is_deterministic else None,
            out=linear(weights.output, weights.output_bias),
            head_norms=_head_norms(spec, weights),
            ops=ops,
        ),
        mlp_norm=RmsNorm(weights.post_norm, spec.rms_norm_eps, ops),
        mlp=GatedMlp(
            gated=build_gated(
                weights.gate_up, weights.gate_up_bias, ops, is_deterministic=is_deterministic
            ),
            down=linear(weights.down, weights.down_bias),
        ),
    )


def _kv_linear(spec: ModelSpec, weights: LayerWeights) -> Linear:
    """hidden -> [k | v], from the same memory as the whole."""
    num_query_rows = spec.num_heads * spec.head_dim
    bias = weights.qkv_bias
    return build_linear(
        weights.qkv[num_query_rows:], None if bias is None else bias[num_query_rows:]
    )


def _head_norms(spec: ModelSpec, weights: LayerWeights) -> HeadNorms | None:
    if weights.q_norm is None or weights.k_norm is None:
        return None
    return HeadNorms(q_weight=weights.q_norm, k_weight=weights.k_norm, eps=spec.rms_norm_eps)
