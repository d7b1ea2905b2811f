"""The project's own attention backend on a GPU: a kernel for single tokens, one for the others.

With fixed tiles one kernel computes every row, so that a request's numbers are the same bits alone
and in any batch, in chunks or at once, as prompt and as output; the price is that no row is split.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kernels.attention.protocol import AttentionShape, AttentionStep, RowTensors
from kernels.attention.triton_decode import (
    DecodeConfig,
    DecodeWork,
    decode_attention,
    open_decode,
    plan_decode,
)
from kernels.attention.triton_prefill import PrefillConfig, PrefillWork, prefill_attention

_HEAD_DIMS = (64, 128)
# Fewer queries a tile: a single token fills four of its rows, the rest is wasted work.
FIXED_TILE_CONFIG = PrefillConfig(tile_queries=64, tile_keys=64, num_warps=4, num_stages=3)


# Measured on an H200, 32 query and 8 KV heads of 128, 36 layers in a graph, ms (FA3 in brackets):
# 1 x 192 keys 0.19 (0.35), 16 x 192 0.24 (0.38), 64 x 192 0.58 (0.99), 256 x 192 1.97 (3.04: 2.4
# TB/s), 64 x 4160 9.20 (9.25: 4.25 TB/s). Small tiles keep more programs a multiprocessor, which
# pays once rows fill the GPU; before that a row's few tiles should be large.
_MANY_ROWS = 32
FEW_ROWS_CONFIG = DecodeConfig(tile_keys=64, num_warps=4, num_stages=3)
MANY_ROWS_CONFIG = DecodeConfig(tile_keys=32, num_warps=2, num_stages=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonMetadata:
    """A step's rows by kernel; owns all scratch memory, so steps may overlap."""

    decode: DecodeWork | None
    prefill: PrefillWork | None


class TritonAttention:
    """A `GraphAttention`; holds no state of a step."""

    def __init__(
        self,
        shape: AttentionShape,
        *,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        fixed_tile: bool = False,
        decode_config: DecodeConfig | None = None,
        prefill_config: PrefillConfig | None = None,
    ) -> None:
        """Raises ValueError for a device, type, head or block size the kernels do not cover."""
        _check(shape, block_size, dtype, device)
        self._shape = shape
        self._is_fixed_tile = fixed_tile
        self._decode_config = decode_config
        default = FIXED_TILE_CONFIG if fixed_tile else PrefillConfig()
        self._prefill_config = prefill_config or default

    def plan(self, step: AttentionStep) -> TritonMetadata:
        num_decodes = 0 if self._is_fixed_tile else step.num_single_rows
        decode = None
        if num_decodes:
            decode = self._open_decode(step.device_rows.part(0, num_decodes), step.max_keys)
            plan_decode(decode)
        prefill = None
        if num_decodes < step.num_rows:
            prefill = self._prefill(step.device_rows, num_decodes, step.num_tokens - num_decodes)
        return TritonMetadata(decode=decode, prefill=prefill)

    def run(
        self,
        q: Tensor,
        k_new: Tensor,
        v_new: Tensor,
        layer: int,
        store: Tensor,
        metadata: TritonMetadata,
        out: Tensor | None = None,
    ) -> Tensor:
        """The fresh K and V are read from `store` like all others."""
        if out is None:
            out = torch.empty((len(q), q.shape[1] * q.shape[2]), dtype=q.dtype, device=q.device)
        if metadata.decode is not None:
            decode_attention(q, out, layer, store, metadata.decode)
        if metadata.prefill is not None:
            prefill_attention(q, out, layer, store, metadata.prefill)
        return out

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
        if self._is_fixed_tile or max_tokens is not None:
            num_tokens = max_tokens or len(rows.num_keys)
            return TritonMetadata(decode=None, prefill=self._prefill(rows, 0, num_tokens))
        return TritonMetadata(decode=self._open_decode(rows, max_keys), prefill=None)

    def begin(self, metadata: TritonMetadata) -> None:
        if metadata.decode is not None:
            plan_decode(metadata.decode)

    def refresh(self, metadata: TritonMetadata, step: AttentionStep) -> None:
        """Nothing: the device plans from the rows' own buffers."""

    def _open_decode(self, rows: RowTensors, max_keys: int) -> DecodeWork:
        default = FEW_ROWS_CONFIG if len(rows.num_keys) < _MANY_ROWS else MANY_ROWS_CONFIG
        return open_decode(rows, max_keys, self._shape, self._decode_config or default)

    def _prefill(self, rows: RowTensors, first_row: int, num_tokens: int) -> PrefillWork:
        return PrefillWork(
            shape=self._shape,
            config=self._prefill_config,
            is_fixed_tile=self._is_fixed_tile,
            rows=rows,
            first_row=first_row,
            num_rows=len(rows.num_keys) - first_row,
            num_tokens=num_tokens,
        )


def _check(
    shape: AttentionShape, block_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    is_interpreted = triton.knobs.runtime.interpret
    dtypes = (torch.float16, torch.float32 if is_interpreted else torch.bfloat16)
    if device.type != "cuda" and not is_interpreted:
        raise ValueError(f"device {device}: the Triton kernels need a GPU")
    if shape.head_dim not in _HEAD_DIMS:
        raise ValueError(f"head_dim {shape.head_dim}: the Triton kernels cover {_HEAD_DIMS}")
    if block_size < 16 or block_size % 16:
        raise ValueError(f"block_size {block_size}: the Triton kernels need a multiple of 16")
    if dtype not in dtypes:
        raise ValueError(f"dtype {dtype}: the Triton kernels cover {dtypes} here")
