"""Attention in plain torch over the paged store: the oracle on a GPU, the backend on a CPU.

Rows with one new token are gathered into one padded batch, or into several if lengths differ so
much that padding would cost more than another call. Each row with more new tokens is its own
`scaled_dot_product_attention`, over the fresh K and V when it has no history. Grouped queries are
a view: of the query for single tokens, of an expanded key for chunks; no head is copied. Both are
written out with attention sinks or a cap, which `scaled_dot_product_attention` does not know, and
where its kernels cannot be trusted (`is_fused_exact`).
Of a store of e4m3 numbers (`kernels.kv.scales`) the step's own K and V are read back too; scales
are multiplied to queries and outputs, which are fewer.

For each distinct mask of the layers, `plan` determines the keys that a row needs:

    key position   0 ........ first ......... num_computed ........ num_computed + num_new
    kept blocks       [start_block * block_size ...............................)
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (the field's own spelling)
from numpy.typing import NDArray
from torch import Tensor

from kernels.attention.masks import LayerMask
from kernels.attention.protocol import AttentionShape, AttentionStep
from kernels.kv.append import layer_half_blocks
from kernels.kv.scales import KvScales, from_e4m3, times_heads

# Padding slots that a batch of single-token rows may have before it is split: gathering and scoring
# this many costs about as much as one more call.
_MAX_PADDED_SLOTS = 256
_MAX_FUSED_HEAD_DIM = 128  # on a GPU
# Scores that are written out at a time where that is necessary: 256 MiB.
_MAX_SCORES = 2**26


@dataclass(frozen=True, slots=True, kw_only=True)
class _SingleGroup:
    """Rows [start, end), one new token each, gathered to a common number of keys."""

    start: int
    end: int
    num_keys: int
    # [planes * rows * blocks] int64  layer-0 half-blocks: all K, then all V
    half_blocks: Tensor
    # [rows, 1, 1, num_keys] 0 or -inf; None if every row sees all of its keys
    mask: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """One row with tokens [start, end) of the step."""

    start: int
    end: int
    num_keys: int
    # [planes * blocks] int64; None = no history, so the fresh K and V are sufficient
    half_blocks: Tensor | None
    # [end - start, num_keys] 0 or -inf; None = plain causal over the fresh keys
    mask: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceMetadata:
    """The step's groups and chunks, in token order, for each distinct mask."""

    by_mask: dict[LayerMask, tuple[list[_SingleGroup], list[_Chunk]]]


class ReferenceAttention:
    """An `AttentionBackend`; keeps no state of a step."""

    def __init__(
        self,
        shape: AttentionShape,
        *,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        is_fp8: bool = False,
    ) -> None:
        """dtype: of queries; is_fp8: the store has e4m3 numbers."""
        self._shape = shape
        self._is_fp8 = is_fp8
        self._block_size = block_size
        self._dtype = dtype
        self._device = device
        self._half_blocks_per_block = shape.num_planes * len(shape.layer_windows)
        self._layer_masks = shape.layer_masks
        self._is_written_out = (
            shape.has_sinks or shape.softcap is not None or not is_fused_exact(shape, device)
        )

    def plan(self, step: AttentionStep) -> ReferenceMetadata:
        return ReferenceMetadata(
            by_mask={
                mask: (list(self._single_groups(step, mask)), list(self._chunks(step, mask)))
                for mask in dict.fromkeys(self._layer_masks)
            }
        )

    def run(
        self,
        q: Tensor,
        k_new: Tensor,
        v_new: Tensor,
        layer: int,
        store: Tensor,
        metadata: ReferenceMetadata,
        out: Tensor | None = None,
        sinks: Tensor | None = None,
        scales: KvScales | None = None,
    ) -> Tensor:
        assert (scales is not None) == self._is_fp8, f"scales {scales}, is_fp8 {self._is_fp8}"
        groups, chunks = metadata.by_mask[self._layer_masks[layer]]
        half_blocks = layer_half_blocks(store, layer)
        assert (sinks is not None) == self._shape.has_sinks, f"sinks {sinks} for {self._shape}"
        if scales is not None:
            q = self._times(q, scales.factors(layer, 0))
        outputs = [self._run_group(q, half_blocks, group, sinks) for group in groups]
        outputs += [self._run_chunk(q, k_new, v_new, half_blocks, chunk, sinks) for chunk in chunks]
        if scales is not None:
            by_head = scales.factors(layer, 1)
            outputs = [self._times(part, by_head) for part in outputs]
        if out is not None:
            return torch.cat(outputs, out=out)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _times(self, x: Tensor, factors: Tensor) -> Tensor:
        """x: [T, heads, head_dim] or [T, heads * head_dim]; factors: fp32 [kv_heads]."""
        by_head = factors.repeat_interleave(self._shape.num_groups)[:, None]
        return times_heads(x.reshape(len(x), self._shape.num_heads, -1), by_head).view(x.shape)

    # ---- one new token a row --------------------------------------------------------------------

    def _single_groups(self, step: AttentionStep, mask: LayerMask) -> Iterator[_SingleGroup]:
        num_rows = step.num_single_rows
        if num_rows == 0:
            return
        lengths = step.num_computed_tokens[:num_rows] + 1
        first = mask.first_keys(lengths - 1)
        start_blocks = first // self._block_size
        num_keys = lengths - start_blocks * self._block_size
        for start, end in _split_by_padding(num_keys):
            yield self._single_group(
                step,
                (start, end),
                start_blocks[start:end],
                (first - start_blocks * self._block_size)[start:end],
                num_keys[start:end],
                mask,
            )

    def _single_group(
        self,
        step: AttentionStep,
        rows: tuple[int, int],
        start_blocks: NDArray[np.int64],
        first_keys: NDArray[np.int64],
        num_keys: NDArray[np.int64],
        layer_mask: LayerMask,
    ) -> _SingleGroup:
        """`first_keys`, `num_keys`: [rows]; the seen keys are in [first, num) from start_block."""
        longest = int(num_keys.max())
        last_blocks = start_blocks + (num_keys - 1) // self._block_size
        columns = start_blocks[:, None] + np.arange(-(-longest // self._block_size))
        # A padded entry repeats the row's own last block. Another row's block could hold a NaN, and
        # 0 * NaN would propagate it in spite of the mask.
        columns = np.minimum(columns, last_blocks[:, None])
        blocks = step.block_ids[step.cu_blocks[rows[0] : rows[1], None] + columns]
        mask = None
        has_function = layer_mask.function is not None
        if has_function or bool((num_keys != longest).any()) or bool(first_keys.any()):
            keys = np.arange(longest)
            is_seen = (keys >= first_keys[:, None]) & (keys < num_keys[:, None])
            if has_function:
                origins = start_blocks * self._block_size
                for row, (origin, length) in enumerate(zip(origins, num_keys, strict=True)):
                    query = np.array([origin + length - 1])
                    is_seen[row] &= layer_mask.seen(query, origin + keys)[0]
            mask = self._mask(is_seen)[:, None, None, :]
        return _SingleGroup(
            start=rows[0],
            end=rows[1],
            num_keys=longest,
            half_blocks=self._half_blocks(blocks),
            mask=mask,
        )

    def _run_group(
        self, q: Tensor, half_blocks: Tensor, group: _SingleGroup, sinks: Tensor | None
    ) -> Tensor:
        shape = self._shape
        num_rows = group.end - group.start
        # The queries of one KV head are placed where SDPA expects query positions.
        q_rows = q[group.start : group.end].view(
            num_rows, shape.num_kv_heads, shape.num_groups, shape.head_dim
        )
        k, v = self._keys_and_values(
            half_blocks.index_select(0, group.half_blocks)
            .view(shape.num_planes, num_rows, -1, shape.num_kv_heads, shape.head_dim)
            .narrow(2, 0, group.num_keys)
            .transpose(2, 3)
        )
        if not self._is_written_out:
            out = F.scaled_dot_product_attention(
                q_rows, k, v, attn_mask=group.mask, scale=shape.scale
            )
        else:
            by_group = None if sinks is None else sinks.view(shape.num_kv_heads, shape.num_groups)
            out = self._attend(q_rows, k, v, group.mask, by_group)
        return out.reshape(num_rows, -1)

    # ---- more than one new token ----------------------------------------------------------------

    def _chunks(self, step: AttentionStep, mask: LayerMask) -> Iterator[_Chunk]:
        start = step.num_single_rows
        for row in range(step.num_single_rows, step.num_rows):
            num_new = int(step.num_new_tokens[row])
            num_computed = int(step.num_computed_tokens[row])
            yield self._chunk(step.row_blocks(row), start, num_new, num_computed, mask)
            start += num_new

    def _chunk(
        self,
        row_blocks: NDArray[np.int32],
        start: int,
        num_new: int,
        num_computed: int,
        layer_mask: LayerMask,
    ) -> _Chunk:
        end = start + num_new
        queries = np.arange(num_computed, num_computed + num_new)
        first_keys = layer_mask.first_keys(queries)
        is_plain = num_computed == 0 and layer_mask.function is None and not first_keys.any()
        if is_plain and not self._is_written_out and not self._is_fp8:
            return _Chunk(start=start, end=end, num_keys=num_new, half_blocks=None, mask=None)
        start_block = int(first_keys[0]) // self._block_size
        end_block = -(-(num_computed + num_new) // self._block_size)
        first_key = start_block * self._block_size
        keys = np.arange(first_key, num_computed + num_new)
        is_read_back = num_computed > 0 or self._is_fp8
        return _Chunk(
            start=start,
            end=end,
            num_keys=len(keys),
            half_blocks=(
                self._half_blocks(row_blocks[start_block:end_block]) if is_read_back else None
            ),
            mask=self._mask(layer_mask.seen(queries, keys)),
        )

    def _run_chunk(
        self,
        q: Tensor,
        k_new: Tensor,
        v_new: Tensor,
        half_blocks: Tensor,
        chunk: _Chunk,
        sinks: Tensor | None,
    ) -> Tensor:
        shape = self._shape
        num_new = chunk.end - chunk.start
        if chunk.half_blocks is None:
            k, v = k_new[chunk.start : chunk.end], v_new[chunk.start : chunk.end]
        else:
            k, v = self._keys_and_values(
                half_blocks.index_select(0, chunk.half_blocks)
                .view(shape.num_planes, -1, shape.num_kv_heads, shape.head_dim)
                .narrow(1, 0, chunk.num_keys)
            )
        # [kv_heads, groups, tokens, head_dim]; stride 0 over groups for K and V
        q_heads = (
            q[chunk.start : chunk.end]
            .view(num_new, shape.num_kv_heads, shape.num_groups, shape.head_dim)
            .permute(1, 2, 0, 3)
        )
        if self._is_written_out:
            by_group = (
                None if sinks is None else sinks.view(shape.num_kv_heads, shape.num_groups, 1)
            )
            k, v = (t.transpose(0, 1).unsqueeze(1) for t in (k, v))
            out = self._attend(q_heads, k, v, chunk.mask, by_group)
            return out.permute(2, 0, 1, 3).reshape(num_new, -1)
        expanded = (shape.num_kv_heads, shape.num_groups, chunk.num_keys, -1)
        out = F.scaled_dot_product_attention(
            q_heads,
            k.transpose(0, 1).unsqueeze(1).expand(expanded),
            v.transpose(0, 1).unsqueeze(1).expand(expanded),
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=shape.scale,
        )
        return out.permute(2, 0, 1, 3).reshape(num_new, -1)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None
    ) -> Tensor:
        shape = self._shape
        return attend_written_out(q, k, v, mask, shape.scale, shape.softcap, sinks)

    def _keys_and_values(self, planes: Tensor) -> tuple[Tensor, ...]:
        """planes: [planes, ..., head_dim]; both without the first dimension, in q's dtype."""
        if self._is_fp8:
            planes = from_e4m3(planes, self._dtype)
        if self._shape.shared_value_dim is None:
            return planes.unbind(0)
        (k,) = planes.unbind(0)
        return k, k[..., : self._shape.shared_value_dim]

    # ---- index tensors --------------------------------------------------------------------------

    def _half_blocks(self, blocks: NDArray[np.int32]) -> Tensor:
        """[planes * blocks.size] int64: layer-0 half-blocks of the K, then of the V, of `blocks`.

        With one plane those of the K alone.
        """
        k = blocks.ravel().astype(np.int64) * self._half_blocks_per_block
        planes = [k + plane for plane in range(self._shape.num_planes)]
        return self._to_device(torch.from_numpy(np.concatenate(planes)))

    def _mask(self, is_seen: NDArray[np.bool_]) -> Tensor:
        mask = np.where(is_seen, np.float32(0), np.float32(-np.inf))
        return self._to_device(torch.from_numpy(mask).to(self._dtype))

    def _to_device(self, host: Tensor) -> Tensor:
        """A copy that does not wait: only a pinned source lets the host run ahead of the GPU."""
        if self._device.type == "cpu":
            return host
        return host.pin_memory().to(self._device, non_blocking=True)


def is_fused_exact(shape: AttentionShape, device: torch.device) -> bool:
    """Whether `scaled_dot_product_attention` may compute heads of this size.

    For wider ones on a GPU it runs a kernel that keeps its sums in global memory, and with
    keys expanded over heads, as here, the last queries may come out wrong: seen on an H200 over
    latents of 576 numbers (torch 2.11), and known for heads of 512 (pytorch issue 191937).
    """
    return device.type != "cuda" or shape.head_dim <= _MAX_FUSED_HEAD_DIM


def attend_written_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """softmax([cap(q k^T * scale) + mask, sink]) v, where the sink's column has no value.

    q: [..., queries, head_dim]; k, v: [..., keys, head_dim]; mask: [queries or 1, keys] or with
    more dimensions; sinks: fp32, as q without its last dimension. All but the last two dimensions
    are broadcast. Scores are fp32, of a bounded number of queries at a time.
    """
    scores_per_query = max(q[..., 0, 0].numel() * k.shape[-2], 1)
    parts = []
    for part in torch.arange(q.shape[-2]).split(max(_MAX_SCORES // scores_per_query, 1)):
        rows = slice(int(part[0]), int(part[-1]) + 1)
        scores = (q[..., rows, :].float() @ k.transpose(-1, -2).float()) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if mask is not None:
            scores = scores + (mask[..., rows, :] if mask.shape[-2] > 1 else mask)
        if sinks is None:
            weights = scores.softmax(dim=-1)
        else:
            sink = sinks[..., rows] if sinks.shape[-1] > 1 else sinks
            column = sink.unsqueeze(-1).expand(*scores.shape[:-1], 1)
            weights = torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]
        parts.append((weights @ v.float()).to(q.dtype))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)


def _split_by_padding(num_keys: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Split rows, ordered by growing history, into ranges [start, end) with little padding.

    A range ends where its padding would exceed both a quarter of its real slots and a fixed bound.
    """
    start = 0
    total = 0
    longest = 0
    for row, keys in enumerate(num_keys.tolist()):
        longest = max(longest, keys)
        padded = longest * (row + 1 - start) - total - keys
        if row > start and padded > max(_MAX_PADDED_SLOTS, (total + keys) // 4):
            yield start, row
            start, total, longest = row, 0, keys
        total += keys
    yield start, len(num_keys)
