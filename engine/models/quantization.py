"""Reads how a folder's weights are quantised: `quantization_config` of config.json, no tensors.

Formats, by `quant_method` (sources: the configurations that the named packages write):

    fp8                 transformers' fine-grained FP8 (`weight_block_size`), and one scale a tensor
    fbgemm_fp8          FP8 with a scale an output (Meta's Llama 3.1 405B)
    compressed-tensors  `float-quantized` (FP8 a tensor, row, group or tile), `pack-quantized`
                        (4 bits a tensor, row or group), `mxfp4-pack-quantized` and
                        `nvfp4-pack-quantized` (4 bits of float)
    awq                 AutoAWQ, version gemm
    gptq                AutoGPTQ and GPTQModel: checkpoint formats gptq and gptq_v2
    modelopt            NVIDIA's ModelOpt: quant_algo FP8 (a scale a tensor) and NVFP4
    mxfp4               gpt-oss's experts, in files of their own layout (`gpt_oss_files`)

Weights of 4 bits of float are published for activations of 4 bits too on GPUs that multiply them;
here activations are as they are, which is more accurate.

Anything else raises ConfigError that names what was found: a format that is nearly right computes
nearly right, which nobody notices.
"""

import fnmatch
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache

from engine.models.config_file import ConfigFile

SECTIONS = ("quantization_config", "compression_config")
_KINDS = (
    "fp8, fbgemm_fp8, compressed-tensors (float-quantized, pack-quantized, mxfp4-pack-quantized,"
    " nvfp4-pack-quantized), awq, gptq, modelopt (FP8, NVFP4)"
)
_DENSE = "use unquantized weights, or quantise them with model.quantization: fp8"
_HEAD = "lm_head"
_SCALE_OF_TILES = "weight_scale_inv"
_PLAIN_NAME = re.compile(r"[\w.-]*")
_MODELOPT_FILE = "hf_quant_config.json"
_PACKED_BITS = 4
_MXFP4_GROUP, _NVFP4_GROUP = 32, 16  # inputs that share a scale


class Packing(Enum):
    """Which tensors a quantised linear map is published as."""

    FP8 = "weight in e4m3, and its scales"
    COMPRESSED_INT4 = "weight_packed, weight_scale, weight_zero_point, weight_g_idx"
    AWQ = "qweight, qzeros and scales, inputs by rows, outputs interleaved"
    GPTQ = "qweight, qzeros, scales and g_idx, inputs by rows"
    ONLINE_FP8 = "weight as without quantisation; quantised to e4m3 while it is read"
    MXFP4 = "weight_packed in e2m1, weight_scale in e8m0"
    NVFP4 = "weight_packed in e2m1, weight_scale in e4m3, and what it is to be divided by"
    MODELOPT_NVFP4 = "weight in e2m1, weight_scale in e4m3, and what it is to be multiplied by"


FP8_PACKINGS = (Packing.FP8, Packing.ONLINE_FP8)
FP4_PACKINGS = (Packing.MXFP4, Packing.NVFP4, Packing.MODELOPT_NVFP4)


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
        is_target = not self.targets or _names_module(self.targets, module)
        return is_target and not _names_module(self.ignored, module)

    def name_read(self, name: str) -> str:
        """The name that a tensor of a file is read under.

        transformers 5 names the scale of a whole tensor as others name those of tiles.
        """
        has_one = self.packing is Packing.FP8 and self.tile_rows is None
        return name.removesuffix("_inv") if has_one and name.endswith(_SCALE_OF_TILES) else name


ONLINE_FP8 = Quantization(
    packing=Packing.ONLINE_FP8,
    tile_rows=1,
    tile_columns=None,
    quantizes_activations=True,
    ignored=(_HEAD,),
)

# Of its experts only; config.json names what is left out, this says what is meant.
GPT_OSS_MXFP4 = Quantization(
    packing=Packing.MXFP4, tile_rows=1, tile_columns=_MXFP4_GROUP, targets=("mlp.experts",)
)


def _names_module(entries: tuple[str, ...], module: str) -> bool:
    """Whether an entry names the module, modules around it, or its last components."""
    names, expressions = _compiled(entries)
    if "Linear" in entries or names.search(module) is not None:
        return True
    return any(expression.match(module) is not None for expression in expressions)


@cache
def _compiled(entries: tuple[str, ...]) -> tuple[re.Pattern[str], list[re.Pattern[str]]]:
    """The names among the entries as one expression: a mixture has thousands of modules."""
    names = [re.escape(entry) for entry in entries if not entry.startswith("re:")]
    found = rf"(?:\A|\.)(?:{'|'.join(names)})(?:\.|\Z)" if names else r"(?!)"
    expressions = [entry.removeprefix("re:") for entry in entries if entry.startswith("re:")]
    return re.compile(found), [re.compile(expression) for expression in expressions]


def read_quantization(config: ConfigFile, *, has_head: bool) -> Quantization | None:
    """The quantisation that config.json describes, or ModelOpt's file beside it; None = none.

    has_head: whether the model has an lm_head of its own. Raises ConfigError for a format that is
    not supported.
    """
    section = config.section(SECTIONS[0]) or config.section(SECTIONS[1])
    beside = config.path.parent / _MODELOPT_FILE
    if section is not None:
        method = section.text("quant_method", "")
    elif beside.exists():
        section = ConfigFile.read(beside).section("quantization")
        method = "modelopt"
    if section is None or _is_of_kv_alone(section):
        return None
    if method not in _METHODS:
        raise section.error(
            "quant_method", f"{method!r} is not supported; supported: {_KINDS}; {_DENSE}"
        )
    quantization = _METHODS[method](section)
    for key, entries in (("targets", quantization.targets), ("ignore", quantization.ignored)):
        try:
            _compiled(entries)
        except re.error as error:
            raise section.error(key, f"has an expression that is not one: {error}") from error
    if has_head and quantization.covers(_HEAD):
        raise section.error("ignore", f"leaves {_HEAD} quantised; only layers' maps may be")
    return quantization


def _is_of_kv_alone(section: ConfigFile) -> bool:
    """Whether K and V are to be quantised, and no weights (compressed-tensors)."""
    return (
        section.text("quant_method", "") == "compressed-tensors"
        and section.section("kv_cache_scheme") is not None
        and section.section("config_groups") is None
    )


# ---- fp8 -----------------------------------------------------------------------------------------


def _fp8(section: ConfigFile) -> Quantization:
    fmt = section.text("fmt", "e4m3")
    if fmt not in ("e4m3", "float8_e4m3fn"):
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
        scale_name=_SCALE_OF_TILES if block else "weight_scale",
        quantizes_activations=True,
        ignored=(_HEAD, *_left_out(section, "modules_to_not_convert", "ignored_layers")),
    )


def _fbgemm(section: ConfigFile) -> Quantization:
    """Inputs have their own scales, so that `activation_scale_ub`, their bound, is not read."""
    return Quantization(
        packing=Packing.FP8,
        tile_rows=1,
        tile_columns=None,
        quantizes_activations=True,
        ignored=(_HEAD, *_left_out(section, "modules_to_not_convert")),
    )


def _names(section: ConfigFile, *keys: str) -> tuple[str, ...]:
    return tuple(name for key in keys for name in section.texts(key) or ())


def _left_out(section: ConfigFile, *keys: str) -> tuple[str, ...]:
    """Modules that are not converted; transformers reads every entry as an expression, too.

    One with a sign that no name has is an expression alone: from the name's beginning to the end of
    a component. A name may end in the dot that separates it from its parts (model.layers.0.).
    """
    end = r"(?:(?<=\.)|(?=\.|$))"

    def entry(name: str) -> str:
        if name.startswith("re:"):
            return name
        return name.strip(".") if _PLAIN_NAME.fullmatch(name) else f"re:(?:{name}){end}"

    return tuple(map(entry, _names(section, *keys)))


# ---- compressed-tensors --------------------------------------------------------------------------


def _compressed(section: ConfigFile) -> Quantization:
    for key in ("sparsity_config", "transform_config"):
        nested = section.section(key)
        if nested is not None and nested.text("format", key) != "dense":
            raise section.error(key, "is not supported")
    # Early versions wrote compressed weights as frozen; that they are is seen by their names.
    status = section.text("quantization_status", "compressed")
    if status not in ("compressed", "frozen"):
        raise section.error("quantization_status", f"{status!r} is not supported: compressed is")
    first, *others = [_compressed_group(section, *found) for found in _groups(section)]
    if any(replace(other, targets=first.targets) != first for other in others):
        raise section.error("config_groups", "are of several schemes; one is supported")
    targets = [one.targets for one in (first, *others)]
    return replace(first, targets=sum(targets, ()) if all(targets) else ())


def _compressed_group(section: ConfigFile, group: ConfigFile, weights: ConfigFile) -> Quantization:
    """One of `config_groups`: modules that are quantised alike."""
    found = group.text("format", section.text("format", ""))
    number = weights.text("type", "int")
    match found:
        case "float-quantized" | "naive-quantized" if number == "float":
            _require(weights, "num_bits", 8)
            return _compressed_fp8(section, group, weights)
        case "pack-quantized" if number == "int":
            _require(weights, "num_bits", _PACKED_BITS)
            return _compressed_int4(section, group, weights)
        case "mxfp4-pack-quantized" | "nvfp4-pack-quantized" if number == "float":
            _require(weights, "num_bits", _PACKED_BITS)
            is_mx = found.startswith("mx")
            _require(weights, "group_size", _MXFP4_GROUP if is_mx else _NVFP4_GROUP)
            return Quantization(
                packing=Packing.MXFP4 if is_mx else Packing.NVFP4,
                tile_rows=1,
                tile_columns=_MXFP4_GROUP if is_mx else _NVFP4_GROUP,
                targets=_names(group, "targets"),
                ignored=_names(section, "ignore"),
            )
    raise section.error(
        "format",
        f"{found!r} with weights of type {number!r} is not supported;"
        f" supported: {_KINDS}; {_DENSE}",
    )


def _groups(section: ConfigFile) -> list[tuple[ConfigFile, ConfigFile]]:
    """Every one of `config_groups`, and how its weights are quantised."""
    groups = section.section("config_groups")
    if groups is None or not groups.keys:
        raise section.error("config_groups", "has no group; what is quantised must be said")
    found = []
    for name in groups.keys:
        group = groups.section(name)
        weights = None if group is None else group.section("weights")
        if group is None or weights is None:
            raise groups.error(name, "has no weights; only quantised weights are supported")
        if group.section("output_activations") is not None:
            raise group.error("output_activations", "are not supported")
        if weights.flag("dynamic", False):
            raise weights.error("dynamic", "true is not supported for weights")
        found.append((group, weights))
    return found


def _strategy(weights: ConfigFile) -> str:
    """Which weights share a scale; where it is not said, the size of groups says it."""
    size = weights.optional_integer("group_size", minimum=-1)
    inferred = {None: "tensor", -1: "channel"}.get(size, "group")
    return weights.text("strategy", inferred)


def _require(section: ConfigFile, key: str, value: int) -> None:
    found = section.integer(key)
    if found != value:
        raise section.error(key, f"{found} is not supported here; supported: {value}")


def _has_fp8_activations(group: ConfigFile) -> bool:
    """Whether inputs are rounded to FP8; raises for others that are quantised."""
    activations = group.section("input_activations")
    if activations is None:
        return False
    found = (activations.text("type", "int"), activations.integer("num_bits"))
    if found != ("float", 8):
        raise group.error("input_activations", f"{found} are not supported: 8 bits of float")
    return True


def _compressed_fp8(section: ConfigFile, group: ConfigFile, weights: ConfigFile) -> Quantization:
    quantizes_activations = _has_fp8_activations(group)
    if not weights.flag("symmetric", True):
        raise weights.error("symmetric", "false is not supported for float")
    rows: int | None
    columns: int | None
    match strategy := _strategy(weights):
        case "tensor":
            rows, columns = None, None
        case "channel":
            rows, columns = 1, None
        case "group":
            rows, columns = 1, weights.integer("group_size")
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
        quantizes_activations=quantizes_activations,
        targets=_names(group, "targets"),
        ignored=_names(section, "ignore"),
    )


def _compressed_int4(section: ConfigFile, group: ConfigFile, weights: ConfigFile) -> Quantization:
    quantizes_activations = _has_fp8_activations(group)
    strategy, is_symmetric = _strategy(weights), weights.flag("symmetric", True)
    if strategy not in ("tensor", "group", "channel"):
        raise weights.error("strategy", f"{strategy!r} is not supported with pack-quantized")
    if strategy == "tensor" and not is_symmetric:
        raise weights.error("symmetric", "false is not supported with a scale a tensor")
    return Quantization(
        packing=Packing.COMPRESSED_INT4,
        tile_rows=None if strategy == "tensor" else 1,
        tile_columns=weights.integer("group_size") if strategy == "group" else None,
        has_zero_points=not is_symmetric,
        must_have_order=weights.text("actorder", "weight") in ("group", "dynamic"),
        quantizes_activations=quantizes_activations,
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
        ignored=(_HEAD, *_left_out(section, "modules_to_not_convert")),
    )


def _gptq(section: ConfigFile) -> Quantization:
    _require(section, "bits", _PACKED_BITS)
    checkpoint = section.text("checkpoint_format", "gptq")
    if checkpoint not in ("gptq", "gptq_v2"):
        raise section.error(
            "checkpoint_format", f"{checkpoint!r} is not supported; supported: gptq, gptq_v2"
        )
    if section.text("rotation", ""):
        raise section.error("rotation", f"{section.text('rotation')!r} of inputs is not supported")
    if section.flag("lm_head", False):
        raise section.error(_HEAD, "true is not supported: only layers' maps may be quantised")
    return Quantization(
        packing=Packing.GPTQ,
        tile_rows=1,
        tile_columns=_group_size(section),
        has_zero_points=True,
        zero_offset=1 if checkpoint == "gptq" else 0,
        must_have_order=section.flag("desc_act", False),
        targets=_in_blocks(section),
        ignored=(
            _HEAD,
            *_left_out(section, "modules_to_not_convert"),
            *_left_out_dynamically(section),
        ),
    )


def _left_out_dynamically(section: ConfigFile) -> tuple[str, ...]:
    """GPTQModel's `dynamic`: expressions, of which those after "-:" are of unquantised modules."""
    dynamic = section.section("dynamic")
    expressions = () if dynamic is None else tuple(dynamic.keys)
    for expression in expressions:
        if not expression.startswith("-:"):
            raise section.error(
                "dynamic", f"has {expression!r}: one scheme for all modules is supported, and -:"
            )
    return tuple("re:" + expression.removeprefix("-:") for expression in expressions)


def _in_blocks(section: ConfigFile) -> tuple[str, ...]:
    """`modules_in_block_to_quantize`, a list of names within a layer or of lists of them."""
    key = "modules_in_block_to_quantize"
    return section.texts(key, may_be_nested=True) or ()


# ---- modelopt ------------------------------------------------------------------------------------


def _modelopt(section: ConfigFile) -> Quantization:
    """Both of its forms: as in config.json, and as in hf_quant_config.json."""
    algorithm = section.text("quant_algo", "")
    ignored = tuple(
        f"re:{fnmatch.translate(name)}" if "*" in name else name
        for name in _names(section, "ignore", "exclude_modules")
    )
    match algorithm:
        case "FP8":
            return Quantization(
                packing=Packing.FP8,
                tile_rows=None,
                tile_columns=None,
                quantizes_activations=True,
                ignored=ignored,
            )
        case "NVFP4" | "W4A16_NVFP4":
            size = section.optional_integer("group_size")
            if size not in (None, _NVFP4_GROUP):
                raise section.error("group_size", f"{size} is not supported here; supported: 16")
            return Quantization(
                packing=Packing.MODELOPT_NVFP4,
                tile_rows=1,
                tile_columns=_NVFP4_GROUP,
                ignored=ignored,
            )
    raise section.error("quant_algo", f"{algorithm!r} is not supported; supported: FP8, NVFP4")


_METHODS: dict[str, Callable[[ConfigFile], Quantization]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "compressed-tensors": _compressed,
    "awq": _awq,
    "gptq": _gptq,
    "modelopt": _modelopt,
}
