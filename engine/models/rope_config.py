"""Reads the rotary settings of a model's config.json. Knows no tensors.

They come in two formats. Old: `rope_theta` beside `rope_scaling: {"type" | "rope_type": ..., ...}`
(or null). New, since transformers 5: everything inside `rope_parameters`. If both occur,
`rope_scaling` wins, as in transformers.
"""

import math
from dataclasses import replace

from engine.layers.rope_spec import (
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    RopeSpec,
    YarnScaling,
)
from engine.models.config_file import ConfigFile

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DEFAULT_THETA = 10000.0


def parse_partial_rope(config: ConfigFile, default_share: float) -> RopeSpec:
    """As `parse_rope`, of a family that rotates a share of each head's numbers."""
    key = "partial_rotary_factor"
    sections = [config.section(name) for name in ("rope_scaling", "rope_parameters")]
    found = {one.number(key) for one in (config, *sections) if one is not None and one.has_key(key)}
    if len(found) > 1 or not all(0 < share <= 1 for share in found):
        raise config.error(key, f"is {sorted(found)}; supported: one number above 0 and up to 1")
    (share,) = found or {default_share}
    return replace(_parse(config, _section_of_all(config), DEFAULT_THETA), rotated_share=share)


def parse_rope(config: ConfigFile, default_theta: float = DEFAULT_THETA) -> RopeSpec:
    """Parse the rotary settings; ConfigError for an unsupported type or partial rotation."""
    _refuse_partial(config)
    section = _section_of_all(config)
    if section is not None:
        _refuse_partial(section)
    return _parse(config, section, default_theta)


def _section_of_all(config: ConfigFile) -> ConfigFile | None:
    """The settings of all layers."""
    return config.section("rope_scaling") or config.section("rope_parameters")


def _parse(config: ConfigFile, section: ConfigFile | None, default_theta: float) -> RopeSpec:
    """section: None = there is none, and no scaling."""
    theta = config.number("rope_theta", default_theta)
    if section is None:
        return RopeSpec(theta=theta)
    return _of_section(config, section, theta)


def parse_layer_ropes(
    config: ConfigFile, *, default_theta: float, default_local_theta: float
) -> tuple[RopeSpec, RopeSpec]:
    """Parse the rotary settings of the global and of the local layers (Gemma 3).

    Old: `rope_theta` and `rope_scaling` are the global layers', `rope_local_base_freq` the local
    ones'. New: a section for each kind in `rope_parameters`.
    """
    theta = config.number("rope_theta", default_theta)
    local_theta = config.number("rope_local_base_freq", default_local_theta)
    sections = config.section("rope_parameters")
    scaling = config.section("rope_scaling")
    _refuse_partial(config)
    if scaling is not None and scaling.has_key("type") and not scaling.has_key("rope_type"):
        # transformers does not look for it here, and computes without any scaling.
        raise scaling.error("type", "is not read for this architecture: name it rope_type")
    if sections is None:
        rope = RopeSpec(theta=theta) if scaling is None else _of_kind(config, scaling, theta)
        return rope, RopeSpec(theta=local_theta)
    if scaling is not None:
        raise config.error("rope_scaling", "beside rope_parameters is not supported: remove one")

    def of(kind: str, default: float) -> RopeSpec:
        section = sections.section(kind)
        if section is None:
            raise sections.error(kind, "is missing")
        return _of_kind(config, section, default)

    return of("full_attention", theta), of("sliding_attention", local_theta)


def _of_kind(config: ConfigFile, section: ConfigFile, theta: float) -> RopeSpec:
    """Of one kind of layers."""
    if not section.flag("truncate", not section.has_key("truncate")):
        # transformers does not look for it in the section of a kind, and computes true.
        raise section.error("truncate", "false is not supported for layers of two kinds")
    _refuse_partial(section)
    return _of_section(config, section, theta)


def _of_section(config: ConfigFile, section: ConfigFile, theta: float) -> RopeSpec:
    """theta: where the section has none."""
    return RopeSpec(
        theta=section.number("rope_theta", theta), scaling=_parse_scaling(config, section)
    )


def _refuse_partial(config: ConfigFile) -> None:
    if config.number("partial_rotary_factor", 1.0) != 1.0:
        raise config.error("partial_rotary_factor", "other than 1.0 is not supported")


def _parse_scaling(config: ConfigFile, section: ConfigFile) -> RopeScaling | None:
    rope_type = section.text("rope_type", section.text("type", "default"))
    match rope_type:
        case "default":
            for key in ("full_attention", "sliding_attention"):
                if section.has_key(key):
                    raise section.error(key, "is not supported for this architecture")
            return None
        case "linear":
            return LinearScaling(factor=section.number("factor"))
        case "llama3":
            return Llama3Scaling(
                factor=section.number("factor"),
                low_freq_factor=section.number("low_freq_factor"),
                high_freq_factor=section.number("high_freq_factor"),
                original_max_tokens=_original_max_tokens(config, section),
            )
        case "yarn":
            return _parse_yarn(config, section)
    raise section.error(
        "rope_type", f"{rope_type!r} is not supported; supported: {', '.join(SUPPORTED_ROPE_TYPES)}"
    )


def _original_max_tokens(config: ConfigFile, section: ConfigFile) -> int:
    key = "original_max_position_embeddings"
    at_top = config.optional_integer(key)
    return at_top or section.integer(key, config.integer("max_position_embeddings"))


def _parse_yarn(config: ConfigFile, section: ConfigFile) -> YarnScaling:
    original = _original_max_tokens(config, section)
    factor = section.number("factor", config.integer("max_position_embeddings") / original)
    attention_factor = section.optional_number("attention_factor")
    if attention_factor is None:
        mscale = section.optional_number("mscale")
        mscale_all_dim = section.optional_number("mscale_all_dim")
        if mscale is not None and mscale_all_dim is not None:
            attention_factor = _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
        else:
            attention_factor = _mscale(factor, 1.0)
    return YarnScaling(
        factor=factor,
        original_max_tokens=original,
        attention_factor=attention_factor,
        beta_fast=section.number("beta_fast", 32.0),
        beta_slow=section.number("beta_slow", 1.0),
        # Absent and null differ here: transformers reads null as false.
        truncate=section.flag("truncate", not section.has_key("truncate")),
    )


def _mscale(factor: float, scale: float) -> float:
    """The YaRN paper's temperature: 0.1 * scale * ln(factor) + 1."""
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0


def max_tokens_of(rope: RopeSpec, max_position_embeddings: int) -> int:
    """Longest context in tokens.

    YaRN and linear scaling extend the length of training; llama3 configurations already state the
    extended length. This is the rule of vLLM's `_get_and_verify_max_len`.
    """
    match rope.scaling:
        case YarnScaling(factor=factor, original_max_tokens=original):
            return int(original * factor)
        case LinearScaling(factor=factor):
            return int(max_position_embeddings * factor)
        case _:
            return max_position_embeddings
