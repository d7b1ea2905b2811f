"""Latent attention (MLA): the interface of its backends, its two forms, and both phases of a step.

The store keeps one vector a token for all heads, [latent | rotated key], `rank + rope_dim` long. A
layer's `up` [heads, nope + value, rank] makes each head's key and value of a latent c:

    k = [up_k c | rotated key],  v = up_v c,  score = scale q k,  out = sum of softmax(score) v

Absorbed, the same without making keys and values: q_nope up_k is a query of the latent itself, and
up_v multiplies the weighted mean of latents. That reads `rank + rope_dim` numbers a key for all
heads (few queries: decode); made keys cost (nope + rope + value) products a head and key instead of
2 rank + rope (many queries: prompts). arXiv:2405.04434, section 2.1 and appendix B.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.attention.phased import PhasedMetadata, Phases
from kernels.attention.protocol import AttentionShape, GraphPlanner, StepPlanner
from kernels.kv.scales import KvScales

FLASH_HEADS = (192, 128)  # `head_sizes` for which FlashAttention-3 was compiled


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """The constants of all steps of one model with latent attention."""

    num_layers: int
    num_heads: int
    rank: int  # of the latent
    nope_dim: int  # of a query and key that are not rotated
    rope_dim: int  # of those that are
    value_dim: int
    scale: float  # factor on the scores

    @property
    def width(self) -> int:
        """Numbers that the store keeps of a token and layer."""
        return self.rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def head_sizes(self) -> tuple[int, int]:
        """Numbers of a head's query and of its value."""
        return self.query_dim, self.value_dim

    def absorbed(self) -> AttentionShape:
        """The same attention over latents: all heads share a key, whose beginning is the value."""
        return AttentionShape(
            num_heads=self.num_heads,
            num_kv_heads=1,
            head_dim=self.width,
            layer_windows=(None,) * self.num_layers,
            shared_value_dim=self.rank,
            query_scale=self.scale,
        )


class LatentBackend(StepPlanner, Protocol):
    """An implementation of latent attention over the paged store."""

    def run(
        self,
        q: Tensor,
        latent_new: Tensor,
        up: Tensor,
        layer: int,
        store: Tensor,
        metadata: Any,  # noqa: ANN401
        out: Tensor | None = None,
        scales: KvScales | None = None,
    ) -> Tensor:
        """Attention of every token of the step, [T, heads * value_dim], in `out` if given.

        q: [T, heads, nope + rope], rotated, tokens may be strided; latent_new: [T, 1, width], in
        `store` too; up: [heads, nope + value, rank]; store: [blocks, layers, 1, block_size, 1,
        width], with `scales` of uint8, e4m3 numbers.
        """
        ...


class GraphLatent(LatentBackend, GraphPlanner, Protocol):
    """A backend whose steps can be captured in a CUDA graph."""


class PhasedLatent(Phases):
    """A `LatentBackend` of two, one for each phase."""

    def run(
        self,
        q: Tensor,
        latent_new: Tensor,
        up: Tensor,
        layer: int,
        store: Tensor,
        metadata: PhasedMetadata,
        out: Tensor | None = None,
        scales: KvScales | None = None,
    ) -> Tensor:
        if out is None:
            num_heads, rank = up.shape[0], up.shape[2]
            value_dim = up.shape[1] - (q.shape[2] - (latent_new.shape[2] - rank))
            out = torch.empty((len(q), num_heads * value_dim), dtype=q.dtype, device=q.device)
        for part in metadata.parts:
            tokens = slice(part.start, part.end)
            part.run(
                q[tokens], latent_new[tokens], up, layer, store, part.metadata, out[tokens], scales
            )
        return out


def absorb(q: Tensor, up: Tensor, shape: LatentShape) -> Tensor:
    """Queries of latents, [T, heads, rank + rope], from q [T, heads, nope + rope]."""
    of_latents = torch.einsum("thd,hdr->thr", q[..., : shape.nope_dim], up[:, : shape.nope_dim])
    return torch.cat((of_latents, q[..., shape.nope_dim :]), dim=-1)


def values_of(means: Tensor, up: Tensor, shape: LatentShape) -> Tensor:
    """[T, heads * value_dim], from the weighted means of latents [T, heads, rank]."""
    return torch.einsum("thr,hvr->thv", means, up[:, shape.nope_dim :]).flatten(1)
