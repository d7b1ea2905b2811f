"""Latent attention in plain torch: the oracle on a GPU, the backend on a CPU.

Absorbed for every row: each latent is read once for all heads, in prompts too, which costs some
three times the products of made keys and needs no memory for them.
"""

import torch
from torch import Tensor

from kernels.attention.latent import LatentShape, absorb, values_of
from kernels.attention.protocol import AttentionStep
from kernels.attention.reference import ReferenceAttention, ReferenceMetadata
from kernels.kv.scales import KvScales


class ReferenceLatent:
    """A `LatentBackend`; keeps no state of a step."""

    def __init__(
        self,
        shape: LatentShape,
        *,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        is_fp8: bool = False,
    ) -> None:
        """dtype: of queries; is_fp8: the store has e4m3 numbers."""
        self._shape = shape
        self._attention = ReferenceAttention(
            shape.absorbed(), block_size=block_size, dtype=dtype, device=device, is_fp8=is_fp8
        )

    def plan(self, step: AttentionStep) -> ReferenceMetadata:
        return self._attention.plan(step)

    def run(
        self,
        q: Tensor,
        latent_new: Tensor,
        up: Tensor,
        layer: int,
        store: Tensor,
        metadata: ReferenceMetadata,
        out: Tensor | None = None,
        scales: KvScales | None = None,
    ) -> Tensor:
        shape = self._shape
        queries = absorb(q, up, shape)
        if scales is not None:
            # The latents' scale is that of all keys and values: queries make up for the others'.
            latents, keys = scales.factors(layer, 0), scales.factors(layer, 1)
            queries[..., shape.rank :] *= keys / latents
            scales = KvScales.of(scales.scale[:, :1].expand(-1, 2, -1))
        means = self._attention.run(
            queries,
            latent_new,
            latent_new[..., : shape.rank],
            layer,
            store,
            metadata,
            scales=scales,
        )
        values = values_of(means.view(len(q), shape.num_heads, shape.rank), up, shape)
        return values if out is None else out.copy_(values)
