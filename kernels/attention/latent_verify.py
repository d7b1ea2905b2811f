"""Latent attention of rows that verify drafts, absorbed: a row's latents are read once for all of
its queries (`latent_decode`).

Which rows a step has, and how many tokens each, is read on the device, so one captured graph serves
any mix. Knows no row of more than `max_queries` new tokens: those are a prompt's.
"""

import torch
from torch import Tensor

from kernels.attention.latent import LatentShape
from kernels.attention.latent_triton import attend_absorbed
from kernels.attention.latent_work import (
    LatentConfig,
    LatentWork,
    fitted_config,
    open_latent,
    plan_latent,
)
from kernels.attention.protocol import AttentionStep, RowTensors
from kernels.device import device_properties
from kernels.kv.scales import KvScales


class LatentVerify:
    """A `GraphLatent` for steps of rows with at most `max_queries` new tokens each."""

    reads_lengths_on_device = True

    def __init__(
        self,
        shape: LatentShape,
        *,
        max_queries: int,
        device: torch.device,
        config: LatentConfig | None = None,
    ) -> None:
        """Raises ValueError for a device whose shared memory is too small."""
        self._shape = shape
        self._max_queries = max_queries
        self._config = config or fitted_config(
            shape, device_properties(device), max_queries=max_queries
        )

    def plan(self, step: AttentionStep) -> LatentWork:
        self._check(step)
        work = self.open_graph(step.device_rows, max_keys=step.max_keys)
        plan_latent(work)
        return work

    def run(
        self,
        q: Tensor,
        latent_new: Tensor,
        up: Tensor,
        layer: int,
        store: Tensor,
        metadata: LatentWork,
        out: Tensor | None = None,
        scales: KvScales | None = None,
    ) -> Tensor:
        """Reads the fresh latents from `store`, like all others."""
        if out is None:
            size = (len(q), self._shape.num_heads * self._shape.value_dim)
            out = torch.empty(size, dtype=q.dtype, device=q.device)
        attend_absorbed(q, up, layer, store, metadata, out, scales)
        return out

    @property
    def can_capture_prompts(self) -> bool:
        """Only rows of at most `max_queries` tokens."""
        return False

    def open_graph(
        self,
        rows: RowTensors,
        *,
        max_keys: int,
        max_tokens: int | None = None,
        max_row_tokens: int | None = None,
    ) -> LatentWork:
        return open_latent(rows, max_keys, self._shape, self._config, self._max_queries)

    def begin(self, metadata: LatentWork) -> None:
        plan_latent(metadata)

    def refresh(self, metadata: LatentWork, step: AttentionStep) -> None:
        """Does nothing on the device, which plans from the rows' own buffers."""
        self._check(step)

    def _check(self, step: AttentionStep) -> None:
        assert step.max_new_tokens <= self._max_queries, f"a row of {step.max_new_tokens} tokens"
