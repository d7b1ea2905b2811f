"""Allocates quantised linear maps and fills them with what is read from the files.

A stacked map (q, k and v, or gate and up) has one matrix of numbers, and its parts' scales under
each other; nothing is quantised anew. Where parts have a scale for all of their rows, or tiles of
more rows than a part fills, a scale stands for fewer rows in memory and is repeated.

The tensors of one published map may stand in two files. They are kept until the last one is read.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.layers.linear import LinearWeight, WeightFormat
from engine.layers.quantized_weight import Scales
from engine.models.llama_weights import StackedTensor
from engine.models.quantization.published_numbers import Numbers, read_numbers
from engine.models.quantization.published_tensors import Axis, Portion, published_tensors
from engine.models.quantization.scheme import (
    FP4_PACKINGS,
    FP8_PACKINGS,
    MXFP4_PACKINGS,
    Packing,
    Quantization,
)
from engine.ranks.rank import Rank
from kernels.quant.int4 import pack_int4
from kernels.quant.sizes import choose_half

_SUFFIX = ".weight"
_MAX_FP8 = 448.0
_DECODED_ROWS = 1024  # at a time: a decoded row needs several times its memory


class TensorCopier(Protocol):
    """See `engine.models.weights`."""

    def copy(self, source: Tensor, destination: Tensor) -> None: ...


class TensorReader(Protocol):
    """Reads a tensor of an open file, or slices of it."""

    def __call__(self, share: tuple[slice, ...] | None) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class _Placed:
    """A part's rows of the stacked tensors."""

    module: str
    rows: slice
    scale_rows: slice
    portion: Portion
    expert: int  # 0 where there are none


class PublishedStack(ABC):
    """A stacked map that is published quantised: what is read for `destinations` fills it."""

    def __init__(
        self,
        stacked: StackedTensor,
        quantization: Quantization,
        *,
        dtype: torch.dtype,
        device: torch.device,
        rank: Rank,
    ) -> None:
        """dtype: of the inputs and outputs."""
        mine = stacked.of_rank(rank)
        assert mine.num_columns is not None
        self.quantization = quantization
        self.device = device
        self.is_filled = False  # with random numbers
        self._num_experts = mine.num_experts
        self._num_columns = mine.num_columns
        self._num_rows = sum(mine.num_rows.values())
        self._tile_rows = _common_rows(quantization, tuple(mine.num_rows.values()))
        self._parts = _place(stacked, mine, self._tile_rows, rank)
        self._allocate(dtype)

    @abstractmethod
    def _allocate(self, dtype: torch.dtype) -> None:
        """Make the tensors that `place` fills."""

    def destinations(self) -> dict[str, "PublishedPart"]:
        """Published name -> where what is read under that name goes."""
        found = {}
        for part in self._parts:
            slices = part.portion.slices(self.quantization, part.module)
            collected = _Collected(self, part, frozenset(slices))
            for suffix, share in slices.items():
                found[f"{part.module}.{suffix}"] = PublishedPart(collected, suffix, share)
        return found

    @abstractmethod
    def weight(self, bias: Tensor | None) -> LinearWeight: ...

    @abstractmethod
    def rows_as_published(self, part: _Placed, suffix: str) -> Tensor | None:
        """Where a tensor is copied to as it is; None = it has to be converted first."""

    @abstractmethod
    def place(self, part: _Placed, found: Numbers) -> None:
        """Write what a part's numbers stand for, or they and their scales, to its rows."""

    @abstractmethod
    def fill_randomly(self, largest: float, generator: torch.Generator) -> None:
        """All weights, between -largest and largest and of all sizes that the format has."""


class QuantizedStack(PublishedStack):
    """The numbers and scales of a map that is computed with as it is quantised."""

    def _allocate(self, dtype: torch.dtype) -> None:
        quantization, device = self.quantization, self.device
        num_rows, num_columns = self._num_rows, self._num_columns
        self._order_of: dict[int, str] = {}  # expert -> the module that its `order` is of
        columns = self._parts[0].portion.scale_columns(quantization)
        num_scales = (-(-num_rows // self._tile_rows), -(-num_columns // columns))
        self._format = _format_of(quantization)
        self._is_fp8 = self._format is WeightFormat.FP8
        self._half = 0 if self._is_fp8 else choose_half(num_columns, columns)
        width = num_columns if self._is_fp8 else num_columns // 2
        data_dtype = torch.float8_e4m3fn if self._is_fp8 else torch.uint8
        self.data = torch.empty((num_rows, width), dtype=data_dtype, device=device)
        has_zeros = quantization.has_zero_points
        has_order = "g_idx" in "".join(published_tensors(quantization))
        is_e2m1 = self._format is WeightFormat.FP4
        orders = torch.arange(num_columns, device=device)
        if self._num_experts is not None:
            orders = orders.repeat(self._num_experts, 1)
        self.scales = Scales(
            values=torch.empty(num_scales, dtype=_scale_dtype(quantization), device=device),
            rows=self._tile_rows,
            columns=columns,
            dtype=dtype,
            quantizes_inputs=quantization.quantizes_activations,
            zeros=torch.empty(num_scales, dtype=torch.uint8, device=device) if has_zeros else None,
            half=self._half,
            is_e2m1=is_e2m1,
            factors=torch.empty(num_rows, device=device) if _has_factors(quantization) else None,
            order=orders if has_order else None,
        )

    def weight(self, bias: Tensor | None) -> LinearWeight:
        return LinearWeight(self.data, bias, self._format, self.scales)

    def rows_as_published(self, part: _Placed, suffix: str) -> Tensor | None:
        if self.quantization.packing is Packing.FP8 and suffix == "weight":
            return self.data[part.rows]
        return None

    def fill_randomly(self, largest: float, generator: torch.Generator) -> None:
        self.is_filled = True
        shape, device = self.data.shape, self.data.device
        if self._is_fp8:
            for rows in torch.split(self.data, 1024):
                numbers = torch.empty(rows.shape, device=device)
                rows.copy_(numbers.uniform_(-448, 448, generator=generator))
            self.scales.values.uniform_(0.5 * largest / 448, largest / 448, generator=generator)
            return
        drawn = torch.randint(256, shape, generator=generator, dtype=torch.uint8, device=device)
        self.data.copy_(drawn)
        if self.scales.is_e2m1:
            self._fill_scales_of_e2m1(largest, generator)
            return
        self.scales.values.uniform_(0.06 * largest, 0.12 * largest, generator=generator)
        self.scales.values.copy_(self.scales.values.to(torch.bfloat16))
        if self.scales.zeros is not None:
            self.scales.zeros.fill_(8)

    def _fill_scales_of_e2m1(self, largest: float, generator: torch.Generator) -> None:
        """Numbers are at most 6."""
        values, factors = self.scales.values, self.scales.factors
        drawn = torch.empty(values.shape, device=values.device)
        if factors is None:  # the power of two below
            drawn.fill_(2.0 ** math.floor(math.log2(largest / 6)))
        else:
            factors.fill_(largest / (6 * _MAX_FP8))
            drawn.uniform_(0.5 * _MAX_FP8, _MAX_FP8, generator=generator)
        values.copy_(drawn)

    def place(self, part: _Placed, found: Numbers) -> None:
        numbers, scales, zeros = found.numbers, found.scales, found.zeros
        if numbers is not None:
            if found.groups is not None:
                numbers = numbers[:, self._take_order(part, found.groups)]
            self.data[part.rows].copy_(numbers if self._is_fp8 else pack_int4(numbers, self._half))
        num_rows = part.rows.stop - part.rows.start
        tile_rows = self.quantization.tile_rows or num_rows
        if tile_rows != self._tile_rows:
            scales = scales.repeat_interleave(tile_rows, dim=0)[: num_rows : self._tile_rows]
        if self.scales.is_e2m1:
            scales = self._of_columns(part, scales)
        self.scales.values[part.scale_rows].copy_(scales)
        if self.scales.factors is not None:
            assert found.factor is not None, f"{part.module} has no scale of all of it"
            self.scales.factors[part.rows] = found.factor
        if self.scales.zeros is not None:
            assert zeros is not None, f"{part.module} has no zero points"
            self.scales.zeros[part.scale_rows].copy_(zeros)

    def _of_columns(self, part: _Placed, scales: Tensor) -> Tensor:
        """Scales of blocks as those of `Portion.scale_columns`, of the rank's inputs."""
        per, columns = self.quantization.tile_columns, self.scales.columns
        assert per is not None, "4 bits of float have groups"
        repeated = scales.view(torch.uint8).repeat_interleave(per // columns, dim=1)
        first = part.portion.parts[Axis.IN].start % per // columns
        mine = repeated[:, first : first + self.scales.values.shape[1]]
        return mine.contiguous().view(scales.dtype)

    def _take_order(self, part: _Placed, groups: Tensor) -> Tensor:
        """The order of inputs in which groups are adjacent. Raises ConfigError if there is none."""
        columns, num_columns = self.scales.columns, self._num_columns
        groups = groups.to(torch.int64)
        # Of one group of all inputs every rank has a part.
        has_one = self.quantization.tile_columns is None
        first = 0 if has_one else part.portion.parts[Axis.IN].start // columns
        order = torch.argsort(groups, stable=True)
        expected = first + torch.arange(num_columns, device=groups.device) // columns
        if not torch.equal(groups[order], expected):
            raise ConfigError(
                f"{part.module}: the groups of its inputs (g_idx) do not have {columns} each, or"
                " are not those of this rank; use weights without activation order"
            )
        assert self.scales.order is not None
        theirs = self.scales.order.view(-1, num_columns)[part.expert]
        first_of = self._order_of.setdefault(part.expert, part.module)
        if first_of == part.module:
            theirs.copy_(order)
        elif not torch.equal(theirs, order):
            raise ConfigError(
                f"{first_of} and {part.module} order their inputs differently (g_idx), but"
                " are computed together; use weights without activation order"
            )
        return order


class DecodedStack(PublishedStack):
    """A map that is made a matrix, once: see `is_made_matrix`."""

    def _allocate(self, dtype: torch.dtype) -> None:
        shape = self._num_rows, self._num_columns
        self._matrix = torch.empty(shape, dtype=dtype, device=self.device)

    def weight(self, bias: Tensor | None) -> LinearWeight:
        return LinearWeight(self._matrix, bias)

    def rows_as_published(self, part: _Placed, suffix: str) -> None:
        return None

    def fill_randomly(self, largest: float, generator: torch.Generator) -> None:
        self.is_filled = True
        self._matrix.uniform_(-largest, largest, generator=generator)

    def place(self, part: _Placed, found: Numbers) -> None:
        if self.quantization.packing is Packing.BITS_AND_BYTES:
            found = self._share(part, found)
        assert found.numbers is not None, "numbers are decoded, not copied as they are"
        groups = self._groups(part, found)
        zeros = self.quantization.middle if found.zeros is None else found.zeros
        matrix = self._matrix[part.rows]
        for start in range(0, len(matrix), _DECODED_ROWS):
            rows = slice(start, start + _DECODED_ROWS)
            numbers = found.numbers[rows].float()
            numbers -= zeros if isinstance(zeros, int) else zeros[rows].float()[:, groups]
            scales = found.scales if len(found.scales) == 1 else found.scales[rows]
            matrix[rows].copy_(numbers.mul_(scales.float()[:, groups]))

    def _share(self, part: _Placed, found: Numbers) -> Numbers:
        """The rank's part of a map of which all was read. Raises ConfigError for another size."""
        portion = part.portion
        rows, columns = portion.parts[Axis.OUT], portion.parts[Axis.IN]
        per = self.quantization.tile_columns
        assert found.numbers is not None, "a table's places are decoded"
        assert per is not None, "a scale is of a block"
        sizes = portion.sizes[Axis.OUT], portion.sizes[Axis.IN]
        if found.numbers.shape != sizes or columns.start % per:
            raise ConfigError(
                f"{part.module}: a quant_state of {list(found.numbers.shape)} and ranks that begin"
                f" at input {columns.start} do not go with {list(sizes)} in blocks of {per}; use"
                " fewer ranks, or unquantized weights"
            )
        scales = found.scales[rows, columns.start // per : -(-columns.stop // per)]
        return Numbers(numbers=found.numbers[rows, columns], scales=scales)

    def _groups(self, part: _Placed, found: Numbers) -> Tensor:
        """[in] int64: the column of each input's scale. Raises ConfigError if there is none."""
        per, portion = self.quantization.tile_columns, part.portion
        columns = torch.arange(self._num_columns, device=self.device)
        if per is None:
            return torch.zeros_like(columns)
        if found.groups is None:
            return columns // per
        # A rank that has inputs of any group reads the scales of all.
        has_all = self.quantization.must_have_order
        groups = found.groups.long() - (0 if has_all else portion.parts[Axis.IN].start // per)
        if not bool(((groups >= 0) & (groups < found.scales.shape[1])).all()):
            raise ConfigError(
                f"{part.module}: the groups of its inputs (g_idx) are not those of this rank; use"
                " weights without activation order"
            )
        return groups


def _format_of(quantization: Quantization) -> WeightFormat:
    if quantization.packing in FP8_PACKINGS:
        return WeightFormat.FP8
    return WeightFormat.FP4 if quantization.packing in FP4_PACKINGS else WeightFormat.INT4


def _scale_dtype(quantization: Quantization) -> torch.dtype:
    """A scale of a few numbers is held as it is published: it is a byte of them."""
    if quantization.packing in MXFP4_PACKINGS:
        return torch.float8_e8m0fnu
    return torch.float8_e4m3fn if _has_factors(quantization) else torch.float32


def _has_factors(quantization: Quantization) -> bool:
    return quantization.packing in (Packing.NVFP4, Packing.MODELOPT_NVFP4)


def _common_rows(quantization: Quantization, parts: tuple[int, ...]) -> int:
    """The rows of a tile of scales that every part consists of."""
    rows = 1 if quantization.tile_rows is None else quantization.tile_rows
    return rows if len(parts) == 1 else math.gcd(rows, *parts)


def _place(
    stacked: StackedTensor, mine: StackedTensor, tile_rows: int, rank: Rank
) -> list[_Placed]:
    placed, start = [], 0
    parts_of_one = len(mine.num_rows) // (mine.num_experts or 1)
    for index, (name, num_rows) in enumerate(mine.num_rows.items()):
        end = start + num_rows
        placed.append(
            _Placed(
                module=name.removesuffix(_SUFFIX),
                rows=slice(start, end),
                scale_rows=slice(start // tile_rows, -(-end // tile_rows)),
                portion=Portion.of(stacked, name, rank),
                expert=index // parts_of_one,
            )
        )
        start = end
    return placed


class _Collected:
    """The tensors of one published map that are read, until all are there."""

    def __init__(self, stack: PublishedStack, part: _Placed, suffixes: frozenset[str]) -> None:
        self._stack = stack
        self._part = part
        self._awaited = set(suffixes)
        self._tensors: dict[str, Tensor] = {}

    def leave_out(self, suffix: str) -> None:
        """No file has this tensor."""
        self._awaited.discard(suffix)
        self._place_if_complete()

    def add(self, suffix: str, tensor: Tensor, copier: TensorCopier) -> None:
        rows = self._stack.rows_as_published(self._part, suffix)
        if rows is not None:
            copier.copy(tensor, rows)
        else:
            # The file is closed before the other tensors may have come.
            self._tensors[suffix] = tensor.to(self._stack.device, copy=True)
        self._awaited.discard(suffix)
        self._place_if_complete()

    def fill_randomly(self, largest: float, generator: torch.Generator) -> None:
        if not self._stack.is_filled:
            self._stack.fill_randomly(largest, generator)

    def _place_if_complete(self) -> None:
        if self._awaited or not self._tensors:
            return
        tensors, self._tensors = self._tensors, {}
        self._stack.place(self._part, read_numbers(self._stack.quantization, tensors))


@dataclass(frozen=True, slots=True)
class PublishedPart:
    """Takes one published tensor of a quantised map."""

    _collected: _Collected
    _suffix: str
    share: tuple[slice, ...]

    def take(self, read: TensorReader, copier: TensorCopier) -> None:
        self._collected.add(self._suffix, read(self.share or None), copier)

    def leave_out(self) -> None:
        self._collected.leave_out(self._suffix)

    def fill_randomly(self, largest: float, generator: torch.Generator) -> None:
        """Fill the stacked map that this is a part of; once for all of its parts."""
        self._collected.fill_randomly(largest, generator)
