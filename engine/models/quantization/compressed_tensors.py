"""Reads `quantization_config` as compressed-tensors writes it (llm-compressor, most of the hub)."""

import re
from dataclasses import replace

from engine.models.config_file import ConfigFile
from engine.models.quantization.config_keys import (
    INT_BITS,
    KINDS,
    MXFP8_GROUP,
    WAY_OUT,
    names_of,
    require,
)
from engine.models.quantization.scheme import MXFP4_GROUP, NVFP4_GROUP, Packing, Quantization


def read_compressed(section: ConfigFile) -> Quantization:
    """section: `quantization_config`. Raises ConfigError for what is not supported."""
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
    match found, number:
        case ("float-quantized" | "naive-quantized", "float"):
            require(weights, "num_bits", 8)
            return _compressed_fp8(section, group, weights)
        case ("mxfp8-quantized", "float"):
            require(weights, "num_bits", 8)
            require(weights, "group_size", MXFP8_GROUP)
            # Inputs are rounded in groups of 128 or by tokens, not in groups of 32.
            fp8 = _compressed_fp8(section, group, weights)
            return replace(fp8, has_exponents=True, quantizes_activations=False)
        case ("int-quantized" | "naive-quantized", "int"):
            require(weights, "num_bits", 8)
            return _compressed_int8(section, group, weights)
        case ("pack-quantized", "int"):
            require(weights, "num_bits", *INT_BITS)
            return _compressed_packed(section, group, weights)
        case ("mxfp4-pack-quantized" | "nvfp4-pack-quantized", "float"):
            require(weights, "num_bits", 4)
            is_mx = found.startswith("mx")
            size = MXFP4_GROUP if is_mx else NVFP4_GROUP
            require(weights, "group_size", size)
            return Quantization(
                packing=Packing.MXFP4 if is_mx else Packing.NVFP4,
                tile_rows=1,
                tile_columns=size,
                targets=names_of(group, "targets"),
                ignored=names_of(section, "ignore"),
            )
    raise section.error(
        "format",
        f"{found!r} with weights of type {number!r} is not supported;"
        f" supported: {KINDS}; {WAY_OUT}",
    )


def _groups(section: ConfigFile) -> list[tuple[ConfigFile, ConfigFile]]:
    """Every one of `config_groups` of linear maps, and how its weights are quantised."""
    groups = section.section("config_groups")
    if groups is None or not groups.keys:
        raise section.error("config_groups", "has no group; what is quantised must be said")
    found = []
    for name in groups.keys:
        group = groups.section(name)
        if is_of_attention(group):
            continue
        weights = None if group is None else group.section("weights")
        if group is None or weights is None:
            raise groups.error(name, "has no weights; only quantised weights are supported")
        if group.section("output_activations") is not None:
            raise group.error("output_activations", "are not supported")
        if weights.flag("dynamic", False):
            raise weights.error("dynamic", "true is not supported for weights")
        found.append((group, weights))
    if not found:
        raise section.error("config_groups", "has no group of weights")
    return found


def is_of_attention(group: ConfigFile | None) -> bool:
    """Whether a group is of attention as such (LlamaAttention): of queries, keys and values.

    What it says of K and V is in `kv_cache_scheme` too; queries are as they are.
    """
    if group is None or group.section("weights") is not None:
        return False
    targets = names_of(group, "targets")
    return bool(targets) and all(
        target.rstrip("$").endswith(("Attention", "self_attn")) for target in targets
    )


def _strategy(weights: ConfigFile) -> str:
    """Which weights share a scale; where it is not said, the size of groups says it."""
    size = weights.optional_integer("group_size", minimum=-1)
    inferred = {None: "tensor", -1: "channel"}.get(size, "group")
    return weights.text("strategy", inferred)


def _has_fp8_activations(group: ConfigFile) -> bool:
    """Whether inputs are rounded to FP8; integers are not, whatever is said; raises for others."""
    activations = group.section("input_activations")
    if activations is None:
        return False
    found = (activations.text("type", "int"), activations.integer("num_bits"))
    if found not in (("float", 8), ("int", 8)):
        raise group.error("input_activations", f"{found} are not supported: 8 bits are")
    return found == ("float", 8)


def _check_inputs(group: ConfigFile, number: str) -> None:
    """Raises where the inputs of 8-bit weights are of another kind of number than these."""
    activations = group.section("input_activations")
    if activations is not None and activations.text("type", "int") != number:
        raise group.error("input_activations", f"are not of type {number}, as the weights are")


def _compressed_fp8(section: ConfigFile, group: ConfigFile, weights: ConfigFile) -> Quantization:
    _check_inputs(group, "float")
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
            rows, columns = _block_structure(weights)
        case _:
            raise weights.error("strategy", f"{strategy!r} is not supported with float-quantized")
    return Quantization(
        packing=Packing.FP8,
        tile_rows=rows,
        tile_columns=columns,
        quantizes_activations=quantizes_activations,
        targets=names_of(group, "targets"),
        ignored=names_of(section, "ignore"),
    )


def _block_structure(weights: ConfigFile) -> tuple[int, int]:
    """Rows and columns of a tile: two numbers, or "128x128" as early versions wrote them."""
    key = "block_structure"
    if weights.is_text(key):
        found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", weights.text(key))
        block = () if found is None else tuple(map(int, found.groups()))
    else:
        block = weights.integers(key)
    if len(block) != 2:
        raise weights.error(key, f"must be two numbers, found {list(block)}")
    return block[0], block[1]


def _compressed_int8(section: ConfigFile, group: ConfigFile, weights: ConfigFile) -> Quantization:
    _check_inputs(group, "int")
    if not weights.flag("symmetric", True):
        raise weights.error("symmetric", "false is not supported with int-quantized")
    rows, columns = _int_tile(weights)
    return Quantization(
        packing=Packing.INT8,
        tile_rows=rows,
        tile_columns=columns,
        targets=names_of(group, "targets"),
        ignored=names_of(section, "ignore"),
    )


def _int_tile(weights: ConfigFile) -> tuple[int | None, int | None]:
    """Outputs and inputs that share a scale, of integers."""
    strategy = _strategy(weights)
    if strategy not in ("tensor", "group", "channel"):
        raise weights.error("strategy", f"{strategy!r} is not supported with integers")
    rows = None if strategy == "tensor" else 1
    return rows, weights.integer("group_size") if strategy == "group" else None


def _compressed_packed(section: ConfigFile, group: ConfigFile, weights: ConfigFile) -> Quantization:
    quantizes_activations = _has_fp8_activations(group)
    is_symmetric = weights.flag("symmetric", True)
    rows, columns = _int_tile(weights)
    if rows is None and not is_symmetric:
        raise weights.error("symmetric", "false is not supported with a scale a tensor")
    return Quantization(
        packing=Packing.COMPRESSED_INT,
        tile_rows=rows,
        tile_columns=columns,
        bits=weights.integer("num_bits"),
        has_zero_points=not is_symmetric,
        must_have_order=weights.text("actorder", "weight") in ("group", "dynamic"),
        quantizes_activations=quantizes_activations,
        targets=names_of(group, "targets"),
        ignored=names_of(section, "ignore"),
    )
