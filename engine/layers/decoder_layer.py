"""One decoder layer as two parts, each `(x, residual, ctx) -> (x, residual)`.

`x` is what the previous part produced and has not been added to `residual` yet; each part adds,
normalises, computes, and communicates only at its end. Schedules (two-batch overlap, tensor
parallelism) order these parts; nothing here knows of them, nor of requests.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.layers.context import ForwardContext, LastTokens
from engine.layers.linear import Linear
from engine.layers.norm import RmsNorm
from kernels.ops import HeadNorms, Ops


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredTokens:
    """A layer's step up to K and V, which are in the store, too."""

    # [T, hidden]  normalised
    x: Tensor
    # [T, kv_heads, head_dim]
    k: Tensor
    v: Tensor
    # [T, hidden]
    residual: Tensor

    def is_finite(self) -> Tensor:
        """[T] bool: whether a token's stream, K and V are; False too where their sum overflows."""
        sums = [
            part.sum(dim=tuple(range(1, part.ndim)), dtype=torch.float32)
            for part in (self.residual, self.k, self.v)
        ]
        return torch.stack(sums).sum(dim=0).isfinite()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProjectedTokens(StoredTokens):
    """A layer's step up to its attention."""

    # [T, heads, head_dim]
    q: Tensor


class Attention:
    """Grouped-query attention of one layer over the paged store."""

    __slots__ = ("_head_dim", "_head_norms", "_kv", "_layer", "_ops", "_out", "_qkv")

    def __init__(
        self,
        *,
        layer: int,
        head_dim: int,
        qkv: Linear,
        kv: Linear | None,
        out: Linear,
        head_norms: HeadNorms | None,
        ops: Ops,
    ) -> None:
        """qkv: hidden -> [q | k | v] heads * head_dim; kv: the k | v of it alone, if wanted.

        out: heads * head_dim -> hidden.
        """
        self._layer = layer
        self._head_dim = head_dim
        self._qkv = qkv
        self._kv = kv
        self._out = out
        self._head_norms = head_norms
        self._ops = ops

    def project(self, x: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """x: [T, hidden]; returns rotated q, k, v; mutates ctx.kv_store at the step's tokens."""
        return self._rotate_and_store(self._qkv(x), ctx)

    @property
    def can_store_alone(self) -> bool:
        return self._kv is not None

    def store(self, x: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """x: [T, hidden]; returns rotated k and v; mutates ctx.kv_store at the step's tokens."""
        assert self._kv is not None, "built without a map of its own to K and V"
        _, k, v = self._rotate_and_store(self._kv(x), ctx)
        return k, v

    def _rotate_and_store(
        self, projected: Tensor, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._ops.rotate_and_store(
            projected.view(projected.shape[0], -1, self._head_dim),
            self._head_norms,
            ctx.rotary,
            ctx.kv_store,
            self._layer,
            ctx.slots,
        )

    def attend(self, tokens: ProjectedTokens, ctx: ForwardContext) -> Tensor:
        """Returns [T, heads * head_dim]."""
        return ctx.attention.run(
            tokens.q, tokens.k, tokens.v, self._layer, ctx.kv_store, ctx.attention_metadata
        )

    def output(self, attended: Tensor) -> Tensor:
        """attended: [T, heads * head_dim]; returns [T, hidden]."""
        return self._out(attended)


class GatedMlp:
    """down(silu(gate(x)) * up(x))."""

    __slots__ = ("_down", "_gated")

    def __init__(self, *, gated: Callable[[Tensor], Tensor], down: Linear) -> None:
        """gated: [T, hidden] -> silu(gate) * up, [T, intermediate]."""
        self._gated = gated
        self._down = down

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, hidden]; returns [T, hidden]."""
        return self._down(self._gated(x))


class DecoderLayer:
    """Pre-norm attention and feed-forward.

    `residual` None stands for a stream that begins with `x`.
    """

    __slots__ = ("_attention", "_attention_norm", "_mlp", "_mlp_norm")

    def __init__(
        self, *, attention_norm: RmsNorm, attention: Attention, mlp_norm: RmsNorm, mlp: GatedMlp
    ) -> None:
        self._attention_norm = attention_norm
        self._attention = attention
        self._mlp_norm = mlp_norm
        self._mlp = mlp

    def attention_part(
        self, x: Tensor, residual: Tensor | None, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """x, residual: [T, hidden], may be overwritten; mutates ctx.kv_store."""
        return self.attend(self.project(x, residual, ctx), ctx)

    def project(self, x: Tensor, residual: Tensor | None, ctx: ForwardContext) -> ProjectedTokens:
        """First half of the attention part; x, residual: [T, hidden]; mutates ctx.kv_store."""
        x, residual = self._attention_norm.add(x, residual)
        q, k, v = self._attention.project(x, ctx)
        return ProjectedTokens(x=x, q=q, k=k, v=v, residual=residual)

    @property
    def can_store_alone(self) -> bool:
        """Whether `store` may be called."""
        return self._attention.can_store_alone

    def store(self, x: Tensor, residual: Tensor | None, ctx: ForwardContext) -> StoredTokens:
        """`project` without queries; mutates ctx.kv_store."""
        x, residual = self._attention_norm.add(x, residual)
        k, v = self._attention.store(x, ctx)
        return StoredTokens(x=x, k=k, v=v, residual=residual)

    def project_last(self, stored: StoredTokens, last: LastTokens) -> ProjectedTokens:
        """What `store` left out, for each row's last token alone; [R]."""
        x = stored.x.index_select(0, last.indices)
        q, k, v = self._attention.project(x, last.ctx)
        residual = stored.residual.index_select(0, last.indices)
        return ProjectedTokens(x=x, q=q, k=k, v=v, residual=residual)

    def attend(
        self, tokens: ProjectedTokens, ctx: ForwardContext, chosen: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Second half of the attention part; returns x and residual, [S, hidden].

        chosen: [S] integer, the tokens that go on; None = all.
        """
        attended, residual = self._attention.attend(tokens, ctx), tokens.residual
        if chosen is not None:
            attended, residual = (t.index_select(0, chosen) for t in (attended, residual))
        return ctx.comm.all_reduce(self._attention.output(attended)), residual

    def mlp_part(self, x: Tensor, residual: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """x, residual: [T, hidden], may be overwritten."""
        x, residual = self._mlp_norm.add(x, residual)
        return ctx.comm.all_reduce(self._mlp(x)), residual
