"""FlashAttention-4 for prompts: Hopper and Blackwell, bf16 and fp16, as published in flash-attn-4.

FlashAttention-4 (arXiv:2603.05451) is written in CuTe DSL, so that its kernels are compiled when
they are first called: `prepare` calls each form once, and compiled code is kept on disk, by the
versions of the packages and the GPU. It has no form for single tokens. Keys and values come to it
in one of three ways (`gathering.py`). Looking blocks up in a table costs each tile of queries an
address for every key, but where a block is a tile, of 128 tokens.
"""

import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.attention.flash_attn import expand_blocks, expand_blocks_torch
from kernels.attention.gathering import (
    MAX_GATHERED_KEYS,
    Gathered,
    Reads,
    copied_bytes,
    gather,
)
from kernels.attention.names import BackendUnavailable
from kernels.attention.protocol import AttentionShape, AttentionStep, RowTensors, build_step
from kernels.kv.scales import KvScales

_PACKAGE = "flash_attn.cute"
_DTYPES = (torch.bfloat16, torch.float16)
# Compute capability -> sizes of heads.
_HEAD_DIMS: dict[int, Sequence[int]] = {9: range(16, 257, 8), 10: (*range(16, 129, 8), 256)}
_TILE_KEYS = 128
_MAX_TILE_HEAD_DIM = 128  # beyond, a tile has fewer keys
_VERSIONS = "it needs nvidia-cutlass-dsl and quack-kernels of versions that go together"
# Beyond so many rows the library launches other kernels.
_FEW_ROWS = 256
_CACHE = Path("~/.cache/laps/flash_attn_4")


def why_not(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why `FlashAttention4` cannot serve this model on this machine; None = it can."""
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
    if major not in _HEAD_DIMS:
        return "FlashAttention-4 needs a GPU of compute capability 9 or 10 (Hopper, Blackwell)"
    if dtype not in _DTYPES:
        return f"FlashAttention-4 computes in bfloat16 and float16, not {dtype}"
    if shape.head_dim not in _HEAD_DIMS[major]:
        return f"FlashAttention-4 has no heads of {shape.head_dim} on this GPU"
    if not _is_installed():
        return (
            "flash_attn.cute is not installed; `pip install 'flash-attn-4[cu13]>=4.0.0b36'`"
            " (without cu13 for CUDA 12) brings it"
        )
    return None


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec(_PACKAGE) is not None
    except ImportError:  # there is no flash_attn at all
        return False


@dataclass(slots=True, kw_only=True)
class FlashAttention4Metadata:
    """Data that all layers of a step share."""

    reads: Reads
    rows: RowTensors
    # [R, blocks] int32, if read by table
    table: Tensor | None = None
    # window -> keys, if gathered
    gathered: dict[int | None, Gathered] | None = None


class FlashAttention4:
    """A `GraphAttention` for rows of any number of new tokens; slow for single ones."""

    def __init__(
        self,
        shape: AttentionShape,
        *,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        reads: Reads | None = None,
    ) -> None:
        """reads: instead of what suits a step, for comparisons. Raises ValueError as `why_not`."""
        reason = why_not(shape, dtype, device)
        if reason is not None:
            raise ValueError(reason)
        self._attend = _import_library()
        self._shape = shape
        self._block_size = block_size
        self._dtype = dtype
        self._device = device
        self._reads = reads
        self._windows = tuple(dict.fromkeys(shape.layer_windows))
        self._loads_blocks = block_size == _TILE_KEYS and shape.head_dim <= _MAX_TILE_HEAD_DIM

    def prepare(self, *, max_rows: int, max_row_tokens: int, max_row_keys: int) -> None:
        """Compile every form that steps of so many rows take; nothing compiles later.

        Raises BackendUnavailable if the library cannot compile here.
        """
        del max_row_tokens, max_row_keys
        try:
            self._compile(max_rows)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # its compiler raises many kinds
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise BackendUnavailable(
                f"flash_attn.cute cannot compile here: {reason}; {_VERSIONS}, or name another"
                " backend for prompts, such as flash_attn or triton"
            ) from error

    def working_bytes(self, *, max_tokens: int, max_rows: int, max_row_keys: int) -> int:
        del max_tokens
        return copied_bytes(self._shape, self._dtype, max_rows * max_row_keys)

    def _compile(self, max_rows: int) -> None:
        shape = self._shape
        parts = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        sinks = torch.zeros(shape.num_heads, device=self._device) if shape.has_sinks else None
        store = self._zeros(1, len(shape.layer_windows), 2, self._block_size, shape.num_kv_heads)
        for count in (2, _FEW_ROWS + 1)[: 1 if max_rows <= _FEW_ROWS else 2]:
            step = build_step([2] * count, [1] * count, [[0] * 3] * count, self._device)
            q, k, v = torch.split(self._zeros(2 * count, sum(parts)), parts, dim=1)
            for reads in Reads:
                metadata = self._plan(step, reads)
                for window in self._windows:
                    layer = shape.layer_windows.index(window)
                    self.run(q, k, v, layer, store, metadata, sinks=sinks)

    def plan(self, step: AttentionStep) -> FlashAttention4Metadata:
        return self._plan(step, self._reads or self._best(step))

    def run(
        self,
        q: Tensor,
        k_new: Tensor,
        v_new: Tensor,
        layer: int,
        store: Tensor,
        metadata: FlashAttention4Metadata,
        out: Tensor | None = None,
        sinks: Tensor | None = None,
        scales: KvScales | None = None,
    ) -> Tensor:
        assert (sinks is not None) == self._shape.has_sinks, f"sinks {sinks} for {self._shape}"
        assert scales is None, "a store of e4m3 numbers is not read here"
        window = self._shape.layer_windows[layer]
        keys: dict[str, Tensor]
        if metadata.reads is Reads.FRESH:
            keys = {"k": k_new, "v": v_new, "cu_seqlens_k": metadata.rows.cu_tokens}
        elif metadata.gathered is not None:
            gathered = metadata.gathered[window]
            k, v = gathered.keys(store, layer)
            keys = {"k": k, "v": v, "cu_seqlens_k": gathered.cu_keys}
        else:
            assert metadata.table is not None, "read by table"
            keys = {
                "k": store[:, layer, 0],
                "v": store[:, layer, 1],
                "page_table": metadata.table,
                "seqused_k": metadata.rows.num_keys,
            }
        attended, _ = self._attend(
            q,
            **keys,
            cu_seqlens_q=metadata.rows.cu_tokens,
            softmax_scale=self._shape.scale,
            causal=True,
            window_size=(None, None) if window is None else (window - 1, 0),
            learnable_sink=sinks,
            softcap=self._shape.softcap or 0.0,
        )
        flat = attended.view(len(q), -1)
        return flat if out is None else out.copy_(flat)  # the library takes no memory

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
    ) -> FlashAttention4Metadata:
        """By table, whose size does not depend on the step."""
        size = (len(rows.num_keys), -(-max_keys // self._block_size))
        table = torch.empty(size, dtype=torch.int32, device=self._device)
        return FlashAttention4Metadata(reads=Reads.TABLE, rows=rows, table=table)

    def begin(self, metadata: FlashAttention4Metadata) -> None:
        assert metadata.table is not None, "not of a graph"
        expand = expand_blocks if self._device.type == "cuda" else expand_blocks_torch
        expand(metadata.rows, metadata.table)

    def refresh(self, metadata: FlashAttention4Metadata, step: AttentionStep) -> None:
        """Does nothing: the captured part derives everything it needs from the rows."""

    # ---- plans ----------------------------------------------------------------------------------

    def _best(self, step: AttentionStep) -> Reads:
        if not step.num_computed_tokens.any():
            return Reads.FRESH
        num_keys = int((step.num_computed_tokens + step.num_new_tokens).sum())
        if self._loads_blocks or num_keys > MAX_GATHERED_KEYS:
            return Reads.TABLE
        return Reads.GATHERED

    def _plan(self, step: AttentionStep, reads: Reads) -> FlashAttention4Metadata:
        match reads:
            case Reads.FRESH:
                return FlashAttention4Metadata(reads=reads, rows=step.device_rows)
            case Reads.TABLE:
                metadata = self.open_graph(step.device_rows, max_keys=step.max_keys)
                self.begin(metadata)
                return metadata
            case Reads.GATHERED:
                return FlashAttention4Metadata(
                    reads=reads,
                    rows=step.device_rows,
                    gathered=gather(
                        step,
                        self._windows,
                        block_size=self._block_size,
                        num_layers=len(self._shape.layer_windows),
                        device=self._device,
                    ),
                )

    def _zeros(self, *size: int) -> Tensor:
        return torch.zeros((*size, self._shape.head_dim), dtype=self._dtype, device=self._device)


def _import_library() -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The library's function. Raises ValueError if it does not work here."""
    try:
        interface = importlib.import_module(f"{_PACKAGE}.interface")
        cache_utils = importlib.import_module(f"{_PACKAGE}.cache_utils")
    except (ImportError, RuntimeError, AttributeError, OSError) as error:
        raise ValueError(
            f"flash_attn.cute is installed and does not work: {error}; {_VERSIONS}"
        ) from error
    _keep_compiled(interface, cache_utils, _CACHE.expanduser() / _cache_name())
    attend: Callable[..., tuple[Tensor, Tensor | None]] = interface.flash_attn_varlen_func
    return attend


def _keep_compiled(interface: Any, cache_utils: Any, folder: Path) -> None:  # noqa: ANN401 - foreign
    """Have the library keep compiled code on disk, which it does by itself only if asked to.

    It tells code apart by its sources, the versions of most packages and the form. Raises
    ValueError if it cannot write.
    """
    if cache_utils.CUTE_DSL_CACHE_ENABLED:
        return
    cache_utils.CUTE_DSL_CACHE_ENABLED = True
    cache_utils.CUTE_DSL_CACHE_DIR = str(folder)
    try:
        for name, function in (
            ("fwd", interface._flash_attn_fwd),
            ("tile_cumsum", interface._compute_tile_cumsum),
            ("blocks_to_batch", interface._compute_blocks_to_batch),
        ):
            function.compile_cache = cache_utils.get_jit_cache(name)
    except OSError as error:
        raise ValueError(
            f"compiled kernels of FlashAttention-4 cannot be kept: {error}; make that folder"
            " writable, or set FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 and"
            " FLASH_ATTENTION_CUTE_DSL_CACHE_DIR to another one"
        ) from error


def _cache_name() -> str:
    """What the library's keys lack: not all of them have the GPU, none has this package."""
    gpu = re.sub(r"\W+", "-", torch.cuda.get_device_name())
    try:
        return f"{gpu}_quack-{importlib.metadata.version('quack-kernels')}"
    except importlib.metadata.PackageNotFoundError:
        return gpu
