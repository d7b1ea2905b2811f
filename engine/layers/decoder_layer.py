"""One decoder layer as two parts, each `(x, residual, ctx) -> (x, residual)`.

`x` is what the previous part produced and has not been added to `residual` yet; each part adds,
normalises, computes, and communicates only at its end. Schedules (two-batch overlap, tensor
parallelism) order these parts; nothing here knows of them, nor of requests.
"""

from torch import Tensor

from engine.layers.context import ForwardContext
from engine.layers.linear import Linear
from engine.layers.norm import HeadNorm, RmsNorm
from kernels.kv_append import kv_append
from kernels.reference import rope, silu_mul


class Attention:
    """Grouped-query attention of one layer over the paged store."""

    __slots__ = ("_head_dim", "_head_norm", "_layer", "_num_heads", "_num_kv_heads", "_out", "_qkv")

    def __init__(
        self,
        *,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qkv: Linear,
        out: Linear,
        head_norm: HeadNorm,
    ) -> None:
        """qkv: hidden -> [q | k | v] heads * head_dim; out: heads * head_dim -> hidden."""
        self._layer = layer
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        self._qkv = qkv
        self._out = out
        self._head_norm = head_norm

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """x: [T, hidden]; returns [T, hidden]; mutates ctx.kv_store at the step's tokens."""
        num_qk_heads = self._num_heads + self._num_kv_heads
        qkv = self._qkv(x).view(-1, num_qk_heads + self._num_kv_heads, self._head_dim)
        qk = self._head_norm(qkv[:, :num_qk_heads])
        qk = rope(qk, ctx.rotary.cos, ctx.rotary.sin)
        q, k, v = qk[:, : self._num_heads], qk[:, self._num_heads :], qkv[:, num_qk_heads:]
        kv_append(k, v, ctx.kv_store, self._layer, ctx.kv_lines)
        attended = ctx.attention.run(q, k, v, self._layer, ctx.kv_store, ctx.attention_metadata)
        return self._out(attended)


class GatedMlp:
    """down(silu(gate(x)) * up(x)), gate and up in one product."""

    __slots__ = ("_down", "_gate_up")

    def __init__(self, *, gate_up: Linear, down: Linear) -> None:
        self._gate_up = gate_up
        self._down = down

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, hidden]; returns [T, hidden]."""
        return self._down(silu_mul(self._gate_up(x)))


class DecoderLayer:
    """Pre-norm attention and feed-forward."""

    __slots__ = ("_attention", "_attention_norm", "_mlp", "_mlp_norm")

    def __init__(
        self, *, attention_norm: RmsNorm, attention: Attention, mlp_norm: RmsNorm, mlp: GatedMlp
    ) -> None:
        self._attention_norm = attention_norm
        self._attention = attention
        self._mlp_norm = mlp_norm
        self._mlp = mlp

    def attention_part(
        self, x: Tensor, residual: Tensor, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """x, residual: [T, hidden]; mutates ctx.kv_store."""
        x, residual = self._attention_norm.add(x, residual)
        return ctx.comm.all_reduce(self._attention(x, ctx)), residual

    def mlp_part(self, x: Tensor, residual: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """x, residual: [T, hidden]."""
        x, residual = self._mlp_norm.add(x, residual)
        return ctx.comm.all_reduce(self._mlp(x)), residual
