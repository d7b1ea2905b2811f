"""FlashAttention-3 for prompts over a store of e4m3 numbers.

The library multiplies such numbers only with queries of eight bits. Here a step's keys, history and
new ones, are copied from the store to numbers of 16 bits, one row after the other, and attended as
they are: K and V are rounded as a later answer reads them, and nothing else is. The copy is one
read of a byte and one write of two: at 16,000 keys a two-hundredth of their attention.

Steps in which a key has few queries, those in CUDA graphs, and those with more keys than are copied
go to the Triton kernels, which read the store. Knows no requests.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.attention.flash_attn import LibraryCall
from kernels.attention.gathering import MAX_GATHERED_KEYS, copied_bytes, to_device
from kernels.attention.protocol import AttentionShape, AttentionStep, RowTensors
from kernels.attention.triton import TritonAttention, TritonMetadata
from kernels.kv.scales import KvScales
from kernels.kv.widen import widen

# Copying a key takes as long as the difference between both kernels for so many queries.
_MIN_QUERIES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedKeys:
    """A step whose keys are copied, layer by layer."""

    rows: RowTensors
    # [R + 1] int32
    cu_keys: Tensor
    num_keys: int
    max_keys: int  # of a row
    max_new_tokens: int


class WidenedAttention:
    """A `GraphAttention` for rows of two or more new tokens."""

    def __init__(
        self,
        shape: AttentionShape,
        *,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Raises ValueError for what one of both kernels does not support."""
        self._attend = LibraryCall(shape, block_size=block_size, dtype=dtype, device=device)
        self._triton = TritonAttention(shape, block_size=block_size, dtype=dtype, device=device)
        self._shape = shape
        self._dtype = dtype
        self._device = device

    def working_bytes(self, *, max_tokens: int, max_rows: int, max_row_keys: int) -> int:
        del max_tokens
        return copied_bytes(self._shape, self._dtype, max_rows * max_row_keys)

    def plan(self, step: AttentionStep) -> CopiedKeys | TritonMetadata:
        num_keys = step.num_computed_tokens + step.num_new_tokens
        cu_keys = np.concatenate(([0], np.cumsum(num_keys)))
        num_queries = int((step.num_new_tokens * num_keys).sum())  # of all keys together
        if cu_keys[-1] > MAX_GATHERED_KEYS or num_queries < _MIN_QUERIES * cu_keys[-1]:
            return self._triton.plan(step)
        return CopiedKeys(
            rows=step.device_rows,
            cu_keys=to_device(cu_keys.astype(np.int32), self._device),
            num_keys=int(cu_keys[-1]),
            max_keys=step.max_keys,
            max_new_tokens=step.max_new_tokens,
        )

    def run(
        self,
        q: Tensor,
        k_new: Tensor,
        v_new: Tensor,
        layer: int,
        store: Tensor,
        metadata: CopiedKeys | TritonMetadata,
        out: Tensor | None = None,
        sinks: Tensor | None = None,
        scales: KvScales | None = None,
    ) -> Tensor:
        """Reads the fresh K and V from `store`, as later steps do."""
        if isinstance(metadata, TritonMetadata):
            return self._triton.run(q, k_new, v_new, layer, store, metadata, out, sinks, scales)
        assert scales is not None, "of a store of e4m3 numbers"
        k, v = widen(
            store,
            layer,
            scales,
            metadata.rows,
            metadata.cu_keys,
            num_keys=metadata.num_keys,
            max_keys=metadata.max_keys,
            dtype=q.dtype,
        )
        return self._attend(q, layer, metadata, out, sinks, k=k, v=v, cu_seqlens_k=metadata.cu_keys)

    # ---- in a CUDA graph, where the number of keys is not known ----------------------------------

    @property
    def can_capture_prompts(self) -> bool:
        return True

    def open_graph(
        self,
        rows: RowTensors,
        *,
        max_keys: int,
        max_tokens: int | None = None,
        max_row_tokens: int | None = None,
    ) -> TritonMetadata:
        return self._triton.open_graph(
            rows, max_keys=max_keys, max_tokens=max_tokens, max_row_tokens=max_row_tokens
        )

    def begin(self, metadata: TritonMetadata) -> None:
        self._triton.begin(metadata)

    def refresh(self, metadata: TritonMetadata, step: AttentionStep) -> None:
        self._triton.refresh(metadata, step)
