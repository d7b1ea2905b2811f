"""FlashAttention-3 over the paged store, as built by vLLM: Hopper, bf16 and fp16.

FlashAttention-3 (arXiv:2407.08608) reads the blocks of K and V through a two-dimensional table
[rows, blocks], while a step has its block ids in one flat list. `expand_blocks` writes the table on
the device, once per step. The library's scheduler metadata (the split of each row's keys over the
SMs) is also computed once per step and window, not once per layer. Eager steps of prompts have
their keys one after the other instead (`gathering.py`), unless a row has few new tokens or all of
them see very many keys. Attention sinks are rounded to bf16, in which models publish them.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.gathering import (
    MAX_GATHERED_KEYS,
    Gathered,
    Reads,
    copied_bytes,
    gather,
)
from kernels.attention.installed import flash_attn_home
from kernels.attention.protocol import AttentionShape, AttentionStep, RowTensors
from kernels.kv.scales import KvScales

_HEAD_DIMS = (64, 128, 256)
# With a window of 3,000 tokens single rows were off by 14 % on an H200 (vLLM 0.26's build), in
# whatever way they had their keys; without one, or with 100 tokens, they were right.
_WIDEST = 256
_DTYPES = (torch.bfloat16, torch.float16)
_BLOCK_MULTIPLE = 16
_MAX_SINK_HEADS = 64  # the library keeps the sinks of so many heads
_SINKS = "s_aux"  # its argument, which older ones do not take
_COLUMNS = 1024
# A row with fewer is not worth a copy of its keys; and lengths of rows with drafts, which have at
# most 17, may be known on the device alone.
_MIN_GATHERED_TOKENS = 64


def why_not(
    shape: AttentionShape, block_size: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why `FlashAttention` cannot serve this model on this machine; None = it can."""
    of_heads = None
    if shape.head_dim not in _HEAD_DIMS:
        of_heads = f"FlashAttention-3 has heads of 64, 128 and 256, not {shape.head_dim}"
    elif shape.head_dim == _WIDEST and any(shape.layer_windows):
        of_heads = f"FlashAttention-3 computes heads of {_WIDEST} wrongly where they have a window"
    elif shape.has_sinks and shape.num_heads > _MAX_SINK_HEADS:
        of_heads = (
            f"FlashAttention-3 has sinks of {_MAX_SINK_HEADS} heads, not of {shape.num_heads}"
        )
    return why_not_here(of_heads, block_size, dtype, device)


def why_not_here(
    of_heads: str | None, block_size: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why the library cannot serve a model on this machine; of_heads: a reason in its heads."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return "FlashAttention-3 needs a GPU of compute capability 9 (Hopper)"
    if dtype not in _DTYPES:
        return f"FlashAttention-3 computes in bfloat16 and float16, not {dtype}"
    if of_heads is not None:
        return of_heads
    if block_size % _BLOCK_MULTIPLE:
        return f"block size {block_size} is not a multiple of {_BLOCK_MULTIPLE}"
    if flash_attn_home() is None:
        return (
            "neither vllm.vllm_flash_attn nor vllm_flash_attn is installed; "
            "`pip install vllm` brings the first"
        )
    return None


@triton.jit(
    do_not_specialize=["num_columns"],
    do_not_specialize_on_alignment=["cu_blocks_ptr", "block_ids_ptr", "table_ptr"],
)
def _expand_blocks_kernel(
    cu_blocks_ptr,  # [R + 1]
    block_ids_ptr,  # [N]
    table_ptr,  # [R, num_columns]
    num_columns,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.load(cu_blocks_ptr + row)
    num_blocks = tl.load(cu_blocks_ptr + row + 1) - first
    ids = tl.load(block_ids_ptr + first + columns, mask=columns < num_blocks, other=0)
    tl.store(table_ptr + row.to(tl.int64) * num_columns + columns, ids, mask=columns < num_columns)


def expand_blocks(rows: RowTensors, table: Tensor) -> None:
    """table[r, c] = block_ids[cu_blocks[r] + c], and 0, a valid id, after a row's last block.

    table: int32 [R, columns], contiguous, overwritten; columns >= the longest row's blocks.
    """
    num_rows, num_columns = table.shape
    grid = (num_rows, triton.cdiv(num_columns, _COLUMNS))
    _expand_blocks_kernel[grid](
        rows.cu_blocks, rows.block_ids, table, num_columns, COLUMNS=_COLUMNS
    )


def expand_blocks_torch(rows: RowTensors, table: Tensor) -> None:
    """The torch twin of `expand_blocks`."""
    columns = torch.arange(table.shape[1], device=table.device)
    first, num_blocks = rows.cu_blocks[:-1, None], rows.cu_blocks.diff()[:, None]
    places = (first + columns).clamp(max=len(rows.block_ids) - 1)
    table.copy_(torch.where(columns < num_blocks, rows.block_ids[places], 0))


@dataclass(slots=True, kw_only=True)
class FlashAttentionMetadata:
    """Data that all layers of a step share."""

    rows: RowTensors
    max_new_tokens: int
    max_keys: int
    # [R, blocks] int32
    table: Tensor
    # window -> the library's scheduler metadata; filled by `begin`
    schedules: dict[int | None, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedKeysMetadata:
    """Of a step whose keys lie one after the other; `gathered`: window -> keys, None = fresh."""

    rows: RowTensors
    max_new_tokens: int
    max_keys: int
    gathered: dict[int | None, Gathered] | None


class StepSizes(Protocol):
    """What the library is told of a step, besides where its keys lie."""

    @property
    def rows(self) -> RowTensors: ...
    @property
    def max_new_tokens(self) -> int: ...
    @property
    def max_keys(self) -> int: ...


class LibraryCall:
    """The library's attention of a layer, for the backends that give it keys in one way each."""

    def __init__(
        self, shape: AttentionShape, *, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raises ValueError if `why_not` gives a reason, or as `import_library` does."""
        reason = why_not(shape, block_size, dtype, device)
        if reason is not None:
            raise ValueError(reason)
        self.library = import_library(has_sinks=shape.has_sinks)
        self._shape = shape

    def __call__(
        self,
        q: Tensor,
        layer: int,
        step: StepSizes,
        out: Tensor | None,
        sinks: Tensor | None,
        **keys: Tensor,
    ) -> Tensor:
        """[T, heads * head_dim], in `out` if given. keys: `k`, `v`, and arguments that say where
        each row's are."""
        assert (sinks is not None) == self._shape.has_sinks, f"sinks {sinks} for {self._shape}"
        attended: Tensor = self.library.flash_attn_varlen_func(
            q=q,
            max_seqlen_q=step.max_new_tokens,
            cu_seqlens_q=step.rows.cu_tokens,
            max_seqlen_k=step.max_keys,
            softmax_scale=self._shape.scale,
            causal=True,
            window_size=window_size(self._shape.layer_windows[layer]),
            fa_version=3,
            out=None if out is None else out.view(q.shape),
            **({} if sinks is None else {_SINKS: sinks.to(torch.bfloat16)}),
            **keys,
        )
        return attended.view(len(q), -1) if out is None else out


class FlashAttention:
    """A `GraphAttention`; single-token rows and chunks go through the same call."""

    reads_lengths_on_device = True

    def __init__(
        self,
        shape: AttentionShape,
        *,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        reads: Reads | None = None,
    ) -> None:
        """reads: how eager steps have their keys; None = as suits a step.

        Raises ValueError as `LibraryCall` does.
        """
        self._attend = LibraryCall(shape, block_size=block_size, dtype=dtype, device=device)
        self._reads = reads
        self._schedule: Callable[..., Tensor] = self._attend.library.get_scheduler_metadata
        self._shape = shape
        self._block_size = block_size
        self._dtype = dtype
        self._device = device
        self._windows = tuple(dict.fromkeys(shape.layer_windows))

    def working_bytes(self, *, max_tokens: int, max_rows: int, max_row_keys: int) -> int:
        del max_tokens
        if self._reads is Reads.TABLE:
            return 0
        return copied_bytes(self._shape, self._dtype, max_rows * max_row_keys)

    def plan(self, step: AttentionStep) -> FlashAttentionMetadata | CopiedKeysMetadata:
        reads = self._reads or _best_reads(step)
        if reads is Reads.TABLE:
            metadata = self._metadata(step.device_rows, step.max_new_tokens, step.max_keys)
            self.begin(metadata)
            return metadata
        gathered = None
        if reads is Reads.GATHERED:
            gathered = gather(
                step,
                self._windows,
                block_size=self._block_size,
                num_layers=len(self._shape.layer_windows),
                device=self._device,
            )
        return CopiedKeysMetadata(
            rows=step.device_rows,
            max_new_tokens=step.max_new_tokens,
            max_keys=step.max_keys,
            gathered=gathered,
        )

    def run(
        self,
        q: Tensor,
        k_new: Tensor,
        v_new: Tensor,
        layer: int,
        store: Tensor,
        metadata: FlashAttentionMetadata | CopiedKeysMetadata,
        out: Tensor | None = None,
        sinks: Tensor | None = None,
        scales: KvScales | None = None,
    ) -> Tensor:
        assert scales is None, "a store of e4m3 numbers was refused"
        if isinstance(metadata, CopiedKeysMetadata):
            cu_keys = metadata.rows.cu_tokens
            if metadata.gathered is not None:
                gathered = metadata.gathered[self._shape.layer_windows[layer]]
                (k_new, v_new), cu_keys = gathered.keys(store, layer), gathered.cu_keys
            return self._attend(
                q, layer, metadata, out, sinks, k=k_new, v=v_new, cu_seqlens_k=cu_keys
            )
        return self._attend(
            q,
            layer,
            metadata,
            out,
            sinks,
            k=store[:, layer, 0],
            v=store[:, layer, 1],
            seqused_k=metadata.rows.num_keys,
            block_table=metadata.table,
            scheduler_metadata=metadata.schedules[self._shape.layer_windows[layer]],
        )

    # ---- in a CUDA graph ------------------------------------------------------------------------

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
    ) -> FlashAttentionMetadata:
        """A token that sees no key gets zeros, which the library writes."""
        return self._metadata(rows, max_row_tokens or max_tokens or 1, max_keys)

    def begin(self, metadata: FlashAttentionMetadata) -> None:
        """Fill the table and the schedules; a captured graph keeps the schedules' memory."""
        expand_blocks(metadata.rows, metadata.table)
        for window in self._windows:
            metadata.schedules[window] = self._schedule(
                batch_size=len(metadata.rows.num_keys),
                max_seqlen_q=metadata.max_new_tokens,
                max_seqlen_k=metadata.max_keys,
                num_heads_q=self._shape.num_heads,
                num_heads_kv=self._shape.num_kv_heads,
                headdim=self._shape.head_dim,
                cache_seqlens=metadata.rows.num_keys,
                qkv_dtype=self._dtype,
                cu_seqlens_q=metadata.rows.cu_tokens,
                page_size=self._block_size,
                causal=True,
                window_size=window_size(window),
            )

    def refresh(self, metadata: FlashAttentionMetadata, step: AttentionStep) -> None:
        """Does nothing: the captured part derives everything it needs from the rows."""

    def _metadata(
        self, rows: RowTensors, max_new_tokens: int, max_keys: int
    ) -> FlashAttentionMetadata:
        num_columns = -(-max_keys // self._block_size)
        return FlashAttentionMetadata(
            rows=rows,
            max_new_tokens=max_new_tokens,
            max_keys=max_keys,
            table=torch.empty(
                (len(rows.num_keys), num_columns), dtype=torch.int32, device=self._device
            ),
            schedules={},
        )


def _best_reads(step: AttentionStep) -> Reads:
    if not step.num_computed_tokens.any():
        return Reads.FRESH
    num_keys = int((step.num_computed_tokens + step.num_new_tokens).sum())
    if step.num_new_tokens.min() < _MIN_GATHERED_TOKENS or num_keys > MAX_GATHERED_KEYS:
        return Reads.TABLE
    return Reads.GATHERED


def window_size(window: int | None) -> tuple[int, int]:
    """Number of keys seen before and after a query's own, for the library; -1 = all."""
    return (-1, -1) if window is None else (window - 1, 0)


def import_library(*, has_sinks: bool = False) -> ModuleType:
    """FlashAttention-3; `why_not_here` has said that it is here.

    Raises ValueError if it is another one, or takes no sinks where there are some.
    """
    home = flash_attn_home()
    assert home is not None, "asked for before why_not"
    library = importlib.import_module(home)
    name = f"{home} {getattr(library, '__version__', '')}"
    if not hasattr(library, "get_scheduler_metadata"):
        raise ValueError(
            f"{name} has no FlashAttention-3; `pip install vllm` brings it as vllm.vllm_flash_attn"
        )
    arguments = inspect.signature(library.flash_attn_varlen_func).parameters
    if has_sinks and _SINKS not in arguments:
        raise ValueError(f"{name} has no attention sinks; a newer vllm brings them")
    return library
