"""DeepSeek-V2 and V3: latent attention in place of a layer's grouped-query attention.

Everything else is that of `DecoderLayer` (llama.py); the feed-forward parts are dense or mixtures
(mixture.py). The layer that guesses further tokens is a model of its own (mtp.py).
"""

from functools import partial

from torch import Tensor

from engine.layers.build_linear import build_linear
from engine.layers.latent_attention import LatentAttention, QueryUp
from engine.layers.linear import LinearWeight
from engine.layers.norm import RmsNorm
from engine.layers.quantized_weight import dequantize
from engine.models.latent_spec import LatentSpec
from engine.models.spec import ModelSpec
from engine.models.weights import LayerWeights
from kernels.attention.latent import LatentShape
from kernels.ops import LatentNorm, Ops

_EPS = 1e-6  # of the norms inside attention; config.json's is of the others


def build_latent_attention(
    spec: ModelSpec,
    latent: LatentSpec,
    layer: int,
    weights: LayerWeights,
    ops: Ops,
    *,
    is_deterministic: bool,
) -> LatentAttention:
    """The attention of one layer. Raises ConfigError if no product computes with its weights."""
    assert weights.kv_up is not None, "latent attention makes keys and values of latents"
    assert weights.k_norm is not None, "latents are normalised"
    linear = partial(build_linear, is_deterministic=is_deterministic)
    q_up = None
    if weights.q_up is not None:
        assert weights.q_norm is not None, "the vector that queries are made from is normalised"
        q_up = QueryUp(norm=RmsNorm(weights.q_norm, _EPS, ops), linear=linear(weights.q_up))
    # In deterministic mode the latent always comes from the same product as the queries.
    stores_alone = layer == spec.num_layers - 1 and not is_deterministic
    kv_rows = weights.qkv.rows(weights.qkv.data.shape[0] - latent.width)
    return LatentAttention(
        layer=layer,
        num_heads=spec.num_heads,
        width=latent.width,
        qkv=linear(weights.qkv),
        kv=build_linear(kv_rows) if stores_alone else None,
        q_up=q_up,
        kv_norm=LatentNorm(weight=weights.k_norm, eps=_EPS, is_interleaved=latent.is_interleaved),
        up=_matrix(weights.kv_up).view(spec.num_heads, -1, latent.rank),
        out=linear(weights.output),
        ops=ops,
    )


def _matrix(weight: LinearWeight) -> Tensor:
    """The weight in the model's dtype: attention multiplies with each head's part of it, by itself.

    A quantised one is decoded, once.
    """
    return weight.data if weight.scales is None else dequantize(weight.data, weight.scales)


def latent_shape(spec: ModelSpec, latent: LatentSpec) -> LatentShape:
    """What an attention backend has to know of a model with latent attention."""
    return LatentShape(
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        rank=latent.rank,
        nope_dim=latent.nope_dim,
        rope_dim=latent.rope_dim,
        value_dim=latent.value_dim,
        scale=latent.scale,
    )
