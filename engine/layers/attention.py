"""Grouped-query attention of one layer over the paged store, in steps that a schedule can order.

    project (or store) -> attend -> output

Knows no other layers, no communication and no requests.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.layers.context import ForwardContext
from engine.layers.linear import Linear, form_of, product
from kernels.attention.protocol import AttentionBackend
from kernels.ops import HeadNorms, Ops
from kernels.quant.coded_tokens import CodedTokens, InputForm


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredTokens:
    """A layer's tensors after K and V were computed and written to the store."""

    # [T, kv_heads, head_dim]
    k: Tensor
    v: Tensor
    # [T, hidden]
    residual: Tensor

    def finite_sums(self) -> Tensor:
        """fp32 [T]: finite only where a token's stream, K and V are; infinite if a sum overflows.

        Each rank has other heads; what its sums and the others' add up to holds for all heads.
        """
        sums = [
            part.sum(dim=tuple(range(1, part.ndim)), dtype=torch.float32)
            for part in (self.residual, self.k, self.v)
        ]
        return torch.stack(sums).sum(dim=0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProjectedTokens(StoredTokens):
    """A layer's tensors before its attention."""

    # [T, heads, head_dim]
    q: Tensor


class SelfAttention(Protocol):
    """Attention of one layer; `Attention` states what its methods do."""

    @property
    def can_store_alone(self) -> bool: ...

    def form(self, num_tokens: int) -> InputForm | None: ...

    def project(
        self, x: Tensor | CodedTokens, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def store(self, x: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]: ...

    def attend(self, tokens: ProjectedTokens, ctx: ForwardContext) -> Tensor: ...

    def output(self, attended: Tensor, ctx: ForwardContext) -> Tensor: ...


class Attention:
    """Grouped-query attention of one layer over the paged store."""

    __slots__ = (
        "_head_dim",
        "_head_norms",
        "_kv",
        "_layer",
        "_ops",
        "_out",
        "_qkv",
        "_rope",
        "_sinks",
    )

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
        rope: int = 0,
        sinks: Tensor | None = None,
    ) -> None:
        """qkv: hidden -> [q | k | v] heads * head_dim. kv: its k | v part alone; None = not used.

        out: heads * head_dim -> hidden. rope: which of the model's rotary tables is the layer's.
        sinks: [heads], logits.
        """
        self._rope = rope
        self._sinks = None if sinks is None else sinks.float()
        self._layer = layer
        self._head_dim = head_dim
        self._qkv = qkv
        self._kv = kv
        self._out = out
        self._head_norms = head_norms
        self._ops = ops

    def form(self, num_tokens: int) -> InputForm | None:
        """How the norm before `project` may code so many tokens; None = not at all."""
        return form_of(self._qkv, num_tokens)

    def project(
        self, x: Tensor | CodedTokens, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x: [T, hidden]; returns rotated q, k, v; writes ctx.kv_store at the step's tokens."""
        return self._rotate_and_store(product(self._qkv, x, ctx.lane), ctx)

    @property
    def can_store_alone(self) -> bool:
        return self._kv is not None

    def store(self, x: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """x: [T, hidden]; returns rotated k and v; writes ctx.kv_store at the step's tokens."""
        assert self._kv is not None, "built without a map of its own to K and V"
        _, k, v = self._rotate_and_store(self._kv(x, ctx.lane), ctx)
        return k, v

    def _rotate_and_store(
        self, projected: Tensor, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._ops.rotate_and_store(
            projected.view(projected.shape[0], -1, self._head_dim),
            self._head_norms,
            ctx.rotary[self._rope],
            ctx.kv_store,
            ctx.num_layers_before + self._layer,
            ctx.slots,
            ctx.kv_scales,
        )

    def attend(self, tokens: ProjectedTokens, ctx: ForwardContext) -> Tensor:
        """Returns [T, heads * head_dim]."""
        attention: AttentionBackend = ctx.attention
        return attention.run(
            tokens.q,
            tokens.k,
            tokens.v,
            ctx.num_layers_before + self._layer,
            ctx.kv_store,
            ctx.attention_metadata,
            sinks=self._sinks,
            scales=ctx.kv_scales,
        )

    def output(self, attended: Tensor, ctx: ForwardContext) -> Tensor:
        """attended: [T, heads * head_dim]; returns [T, hidden]."""
        return self._out(attended, ctx.lane)
