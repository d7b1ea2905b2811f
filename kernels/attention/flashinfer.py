"""FlashInfer over the paged store: bf16, models without sliding windows.

FlashInfer (arXiv:2501.01005) plans on the host: from the rows' lengths it cuts the work into pieces
of equal size and copies the list to the device, once per step. Its prefill kernels handle both
kinds of rows. In the "fa2" form the queries of one KV head share a tile, so a step of single tokens
reads each key once, and long rows are split. The "fa3" form (Hopper, heads of 128) is faster for
chunks. FlashInfer's own decode wrapper uses these same kernels plus a copy that the host waits for.

Windows and fp16 are refused, because FlashInfer would compile kernels when the first request comes.
"""

import importlib
import importlib.util
import logging
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.attention.protocol import AttentionShape, AttentionStep, RowTensors
from kernels.kv.scales import KvScales

logger = logging.getLogger(__name__)

_HEAD_DIMS = (64, 128)
_FA3_HEAD_DIM = 128
# A plan is copied from pinned memory when the steps before it are done. That memory is rewritten
# this many plans later. A host that plans one step ahead has at most two copies in flight.
_NUM_STAGING = 4
_STAGING_BYTES = 8 * 2**20
_GRAPH_PLAN_BYTES = 2**20  # a plan of 512 single tokens takes 2 % of it
_CTAS_PER_SM = 2  # FlashInfer's bound on pieces of split rows
_MAX_TILE_QUERIES = 128
_INT32_MAX = 2**31 - 1


def why_not(
    shape: AttentionShape, block_size: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why `FlashInferAttention` cannot serve this model on this machine; None = it can."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 8:
        return "FlashInfer needs a GPU of compute capability 8 or later"
    if dtype != torch.bfloat16:
        return f"FlashInfer is used in bfloat16, not {dtype}: its other kernels compile at run time"
    if shape.head_dim not in _HEAD_DIMS:
        return f"FlashInfer is used with heads of 64 and 128, not {shape.head_dim}"
    if any(window is not None for window in shape.layer_windows):
        return "FlashInfer is used without sliding windows: those kernels compile at run time"
    if shape.has_sinks:
        return "FlashInfer is used without attention sinks: those kernels compile at run time"
    block_stride = len(shape.layer_windows) * 2 * block_size * shape.num_kv_heads * shape.head_dim
    if block_stride > _INT32_MAX:
        return f"a block of {block_stride} elements is beyond FlashInfer's 32-bit strides"
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed; `pip install flashinfer-python` brings it"
    return None


@cache  # a start builds attention several times
def _tell_that_it_compiles() -> None:
    logger.info("FlashInfer compiles kernels now unless its cache has them: that takes minutes")


class _Staging:
    """A ring of pinned buffers for plans; waits only when all of them are in use."""

    def __init__(self) -> None:
        self._buffers = [
            torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
            for _ in range(_NUM_STAGING)
        ]
        self._copied = [torch.cuda.Event() for _ in range(_NUM_STAGING)]
        self._next = 0

    def take(self) -> tuple[Tensor, torch.cuda.Event]:
        """A buffer, and the event to record once its copy is queued in the stream."""
        index = self._next
        self._next = (index + 1) % _NUM_STAGING
        self._copied[index].synchronize()
        return self._buffers[index], self._copied[index]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashInferMetadata:
    """The wrapper that holds a step's plan, or a graph's current one."""

    wrapper: Any
    # Rows of every plan made for this wrapper; padding rows have no query.
    num_rows: int


class FlashInferAttention:
    """A `GraphAttention` that plans on the host; use it from one stream.

    A mixed step should be split into two plans (`PhasedAttention` over two of these): in one plan,
    the kernel for chunks would read a single token's keys once per query head.
    """

    def __init__(
        self,
        shape: AttentionShape,
        *,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Raises ValueError if `why_not` gives a reason."""
        reason = why_not(shape, block_size, dtype, device)
        if reason is not None:
            raise ValueError(reason)
        _tell_that_it_compiles()
        self._library: ModuleType = importlib.import_module("flashinfer")
        self._shape = shape
        self._block_size = block_size
        self._dtype = dtype
        self._device = device
        is_hopper = torch.cuda.get_device_capability(device)[0] == 9
        self._chunk_kernels = "fa3" if is_hopper and shape.head_dim == _FA3_HEAD_DIM else "fa2"
        self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._staging = _Staging()
        self._partials = self._bytes(self._num_partial_bytes(0))

    def plan(self, step: AttentionStep) -> FlashInferMetadata:
        is_single = step.max_new_tokens == 1
        wrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(
            self._partials, "NHD", backend="fa2" if is_single else self._chunk_kernels
        )
        first, last = int(step.cu_blocks[0]), int(step.cu_blocks[-1])
        block_ids = step.device_rows.block_ids[first:last]
        self._plan(wrapper, step, step.num_rows, block_ids, first)
        return FlashInferMetadata(wrapper=wrapper, num_rows=step.num_rows)

    def run(
        self,
        q: Tensor,
        k_new: Tensor,
        v_new: Tensor,
        layer: int,
        store: Tensor,
        metadata: FlashInferMetadata,
        out: Tensor | None = None,
        sinks: Tensor | None = None,
        scales: KvScales | None = None,
    ) -> Tensor:
        assert sinks is None, "a shape with sinks was refused"
        assert scales is None, "a store of e4m3 numbers was refused"
        if out is None:
            out = torch.empty((len(q), q.shape[1] * q.shape[2]), dtype=q.dtype, device=q.device)
        keys_and_values = (store[:, layer, 0], store[:, layer, 1])
        metadata.wrapper.run(q, keys_and_values, out=out.view(q.shape))
        return out

    # ---- in a CUDA graph ------------------------------------------------------------------------

    @property
    def can_capture_prompts(self) -> bool:
        """False: the host plans how chunks are cut, and a graph would keep the first plan."""
        return False

    def open_graph(
        self,
        rows: RowTensors,
        *,
        max_keys: int,
        max_tokens: int | None = None,
        max_row_tokens: int | None = None,
    ) -> FlashInferMetadata:
        """Plans rows of one key each: capture needs a plan, and any plan has the same launches."""
        assert max_tokens is None, "only rows of one new token can be captured"
        num_rows = len(rows.num_keys)
        num_partial_bytes = self._num_partial_bytes(num_rows)
        if num_partial_bytes > len(self._partials):
            # Graphs opened before keep the memory with which they were captured.
            self._partials = self._bytes(num_partial_bytes)
        wrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(
            self._partials,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=self._fixed(num_rows + 1),
            paged_kv_indptr_buf=self._fixed(num_rows + 1),
            paged_kv_indices_buf=rows.block_ids,
            paged_kv_last_page_len_buf=self._fixed(num_rows),
            backend="fa2",
        )
        wrapper.reset_workspace_buffer(self._partials, self._bytes(_GRAPH_PLAN_BYTES))
        one_key_each = AttentionStep(
            num_single_rows=num_rows,
            num_new_tokens=np.ones(num_rows, dtype=np.int64),
            num_computed_tokens=np.zeros(num_rows, dtype=np.int64),
            cu_blocks=np.arange(num_rows + 1, dtype=np.int64),
            block_ids=np.zeros(num_rows, dtype=np.int32),
            device_rows=rows,
        )
        self._plan(wrapper, one_key_each, num_rows, rows.block_ids[:0])
        return FlashInferMetadata(wrapper=wrapper, num_rows=num_rows)

    def begin(self, metadata: FlashInferMetadata) -> None:
        """Does nothing: the plan is made on the host."""

    def refresh(self, metadata: FlashInferMetadata, step: AttentionStep) -> None:
        # The graph reads the rows' own block ids, which are up to date, so none are copied. They
        # begin with the first row's, also where `step` is the end of a longer one.
        self._plan(metadata.wrapper, step, metadata.num_rows, step.device_rows.block_ids[:0])

    # ---- plans ----------------------------------------------------------------------------------

    def _plan(
        self,
        wrapper: Any,  # noqa: ANN401
        step: AttentionStep,
        num_rows: int,
        block_ids: Tensor,
        first_block: int = 0,
    ) -> None:
        """Plan `step`; rows after its own, up to `num_rows`, get no query, no key and no work.

        first_block: of the step, which `block_ids` begins with.
        """
        num_padding = num_rows - step.num_rows
        cu_tokens = np.concatenate(([0], step.num_new_tokens.cumsum()))
        cu_blocks = step.cu_blocks - first_block
        num_keys = np.pad(step.num_computed_tokens + step.num_new_tokens, (0, num_padding))
        staging, copied = self._staging.take()
        # The library's own buffer would be overwritten while a copy from it is in flight.
        wrapper._pin_memory_int_workspace_buffer = staging
        wrapper.plan(
            _pinned(np.pad(cu_tokens, (0, num_padding), mode="edge")),
            _pinned(np.pad(cu_blocks, (0, num_padding), mode="edge")),
            block_ids,
            _pinned((num_keys - 1) % self._block_size + 1),
            self._shape.num_heads,
            self._shape.num_kv_heads,
            self._shape.head_dim,
            self._block_size,
            causal=step.max_new_tokens > 1,
            sm_scale=self._shape.scale,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            seq_lens=_pinned(num_keys),
            max_token_per_sequence=step.max_new_tokens,
        )
        copied.record()

    def _num_partial_bytes(self, num_graph_rows: int) -> int:
        """Bytes for partial results of split rows, in eager steps and in a graph of rows.

        A piece is up to 128 packed queries of every KV head. A graph has one piece per row, of the
        smallest tile that holds a KV head's queries, in addition to those that its tokens fill.
        """
        shape = self._shape
        num_pieces = _CTAS_PER_SM * self._num_sms // shape.num_kv_heads + 1
        tile = 16 if shape.num_groups <= 16 else 64 if shape.num_groups <= 64 else _MAX_TILE_QUERIES
        num_graph_pieces = max(
            num_pieces, -(-num_graph_rows * shape.num_groups // tile) + num_graph_rows
        )
        num_queries = max(num_pieces * _MAX_TILE_QUERIES, num_graph_pieces * tile)
        # Per query a vector and a sum, fp32, plus the alignment of both.
        return num_queries * shape.num_heads * (shape.head_dim + 1) * 4 + 256

    def _bytes(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def _fixed(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, device=self._device)


def _pinned(values: NDArray[Any]) -> Tensor:
    """int32 in pinned memory, so that a copy to the device does not wait."""
    return torch.from_numpy(values.astype(np.int32)).pin_memory()
