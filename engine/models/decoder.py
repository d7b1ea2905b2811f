"""A decoder-only language model, composed from a spec and its weights.

What a family has or lacks (biases, QK-norm, tied embeddings) became an object or a None while it
was built; nothing here asks again. Knows no requests and keeps no state of a step.
"""

import torch
import torch.nn.functional as F  # noqa: N812  (the field's own spelling)
from torch import Tensor

from engine.layers.context import ForwardContext
from engine.layers.decoder_layer import Attention, DecoderLayer, GatedMlp
from engine.layers.linear import Linear, build_linear
from engine.layers.norm import HeadNorm, NoHeadNorm, QkNorm, RmsNorm
from engine.layers.rotary import RotaryTable
from engine.models.spec import ModelSpec
from engine.models.weights import LayerWeights, ModelWeights


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

    def forward(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """input_ids: [T] int64; returns the stream before the final norm, [T, hidden].

        Mutates ctx.kv_store at the step's tokens.
        """
        x = F.embedding(input_ids, self._embedding)
        residual = torch.zeros_like(x)
        for layer in self.layers:
            x, residual = layer.attention_part(x, residual, ctx)
            x, residual = layer.mlp_part(x, residual, ctx)
        return torch.add(x, residual)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [S, hidden], rows of what `forward` returned; returns fp32 [S, vocab]."""
        return self._head(self._final_norm(hidden)).float()


def build_decoder(spec: ModelSpec, weights: ModelWeights, *, max_model_len: int) -> CausalLM:
    """Compose the model; positions below `max_model_len` get rotary angles.

    Empties `weights.layers` as it goes, so that a reordered copy of a weight replaces the
    published one layer by layer instead of doubling the peak.
    """
    layers: list[DecoderLayer] = []
    while weights.layers:
        layers.append(_build_layer(spec, len(layers), weights.layers.pop(0)))
    return CausalLM(
        spec=spec,
        embedding=weights.embedding,
        layers=layers,
        final_norm=RmsNorm(weights.final_norm, spec.rms_norm_eps),
        head=build_linear(weights.head, None),
        rotary=RotaryTable(
            spec.rope,
            head_dim=spec.head_dim,
            max_tokens=max_model_len,
            device=weights.embedding.device,
        ),
    )


def _build_layer(spec: ModelSpec, layer: int, weights: LayerWeights) -> DecoderLayer:
    return DecoderLayer(
        attention_norm=RmsNorm(weights.input_norm, spec.rms_norm_eps),
        attention=Attention(
            layer=layer,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            qkv=build_linear(weights.qkv, weights.qkv_bias),
            out=build_linear(weights.output, weights.output_bias),
            head_norm=_build_head_norm(spec, weights),
        ),
        mlp_norm=RmsNorm(weights.post_norm, spec.rms_norm_eps),
        mlp=GatedMlp(
            gate_up=build_linear(weights.gate_up, weights.gate_up_bias),
            down=build_linear(weights.down, weights.down_bias),
        ),
    )


def _build_head_norm(spec: ModelSpec, weights: LayerWeights) -> HeadNorm:
    if weights.q_norm is None or weights.k_norm is None:
        return NoHeadNorm()
    return QkNorm(
        weights.q_norm,
        weights.k_norm,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        eps=spec.rms_norm_eps,
    )
