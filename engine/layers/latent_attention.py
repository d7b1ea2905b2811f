"""Latent attention (MLA) of one layer over the paged store, in the steps of `Attention`.

    x -> [q or its vector | latent | key] -> norms, rotation, store -> attention -> output

Only the latent and the rotated key are kept, one vector a token for all heads.
"""

from dataclasses import dataclass

from torch import Tensor

from engine.layers.attention import ProjectedTokens
from engine.layers.context import ForwardContext
from engine.layers.linear import Linear, form_of, product
from engine.layers.norm import RmsNorm
from kernels.attention.latent import LatentBackend
from kernels.ops import LatentNorm, Ops
from kernels.quant.coded_tokens import CodedTokens, InputForm


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryUp:
    """Makes queries from a vector that is shorter than all of them."""

    norm: RmsNorm
    linear: Linear  # rank -> heads * (nope + rope)


class LatentAttention:
    """A `SelfAttention`; its k is the kept vector, [T, 1, width], and its v is empty."""

    __slots__ = (
        "_kv",
        "_kv_norm",
        "_layer",
        "_num_heads",
        "_ops",
        "_out",
        "_q_up",
        "_qkv",
        "_up",
        "_width",
    )

    def __init__(
        self,
        *,
        layer: int,
        num_heads: int,
        width: int,
        qkv: Linear,
        kv: Linear | None,
        q_up: QueryUp | None,
        kv_norm: LatentNorm,
        up: Tensor,
        out: Linear,
        ops: Ops,
    ) -> None:
        """qkv: hidden -> [q or its vector | latent | key]. kv: its end alone; None = not used.

        width: of latent and key. up: [heads, nope + value, rank]. out: heads * value -> hidden.
        """
        self._layer = layer
        self._num_heads = num_heads
        self._width = width
        self._qkv = qkv
        self._kv = kv
        self._q_up = q_up
        self._kv_norm = kv_norm
        self._up = up
        self._out = out
        self._ops = ops

    def form(self, num_tokens: int) -> InputForm | None:
        """How the norm before `project` may code so many tokens; None = not at all."""
        return form_of(self._qkv, num_tokens)

    def project(
        self, x: Tensor | CodedTokens, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x: [T, hidden]; returns rotated q, the kept vector, and nothing as v."""
        projected = product(self._qkv, x, ctx.lane)
        q, kv = projected[:, : -self._width], projected[:, -self._width :]
        if self._q_up is not None:
            q = self._q_up.linear(self._q_up.norm(q), ctx.lane)
        return self._rotate_and_store(q.view(len(q), self._num_heads, -1), kv, ctx)

    @property
    def can_store_alone(self) -> bool:
        return self._kv is not None

    def store(self, x: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """x: [T, hidden]; returns the kept vector, and nothing as v."""
        assert self._kv is not None, "built without a map of its own to the latent"
        kv = self._kv(x, ctx.lane)
        no_queries = kv.new_empty((len(kv), 0, self._width))
        _, k, v = self._rotate_and_store(no_queries, kv, ctx)
        return k, v

    def _rotate_and_store(
        self, q: Tensor, kv: Tensor, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, kept = self._ops.rotate_and_store_latent(
            q, kv, self._kv_norm, ctx.rotary[0], ctx.kv_store, self._layer, ctx.slots, ctx.kv_scales
        )
        return q, kept, kept[..., :0]

    def attend(self, tokens: ProjectedTokens, ctx: ForwardContext) -> Tensor:
        """Returns [T, heads * value_dim]."""
        attention: LatentBackend = ctx.attention
        return attention.run(
            tokens.q,
            tokens.k,
            self._up,
            self._layer,
            ctx.kv_store,
            ctx.attention_metadata,
            scales=ctx.kv_scales,
        )

    def output(self, attended: Tensor, ctx: ForwardContext) -> Tensor:
        """attended: [T, heads * value_dim]; returns [T, hidden]."""
        return self._out(attended, ctx.lane)
