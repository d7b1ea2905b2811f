"""K and V in eight bits: e4m3 numbers, each standing for itself times a scale of its head.

    number = round(x / scale), at most 448 in size        x' = scale * number

Scales are static: they are known before the first token and never change, so that blocks stay
right. There is one for each layer, plane (K, V) and KV head; of latent attention, whose plane holds
two kinds of numbers, one for each layer's latents and one for its rotated keys, as if these were
planes of one head (`of_latent`). A store keeps the numbers as bytes (uint8), which every device can
copy. The quotient is x times the inverse, computed once, so that all devices round alike. What is
not finite becomes NaN and stays noticeable.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_E4M3 = 448.0
_NAN = 0x7F


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KvScales:
    """Both tensors fp32 [layers, planes, kv_heads], contiguous, on the store's device."""

    scale: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, scale: Tensor) -> "KvScales":
        """scale: [layers, planes, kv_heads], positive."""
        scale = scale.float().contiguous()
        return cls(scale=scale, inverse=scale.reciprocal())

    def factors(self, layer: int, plane: int) -> Tensor:
        """fp32 [kv_heads], by which a plane's numbers are to be multiplied."""
        return self.scale[layer, plane]


def of_latent(factors: Tensor, rank: int, rope_dim: int) -> Tensor:
    """[rank + rope_dim], each number's own, of a layer's [2, 1]: of latents and of rotated keys."""
    return torch.cat((factors[0].expand(rank), factors[1].expand(rope_dim)))


def to_e4m3(x: Tensor, inverse: Tensor) -> Tensor:
    """x: [T, kv_heads, width], inverse: fp32 [kv_heads] or [kv_heads, width]; returns the numbers'
    bytes, uint8.
    """
    scaled = x.float() * inverse.view(x.shape[1], -1)
    codes = scaled.clamp(-MAX_E4M3, MAX_E4M3).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill(~scaled.isfinite(), _NAN)


def from_e4m3(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of bytes, without their scale, which `dtype` holds exactly."""
    return codes.view(torch.float8_e4m3fn).to(dtype)


def times_heads(x: Tensor, factors: Tensor) -> Tensor:
    """x times a factor of its KV head, in x's dtype; factors: fp32, broadcast to x."""
    return (x.float() * factors).to(x.dtype)
