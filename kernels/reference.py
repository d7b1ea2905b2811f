"""Torch twins of the element-wise kernels: the oracle on a GPU, the implementation on a CPU.

Each states its formula. Knows shapes, and nothing of models, requests or devices.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  (the field's own spelling)
from torch import Tensor

from kernels.kv.append import kv_append, latent_append, slot_lines
from kernels.kv.scales import KvScales, of_latent, to_e4m3
from kernels.ops import HeadNorms, LatentNorm
from kernels.quant import coded_tokens
from kernels.quant.coded_tokens import CodedTokens, InputForm


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last axis, mean taken in fp32.

    x: [..., n], weight: [n] in x's dtype or fp32; returns x's shape and dtype. arXiv:1910.07467.
    """
    if weight.dtype != x.dtype:
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight, eps)


def rms_norm_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """r = x + residual; returns (rms_norm(r), r).

    x, residual: [T, n], weight: [n].
    """
    residual = torch.add(x, residual)
    return rms_norm(residual, weight, eps), residual


def qk_norm(qk: Tensor, norms: HeadNorms, num_heads: int) -> Tensor:
    """RMSNorm of every query and key head over its own head_dim, before rotation.

    qk: [T, heads + kv_heads, head_dim], queries first; returns a new tensor of that shape. One
    pass for both. arXiv:2302.05442, as in Qwen3.
    """
    dtype = norms.q_weight.dtype
    normed = F.rms_norm(qk.to(dtype), (qk.shape[-1],), None, norms.eps)
    normed[:, :num_heads].mul_(norms.q_weight)
    normed[:, num_heads:].mul_(norms.k_weight)
    return normed.to(qk.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """y = x * cos + swap_halves(x) * sin, computed in fp32, returned in x's dtype.

    x: [T, heads, head_dim], cos and sin: fp32 [T, 1, head_dim]. The first half of `sin` is already
    negated, so that (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) with pairs head_dim / 2 apart.
    arXiv:2104.09864 in the ordering of Hugging Face checkpoints.
    """
    rotated = torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
    return rotated.to(x.dtype)


def rope_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rope` with pairs of neighbours (x0, x1), (x2, x3), ..., as DeepSeek publishes them."""
    halves = rope(torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1), cos, sin)
    return torch.stack(halves.chunk(2, dim=-1), dim=-1).flatten(-2)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """y = gelu(gate) * up in the tanh form of gelu, with gate_up = [gate | up].

    gate_up: [T, 2 n]; returns [T, n]. arXiv:1606.08415.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def silu_mul(gate_up: Tensor) -> Tensor:
    """y = silu(gate) * up, with gate_up = [gate | up].

    gate_up: [T, 2 n]; returns [T, n]. arXiv:2002.05202.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _KvTargets:
    """Destinations of a step's K and V, computed from `slots` for stores shaped like `store`."""

    slots: Tensor
    store: Tensor
    # int64 [S]  the tokens that have a slot; None = all
    tokens: Tensor | None
    # int64 [planes, S]  see kernels/kv/append.py
    lines: Tensor

    def append_latent(self, latent: Tensor, layer: int, inverse: Tensor | None) -> None:
        """latent: [T, 1, width]; writes it to the store, as e4m3 numbers with inverse [width]."""
        if self.tokens is not None:
            latent = latent.index_select(0, self.tokens)
        if inverse is not None:
            latent = to_e4m3(latent, inverse)
        latent_append(latent, self.store, layer, self.lines)

    def append(self, k: Tensor, v: Tensor, layer: int, scales: KvScales | None) -> None:
        """k, v: [T, kv_heads, head_dim]; writes them to the store."""
        if self.tokens is not None:
            k, v = k.index_select(0, self.tokens), v.index_select(0, self.tokens)
        if scales is not None:
            k, v = (to_e4m3(x, scales.inverse[layer, i]) for i, x in enumerate((k, v)))
        kv_append(k, v, self.store, layer, self.lines)


@dataclass(slots=True, kw_only=True, eq=False)
class StepAngles:
    """Angles of one step's tokens, ready for `rope`, and data that the layers share."""

    # fp32 [T, 1, head_dim]
    cos: Tensor
    # fp32 [T, 1, head_dim], first half negated
    sin: Tensor
    # Computed by the step's first layer: these four small operations would cost every layer of a
    # small model a tenth of its time.
    _kv_targets: _KvTargets | None = None

    def kv_targets(self, slots: Tensor, store: Tensor) -> _KvTargets:
        """slots: int32 [T], not changed during the step."""
        made = self._kv_targets
        if made is None or made.slots is not slots or made.store is not store:
            made = self._kv_targets = _build_kv_targets(slots, store)
        return made


def _build_kv_targets(slots: Tensor, store: Tensor) -> _KvTargets:
    if int(slots.min()) >= 0:
        lines = slot_lines(slots, store)
        return _KvTargets(slots=slots, store=store, tokens=None, lines=lines)
    tokens = (slots >= 0).nonzero().squeeze(1)
    lines = slot_lines(slots.index_select(0, tokens), store)
    return _KvTargets(slots=slots, store=store, tokens=tokens, lines=lines)


class TorchOps:
    """See `kernels.ops.Ops`; does not overwrite its inputs."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x: [T, n], weight: [n]; returns [T, n]."""
        return rms_norm(x, weight, eps)

    def rms_norm_add(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """x, residual: [T, n], weight: [n]; returns (norm, sum)."""
        return rms_norm_add(x, residual, weight, eps)

    def rms_norm_coded(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, form: InputForm
    ) -> tuple[CodedTokens, Tensor]:
        """x, residual: [T, n], weight: [n]; returns (norm in e4m3, sum)."""
        total = x if residual is None else x + residual
        return coded_tokens.reference(rms_norm(total, weight, eps), form), total

    def rotary(self, cos_sin: Tensor, positions: Tensor) -> StepAngles:
        """cos_sin: fp32 [max_positions, head_dim], cos | sin; positions: int32 [T]."""
        cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
        return StepAngles(cos=torch.cat((cos, cos), -1), sin=torch.cat((-sin, sin), -1))

    def rotate_and_store(
        self,
        qkv: Tensor,
        norms: HeadNorms | None,
        rotary: StepAngles,
        store: Tensor,
        layer: int,
        slots: Tensor,
        scales: KvScales | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """qkv: [T, heads + 2 kv_heads, head_dim]; returns new q and k, and v as a view."""
        num_kv_heads = store.shape[4]
        num_heads = qkv.shape[1] - 2 * num_kv_heads
        qk, v = qkv[:, : num_heads + num_kv_heads], qkv[:, num_heads + num_kv_heads :]
        if norms is not None:
            qk = qk_norm(qk, norms, num_heads)
        qk = rope(qk, rotary.cos, rotary.sin)
        q, k = qk[:, :num_heads], qk[:, num_heads:]
        rotary.kv_targets(slots, store).append(k, v, layer, scales)
        return q, k, v

    def rotate_and_store_latent(
        self,
        q: Tensor,
        kv: Tensor,
        norm: LatentNorm,
        rotary: StepAngles,
        store: Tensor,
        layer: int,
        slots: Tensor,
        scales: KvScales | None = None,
    ) -> tuple[Tensor, Tensor]:
        """q: [T, heads, nope + rope], kv: [T, rank + rope]; returns new ones."""
        rope_dim, rank = rotary.cos.shape[-1], norm.weight.shape[0]
        latent, key = kv[:, None, :rank], kv[:, None, rank:]
        rotate = rope_neighbours if norm.is_interleaved else rope
        q_end, key = (rotate(x, rotary.cos, rotary.sin) for x in (q[..., -rope_dim:], key))
        q = torch.cat((q[..., :-rope_dim], q_end), dim=-1)
        kept = torch.cat((rms_norm(latent, norm.weight, norm.eps), key), dim=-1)
        inverse = None if scales is None else of_latent(scales.inverse[layer], rank, rope_dim)
        rotary.kv_targets(slots, store).append_latent(kept, layer, inverse)
        return q, kept

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up: [T, 2 n]; returns [T, n]."""
        return silu_mul(gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up: [T, 2 n]; returns [T, n]."""
        return gelu_mul(gate_up)
