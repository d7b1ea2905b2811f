"""FlexAttention: torch's attention under any mask, compiled on a GPU, written out on a CPU.

FlexAttention (arXiv:2412.05496) makes a kernel of a mask function over indices. Here every mask is
the same function of two tensors, a number per query slot each, so that one kernel serves all
layers; only a mask function of the configuration adds to it, and the key slot of position 0:

    seen = first[query] <= key <= last[query]  and  function(last - origin, key - origin)

The rows of a step are packed into few calls (`flex_packing.py`), and their keys gathered from the
paged store to where the packing says. On a GPU calls have few different sizes, which `prepare`
compiles. On a CPU each row is a call of its own without padding, because all its scores are
computed, and nothing is compiled: code compiled for a CPU has no log-sum-exp, and with it come
attention sinks:

    out * exp(lse) / (exp(lse) + exp(sink)) = out * sigmoid(lse - sink)
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch._dynamo.config
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from kernels.attention.flex_packing import (
    Pack,
    PackedMask,
    PackedRow,
    Packing,
    PackShape,
    SlotSizes,
    TileLists,
)
from kernels.attention.gathering import key_lines, to_device
from kernels.attention.masks import LayerMask, MaskFunction
from kernels.attention.names import BackendUnavailable
from kernels.attention.protocol import AttentionShape, AttentionStep
from kernels.kv.append import layer_lines
from kernels.kv.scales import KvScales

# A `mask_mod` of FlexAttention: batch, head, query slot, key slot -> bool.
_SlotTest = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MIN_GPU_HEAD_DIM = 16
_MAX_PLACED = 64
_MAX_COMPILED = 256  # sizes of calls, of all models of a process

# Slots without a token cost little: their tiles are in no list.
GPU_PACKING = Packing(
    tile=128,
    query_sizes=SlotSizes(first=1024, factor=4, most=16384),
    key_sizes=SlotSizes(first=4096, factor=4, most=65536),
)
CPU_PACKING = Packing(tile=1)


def why_not(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why `FlexAttention` cannot serve this model on this machine; None = it can."""
    if dtype not in _DTYPES:
        return f"FlexAttention computes in bfloat16, float16 and float32, not {dtype}"
    if device.type == "cuda" and shape.head_dim < _MIN_GPU_HEAD_DIM:
        return f"FlexAttention's kernels have heads of 16 and more, not {shape.head_dim}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """What packs of equal rows share."""

    shape: PackShape
    block_mask: flex.BlockMask


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One call of FlexAttention."""

    pack: Pack
    placed: _Placed
    # [2, used key slots] int64  layer-0 line of the K, and of the V, at each slot
    lines: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FlexMetadata:
    """The calls of a step for each distinct mask, in token order."""

    by_mask: dict[LayerMask, list[_Call]]


class FlexAttention:
    """An `AttentionBackend`; what steps of equal rows share is kept from step to step."""

    def __init__(
        self,
        shape: AttentionShape,
        *,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        packing: Packing | None = None,
        is_compiled: bool | None = None,
    ) -> None:
        """packing, is_compiled: None = as suits the device. Raises ValueError as `why_not` says."""
        reason = why_not(shape, dtype, device)
        if reason is not None:
            raise ValueError(reason)
        is_gpu = device.type == "cuda"
        _set_up_torch()
        self._packing = packing or (GPU_PACKING if is_gpu else CPU_PACKING)
        self._is_compiled = is_gpu if is_compiled is None else is_compiled
        self._shape = shape
        self._block_size = block_size
        self._dtype = dtype
        self._device = device
        self._layer_masks = shape.layer_masks
        self._masks = {
            mask: PackedMask(mask, self._packing, device)
            for mask in dict.fromkeys(self._layer_masks)
        }
        self._placed: OrderedDict[tuple[LayerMask, tuple[PackedRow, ...]], _Placed] = OrderedDict()

    @torch.inference_mode()
    def prepare(self, *, max_rows: int, max_row_tokens: int, max_row_keys: int) -> None:
        """Compile every size of call that steps of such rows have; nothing compiles later.

        max_row_tokens: new tokens of one row; max_row_keys: those and its history. `max_rows` makes
        no difference: rows are packed. Raises BackendUnavailable for a mask function that fails.
        """
        if not self._is_compiled:
            return
        try:
            self._compile(max_row_tokens, max_row_keys)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a user's function may raise anything on this device
            function = self._shape.mask_function
            if function is None:
                raise
            reason = str(error).partition("\n")[0]
            raise BackendUnavailable(
                f"flex cannot compile mask {function.name}: {reason}; it may use torch's operations"
                " on its two arguments and Python's numbers"
            ) from error

    def _compile(self, max_row_tokens: int, max_row_keys: int) -> None:
        for mask in self._masks.values():
            mask.classify(max_row_keys)
        shape = self._shape
        sinks = torch.zeros(shape.num_heads, device=self._device) if shape.has_sinks else None
        for num_queries, num_keys in self._packing.all_sizes(max_row_tokens, max_row_keys):
            q = self._zeros(num_queries, shape.num_heads)
            k, v = (self._zeros(num_keys, shape.num_kv_heads) for _ in range(2))
            self._attend(q, k, v, self._empty_mask(num_queries, num_keys), sinks)

    @torch.inference_mode()
    def plan(self, step: AttentionStep) -> FlexMetadata:
        return FlexMetadata(
            by_mask={
                mask: [self._call(step, mask, pack) for pack in self._packing.packs(step, mask)]
                for mask in self._masks
            }
        )

    @torch.inference_mode()
    def run(
        self,
        q: Tensor,
        k_new: Tensor,
        v_new: Tensor,
        layer: int,
        store: Tensor,
        metadata: FlexMetadata,
        out: Tensor | None = None,
        sinks: Tensor | None = None,
        scales: KvScales | None = None,
    ) -> Tensor:
        """Reads all keys and values from the store, the new ones too."""
        assert scales is None, "a store of e4m3 numbers is not read here"
        shape = self._shape
        assert (sinks is not None) == shape.has_sinks, f"sinks {sinks} for {shape}"
        if out is None:
            out = q.new_empty((len(q), shape.num_heads * shape.head_dim))
        lines = layer_lines(store, layer)
        for call in metadata.by_mask[self._layer_masks[layer]]:
            tokens = slice(call.pack.first_token, call.pack.end_token)
            placed = call.placed.shape
            k, v = (self._gather(lines, plane, placed) for plane in call.lines)
            q_slots = q[tokens].index_select(0, placed.tokens)
            attended = self._attend(q_slots, k, v, call.placed.block_mask, sinks)
            result = out[tokens].view(-1, shape.num_heads, shape.head_dim)
            torch.index_select(attended, 0, placed.slots, out=result)
        return out

    # ---- one call -------------------------------------------------------------------------------

    def _call(self, step: AttentionStep, mask: LayerMask, pack: Pack) -> _Call:
        key = (mask, pack.rows)
        placed = self._placed.pop(key, None)
        if placed is None:
            shape = self._masks[mask].shape(pack.rows, with_tiles=self._is_compiled)
            placed = _Placed(shape=shape, block_mask=self._block_mask(shape))
        self._placed[key] = placed
        if len(self._placed) > _MAX_PLACED:
            self._placed.popitem(last=False)
        return _Call(pack=pack, placed=placed, lines=self._lines(step, pack, placed.shape))

    def _lines(self, step: AttentionStep, pack: Pack, shape: PackShape) -> Tensor:
        lines = key_lines(
            step,
            pack.first_row + shape.key_rows,
            shape.key_positions,
            block_size=self._block_size,
            num_layers=len(self._layer_masks),
        )
        return to_device(lines, self._device)

    def _gather(self, lines: Tensor, indices: Tensor, shape: PackShape) -> Tensor:
        """[key slots, kv_heads, head_dim]; slots that no row uses are in no tile that is read."""
        size = (shape.num_key_slots, *lines.shape[1:])
        # Written out, all scores are computed: what a mask hides must at least be finite.
        make = torch.empty if self._is_compiled else torch.zeros
        gathered = make(size, dtype=lines.dtype, device=lines.device)
        torch.index_select(lines, 0, indices, out=gathered[: len(indices)])
        return gathered

    def _block_mask(self, shape: PackShape) -> flex.BlockMask:
        test = _slot_test(shape.first, shape.last, shape.origin, self._shape.mask_function)
        if shape.tiles is not None:
            return self._tiled_mask(shape.tiles, test, shape.num_query_slots, shape.num_key_slots)
        sizes = (shape.num_query_slots, shape.num_key_slots)  # one tile, all of it tested
        zero = torch.zeros((1, 1, 1, 1), dtype=torch.int32, device=self._device)
        return flex.BlockMask.from_kv_blocks(
            zero[0] + 1, zero, BLOCK_SIZE=sizes, mask_mod=test, seq_lengths=sizes
        )

    def _tiled_mask(
        self, tiles: TileLists, test: _SlotTest, num_queries: int, num_keys: int
    ) -> flex.BlockMask:
        return flex.BlockMask.from_kv_blocks(
            tiles.num_partial[None, None],
            tiles.partial[None, None],
            tiles.num_full[None, None],
            tiles.full[None, None],
            BLOCK_SIZE=self._packing.tile,
            mask_mod=test,
            seq_lengths=(num_queries, num_keys),
        )

    def _empty_mask(self, num_queries: int, num_keys: int) -> flex.BlockMask:
        """Nobody sees anything; as the mask of a pack of this size is made."""
        tile = self._packing.tile
        counts, lists = (
            torch.zeros(size, dtype=torch.int32, device=self._device)
            for size in (num_queries // tile, (num_queries // tile, num_keys // tile))
        )
        zeros = torch.zeros(num_queries, dtype=torch.int32, device=self._device)
        test = _slot_test(zeros, zeros - 1, zeros.clone(), self._shape.mask_function)
        tiles = TileLists(num_partial=counts, partial=lists, num_full=counts, full=lists)
        return self._tiled_mask(tiles, test, num_queries, num_keys)

    def _zeros(self, num_slots: int, num_heads: int) -> Tensor:
        size = (num_slots, num_heads, self._shape.head_dim)
        return torch.zeros(size, dtype=self._dtype, device=self._device)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, block_mask: flex.BlockMask, sinks: Tensor | None
    ) -> Tensor:
        """q: [query slots, heads, head_dim]; k, v: [key slots, kv_heads, head_dim]; like q."""
        # Compiled code is given four dimensions of memory as it is, and tensors of inference mode.
        q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
        given = None if sinks is None else sinks.clone()
        attend = _compiled_attend if self._is_compiled else _attend
        shape = self._shape
        attended: Tensor = attend(q, k, v, block_mask, shape.scale, shape.softcap, given)
        return attended.squeeze(0).transpose(0, 1)


def _set_up_torch() -> None:
    """Two settings of this process, for FlexAttention alone.

    Sizes of calls are constants of compiled code, of which torch keeps 8 versions by default. A
    call that is not compiled is computed as it is: by default torch traces it for every new size.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _MAX_COMPILED)
    if hasattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"):
        flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True


def _slot_test(
    first: Tensor, last: Tensor, origin: Tensor, function: MaskFunction | None
) -> _SlotTest:
    """A `mask_mod` of FlexAttention."""

    def in_range(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= first[query]) & (key <= last[query])

    if function is None:
        return in_range
    allowed = function.test

    def in_range_and_allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        # The function is asked of slots without a token too; then of positions that exist.
        position = (last[query] - origin[query]).clamp(min=0)
        key_position = torch.minimum((key - origin[query]).clamp(min=0), position)
        return in_range(batch, head, query, key) & allowed(position, key_position)

    return in_range_and_allowed


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_mask: flex.BlockMask,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """q: [1, heads, slots, head_dim]; k, v: [1, kv_heads, slots, head_dim]; returns as q."""
    is_grouped = q.shape[1] != k.shape[1]

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert softcap is not None, "asked for"
        return softcap * torch.tanh(score / softcap)

    score_mod = None if softcap is None else capped
    if sinks is None:
        return flex.flex_attention(
            q, k, v, score_mod, block_mask=block_mask, scale=scale, enable_gqa=is_grouped
        )
    out, found = flex.flex_attention(
        q,
        k,
        v,
        score_mod,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=is_grouped,
        return_aux=flex.AuxRequest(lse=True),
    )
    assert found.lse is not None, "it was asked for"
    share = torch.sigmoid(found.lse - sinks[:, None])
    return (out * share.unsqueeze(-1)).to(q.dtype)


# Sizes are constants of the code: `prepare` compiles each that may come.
_compiled_attend = torch.compile(_attend, fullgraph=True, dynamic=False)
