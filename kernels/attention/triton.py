"""The project's own attention backend on a GPU: one kernel for single tokens, one for other rows.

With fixed tiles one kernel computes every row. Then a request's results are bitwise equal alone and
in any batch, in chunks or at once, as prompt and as output; the price is that no row is split.
"""

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from kernels.attention.decode_items import DecodeConfig, DecodeWork, open_decode, plan_decode
from kernels.attention.protocol import AttentionShape, AttentionStep, RowTensors
from kernels.attention.triton_decode import MIN_DOT_ROWS, decode_attention
from kernels.attention.triton_prefill import PrefillConfig, PrefillWork, prefill_attention
from kernels.device import DeviceProperties, device_properties, stages_that_fit
from kernels.kv.scales import KvScales

_HEAD_DIMS = (64, 128, 256)
# Fewer queries per tile: a single token fills four of its rows, the rest is wasted work.
FIXED_TILE_CONFIG = PrefillConfig(tile_queries=64, tile_keys=64, num_warps=4, num_stages=3)


# Measured on an H200, 32 query and 8 KV heads of 128, one layer after the other in a graph, us per
# layer with few | some | many (floor, bytes at 4.29 TB/s): 1 x 192 keys 5.1 | 6.1 | 6.4, 1 x 4,000
# 12.8 | 18 | 16, 16 x 192 8.9 | 9.2 | 8.6, 64 x 192 19 | 15.7 | 15.6 (11.7), 64 x 2,000 151 | 125 |
# 130 (122), 64 x 4,160 263 | 254 | 255 (254), 256 x 138 49 | 48 | 45 (34), 256 x 192 55 |
# 54 | 55 (47). FA3, 36 layers: 64 x 192 0.99 ms, 64 x 4,160 9.25, 256 x 192 3.04. Small tiles with
# few warps keep more programs on a multiprocessor, which pays once rows fill the GPU. Prefetching
# an item's first tile to L2 before q is ready gained nothing: whole steps of 256 rows 9.70 ms
# against 9.61, of 64 x 4,096 14.01 against 14.04. Of e4m3 numbers, 64 x 4,112 (floor 126): 154 with
# two stages of 64 keys and two warps, 138 with three, 131 with half or a quarter of the programs;
# in the chain of a layer's kernels 16 x 160 takes 2.4 less with few than with some.
FEW_ROWS_CONFIG = DecodeConfig(tile_keys=64, num_warps=4, num_stages=3)
SOME_ROWS_CONFIG = DecodeConfig(tile_keys=64, num_warps=2, num_stages=2)
MANY_ROWS_CONFIG = DecodeConfig(tile_keys=32, num_warps=2, num_stages=3, min_part_tiles=8)
_SOME_ROWS, _MANY_ROWS = 33, 129
_PROGRAMS_PER_SM = 4  # that share a step's keys, beyond one a row and KV head
_MIN_TILE_KEYS = 16
_MEASURED_HEAD_DIM = 128  # the largest that tiles were measured with


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonMetadata:
    """A step's rows by kernel; owns all scratch memory, so steps may overlap."""

    decode: DecodeWork | None
    prefill: PrefillWork | None


class TritonAttention:
    """A `GraphAttention`; keeps no state of a step."""

    reads_lengths_on_device = True

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
        """Raises ValueError for a device, dtype, head size or block size without kernel support."""
        check_supported(shape, block_size, dtype, device)
        self._shape = shape
        self._is_fixed_tile = fixed_tile
        self._device = device_properties(device)
        self._decode_config = decode_config
        default = FIXED_TILE_CONFIG if fixed_tile else _prefill_config(shape)
        self._prefill_config = prefill_config or fitted_prefill(default, shape, self._device)

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
        sinks: Tensor | None = None,
        scales: KvScales | None = None,
    ) -> Tensor:
        """Reads the fresh K and V from `store`, like all others."""
        if out is None:
            out = torch.empty((len(q), q.shape[1] * q.shape[2]), dtype=q.dtype, device=q.device)
        if metadata.decode is not None:
            decode_attention(q, out, layer, store, metadata.decode, sinks, scales)
        if metadata.prefill is not None:
            prefill_attention(q, out, layer, store, metadata.prefill, sinks, scales)
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
        """Does nothing: the device plans from the rows' own buffers."""

    def _open_decode(self, rows: RowTensors, max_keys: int) -> DecodeWork:
        config = self._decode_config
        if config is None:
            num_rows = len(rows.num_keys)
            config = fitted_decode(decode_config_for(num_rows), self._shape, self._device)
            if num_rows >= _SOME_ROWS:  # they fill the GPU as they are: parts have to be combined
                config = replace(config, num_programs=config.num_programs // 2)
        return open_decode(rows, max_keys, self._shape, config)

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


def decode_config_for(num_rows: int) -> DecodeConfig:
    if num_rows < _SOME_ROWS:
        return FEW_ROWS_CONFIG
    return SOME_ROWS_CONFIG if num_rows < _MANY_ROWS else MANY_ROWS_CONFIG


def _prefill_config(shape: AttentionShape) -> PrefillConfig:
    # Sums of 128 queries with heads of 256 would take half of all registers.
    return (
        PrefillConfig(tile_queries=64) if shape.head_dim > _MEASURED_HEAD_DIM else PrefillConfig()
    )


def fitted_decode(
    config: DecodeConfig, shape: AttentionShape, device: DeviceProperties
) -> DecodeConfig:
    """`config` with programs for the device's multiprocessors, and tiles for its shared memory."""
    query_rows = max(MIN_DOT_ROWS, triton.next_power_of_2(shape.num_groups))
    tile_keys, num_stages = _fitted_tiles(
        config.tile_keys, config.num_stages, query_rows, shape, device
    )
    num_programs = _PROGRAMS_PER_SM * device.num_sms if device.is_gpu else config.num_programs
    return replace(config, tile_keys=tile_keys, num_stages=num_stages, num_programs=num_programs)


def fitted_prefill(
    config: PrefillConfig, shape: AttentionShape, device: DeviceProperties
) -> PrefillConfig:
    """`config` with tiles of keys for the device's shared memory."""
    padded_groups = triton.next_power_of_2(shape.num_groups)
    query_rows = max(config.tile_queries, padded_groups, MIN_DOT_ROWS)
    tile_keys, num_stages = _fitted_tiles(
        config.tile_keys, config.num_stages, query_rows, shape, device
    )
    return replace(config, tile_keys=tile_keys, num_stages=num_stages)


def _fitted_tiles(
    tile_keys: int,
    num_stages: int,
    query_rows: int,
    shape: AttentionShape,
    device: DeviceProperties,
) -> tuple[int, int]:
    """Keys of a tile and stages that fit beside the queries: fewer stages first, then fewer keys.

    With one stage nothing is loaded ahead, so two smaller ones are preferred.
    """
    while True:
        fitting = stages_that_fit(
            num_stages,
            stage_bytes=2 * tile_keys * shape.head_dim * 2,  # K and V, two bytes an element
            other_bytes=query_rows * shape.head_dim * 2,
            shared_memory_bytes=device.shared_memory_per_block_bytes,
        )
        if fitting >= 2 or (fitting == 1 and tile_keys == _MIN_TILE_KEYS):
            return tile_keys, fitting
        if tile_keys == _MIN_TILE_KEYS:
            raise ValueError(
                f"{device.name} has {device.shared_memory_per_block_bytes} bytes of shared memory"
                f" a block: too few for {query_rows} queries of {shape.head_dim}"
            )
        tile_keys //= 2


def check_supported(
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
