"""The interface of an attention backend: metadata once per step, then one call per layer.

A backend reads the paged store, block-first `[blocks, layers, 2, block_size, kv_heads, head_dim]`.
It knows neither requests nor models. Latent attention has an interface of its own (latent.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.attention.masks import LayerMask, MaskFunction
from kernels.kv.scales import KvScales


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """The constants of all steps of one model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    # One per layer: a query sees itself and the window - 1 keys before it; None = all before it.
    layer_windows: tuple[int | None, ...]
    # One per layer: a query sees the keys from the last multiple of it on; () = no layer has one.
    layer_chunks: tuple[int | None, ...] = ()
    # Of all layers, besides windows and chunks.
    mask_function: MaskFunction | None = None
    # Factor on the scores; None = 1 / sqrt(head_dim).
    query_scale: float | None = None
    # Scaled scores s become cap * tanh(s / cap) before the mask (Gemma 2); None = they stay.
    softcap: float | None = None
    # Whether `run` is given the logit of a sink for every query head.
    has_sinks: bool = False
    # Values are the first so many numbers of a key; the store has one plane. None = V is a plane.
    shared_value_dim: int | None = None

    def __post_init__(self) -> None:
        assert self.num_heads % self.num_kv_heads == 0, (
            f"{self.num_heads} query heads over {self.num_kv_heads} KV heads"
        )
        assert len(self.layer_chunks) in (0, len(self.layer_windows)), f"{self.layer_chunks}"

    @property
    def layer_masks(self) -> tuple[LayerMask, ...]:
        chunks = self.layer_chunks or (None,) * len(self.layer_windows)
        return tuple(
            LayerMask(window=window, chunk=chunk, function=self.mask_function)
            for window, chunk in zip(self.layer_windows, chunks, strict=True)
        )

    @property
    def has_windows_only(self) -> bool:
        """Whether causal masks, with a window or without, are all that its layers have."""
        return self.mask_function is None and not any(self.layer_chunks)

    @property
    def num_groups(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        return float(self.head_dim**-0.5) if self.query_scale is None else self.query_scale

    @property
    def num_planes(self) -> int:
        """Planes of the store: K and V, or one for both."""
        return 2 if self.shared_value_dim is None else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTensors:
    """A step's rows on the device, int32; row r has tokens [cu_tokens[r], cu_tokens[r + 1]).

    In a CUDA graph these are views of buffers at fixed addresses whose content changes from replay
    to replay. Rows after the step's own are padding with no key or one key; attention's output for
    them is never read. A row may have more new tokens than keys: its last token sees the last key.
    The surplus tokens come first, see nothing, and their output is never read.
    """

    # [R + 1]
    cu_tokens: Tensor
    # [R]  history and new tokens
    num_keys: Tensor
    # [R + 1]  row r's blocks are block_ids[cu_blocks[r] : cu_blocks[r + 1]]
    cu_blocks: Tensor
    # [N or more]
    block_ids: Tensor

    def part(self, start: int, end: int) -> "RowTensors":
        """Rows [start, end); `cu_tokens` and `cu_blocks` still count from the step's start."""
        return RowTensors(
            cu_tokens=self.cu_tokens[start : end + 1],
            num_keys=self.num_keys[start:end],
            cu_blocks=self.cu_blocks[start : end + 1],
            block_ids=self.block_ids,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStep:
    """The rows of one step: on the host for planning, on the device for computing.

    The first `num_single_rows` rows have one new token each, ordered by growing history; the
    others have two or more. The step's tokens are in row order.
    """

    num_single_rows: int
    # [R]
    num_new_tokens: NDArray[np.int64]
    # [R]  tokens whose K and V were in the store before the step
    num_computed_tokens: NDArray[np.int64]
    # [R + 1]
    cu_blocks: NDArray[np.int64]
    # [N]  block ids of all rows, one row after the other
    block_ids: NDArray[np.int32]
    device_rows: RowTensors

    @property
    def num_rows(self) -> int:
        return len(self.num_new_tokens)

    @property
    def num_tokens(self) -> int:
        return int(self.num_new_tokens.sum())

    @property
    def max_new_tokens(self) -> int:
        return int(self.num_new_tokens.max())

    @property
    def max_keys(self) -> int:
        """Keys of the longest row, its new tokens included."""
        return int((self.num_computed_tokens + self.num_new_tokens).max())

    def row_blocks(self, row: int) -> NDArray[np.int32]:
        return self.block_ids[self.cu_blocks[row] : self.cu_blocks[row + 1]]


def build_step(
    num_new_tokens: Sequence[int],
    num_computed_tokens: Sequence[int],
    row_blocks: Sequence[Sequence[int]],
    device: torch.device | str,
) -> AttentionStep:
    """A step from plain lists; rows with one new token must come first, by growing history."""
    num_new = np.array(num_new_tokens, dtype=np.int64)
    num_computed = np.array(num_computed_tokens, dtype=np.int64)
    block_ids = np.array([b for blocks in row_blocks for b in blocks], dtype=np.int32)
    cu_blocks = np.cumsum([0, *map(len, row_blocks)], dtype=np.int64)

    def on_device(values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values.astype(np.int32)).to(device)

    return AttentionStep(
        num_single_rows=int((num_new == 1).sum()),
        num_new_tokens=num_new,
        num_computed_tokens=num_computed,
        cu_blocks=cu_blocks,
        block_ids=block_ids,
        device_rows=RowTensors(
            cu_tokens=on_device(np.cumsum([0, *num_new_tokens])),
            num_keys=on_device(num_new + num_computed),
            cu_blocks=on_device(cu_blocks),
            block_ids=on_device(block_ids),
        ),
    )


class StepPlanner(Protocol):
    """Prepares a step for attention of any kind.

    What `plan` returns differs by backend, hence `Any`: only the backend that made it reads it. A
    backend may say `reads_lengths_on_device = True`: then the host's numbers of keys are only
    bounds, and those in `RowTensors` count when the step runs. `reads_single_lengths_on_device`:
    the same, but only of rows of one token.
    """

    def plan(self, step: AttentionStep) -> Any:  # noqa: ANN401
        """Everything that is constant over the layers of a step: indices and masks, on the device.

        Copies what it needs from `step`'s host arrays before it returns; never waits for the GPU.
        """
        ...


class AttentionBackend(StepPlanner, Protocol):
    """An implementation of attention over the paged store."""

    def run(
        self,
        q: Tensor,
        k_new: Tensor,
        v_new: Tensor,
        layer: int,
        store: Tensor,
        metadata: Any,  # noqa: ANN401
        out: Tensor | None = None,
        sinks: Tensor | None = None,
        scales: KvScales | None = None,
    ) -> Tensor:
        """softmax(q k^T * scale + mask) v for every token of the step.

        q: [T, heads, head_dim]; k_new, v_new: [T, kv_heads, head_dim], already in `store` too.
        All three may be views with a larger token stride (one buffer holds q, k and v).
        Returns [T, heads * head_dim], written to `out` if given, which must be contiguous.
        Query head h reads KV head h // (heads / kv_heads).
        sinks: fp32 [heads], given if and only if the shape has sinks: one more logit in the softmax
        of a head, without a value and without `scale` (arXiv:2309.17453, learnt as in gpt-oss).
        scales: given if and only if `store` has e4m3 numbers, as uint8. Then attention is over
        what they stand for, the step's own tokens included: k_new and v_new are not read.
        """
        ...


@runtime_checkable
class PreparedAttention(Protocol):
    """What a backend offers that compiles kernels: all of them, before the first step."""

    def prepare(self, *, max_rows: int, max_row_tokens: int, max_row_keys: int) -> None:
        """Compile for all steps of so many rows, with so many new tokens and keys each, at most."""
        ...


@runtime_checkable
class CopyingAttention(Protocol):
    """What a backend offers whose steps take memory of their own, which they give back."""

    def working_bytes(self, *, max_tokens: int, max_rows: int, max_row_keys: int) -> int:
        """At most what a step takes at once.

        max_tokens: new tokens of all rows; max_row_keys: keys of one row, its history included.
        """
        ...


class GraphPlanner(StepPlanner, Protocol):
    """What a backend offers whose steps can be captured in a CUDA graph.

    Before capture:       metadata = open_graph(rows, max_keys)
    in the captured part: begin(metadata), then run(...) per layer
    before each replay:   refresh(metadata, step), after the update of the rows' buffers was queued
    """

    @property
    def can_capture_prompts(self) -> bool:
        """Whether `open_graph` accepts rows with more than one new token."""
        ...

    def open_graph(
        self,
        rows: RowTensors,
        *,
        max_keys: int,
        max_tokens: int | None = None,
        max_row_tokens: int | None = None,
    ) -> Any:  # noqa: ANN401
        """Metadata over fixed buffers for all of `rows`, each with at most `max_keys` keys.

        max_tokens: maximum number of new tokens of all rows together; None = each row has one.
        max_row_tokens: maximum for one row, including padding before its own tokens; None = they
        may be spread over the rows in any way.
        """
        ...

    def begin(self, metadata: Any) -> None:  # noqa: ANN401
        """Launch the kernels that derive what the layers need from the rows' current content."""
        ...

    def refresh(self, metadata: Any, step: AttentionStep) -> None:  # noqa: ANN401
        """Do the planning on the host that the next replay needs.

        `step`'s host arrays are not padded; its device rows are the graph's.
        """
        ...


class GraphAttention(AttentionBackend, GraphPlanner, Protocol):
    """A backend whose steps can be captured in a CUDA graph."""
