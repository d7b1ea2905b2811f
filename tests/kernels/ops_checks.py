"""What every implementation of `kernels.ops.Ops` has to pass: each formula again, in float64.

Runs on any device; memory an operation allocates holds NaN before it is written.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.kv.scales import KvScales, of_latent
from kernels.ops import HeadNorms, LatentNorm, Ops

# Of the whole result, relative: one rounding and a few more inside.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """One model's heads and the store they are kept in."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    has_norms: bool


class OpsChecks:
    """The checks of one implementation in one dtype on one device, on fresh inputs."""

    def __init__(self, ops: Ops, dtype: torch.dtype, device: str = "cpu") -> None:
        self.ops = ops
        self.dtype = dtype
        self.device = device
        self.generator = torch.Generator()
        print(f"seed {self.generator.seed()}, {dtype}")

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def strided(self, num_rows: int, n: int) -> Tensor:
        """Rows that lie among others' elements."""
        return self.random(num_rows, n + 16)[:, 8 : 8 + n]

    def rms_norm(self, num_rows: int, n: int) -> None:
        weight, eps = self.random(n), 0.1
        for x in (self.random(num_rows, n), self.strided(num_rows, n)):
            exact = exact_norm(x, weight, eps)
            with _poisoned_memory():
                normed = self.ops.rms_norm(x, weight, eps)
            assert normed.is_contiguous()
            assert_near(normed, exact)

    def rms_norm_add(self, num_rows: int, n: int) -> None:
        weight, eps = self.random(n), 1e-5
        for make in (self.random, self.strided):
            x, residual = make(num_rows, n), make(num_rows, n)
            added = x + residual
            with _poisoned_memory():
                normed, ours = self.ops.rms_norm_add(x, residual, weight, eps)
            assert torch.equal(ours, added)
            assert_near(normed, exact_norm(added, weight, eps))

    def silu_mul(self, num_rows: int, n: int) -> None:
        for gate_up in (4 * self.random(num_rows, 2 * n), 4 * self.strided(num_rows, 2 * n)):
            gate, up = gate_up.double().chunk(2, -1)
            with _poisoned_memory():
                ours = self.ops.silu_mul(gate_up)
            assert_near(ours, gate / (1 + (-gate).exp()) * up)

    def gelu_mul(self, num_rows: int, n: int) -> None:
        for gate_up in (2 * self.random(num_rows, 2 * n), 2 * self.strided(num_rows, 2 * n)):
            gate, up = gate_up.double().chunk(2, -1)
            with _poisoned_memory():
                ours = self.ops.gelu_mul(gate_up)
            bent = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
            assert_near(ours, 0.5 * gate * (1 + bent.tanh()) * up)

    def norms_with_fp32_weights(self, num_rows: int, n: int) -> None:
        weight, eps = self.random(n).float(), 1e-5
        x, residual = self.random(num_rows, n), self.random(num_rows, n)
        added = x + residual
        assert_near(self.ops.rms_norm(x, weight, eps), exact_norm(x, weight, eps))
        normed, ours = self.ops.rms_norm_add(x, residual, weight, eps)
        assert torch.equal(ours, added)
        assert_near(normed, exact_norm(added, weight, eps))

    def rotate_and_store(self, heads: Heads, num_tokens: int, *, in_fp8: bool = False) -> None:
        """Every layer of a store, each with other slots; the third token has none.

        in_fp8: K and V are kept as e4m3 numbers, with scales so small that some are cut off.
        """
        num_blocks, num_layers, max_positions = 7 + num_tokens, 3, 50
        norms = None
        if heads.has_norms:
            norms = HeadNorms(
                q_weight=self.random(heads.head_dim), k_weight=self.random(heads.head_dim), eps=0.1
            )
        angles = torch.randn((max_positions, heads.head_dim // 2), generator=self.generator)
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(self.device)
        sizes = (num_layers, 2, heads.block_size, heads.num_kv_heads, heads.head_dim)
        store = self.random(num_blocks, *sizes)
        scales = None
        if in_fp8:
            store = torch.randint(256, store.shape, generator=self.generator).to(store.device)
            store = store.to(torch.uint8)
            spread = torch.rand((num_layers, 2, heads.num_kv_heads), generator=self.generator)
            scales = KvScales.of((10.0 ** (-4 + 5 * spread)).to(self.device))
        num_all_heads = heads.num_heads + 2 * heads.num_kv_heads
        for layer in range(num_layers):
            qkv = self.random(num_tokens, num_all_heads, heads.head_dim)
            positions = torch.randint(max_positions, (num_tokens,), generator=self.generator)
            slots = torch.randperm(num_blocks * heads.block_size, generator=self.generator)
            slots = slots[:num_tokens]
            slots[2:3] = -1
            exact = exact_rotation(qkv, norms, cos_sin.double().cpu()[positions], heads)
            before, v_before = store.clone(), qkv[:, -heads.num_kv_heads :].clone()
            rotary = self.ops.rotary(cos_sin, positions.int().to(self.device))
            on_device = slots.int().to(self.device)
            with _poisoned_memory():
                q, k, v = self.ops.rotate_and_store(
                    qkv, norms, rotary, store, layer, on_device, scales
                )
            assert_near(torch.cat((q, k), dim=1), exact)
            assert torch.equal(v, v_before)
            for token, slot in enumerate(slots.tolist()):
                if slot >= 0:
                    block, place = divmod(slot, heads.block_size)
                    for plane, x in enumerate((k[token], v[token])):
                        kept = x if scales is None else nearest(x, scales.inverse[layer, plane])
                        before[block, layer, plane, place] = kept
            assert torch.equal(store, before)

    def rotate_and_store_latent(
        self,
        num_tokens: int,
        num_heads: int,
        rank: int,
        dims: tuple[int, int],
        *,
        of_pairs: bool,
        in_fp8: bool = False,
    ) -> None:
        """dims: nope and rope. With and without neighbours as pairs; the third token has no slot.

        of_pairs: neighbours; else halves. in_fp8: as of `rotate_and_store`.
        """
        nope, rope_dim = dims
        num_blocks, num_layers, max_positions, block_size = 5 + num_tokens, 2, 40, 3
        norm = LatentNorm(weight=self.random(rank), eps=0.1, is_interleaved=of_pairs)
        angles = torch.randn((max_positions, rope_dim // 2), generator=self.generator)
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(self.device)
        store = self.random(num_blocks, num_layers, 1, block_size, 1, rank + rope_dim)
        scales = None
        if in_fp8:
            store = torch.randint(256, store.shape, generator=self.generator).to(store.device)
            store = store.to(torch.uint8)
            spread = torch.rand((num_layers, 2, 1), generator=self.generator)
            scales = KvScales.of((10.0 ** (-4 + 5 * spread)).to(self.device))
        for layer in range(num_layers):
            # Both are views of one product, or of two.
            wide = self.random(num_tokens, num_heads * (nope + rope_dim) + rank + rope_dim)
            q, kv = wide.split([num_heads * (nope + rope_dim), rank + rope_dim], dim=1)
            q = q.view(num_tokens, num_heads, nope + rope_dim)
            positions = torch.randint(max_positions, (num_tokens,), generator=self.generator)
            slots = torch.randperm(num_blocks * block_size, generator=self.generator)[:num_tokens]
            slots[2:3] = -1
            turned = cos_sin.double().cpu()[positions]
            exact_q = exact_latent_rotation(q, turned, is_interleaved=of_pairs)
            key = exact_latent_rotation(kv[:, None, rank:], turned, is_interleaved=of_pairs)
            latent = exact_norm(kv[:, None, :rank], norm.weight, norm.eps)
            before = store.clone()
            rotary = self.ops.rotary(cos_sin, positions.int().to(self.device))
            on_device = slots.int().to(self.device)
            with _poisoned_memory():
                q, kept = self.ops.rotate_and_store_latent(
                    q, kv, norm, rotary, store, layer, on_device, scales
                )
            assert_near(
                torch.cat((kept[:, 0], q.flatten(1)), 1),
                torch.cat((latent[:, 0], key[:, 0], exact_q.flatten(1)), 1),
            )
            for token, slot in enumerate(slots.tolist()):
                if slot >= 0:
                    block, place = divmod(slot, block_size)
                    wanted = kept[token]
                    if scales is not None:
                        inverse = of_latent(scales.inverse[layer], rank, rope_dim)
                        # Each number as a head of its own, with its own factor.
                        wanted = nearest(wanted.view(-1, 1), inverse).view(1, -1)
                    before[block, layer, 0, place] = wanted
            assert torch.equal(store, before)


def nearest(x: Tensor, inverse: Tensor) -> Tensor:
    """The bytes of the e4m3 numbers nearest to x * inverse, ties to even, found in a table.

    x: [heads, n], inverse: fp32 [heads]. What is beyond 448 is 448; what is not finite is NaN.
    """
    codes = torch.arange(127, dtype=torch.int64)  # 127 is NaN
    exponents, places = codes // 8, codes % 8
    table = torch.where(
        exponents > 0, (8 + places) * 2.0 ** (exponents - 10.0), places * 2.0**-9
    ).double()
    scaled = (x.float() * inverse[:, None]).double().cpu()
    distances = (scaled.abs().clamp(max=448)[..., None] - table).abs()
    best = distances.amin(dim=-1, keepdim=True)
    # Of two that are equally near, the even one.
    found = torch.where(distances == best, codes % 2 * 1000 + codes, 10**6).amin(dim=-1) % 1000
    found = found + 128 * scaled.signbit()
    found = found.masked_fill(~scaled.isfinite(), 127)
    return found.to(torch.uint8).to(x.device)


def exact_latent_rotation(x: Tensor, cos_sin: Tensor, *, is_interleaved: bool) -> Tensor:
    """The end of each head of x, turned as complex numbers, in float64; cos_sin: [T, rope]."""
    cos, sin = cos_sin.to(x.device).chunk(2, dim=-1)
    rope_dim = cos_sin.shape[1]
    kept, end = x.double().split([x.shape[-1] - rope_dim, rope_dim], dim=-1)
    if is_interleaved:
        turned = torch.view_as_complex(end.unflatten(-1, (-1, 2)).contiguous())
    else:
        turned = torch.complex(*end.chunk(2, dim=-1))
    turned = turned * torch.complex(cos, sin)[:, None]
    parts = (turned.real, turned.imag)
    end = torch.stack(parts, -1).flatten(-2) if is_interleaved else torch.cat(parts, -1)
    return torch.cat((kept, end), dim=-1)


def exact_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """float64, over the last axis."""
    x, weight = x.double(), weight.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def exact_rotation(qkv: Tensor, norms: HeadNorms | None, cos_sin: Tensor, heads: Heads) -> Tensor:
    """q and k, normalised and turned as complex numbers; cos_sin: [T, head_dim] by token."""
    q, k, _ = qkv.double().split([heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], dim=1)
    if norms is not None:
        q = exact_norm(q, norms.q_weight, norms.eps)
        k = exact_norm(k, norms.k_weight, norms.eps)
    real, imaginary = torch.cat((q, k), dim=1).cpu().chunk(2, -1)
    cos, sin = cos_sin.unsqueeze(1).chunk(2, -1)
    turned = torch.complex(real, imaginary) * torch.complex(cos, sin)
    return torch.cat((turned.real, turned.imag), dim=-1)


def assert_near(ours: Tensor, exact: Tensor) -> None:
    assert ours.shape == exact.shape, f"{list(ours.shape)} and {list(exact.shape)}"
    difference = ours.double().cpu() - exact.cpu()
    error = (difference.norm() / exact.norm()).item()
    assert error < TOLERANCES[ours.dtype], f"relative error {error}"


@contextmanager
def _poisoned_memory() -> Iterator[None]:
    """`torch.empty` is full of NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)
