"""Which tensors stand in the files of a model, quantised or not: names, shapes, dtypes, no torch.

`llama_weights` defines a model by the tensors it computes with. Where a linear map is quantised,
its published weight is several tensors, each of which covers outputs and inputs in its own units:

    FP8              weight [out, in]             scale [out / rows, in / columns], [out, 1] or []
    INT8             weight [out, in]             weight_scale [out, in / g], [out, 1] or []
    COMPRESSED_INT   weight_packed [out, in / 8]  weight_scale [out, in / g] or []
                     weight_zero_point [out / 8, in / g]            weight_g_idx [in]
    AWQ              qweight [in, out / 8]        scales [in / g, out]   qzeros [in / g, out / 8]
    GPTQ             qweight [in / 8, out]        scales [in / g, out]   qzeros [in / g, out / 8]
                     g_idx [in]
    MXFP4            weight_packed [out, in / 2]  weight_scale [out, in / 32]
    QUARK_MXFP4      weight [out, in / 2]         weight_scale [out, in / 32]
    NVFP4            weight_packed [out, in / 2]  weight_scale [out, in / 16]
                     weight_global_scale [1]
    MODELOPT_NVFP4   weight [out, in / 2]         weight_scale [out, in / 16]
                     weight_scale_2 []
    BITS_AND_BYTES   weight [out in / 2]          weight.absmax [out in / 64]
                     weight.quant_map [16]        weight.quant_state... [JSON]
                     weight.nested_absmax [out in / 64 / 256]
                     weight.nested_quant_map [256]

A word has eight numbers of 4 bits, or four of 8.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from engine.errors import ConfigError
from engine.models.llama_weights import Split, StackedTensor, layer_tensors, outer_tensors
from engine.models.quantization.scheme import (
    BITS_AND_BYTES_GROUP,
    FP4_PACKINGS,
    FP8_PACKINGS,
    MXFP4_PACKINGS,
    Packing,
    Quantization,
)
from engine.models.sources import DENSE_DTYPES
from engine.models.spec import ModelSpec
from engine.ranks.rank import SIZE_KEY, WHOLE_MODEL, Rank
from kernels.quant.sizes import reads_sizes

_WORD_BITS = 32
ANY_LENGTH = -1
_INT4_COLUMNS = 16  # what kernels of 4-bit numbers read at once
_SUFFIX = ".weight"
_PER_BYTE = 2
_SCALE_BYTES = _FLOAT32_BYTES = 4
# Tensors beside a quantised model's weights that are not used. Scales of activations: ours are
# computed from the activations themselves. Scales of K and V are read by `kv_scales`.
_UNUSED = re.compile(
    r"\.(input_scale|input_zero_point|activation_scale|input_global_scale|weight_shape"
    r"|output_scale)$"
)
_KV_SCALE = re.compile(r"\.self_attn\.([a-z_]+\.)?(q|k|v|kv)_scale$")  # of unquantised models too


class Axis(Enum):
    OUT = "outputs"
    IN = "inputs"


@dataclass(frozen=True, slots=True)
class Cut:
    """A dimension of a published tensor: one entry for each `per` outputs or inputs; None: all."""

    axis: Axis
    per: int | None = 1
    # Two ranks may hold the entry of a block that is cut, each for its part of it.
    may_be_cut: bool = False

    def length(self, size: int) -> int:
        return 1 if self.per is None else -(-size // self.per)

    def share(self, part: slice, size: int, what: str, way_out: str) -> slice:
        """The entries for `part` of `size`. Raises ConfigError where an entry would be cut."""
        if self.per is None or (part.start, part.stop) == (0, size):
            return slice(0, self.length(size))
        if self.may_be_cut:
            return slice(part.start // self.per, -(-part.stop // self.per))
        if part.start % self.per or (part.stop % self.per and part.stop != size):
            raise ConfigError(
                f"{what}: {size} {self.axis.value} in blocks of {self.per} cannot be shared in"
                f" parts of {part.stop - part.start}; {way_out}"
            )
        return slice(part.start // self.per, -(-part.stop // self.per))


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedTensor:
    """One of the tensors of a quantised linear map."""

    dtypes: tuple[str, ...]
    cuts: tuple[Cut, ...] = ()  # none: a single number
    is_optional: bool = False
    # Of bitsandbytes, in one dimension and not to be cut: so many entries (ANY_LENGTH: any number
    # of them), or one for so many weights.
    length: int | None = None
    weights_each: int | None = None

    def shape(self, num_rows: int, num_columns: int) -> tuple[int, ...]:
        if self.length is not None:
            return (self.length,)
        if self.weights_each is not None:
            return (-(-num_rows * num_columns // self.weights_each),)
        sizes = {Axis.OUT: num_rows, Axis.IN: num_columns}
        return tuple(cut.length(sizes[cut.axis]) for cut in self.cuts)

    def share(
        self, parts: Mapping[Axis, slice], sizes: Mapping[Axis, int], what: str, way_out: str
    ) -> list[slice]:
        """Slices of the outputs and inputs `parts`; none for a single number."""
        return [cut.share(parts[cut.axis], sizes[cut.axis], what, way_out) for cut in self.cuts]


@dataclass(frozen=True, slots=True, kw_only=True)
class NeededTensor:
    """What a file has to hold under a name."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = DENSE_DTYPES
    is_optional: bool = False

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor has this shape; dimensions of 1 at the end do not count."""
        if self.shape == (ANY_LENGTH,):
            return len(shape) == 1
        return _without_ones(shape) == _without_ones(self.shape)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    length = len(shape)
    while length and shape[length - 1] == 1:
        length -= 1
    return shape[:length]


def published_tensors(quantization: Quantization) -> dict[str, PublishedTensor]:
    """Suffix -> tensor, of every quantised linear map."""
    match quantization.packing:
        case Packing.FP8 | Packing.ONLINE_FP8 | Packing.INT8:
            return _tensors_of_bytes(quantization)
        case Packing.COMPRESSED_INT | Packing.AWQ | Packing.GPTQ:
            return _tensors_of_words(quantization)
        case Packing.MXFP4 | Packing.QUARK_MXFP4 | Packing.NVFP4 | Packing.MODELOPT_NVFP4:
            return _tensors_of_fp4(quantization)
        case Packing.BITS_AND_BYTES:
            return _tensors_of_table(quantization)


def _tensors_of_bytes(quantization: Quantization) -> dict[str, PublishedTensor]:
    """A number a weight, in FP8 or INT8."""
    one_out, one_in = Cut(Axis.OUT), Cut(Axis.IN)
    if quantization.packing is Packing.ONLINE_FP8:
        return {"weight": _floats((one_out, one_in))}
    number = "I8" if quantization.packing is Packing.INT8 else "F8_E4M3"
    # Exponents in bytes also where scale_fmt is ue8m0.
    scale_dtypes = ("F8_E8M0", *(("U8",) if quantization.has_exponents else DENSE_DTYPES))
    tile = (Cut(Axis.OUT, quantization.tile_rows), Cut(Axis.IN, quantization.tile_columns))
    return {
        "weight": PublishedTensor(dtypes=(number,), cuts=(one_out, one_in)),
        quantization.scale_name: PublishedTensor(
            dtypes=scale_dtypes, cuts=() if quantization.tile_rows is None else tile
        ),
    }


def _tensors_of_words(quantization: Quantization) -> dict[str, PublishedTensor]:
    """Integers, packed in words of 32 bits."""
    per_word = _WORD_BITS // quantization.bits
    packed_out, packed_in = Cut(Axis.OUT, per_word), Cut(Axis.IN, per_word)
    one_out, one_in = Cut(Axis.OUT), Cut(Axis.IN)
    group = Cut(Axis.IN, quantization.tile_columns)
    if quantization.packing is Packing.AWQ:
        return {
            "qweight": _words((one_in, packed_out)),
            "scales": _floats((group, one_out)),
            "qzeros": _words((group, packed_out)),
        }
    order = PublishedTensor(
        dtypes=("I32", "I64"), cuts=(one_in,), is_optional=not quantization.must_have_order
    )
    if quantization.packing is Packing.GPTQ:
        return {
            "qweight": _words((packed_in, one_out)),
            "scales": _floats((group, one_out)),
            "qzeros": _words((group, packed_out)),
            "g_idx": order,
        }
    tensors = {
        "weight_packed": _words((one_out, packed_in)),
        "weight_scale": _floats(() if quantization.tile_rows is None else (one_out, group)),
    }
    if quantization.has_zero_points:
        tensors["weight_zero_point"] = _words((packed_out, group))
    return tensors | {"weight_g_idx": order}


def _tensors_of_table(quantization: Quantization) -> dict[str, PublishedTensor]:
    """Places in a table of 16 numbers, two in a byte, in one dimension; scales of blocks."""
    block, nested = BITS_AND_BYTES_GROUP, BITS_AND_BYTES_GROUP * 256
    has_nested = quantization.has_nested_scales
    tensors = {
        "weight": PublishedTensor(dtypes=("U8",), weights_each=_PER_BYTE),
        "weight.absmax": PublishedTensor(
            dtypes=("U8",) if has_nested else ("F32",), weights_each=block
        ),
        "weight.quant_map": PublishedTensor(dtypes=("F32",), length=16),
        state_name(quantization): PublishedTensor(dtypes=("U8",), length=ANY_LENGTH),
    }
    if has_nested:
        tensors["weight.nested_absmax"] = PublishedTensor(dtypes=("F32",), weights_each=nested)
        tensors["weight.nested_quant_map"] = PublishedTensor(dtypes=("F32",), length=256)
    return tensors


def state_name(quantization: Quantization) -> str:
    """The tensor whose bytes are JSON: sizes, and what is added to nested scales."""
    return f"weight.quant_state.bitsandbytes__{quantization.table_name}"


def _tensors_of_fp4(quantization: Quantization) -> dict[str, PublishedTensor]:
    """Pairs of numbers in bytes; scales of groups, which two ranks may share."""
    one_out, group = Cut(Axis.OUT), Cut(Axis.IN, quantization.tile_columns, may_be_cut=True)
    pairs = PublishedTensor(dtypes=("U8",), cuts=(one_out, Cut(Axis.IN, _PER_BYTE)))
    is_mx = quantization.packing in MXFP4_PACKINGS
    dtypes = ("U8", "F8_E8M0") if is_mx else ("F8_E4M3",)
    scales = PublishedTensor(dtypes=dtypes, cuts=(one_out, group))
    match quantization.packing:
        case Packing.MXFP4:
            return {"weight_packed": pairs, "weight_scale": scales}
        case Packing.QUARK_MXFP4:
            return {"weight": pairs, "weight_scale": scales}
        case Packing.NVFP4:
            names = ("weight_packed", "weight_scale", "weight_global_scale")
        case _:
            names = ("weight", "weight_scale", "weight_scale_2")
    return dict(zip(names, (pairs, scales, _floats(())), strict=True))


def _floats(cuts: tuple[Cut, ...]) -> PublishedTensor:
    return PublishedTensor(dtypes=DENSE_DTYPES, cuts=cuts)


def _words(cuts: tuple[Cut, ...]) -> PublishedTensor:
    return PublishedTensor(dtypes=("I32",), cuts=cuts)


@dataclass(frozen=True, slots=True)
class Portion:
    """What a rank has of one published linear map."""

    parts: dict[Axis, slice]
    sizes: Mapping[Axis, int]  # of the whole map
    is_of_expert: bool

    @classmethod
    def of(cls, stacked: StackedTensor, name: str, rank: Rank) -> "Portion":
        num_rows, num_columns = stacked.num_rows[name], stacked.num_columns
        assert num_columns is not None, f"{name} is a vector"
        whole = (slice(0, num_rows), slice(0, num_columns))
        rows, columns = stacked.share_of(name, rank) or whole
        return cls(
            {Axis.OUT: rows, Axis.IN: columns},
            {Axis.OUT: num_rows, Axis.IN: num_columns},
            stacked.num_experts is not None,
        )

    def scale_columns(self, quantization: Quantization) -> int:
        """The inputs that share a scale in memory: fewer than published where a block is cut."""
        part = self.parts[Axis.IN]
        num_columns: int = part.stop - part.start
        if quantization.packing not in FP4_PACKINGS:
            return min(quantization.tile_columns or num_columns, num_columns)
        return math.gcd(quantization.tile_columns or 1, part.start, part.stop)

    def slices(self, quantization: Quantization, module: str) -> dict[str, tuple[slice, ...]]:
        """Suffix -> slices of the published tensor. Raises ConfigError for a block in part.

        Inputs in an order of their own may be of any group: then a part of them has all groups.
        """
        whole = self.parts | {Axis.IN: slice(0, self.sizes[Axis.IN])}
        group = Cut(Axis.IN, quantization.tile_columns)
        way_out = "use fewer ranks"
        if self.is_of_expert:
            way_out += ", or set workers.expert_parallel to true"
        return {
            suffix: tuple(
                tensor.share(
                    whole if quantization.must_have_order and group in tensor.cuts else self.parts,
                    self.sizes,
                    f"{module}.{suffix}",
                    way_out,
                )
            )
            for suffix, tensor in published_tensors(quantization).items()
        }


def check_shares(spec: ModelSpec, rank: Rank, *, is_on_gpu: bool = False) -> None:
    """Raises ConfigError if a rank would get part of a tile, of a group or of a word.

    is_on_gpu: also if no kernel reads a rank's part of a weight.
    """
    if spec.quantization is None:
        return
    for layer in range(spec.num_layers):
        for tensor in layer_tensors(spec, layer).values():
            quantization = quantization_of(spec, tensor)
            if quantization is None:
                continue
            if rank.size > 1:
                _check_parts(tensor, quantization, rank)
            is_decoded = tensor.is_decoded or is_made_matrix(tensor, quantization, rank)
            if is_on_gpu and not is_decoded:
                _check_kernels(tensor, quantization, rank)


def _check_parts(tensor: StackedTensor, quantization: Quantization, rank: Rank) -> None:
    for name in tensor.of_rank(rank).num_rows:
        module = name.removesuffix(_SUFFIX)
        Portion.of(tensor, name, rank).slices(quantization, module)
        is_cut = is_cut_in_order(tensor, quantization, rank)
        if is_cut and tensor.num_experts is not None:
            raise ConfigError(
                f"{module}: {rank.size} ranks cannot share experts' inputs in an order of their own"
                " (g_idx); set workers.expert_parallel to true, or use weights without activation"
                " order"
            )


def is_cut_in_order(tensor: StackedTensor, quantization: Quantization, rank: Rank) -> bool:
    """Whether ranks share inputs that are in groups out of their order.

    Then a rank has inputs of any group, and computes with a matrix that is decoded once.
    """
    shares_inputs = rank.size > 1 and tensor.split is Split.COLUMNS
    return shares_inputs and quantization.must_have_order


def is_made_matrix(tensor: StackedTensor, quantization: Quantization, rank: Rank) -> bool:
    """Whether a rank decodes the tensor when it is loaded, and computes with the matrix."""
    return quantization.is_made_matrix or is_cut_in_order(tensor, quantization, rank)


def _check_kernels(tensor: StackedTensor, quantization: Quantization, rank: Rank) -> None:
    mine = tensor.of_rank(rank)
    num_rows, num_columns = mine.shape
    num_rows //= mine.num_experts or 1
    name = next(iter(mine.num_rows))
    group = Portion.of(tensor, name, rank).scale_columns(quantization)
    if reads_sizes(num_rows, num_columns, group, is_fp8=quantization.packing in FP8_PACKINGS):
        return
    way_out = "use other weights" if rank.size == 1 else f"set {SIZE_KEY} lower"
    if rank.size > 1 and mine.num_experts is not None and tensor.split is not Split.EXPERTS:
        way_out += ", or workers.expert_parallel to true"
    raise ConfigError(
        f"{name.removesuffix(_SUFFIX)}: a rank's {num_rows} outputs and {num_columns} inputs in"
        f" groups of {group} are not computed on a GPU, whose kernels read multiples of 16, with 4"
        f" bits inputs of 32, and groups of 16; {way_out}"
    )


def quantization_of(spec: ModelSpec, tensor: StackedTensor) -> Quantization | None:
    """How a tensor of a layer is quantised; None = not.

    Raises ConfigError if its parts are of two kinds, or of sizes that do not fill their groups.
    """
    if spec.quantization is None or tensor.num_columns is None or not tensor.may_be_quantised:
        return None
    if spec.quantization.packing is Packing.ONLINE_FP8 and tensor.is_decoded:
        return None  # it would be rounded for nothing
    modules = [name.removesuffix(_SUFFIX) for name in tensor.num_rows]
    covered = [module for module in modules if spec.quantization.covers(module)]
    if not covered:
        return None
    if len(covered) < len(modules):
        dense = next(module for module in modules if module not in covered)
        raise ConfigError(
            f"quantization_config: {covered[0]} is quantised and {dense} is not, but they are"
            " computed together; quantise both or neither"
        )
    _check_sizes(spec.quantization, tensor, modules)
    return spec.quantization


def _check_sizes(quantization: Quantization, tensor: StackedTensor, modules: list[str]) -> None:
    """FP8 tiles may be cut short by the end; groups and words of integers may not."""
    num_columns = tensor.num_columns
    assert num_columns is not None
    if quantization.packing in FP8_PACKINGS:
        return
    rows, columns = _whole_sizes(quantization)
    for module, num_rows in zip(modules, tensor.num_rows.values(), strict=True):
        if num_columns % columns or num_rows % rows:
            raise ConfigError(
                f"quantization_config: {module} has {num_rows} outputs and {num_columns} inputs;"
                f" these weights need multiples of {rows} and of {columns}"
            )


def _whole_sizes(quantization: Quantization) -> tuple[int, int]:
    """Outputs and inputs of which a map must have a multiple."""
    group = quantization.tile_columns or 1
    if quantization.packing in (Packing.INT8, Packing.BITS_AND_BYTES):
        return 1, group
    per_word = _WORD_BITS // quantization.bits
    return per_word, math.lcm(group, per_word if quantization.is_made_matrix else _INT4_COLUMNS)


def needed_tensors(spec: ModelSpec) -> dict[str, NeededTensor]:
    """Published name -> what the files have to hold, of every tensor that the model needs."""
    needed = unquantised(outer_tensors(spec))
    for layer in range(spec.num_layers):
        needed |= needed_of_layer(spec, layer)
    return needed


def unquantised(tensors: Mapping[str, StackedTensor]) -> dict[str, NeededTensor]:
    """The same of tensors that are as they are in every format."""
    return {
        name: NeededTensor(shape=shape)
        for tensor in tensors.values()
        for name, shape in tensor.part_shapes()
    }


def needed_of_layer(spec: ModelSpec, layer: int) -> dict[str, NeededTensor]:
    """The same of one layer."""
    needed: dict[str, NeededTensor] = {}
    for tensor in layer_tensors(spec, layer).values():
        quantization = quantization_of(spec, tensor)
        for name, shape in tensor.part_shapes():
            if quantization is None:
                needed[name] = NeededTensor(shape=shape)
            else:
                needed |= dict(_needed_parts(quantization, name, shape))
    return needed


def _needed_parts(
    quantization: Quantization, name: str, shape: tuple[int, ...]
) -> Iterator[tuple[str, NeededTensor]]:
    num_rows, num_columns = shape
    for suffix, tensor in published_tensors(quantization).items():
        yield (
            f"{name.removesuffix(_SUFFIX)}.{suffix}",
            NeededTensor(
                shape=tensor.shape(num_rows, num_columns),
                dtypes=tensor.dtypes,
                is_optional=tensor.is_optional,
            ),
        )


def is_unused(name: str, spec: ModelSpec) -> bool:
    """Whether a tensor of a model's files is none of the weights that it computes with."""
    is_of_quantised = spec.quantization is not None and _UNUSED.search(name) is not None
    return is_of_quantised or _KV_SCALE.search(name) is not None


def weight_bytes(
    spec: ModelSpec, *, element_bytes: int, keeps_quantised: bool, rank: Rank = WHOLE_MODEL
) -> int:
    """Bytes of a rank's weights in memory; a tied head counts once.

    keeps_quantised: whether the device computes with quantised weights (a GPU), not with weights
    that were dequantised once (a CPU; experts stay quantised there too). Weights that are computed
    with as a matrix are one.
    """
    outer = outer_tensors(spec).values()
    total = sum(math.prod(tensor.of_rank(rank).shape) * element_bytes for tensor in outer)
    for layer in range(spec.num_layers):
        for tensor in layer_tensors(spec, layer).values():
            if not tensor.is_on(rank):
                continue
            is_kept = (keeps_quantised or tensor.num_experts is not None) and not tensor.is_decoded
            quantization = quantization_of(spec, tensor) if is_kept else None
            if quantization is not None and is_made_matrix(tensor, quantization, rank):
                quantization = None
            plain = _FLOAT32_BYTES if tensor.is_float32 else element_bytes
            each = plain if quantization is None else _bytes_each(quantization, tensor)
            total += round(math.prod(tensor.of_rank(rank).shape) * each)
    return total


def _bytes_each(quantization: Quantization, tensor: StackedTensor) -> float:
    """Bytes of a weight with its part of a scale."""
    tile = (quantization.tile_rows or 1) * (quantization.tile_columns or tensor.num_columns or 1)
    if quantization.packing in FP4_PACKINGS:  # a scale is a byte
        has_factors = quantization.packing not in MXFP4_PACKINGS
        return 0.5 + 1 / tile + has_factors * _SCALE_BYTES / (tensor.num_columns or 1)
    return (1 if quantization.packing in FP8_PACKINGS else 0.5) + _SCALE_BYTES / tile
