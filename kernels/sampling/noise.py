"""The random numbers of sampling: one counter-based hash, the same on every backend.

A draw is a pure function of (seed, index, token id). So a seeded request draws the same whatever
else is in its batch, after preemption and after migration. All arithmetic is modulo 2**32; with
`x >> n` a logical shift:

    half1(x)   = (x ^ (x >> 15)) * 0x2C1B3C6D
    half2(x)   = y ^ (y >> 15)            where y = (x ^ (x >> 12)) * 0x297A2D39
    mix(x)     = half2(half1(x))                                  a bijection of 32-bit words

    k0         = mix(mix(mix(seed_lo ^ 0x9E3779B9) ^ seed_hi) ^ index)
    k1         = mix(mix(mix(seed_hi ^ 0x7F4A7C15) ^ seed_lo) ^ index)
    bits       = half2(half1(mix(token_id ^ 0x1B56C4E9) ^ k0) + k1)

    u          = min((fp32(bits) + 0.5) * 2**-32, 1 - 2**-24)     in [2**-33, 1 - 2**-24]
    gumbel(u)  = -log(-log(1 - u)), computed as -log(-log1p(-u))

`fp32` rounds to nearest even. A token wins an argmax by a small -log(1 - u), that is, by a u near
0, and near 0 fp32 still resolves all 32 bits of the hash (near 1 it holds only 24). The textbook
-log(-log(u)) would draw tokens of probability 1e-8 about thirty times too rarely.

The constants of `mix` are from the public hash-prospector search (C. Wellons). Both multipliers
are below 2**31, so torch's int64 holds every product exactly: nothing here relies on overflow.

Knows nothing of requests, rows or logits. Changing a constant changes the output of every seeded
request, so golden values in the tests pin the constants.
"""

import struct

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIER_1 = 0x2C1B3C6D
_MULTIPLIER_2 = 0x297A2D39
_SALT_K0 = 0x9E3779B9
_SALT_K1 = 0x7F4A7C15
_SALT_TOKEN = 0x1B56C4E9
_LARGEST_U = 1.0 - 2.0**-24


def uniform(seeds: Tensor, indices: Tensor, token_ids: Tensor) -> Tensor:
    """u strictly inside (0, 1) as fp32 [S, V]; bit for bit equal to `uniform_reference`.

    seeds: int64 [S], any 64-bit pattern. indices: int64 [S], output tokens before this one, below
    2**32. token_ids: int64 [V], below 2**32.
    """
    return unit_interval(noise_bits(seeds, indices, token_ids))


def gumbel(seeds: Tensor, indices: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, fp32 [S, V], always finite (in [-2.82, 22.88]); inputs as `uniform`.

    The argmax over V of (log-probability + noise) is a draw from the distribution. The underlying
    bits are exact; the two logarithms may differ between devices in the last place.
    """
    u = uniform(seeds, indices, token_ids)
    return u.neg_().log1p_().neg_().log_().neg_()


def noise_bits(seeds: Tensor, indices: Tensor, token_ids: Tensor) -> Tensor:
    """The hash itself: int64 [S, V] with values in [0, 2**32); inputs as `uniform`."""
    for name, tensor in (("seeds", seeds), ("indices", indices), ("token_ids", token_ids)):
        assert tensor.dtype == torch.int64, f"{name} is {tensor.dtype}, not int64"
        assert tensor.dim() == 1, f"{name} has shape {tuple(tensor.shape)}"
    assert seeds.shape == indices.shape, f"{seeds.shape[0]} seeds, {indices.shape[0]} indices"
    seed_lo = seeds & _WORD
    seed_hi = (seeds >> 32) & _WORD
    k0 = _mix(_mix(_mix(seed_lo ^ _SALT_K0) ^ seed_hi) ^ indices).unsqueeze(1)  # [S, 1]
    k1 = _mix(_mix(_mix(seed_hi ^ _SALT_K1) ^ seed_lo) ^ indices).unsqueeze(1)  # [S, 1]
    bits = _mix(token_ids ^ _SALT_TOKEN) ^ k0  # [S, V], a new tensor, changed in place from here on
    _half1_(bits)
    bits.add_(k1).bitwise_and_(_WORD)
    return _half2_(bits)


def unit_interval(bits: Tensor) -> Tensor:
    """Words (int64, any shape) to fp32 u; the clamp catches words that round up to 2**32."""
    return bits.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=_LARGEST_U)


def _half1_(x: Tensor) -> Tensor:
    """In place; x holds words, and so does the result."""
    return x.bitwise_xor_(x >> 15).mul_(_MULTIPLIER_1).bitwise_and_(_WORD)


def _half2_(x: Tensor) -> Tensor:
    """In place; x holds words, and so does the result."""
    x.bitwise_xor_(x >> 12).mul_(_MULTIPLIER_2).bitwise_and_(_WORD)
    return x.bitwise_xor_(x >> 15)


def _mix(x: Tensor) -> Tensor:
    return _half2_(_half1_(x.clone()))


# ---- the same in plain Python integers: the definition that every backend is tested against ------


def noise_bits_reference(seed: int, index: int, token_id: int) -> int:
    """One word of `noise_bits`; `seed` may be signed or unsigned, its low 64 bits count."""
    seed_lo, seed_hi = seed & _WORD, (seed >> 32) & _WORD
    k0 = _mix_int(_mix_int(_mix_int(seed_lo ^ _SALT_K0) ^ seed_hi) ^ index)
    k1 = _mix_int(_mix_int(_mix_int(seed_hi ^ _SALT_K1) ^ seed_lo) ^ index)
    return _half2_int((_half1_int(_mix_int(token_id ^ _SALT_TOKEN) ^ k0) + k1) & _WORD)


def uniform_reference(seed: int, index: int, token_id: int) -> float:
    """One element of `uniform`, exactly."""
    return unit_interval_reference(noise_bits_reference(seed, index, token_id))


def unit_interval_reference(bits: int) -> float:
    """A word to u, rounding to fp32 after each operation."""
    return min(_fp32(_fp32(bits) + 0.5) * 2.0**-32, _LARGEST_U)


def _fp32(value: float) -> float:
    (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    return float(rounded)


def _half1_int(x: int) -> int:
    return (x ^ (x >> 15)) * _MULTIPLIER_1 & _WORD


def _half2_int(x: int) -> int:
    y = (x ^ (x >> 12)) * _MULTIPLIER_2 & _WORD
    return y ^ (y >> 15)


def _mix_int(x: int) -> int:
    return _half2_int(_half1_int(x))
