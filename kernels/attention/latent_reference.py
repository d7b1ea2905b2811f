"""Latent attention in plain torch: the oracle on a GPU, the backend on a CPU.

Absorbed for every row: each latent is read once for all heads, in prompts too, which costs some
three times the products of made keys and needs no memory for them.
"""

import torch
from torch import Tensor

from kernels.attention.latent import LatentShape, absorb, values_of
from kernels.attention.protocol import AttentionStep
from kernels.attention.reference import ReferenceAttention, ReferenceMetadata


class ReferenceLatent:
    """A `LatentBackend`; keeps no state of a step."""

    def __init__(
        self, shape: LatentShape, *, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shape = shape
        self._attention = ReferenceAttention(
            shape.absorbed(), block_size=block_size, dtype=dtype, device=device
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
    ) -> Tensor:
        shape = self._shape
        means = self._attention.run(
            absorb(q, up, shape),
            latent_new,
            latent_new[..., : shape.rank],
            layer,
            store,
            metadata,
        )
        values = values_of(means.view(len(q), shape.num_heads, shape.rank), up, shape)
        return values if out is None else out.copy_(values)
