"""Reads how a folder's weights are quantised: `quantization_config` of config.json, no tensors.

Formats, by `quant_method` (sources: the configurations that the named packages write):

    fp8                 transformers' fine-grained FP8 (`weight_block_size`), and one scale a tensor
    fbgemm_fp8          FP8 with a scale an output (Meta's Llama 3.1 405B)
    compressed-tensors  `float-quantized` (FP8 a tensor, row, group or tile), `mxfp8-quantized`,
                        `int-quantized` (INT8 a tensor, row or group), `pack-quantized` (4 or 8
                        bits a tensor, row or group), `mxfp4-pack-quantized` and
                        `nvfp4-pack-quantized` (4 bits of float)
    awq                 AutoAWQ and GPTQModel, version gemm
    gptq                AutoGPTQ and GPTQModel: checkpoint formats gptq and gptq_v2, 4 or 8 bits
    auto-round          Intel's AutoRound: integers, packed as by gptq, gptq_v2 or awq
    modelopt            NVIDIA's ModelOpt: quant_algo FP8 (a scale a tensor),
                        FP8_PER_CHANNEL_PER_TOKEN (an output), MXFP8, NVFP4 and W4A16_NVFP4
    quark               AMD's Quark: FP8 a tensor or output, MXFP4
    bitsandbytes        4 bits, nf4 and fp4, with scales in fp32 or quantised (unsloth's)
    mxfp4               gpt-oss's experts, in files of their own layout (`gpt_oss_experts`)

Weights of integers and of 4 bits of float are published for activations of few bits too; here
activations are as they are, which is more accurate.

Anything else raises ConfigError that names what was found: a format that is nearly right computes
nearly right, which nobody notices.
"""

import fnmatch
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from engine.models.config_file import ConfigFile
from engine.models.quantization.compressed_tensors import is_of_attention, read_compressed
from engine.models.quantization.config_keys import (
    INT_BITS,
    KINDS,
    MXFP8_GROUP,
    WAY_OUT,
    names_of,
    require,
)
from engine.models.quantization.scheme import (
    BITS_AND_BYTES_GROUP,
    HEAD_MODULE,
    MXFP4_GROUP,
    NVFP4_GROUP,
    SCALE_OF_TILES,
    Packing,
    Quantization,
    compiled_entries,
)

SECTIONS = ("quantization_config", "compression_config")
MODELOPT_FILE = "hf_quant_config.json"
_PLAIN_NAME = re.compile(r"[\w.-]*")


def read_quantization(
    config: ConfigFile, *, has_head: bool, file_prefix: str = ""
) -> Quantization | None:
    """The quantisation that config.json describes, or ModelOpt's file beside it; None = none.

    has_head: whether the model has an lm_head of its own. file_prefix: of all names in the files.
    Raises ConfigError for a format that is not supported.
    """
    section = published_section(config)
    if section is None or _is_of_kv_alone(section):
        return None
    method = _method(section)
    if method not in _METHODS:
        raise section.error(
            "quant_method", f"{method!r} is not supported; supported: {KINDS}; {WAY_OUT}"
        )
    quantization = replace(_METHODS[method](section), file_prefix=file_prefix)
    for key, entries in (("targets", quantization.targets), ("ignore", quantization.ignored)):
        try:
            compiled_entries(entries)
        except re.error as error:
            raise section.error(key, f"has an expression that is not one: {error}") from error
    if has_head and quantization.covers(HEAD_MODULE):
        raise section.error("ignore", f"leaves {HEAD_MODULE} quantised; only layers' maps may be")
    return quantization


def published_section(config: ConfigFile) -> ConfigFile | None:
    """What config.json, or ModelOpt's file beside it, says of the quantisation; None = nothing."""
    section = config.section(SECTIONS[0]) or config.section(SECTIONS[1])
    beside = config.path.parent / MODELOPT_FILE
    if section is None and beside.exists():
        return ConfigFile.read(beside).section("quantization")
    nested = None if section is None else section.section("quantization")  # ModelOpt's file, too
    return section if nested is None else nested


def _method(section: ConfigFile) -> str:
    """`quant_method`; some of ModelOpt's files have `quant_algo` alone."""
    return section.text("quant_method", "modelopt" if section.has_key("quant_algo") else "")


def _is_of_kv_alone(section: ConfigFile) -> bool:
    """Whether K and V are to be quantised, and no weights (compressed-tensors, ModelOpt)."""
    match _method(section):
        case "compressed-tensors":
            groups = section.section("config_groups")
            has_weights = groups is not None and any(
                not is_of_attention(groups.section(name)) for name in groups.keys
            )
            return section.section("kv_cache_scheme") is not None and not has_weights
        case "modelopt":
            has_kv = any(section.has_key(f"kv_cache_{word}") for word in ("scheme", "quant_algo"))
            return has_kv and not section.text("quant_algo", "")
    return False


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
        scale_name=SCALE_OF_TILES if block else "weight_scale",
        quantizes_activations=True,
        ignored=(HEAD_MODULE, *_left_out(section, "modules_to_not_convert", "ignored_layers")),
    )


def _fbgemm(section: ConfigFile) -> Quantization:
    """Inputs have their own scales, so that `activation_scale_ub`, their bound, is not read."""
    ignored = (HEAD_MODULE, *_left_out(section, "modules_to_not_convert"))
    return _fp8_with("output", ignored)


def _fp8_with(
    scale_of: Literal["tensor", "output"],
    ignored: tuple[str, ...],
    *,
    quantizes_activations: bool = True,
) -> Quantization:
    """FP8 with a scale of each tensor or output."""
    return Quantization(
        packing=Packing.FP8,
        tile_rows=None if scale_of == "tensor" else 1,
        tile_columns=None,
        quantizes_activations=quantizes_activations,
        ignored=ignored,
    )


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

    return tuple(map(entry, names_of(section, *keys)))


# ---- awq and gptq --------------------------------------------------------------------------------


def _group_size(section: ConfigFile) -> int | None:
    """`group_size`; -1 means one group of all inputs."""
    size = section.optional_integer("group_size", minimum=-1)
    if size == 0:
        raise section.error("group_size", "0 is not supported")
    return None if size in (-1, None) else size


def _refuse_rotation(section: ConfigFile) -> None:
    """Raises ConfigError for weights that multiply rotated inputs, which no tensor shows.

    `rotation` is GPTQModel's, a word; the others are AutoRound's, objects.
    """
    if section.text("rotation", ""):
        raise section.error("rotation", f"{section.text('rotation')!r} of inputs is not supported")
    for key in ("rotation_config", "spinquant_config"):
        if section.section(key) is not None:
            raise section.error(key, f"is not supported: inputs are not rotated; {WAY_OUT}")


def _awq(section: ConfigFile) -> Quantization:
    require(section, "bits", 4)
    _refuse_rotation(section)
    written = section.text("format", section.text("checkpoint_format", "gemm"))  # GPTQModel
    version = section.text("version", written).lower()
    if version != "gemm":
        raise section.error("version", f"{version!r} is not supported; supported: gemm")
    if not section.flag("zero_point", True):
        raise section.error("zero_point", "false is not supported")
    order = section.text("pack_method", "reorder")  # Quark: of the outputs in a word
    if order != "reorder":
        raise section.error("pack_method", f"{order!r} is not supported; supported: reorder")
    return Quantization(
        packing=Packing.AWQ,
        tile_rows=1,
        tile_columns=_group_size(section),
        has_zero_points=True,
        ignored=(HEAD_MODULE, *_left_out(section, "modules_to_not_convert")),
    )


def _gptq(section: ConfigFile) -> Quantization:
    require(section, "bits", *INT_BITS)
    checkpoint = section.text("checkpoint_format", section.text("format", "gptq"))
    if checkpoint not in ("gptq", "gptq_v2"):
        raise section.error(
            "checkpoint_format", f"{checkpoint!r} is not supported; supported: gptq, gptq_v2"
        )
    _refuse_rotation(section)
    if section.flag("lm_head", False):
        raise section.error(
            HEAD_MODULE, "true is not supported: only layers' maps may be quantised"
        )
    group = _group_size(section)
    return Quantization(
        packing=Packing.GPTQ,
        tile_rows=1,
        tile_columns=group,
        bits=section.integer("bits"),
        has_zero_points=True,
        zero_offset=1 if checkpoint == "gptq" else 0,
        must_have_order=section.flag("desc_act", False) and group is not None,
        targets=_in_blocks(section),
        ignored=(
            HEAD_MODULE,
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


# ---- auto-round ----------------------------------------------------------------------------------

_AUTO_ROUND_OFFSETS = {"auto_round:auto_gptq": 1, "auto_round:gptqmodel": 0, "auto_round": 0}
_AUTO_ROUND_AWQ = "auto_round:auto_awq"
_UNQUANTISED_BITS = 16


def _auto_round(section: ConfigFile) -> Quantization:
    require(section, "bits", *INT_BITS)
    _refuse_rotation(section)
    kind = section.text("data_type", "int")
    if kind != "int":
        raise section.error("data_type", f"{kind!r} is not supported; supported: int")
    if (section.optional_integer("act_bits") or _UNQUANTISED_BITS) < _UNQUANTISED_BITS:
        raise section.error("act_bits", "below 16 are not supported: inputs are not rounded")
    packing = section.text("packing_format", "auto_round:auto_gptq")
    is_awq = packing == _AUTO_ROUND_AWQ
    if not is_awq and packing not in _AUTO_ROUND_OFFSETS:
        supported = ", ".join((*_AUTO_ROUND_OFFSETS, _AUTO_ROUND_AWQ))
        raise section.error(
            "packing_format", f"{packing!r} is not supported; supported: {supported}"
        )
    if is_awq:
        require(section, "bits", 4)
    blocks = (
        section.text("block_name_to_quantize", "")
        if section.is_text("block_name_to_quantize")
        else ",".join(section.texts("block_name_to_quantize", may_be_nested=True) or ())
    )
    return Quantization(
        packing=Packing.AWQ if is_awq else Packing.GPTQ,
        tile_rows=1,
        tile_columns=_group_size(section),
        bits=section.integer("bits"),
        has_zero_points=True,
        zero_offset=0 if is_awq else _AUTO_ROUND_OFFSETS[packing],
        targets=tuple(name.strip() for name in blocks.split(",") if name.strip()),
        ignored=(HEAD_MODULE, *_left_out_of_auto_round(section)),
    )


def _left_out_of_auto_round(section: ConfigFile) -> tuple[str, ...]:
    """`extra_config`: modules, or expressions that are searched, with a scheme of their own.

    Raises ConfigError for one that is quantised otherwise than the others.
    """
    extra = section.section("extra_config")
    if extra is None:
        return ()
    left_out = []
    for name in extra.keys:
        of_module = extra.section(name)
        if of_module is None:
            continue
        bits = of_module.optional_integer("bits") or section.integer("bits")
        if bits >= _UNQUANTISED_BITS:
            left_out.append(name if _PLAIN_NAME.fullmatch(name) else f"re:.*(?:{name})")
        elif name == HEAD_MODULE or not _is_alike(section, of_module):
            raise extra.error(name, "is quantised unlike the others; one scheme is supported")
    return tuple(left_out)


def _is_alike(section: ConfigFile, of_module: ConfigFile) -> bool:
    size, is_symmetric = (
        section.optional_integer("group_size", minimum=-1),
        section.flag("sym", True),
    )
    return (
        of_module.integer("bits", section.integer("bits")) == section.integer("bits")
        and (of_module.optional_integer("group_size", minimum=-1) or size) == size
        and of_module.flag("sym", is_symmetric) == is_symmetric
    )


# ---- modelopt ------------------------------------------------------------------------------------

_MODELOPT_ALGORITHMS = (
    "FP8, FP8_PER_CHANNEL_PER_TOKEN, MXFP8, NVFP4, W4A16_NVFP4; "
    "for others use the same model in one of these, or unquantized with model.quantization: fp8"
)


def _modelopt(section: ConfigFile) -> Quantization:
    """Both of its forms: as in config.json, and as in hf_quant_config.json."""
    algorithm = section.text("quant_algo", "")
    ignored = _globs(names_of(section, "ignore", "exclude_modules", "modules_to_not_convert"))
    match algorithm.upper():
        case "FP8":
            return _fp8_with("tensor", ignored)
        case "FP8_PER_CHANNEL_PER_TOKEN":
            return _fp8_with("output", ignored)
        case "MXFP8":
            _check_modelopt_group(section, MXFP8_GROUP)
            return Quantization(
                packing=Packing.FP8,
                tile_rows=1,
                tile_columns=MXFP8_GROUP,
                has_exponents=True,
                ignored=ignored,
            )
        case "NVFP4" | "W4A16_NVFP4":
            _check_modelopt_group(section, NVFP4_GROUP)
            return Quantization(
                packing=Packing.MODELOPT_NVFP4,
                tile_rows=1,
                tile_columns=NVFP4_GROUP,
                ignored=ignored,
            )
    raise section.error(
        "quant_algo", f"{algorithm!r} is not supported; supported: {_MODELOPT_ALGORITHMS}"
    )


def _check_modelopt_group(section: ConfigFile, size: int) -> None:
    found = section.optional_integer("group_size")
    if found not in (None, size):
        raise section.error("group_size", f"{found} is not supported here; supported: {size}")


def _globs(names: tuple[str, ...]) -> tuple[str, ...]:
    """Names with a star are patterns, of modules or of those around them."""
    return tuple(
        f"re:{fnmatch.translate(name)}|{fnmatch.translate(name + '.*')}"
        if "*" in name and not name.startswith("re:")
        else name
        for name in names
    )


# ---- quark ---------------------------------------------------------------------------------------


def _quark(section: ConfigFile) -> Quantization:
    """`global_quant_config`; `layer_quant_config` may only repeat it for K and V's maps."""
    export = section.section("export")
    layout = None if export is None else export.text("weight_format", "real_quantized")
    if layout not in (None, "real_quantized"):
        raise section.error("export", f"has weights as {layout!r}; supported: real_quantized")
    if section.section("layer_type_quant_config") is not None:
        raise section.error("layer_type_quant_config", "is not supported: one scheme is")
    general = section.section("global_quant_config")
    if general is None:
        raise section.error("global_quant_config", "is missing")
    quantization = _quark_scheme(general, _globs(names_of(section, "exclude")))
    layers = section.section("layer_quant_config")
    for name in [] if layers is None else layers.keys:
        assert layers is not None, "it has names"
        of_layer = layers.section(name)
        if of_layer is None or _quark_scheme(of_layer, quantization.ignored) != quantization:
            raise layers.error(name, "is quantised unlike the others; one scheme is supported")
    return quantization


def _quark_scheme(general: ConfigFile, ignored: tuple[str, ...]) -> Quantization:
    weight = general.section("weight")
    if weight is None:
        raise general.error("weight", "is missing; only quantised weights are supported")
    if weight.flag("is_dynamic", False):
        raise weight.error("is_dynamic", "true is not supported for weights")
    inputs = general.section("input_tensors")
    kind, shared = weight.text("dtype"), weight.text("qscheme")
    match kind, shared:
        case ("fp8_e4m3", "per_tensor" | "per_channel"):
            return _fp8_with(
                "tensor" if shared == "per_tensor" else "output",
                ignored,
                quantizes_activations=inputs is not None,
            )
        case ("fp4", "per_group") if weight.text("scale_format", "") == "e8m0":
            require(weight, "group_size", MXFP4_GROUP)
            return Quantization(
                packing=Packing.QUARK_MXFP4,
                tile_rows=1,
                tile_columns=MXFP4_GROUP,
                ignored=ignored,
            )
    raise weight.error(
        "dtype",
        f"{kind!r} {shared} is not supported; supported: fp8_e4m3 per_tensor or per_channel, fp4 in"
        f" groups of 32 with scales in e8m0; {WAY_OUT}",
    )


# ---- bitsandbytes --------------------------------------------------------------------------------


def _bits_and_bytes(section: ConfigFile) -> Quantization:
    if not section.flag("load_in_4bit", False):
        raise section.error("load_in_4bit", f"is false: LLM.int8 is not supported; {WAY_OUT}")
    kind = section.text("bnb_4bit_quant_type", "fp4")
    if kind not in ("nf4", "fp4"):
        raise section.error("bnb_4bit_quant_type", f"{kind!r} is not supported")
    storage = section.text("bnb_4bit_quant_storage", "uint8")
    if storage != "uint8":
        raise section.error("bnb_4bit_quant_storage", f"{storage!r} is not supported: uint8 is")
    return Quantization(
        packing=Packing.BITS_AND_BYTES,
        tile_rows=1,
        tile_columns=BITS_AND_BYTES_GROUP,
        table_name=kind,
        has_nested_scales=section.flag("bnb_4bit_use_double_quant", False),
        ignored=(HEAD_MODULE, *_left_out(section, "llm_int8_skip_modules")),
    )


_METHODS: dict[str, Callable[[ConfigFile], Quantization]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "compressed-tensors": read_compressed,
    "awq": _awq,
    "gptq": _gptq,
    "auto-round": _auto_round,
    "bitsandbytes": _bits_and_bytes,
    "intel/auto-round": _auto_round,
    "modelopt": _modelopt,
    "quark": _quark,
}
