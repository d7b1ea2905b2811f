"""Reads how a folder's weights are quantised: `quantization_config` of config.json, no tensors.

Formats, by `quant_method` (sources: the configurations that the named packages write):

    fp8                 transformers' fine-grained FP8 (`weight_block_size`), and one scale a tensor
    compressed-tensors  `float-quantized` (FP8 a tensor, row or tile), `pack-quantized` (4 bits)
    awq                 AutoAWQ, version gemm
    gptq                AutoGPTQ and GPTQModel: checkpoint formats gptq and gptq_v2

Anything else raises ConfigError that names what was found: a format that is nearly right computes
nearly right, which nobody notices.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from engine.models.config_file import ConfigFile

SECTIONS = ("quantization_config", "compression_config")
_KINDS = "fp8, compressed-tensors (float-quantized, pack-quantized), awq, gptq"
_DENSE = "use unquantized weights, or quantise them with model.quantization: fp8"
_HEAD = "lm_head"
_PACKED_BITS = 4


class Packing(Enum):
    """Which tensors a quantised linear map is published as."""

    FP8 = "weight in e4m3, and its scales"
    COMPRESSED_INT4 = "weight_packed, weight_scale, weight_zero_point, weight_g_idx"
    AWQ = "qweight, qzeros and scales, inputs by rows, outputs interleaved"
    GPTQ = "qweight, qzeros, scales and g_idx, inputs by rows"
    ONLINE_FP8 = "weight as without quantisation; quantised to e4m3 while it is read"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """How the linear maps of a model's layers are quantised; all of them alike."""

    packing: Packing
    # Outputs and inputs that share a scale; None = all of the published tensor.
    tile_rows: int | None
    tile_columns: int | None
    scale_name: str = "weight_scale"
    has_zero_points: bool = False
    zero_offset: int = 0  # added to the stored zero points (GPTQ's first format: 1)
    # Whether inputs may be assigned to groups out of their order; True = the file has to say so.
    must_have_order: bool = False
    # Whether the publisher computed with FP8 activations too; else only weights are quantised.
    quantizes_activations: bool = False
    targets: tuple[str, ...] = ()  # modules, or re:<expression>; none = every linear map
    ignored: tuple[str, ...] = ()  # modules that are not quantised, likewise

    def covers(self, module: str) -> bool:
        """Whether the linear map `module` (model.layers.0.mlp.down_proj) is quantised."""
        is_target = not self.targets or any(_matches(target, module) for target in self.targets)
        return is_target and not any(_matches(name, module) for name in self.ignored)


ONLINE_FP8 = Quantization(
    packing=Packing.ONLINE_FP8,
    tile_rows=1,
    tile_columns=None,
    quantizes_activations=True,
    ignored=(_HEAD,),
)


def _matches(entry: str, module: str) -> bool:
    """Whether `entry` names the module, modules around it, or its last components."""
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), module) is not None
    return entry == "Linear" or f".{entry}." in f".{module}."


def read_quantization(config: ConfigFile, *, has_head: bool) -> Quantization | None:
    """The quantisation that config.json describes; None = none.

    has_head: whether the model has an lm_head of its own. Raises ConfigError for a format that is
    not supported.
    """
    section = config.section(SECTIONS[0]) or config.section(SECTIONS[1])
    if section is None:
        return None
    method = section.text("quant_method", "")
    if method not in _METHODS:
        raise section.error(
            "quant_method", f"{method!r} is not supported; supported: {_KINDS}; {_DENSE}"
        )
    quantization = _METHODS[method](section)
    if has_head and quantization.covers(_HEAD):
        raise section.error("ignore", f"leaves {_HEAD} quantised; only layers' maps may be")
    return quantization


# ---- fp8 -----------------------------------------------------------------------------------------


def _fp8(section: ConfigFile) -> Quantization:
    fmt = section.text("fmt", "e4m3")
    if fmt != "e4m3":
        raise section.error("fmt", f"{fmt!r} is not supported; supported: e4m3")
    scheme = section.text("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise section.error("activation_scheme", f"{scheme!r} is not supported")
    if section.text("scale_fmt", "float") not in ("float", "ue8m0"):
        raise section.error("scale_fmt", f"{section.text('scale_fmt')!r} is not supported")
    block = section.integers("weight_block_size")
    if block and len(block) != 2:
        raise section.error("weight_block_size", f"must be two numbers, found {list(block)}")
    rows, columns = block or (None, None)
    return Quantization(
        packing=Packing.FP8,
        tile_rows=rows,
        tile_columns=columns,
        scale_name="weight_scale_inv" if block else "weight_scale",
        quantizes_activations=True,
        ignored=(_HEAD, *_names(section, "modules_to_not_convert", "ignored_layers")),
    )


def _names(section: ConfigFile, *keys: str) -> tuple[str, ...]:
    return tuple(name for key in keys for name in section.texts(key) or ())


# ---- compressed-tensors --------------------------------------------------------------------------


def _compressed(section: ConfigFile) -> Quantization:
    for key in ("sparsity_config", "transform_config"):
        nested = section.section(key)
        if nested is not None and nested.text("format", key) != "dense":
            raise section.error(key, "is not supported")
    status = section.text("quantization_status", "compressed")
    if status != "compressed":
        raise section.error("quantization_status", f"{status!r} is not supported: compressed is")
    group, weights = _only_group(section)
    found = group.text("format", section.text("format", ""))
    number = weights.text("type", "int")
    match found:
        case "float-quantized" | "naive-quantized" if number == "float":
            _require(weights, "num_bits", 8)
            return _compressed_fp8(section, group, weights)
        case "pack-quantized" if number == "int":
            _require(weights, "num_bits", _PACKED_BITS)
            return _compressed_int4(section, group, weights)
    raise section.error(
        "format",
        f"{found!r} with weights of type {number!r} is not supported;"
        f" supported: {_KINDS}; {_DENSE}",
    )


def _only_group(section: ConfigFile) -> tuple[ConfigFile, ConfigFile]:
    groups = section.section("config_groups")
    names = groups.keys if groups is not None else []
    if groups is None or len(names) != 1:
        raise section.error("config_groups", f"must be one, found {len(names)}: {names}")
    group = groups.section(names[0])
    weights = None if group is None else group.section("weights")
    if group is None or weights is None:
        raise groups.error(names[0], "has no weights; only quantised weights are supported")
    if group.section("output_activations") is not None:
        raise group.error("output_activations", "are not supported")
    if weights.flag("dynamic", False):
        raise weights.error("dynamic", "true is not supported for weights")
    return group, weights


def _require(section: ConfigFile, key: str, value: int) -> None:
    found = section.integer(key)
    if found != value:
        raise section.error(key, f"{found} is not supported here; supported: {value}")


def _compressed_fp8(section: ConfigFile, group: ConfigFile, weights: ConfigFile) -> Quantization:
    activations = group.section("input_activations")
    if activations is not None:
        found = (activations.text("type", "int"), activations.integer("num_bits"))
        if found != ("float", 8):
            raise group.error("input_activations", f"{found} are not supported: 8 bits of float")
    if not weights.flag("symmetric", True):
        raise weights.error("symmetric", "false is not supported for float")
    rows: int | None
    columns: int | None
    match strategy := weights.text("strategy", ""):
        case "tensor":
            rows, columns = None, None
        case "channel":
            rows, columns = 1, None
        case "block":
            block = weights.integers("block_structure")
            if len(block) != 2:
                raise weights.error("block_structure", f"must be two numbers, found {list(block)}")
            rows, columns = block
        case _:
            raise weights.error("strategy", f"{strategy!r} is not supported with float-quantized")
    return Quantization(
        packing=Packing.FP8,
        tile_rows=rows,
        tile_columns=columns,
        quantizes_activations=activations is not None,
        targets=_names(group, "targets"),
        ignored=_names(section, "ignore"),
    )


def _compressed_int4(section: ConfigFile, group: ConfigFile, weights: ConfigFile) -> Quantization:
    if group.section("input_activations") is not None:
        raise group.error("input_activations", "are not supported with pack-quantized")
    strategy = weights.text("strategy", "")
    if strategy not in ("group", "channel"):
        raise weights.error("strategy", f"{strategy!r} is not supported with pack-quantized")
    return Quantization(
        packing=Packing.COMPRESSED_INT4,
        tile_rows=1,
        tile_columns=weights.integer("group_size") if strategy == "group" else None,
        has_zero_points=not weights.flag("symmetric", True),
        must_have_order=weights.text("actorder", "weight") in ("group", "dynamic"),
        targets=_names(group, "targets"),
        ignored=_names(section, "ignore"),
    )


# ---- awq and gptq --------------------------------------------------------------------------------


def _group_size(section: ConfigFile) -> int | None:
    """`group_size`; -1 means one group of all inputs."""
    size = section.optional_integer("group_size", minimum=-1)
    if size == 0:
        raise section.error("group_size", "0 is not supported")
    return None if size in (-1, None) else size


def _awq(section: ConfigFile) -> Quantization:
    _require(section, "bits", _PACKED_BITS)
    version = section.text("version", "gemm").lower()
    if version != "gemm":
        raise section.error("version", f"{version!r} is not supported; supported: gemm")
    if not section.flag("zero_point", True):
        raise section.error("zero_point", "false is not supported")
    return Quantization(
        packing=Packing.AWQ,
        tile_rows=1,
        tile_columns=_group_size(section),
        has_zero_points=True,
        ignored=(_HEAD, *_names(section, "modules_to_not_convert")),
    )


def _gptq(section: ConfigFile) -> Quantization:
    _require(section, "bits", _PACKED_BITS)
    checkpoint = section.text("checkpoint_format", "gptq")
    if checkpoint not in ("gptq", "gptq_v2"):
        raise section.error(
            "checkpoint_format", f"{checkpoint!r} is not supported; supported: gptq, gptq_v2"
        )
    if section.section("dynamic") is not None:
        raise section.error("dynamic", "is not supported: one scheme for all modules")
    if section.flag("lm_head", False):
        raise section.error(_HEAD, "true is not supported: only layers' maps may be quantised")
    return Quantization(
        packing=Packing.GPTQ,
        tile_rows=1,
        tile_columns=_group_size(section),
        has_zero_points=True,
        zero_offset=1 if checkpoint == "gptq" else 0,
        must_have_order=section.flag("desc_act", False),
        ignored=(_HEAD, *_names(section, "modules_to_not_convert")),
    )


_METHODS: dict[str, Callable[[ConfigFile], Quantization]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "awq": _awq,
    "gptq": _gptq,
}
