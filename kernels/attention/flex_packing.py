"""Packs the rows of a step into few calls of FlexAttention, and finds the tiles that each needs.

A call has slots for queries and slots for keys, both in tiles. A row takes whole tiles, and its
tokens lie in them as in its sequence: slot and position differ by a multiple of the tile.

    queries of a row   | . . p p+1 ... |  ...  | p+n-1 . . . |        p = tokens computed before
    keys of a row      | f ...         |  ...  | p+n-1 . . . |        f = first tile that p may see

So which tiles of keys a tile of queries needs depends on positions alone: `PackedMask` classifies
the tiles of one sequence once, and every pack copies its part. Knows neither store nor attention.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.attention.gathering import to_device
from kernels.attention.masks import LayerMask
from kernels.attention.protocol import AttentionStep

_EMPTY, _PARTIAL, _FULL = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSizes:
    """Numbers of slots that a call may have: `first`, times `factor`, times `factor` again, ..."""

    first: int
    factor: int
    # More than this only for a single row.
    most: int

    def __call__(self, num_slots: int) -> int:
        """The smallest size for so many slots."""
        size = self.first
        while size < num_slots:
            size *= self.factor
        return size


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How rows become packs."""

    # Tokens of a tile, of queries and of keys.
    tile: int
    # None = as many slots as tiles need, and one row in each pack.
    query_sizes: SlotSizes | None = None
    key_sizes: SlotSizes | None = None

    def packs(self, step: AttentionStep, mask: LayerMask) -> "Iterator[Pack]":
        """The step's rows, in order, as many in each pack as fit."""
        start = token = 0
        while start < step.num_rows:
            rows: list[PackedRow] = []
            for index in range(start, step.num_rows):
                row = PackedRow.of(
                    int(step.num_computed_tokens[index]),
                    int(step.num_new_tokens[index]),
                    mask,
                    self.tile,
                )
                if rows and not self._fits([*rows, row]):
                    break
                rows.append(row)
            end_token = token + sum(row.num_new for row in rows)
            yield Pack(rows=tuple(rows), first_row=start, first_token=token, end_token=end_token)
            start, token = start + len(rows), end_token

    def _fits(self, rows: "list[PackedRow]") -> bool:
        if self.query_sizes is None or self.key_sizes is None:
            return False
        num_queries = self.tile * sum(row.num_query_tiles for row in rows)
        num_keys = self.tile * sum(row.num_key_tiles for row in rows)
        return num_queries <= self.query_sizes.most and num_keys <= self.key_sizes.most

    def sizes(self, rows: "tuple[PackedRow, ...]") -> tuple[int, int]:
        """Slots of queries and of keys for a pack of `rows`."""
        num_queries = self.tile * sum(row.num_query_tiles for row in rows)
        num_keys = self.tile * sum(row.num_key_tiles for row in rows)
        if self.query_sizes is None or self.key_sizes is None:
            return num_queries, num_keys
        return self.query_sizes(num_queries), self.key_sizes(num_keys)

    def all_sizes(self, max_row_tokens: int, max_row_keys: int) -> list[tuple[int, int]]:
        """Every size that a pack can have, of rows with at most so many new tokens and keys."""
        assert self.query_sizes is not None, "without sizes they are not limited"
        assert self.key_sizes is not None, "likewise"
        lists = []
        for sizes, max_tokens in (
            (self.query_sizes, max_row_tokens),
            (self.key_sizes, max_row_keys),
        ):
            # A row begins and ends anywhere in its first and last tile.
            last = sizes(max(sizes.most, max_tokens + 2 * self.tile))
            size, found = sizes.first, []
            while size <= last:
                found.append(size)
                size *= sizes.factor
            lists.append(found)
        return [(num_queries, num_keys) for num_queries in lists[0] for num_keys in lists[1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """A row's tokens, and the tiles of its sequence that it takes part with."""

    num_computed: int
    num_new: int
    first_query_tile: int
    num_query_tiles: int
    first_key_tile: int
    num_key_tiles: int

    @classmethod
    def of(cls, num_computed: int, num_new: int, mask: LayerMask, tile: int) -> "PackedRow":
        first_key = int(mask.first_keys(np.array([num_computed]))[0])
        end_tile = -(-(num_computed + num_new) // tile)
        return cls(
            num_computed=num_computed,
            num_new=num_new,
            first_query_tile=num_computed // tile,
            num_query_tiles=end_tile - num_computed // tile,
            first_key_tile=first_key // tile,
            num_key_tiles=end_tile - first_key // tile,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """Rows from `first_row` of a step on, with tokens [first_token, end_token) of it."""

    rows: tuple[PackedRow, ...]
    first_row: int
    first_token: int
    end_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TileLists:
    """Of each tile of queries, the tiles of keys that it sees in part, and those it sees whole.

    int32 [query tiles] and [query tiles, key tiles]; what is behind a list's end is not read.
    """

    num_partial: Tensor
    partial: Tensor
    num_full: Tensor
    full: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PackShape:
    """What packs of equal rows share: everything but the blocks that hold their keys."""

    num_query_slots: int
    num_key_slots: int
    # int32 [query slots], on the device: the first and the last key slot that may be seen (the
    # last holds the query's own key), and the key slot of position 0, which may be negative. A slot
    # without a token sees nothing: its last comes before its first.
    first: Tensor
    last: Tensor
    origin: Tensor
    # int64, on the device: the pack's token in each query slot (0 where there is none), [slots],
    # and the slot of each token, [tokens].
    tokens: Tensor
    slots: Tensor
    # int64 [used key slots], on the host: the pack's row, and the position of its sequence. Slots
    # behind a row's last token repeat it.
    key_rows: NDArray[np.int64]
    key_positions: NDArray[np.int64]
    tiles: TileLists | None


class PackedMask:
    """One layer mask over packs; knows the classes of a sequence's tiles."""

    def __init__(self, mask: LayerMask, packing: Packing, device: torch.device) -> None:
        self._mask = mask
        self._packing = packing
        self._device = device
        # [query tiles, key tiles] of one sequence from its start
        self._classes = np.zeros((0, 0), dtype=np.uint8)

    def shape(self, rows: tuple[PackedRow, ...], *, with_tiles: bool) -> PackShape:
        """Of a pack of `rows`."""
        tile = self._packing.tile
        num_query_slots, num_key_slots = self._packing.sizes(rows)
        first, last, origin = np.zeros((3, num_query_slots), dtype=np.int32)
        last.fill(-1)
        tokens = np.zeros(num_query_slots, dtype=np.int64)
        slots, key_rows, key_positions = [], [], []
        query_tile = key_tile = token = 0
        for index, row in enumerate(rows):
            positions = np.arange(row.num_computed, row.num_computed + row.num_new)
            row_slots = positions + (query_tile - row.first_query_tile) * tile
            row_origin = (key_tile - row.first_key_tile) * tile
            first[row_slots] = self._mask.first_keys(positions) + row_origin
            last[row_slots] = positions + row_origin
            origin[row_slots] = row_origin
            tokens[row_slots] = np.arange(token, token + row.num_new)
            slots.append(row_slots)
            first_key = row.first_key_tile * tile
            keys = np.arange(first_key, first_key + row.num_key_tiles * tile)
            key_rows.append(np.full(len(keys), index))
            key_positions.append(np.minimum(keys, positions[-1]))
            query_tile += row.num_query_tiles
            key_tile += row.num_key_tiles
            token += row.num_new
        return PackShape(
            num_query_slots=num_query_slots,
            num_key_slots=num_key_slots,
            first=to_device(first, self._device),
            last=to_device(last, self._device),
            origin=to_device(origin, self._device),
            tokens=to_device(tokens, self._device),
            slots=to_device(np.concatenate(slots), self._device),
            key_rows=np.concatenate(key_rows),
            key_positions=np.concatenate(key_positions),
            tiles=self._tiles(rows, num_query_slots, num_key_slots) if with_tiles else None,
        )

    # ---- tiles ----------------------------------------------------------------------------------

    def classify(self, num_positions: int) -> None:
        """Find the classes of all tiles of a sequence of so many positions, if not known yet.

        Waits for the device if the mask has a function.
        """
        tile = self._packing.tile
        num_tiles = -(-num_positions // tile)
        if num_tiles <= len(self._classes):
            return
        first_query = np.arange(num_tiles) * tile
        low = self._mask.first_keys(first_query)[:, None]
        high = self._mask.first_keys(first_query + tile - 1)[:, None]
        first_key = first_query[None, :]
        last_key, query = first_key + tile - 1, first_query[:, None]
        is_seen = (last_key >= low) & (first_key <= query + tile - 1)
        is_full = (first_key >= high) & (last_key <= query)
        if self._mask.function is not None:
            some, all_ = self._function_classes(num_tiles, num_positions)
            is_seen, is_full = is_seen & some, is_full & all_
        self._classes = np.where(is_full, _FULL, np.where(is_seen, _PARTIAL, _EMPTY)).astype(
            np.uint8
        )

    def _function_classes(
        self, num_tiles: int, num_positions: int
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Whether the mask's function lets some, or all, of a tile be seen; [tiles, tiles] each."""
        function, tile = self._mask.function, self._packing.tile
        assert function is not None, "only of a mask with a function"
        positions = torch.arange(num_tiles * tile, device=self._device).clamp(max=num_positions - 1)
        found = torch.zeros((2, num_tiles, num_tiles), dtype=torch.bool, device=self._device)
        for index in range(num_tiles):
            queries = positions[index * tile : (index + 1) * tile]
            keys = positions[: (index + 1) * tile]  # no query sees later ones
            allowed = function.test(queries[:, None], keys[None, :]).view(tile, index + 1, tile)
            found[0, index, : index + 1] = allowed.any(2).any(0)
            found[1, index, : index + 1] = allowed.all(2).all(0)
        some, all_ = found.cpu().numpy()
        return some, all_

    def _tiles(
        self, rows: tuple[PackedRow, ...], num_query_slots: int, num_key_slots: int
    ) -> TileLists:
        tile = self._packing.tile
        longest = max(row.num_computed + row.num_new for row in rows)
        if -(-longest // tile) > len(self._classes):
            self.classify(2 * longest)
        classes = np.zeros((num_query_slots // tile, num_key_slots // tile), dtype=np.uint8)
        query_tile = key_tile = 0
        for row in rows:
            queries = slice(row.first_query_tile, row.first_query_tile + row.num_query_tiles)
            keys = slice(row.first_key_tile, row.first_key_tile + row.num_key_tiles)
            classes[
                query_tile : query_tile + row.num_query_tiles,
                key_tile : key_tile + row.num_key_tiles,
            ] = self._classes[queries, keys]
            query_tile += row.num_query_tiles
            key_tile += row.num_key_tiles
        num_partial, partial = self._listed(classes == _PARTIAL)
        num_full, full = self._listed(classes == _FULL)
        return TileLists(num_partial=num_partial, partial=partial, num_full=num_full, full=full)

    def _listed(self, is_listed: NDArray[np.bool_]) -> tuple[Tensor, Tensor]:
        """The columns that are set in each row, first in `lists`, and how many they are."""
        counts = is_listed.sum(axis=1, dtype=np.int32)
        rows, columns = np.nonzero(is_listed)
        places = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        lists = np.zeros(is_listed.shape, dtype=np.int32)
        lists[rows, places] = columns
        return to_device(counts, self._device), to_device(lists, self._device)
