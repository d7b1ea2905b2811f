"""Reads what config.json says of latent attention (MLA). Knows no tensors and no weights.

A token leaves one vector for all heads: a latent of `rank`, from which each head's key and value
are made, and a rotated key of `rope_dim` that all heads share. arXiv:2405.04434, section 2.1.
"""

import math
from dataclasses import dataclass

from engine.models.config_file import ConfigFile


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """The dimensions of latent attention, equal in all layers."""

    q_rank: int | None  # queries are made from a vector of this length; None = from the input
    rank: int  # of the latent, kv_lora_rank
    nope_dim: int  # of a head's query and key that are not rotated
    rope_dim: int  # of those that are
    value_dim: int  # of a head's value
    is_interleaved: bool  # neighbours are rotated as pairs; else halves
    scale: float  # factor on the scores

    @property
    def width(self) -> int:
        """Numbers that a layer keeps of a token."""
        return self.rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Of a head's query, and of its key as computed with."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentDefaults:
    """What a family's files may leave out."""

    q_rank: int | None = 1536
    rank: int = 512
    nope_dim: int = 128
    rope_dim: int = 64
    value_dim: int = 128


DEEPSEEK = LatentDefaults()
GLM = LatentDefaults(q_rank=768, nope_dim=192, value_dim=256)


def read_latent(
    config: ConfigFile, num_heads: int, default: LatentDefaults, *, is_interleaved: bool
) -> LatentSpec:
    """Raises ConfigError as all readers of config.json do."""
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_kv_heads != num_heads:
        raise config.error(
            "num_key_value_heads",
            f"is {num_kv_heads} of {num_heads} heads; with latent attention both must be equal",
        )
    # Absent and null differ here: null means that queries are made from the input.
    q_rank = config.optional_integer("q_lora_rank")
    if q_rank is None and not config.has_key("q_lora_rank"):
        q_rank = default.q_rank
    if q_rank is None and config.flag("attention_bias", False):
        raise config.error(
            "attention_bias", "true is not supported where q_lora_rank is null: q_proj has no bias"
        )
    rank = config.integer("kv_lora_rank", default.rank)
    nope_dim = config.integer("qk_nope_head_dim", default.nope_dim)
    rope_dim = config.integer("qk_rope_head_dim", default.rope_dim)
    for key, value in (("kv_lora_rank", rank), ("qk_rope_head_dim", rope_dim)):
        if value % 2:
            raise config.error(key, f"is {value}; an odd length is not supported")
    return LatentSpec(
        q_rank=q_rank,
        rank=rank,
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=config.integer("v_head_dim", default.value_dim),
        is_interleaved=is_interleaved,
        scale=(nope_dim + rope_dim) ** -0.5 * _temperature(config),
    )


def _temperature(config: ConfigFile) -> float:
    """Square of YaRN's factor for all dimensions, where the rotary settings name one."""
    section = config.section("rope_scaling") or config.section("rope_parameters")
    if section is None or section.text("rope_type", section.text("type", "default")) == "default":
        return 1.0
    weight = section.optional_number("mscale_all_dim")
    factor = section.optional_number("factor")
    if weight is None:
        return 1.0
    if factor is None:
        raise section.error("factor", "is missing; mscale_all_dim requires it")
    if factor <= 1.0:
        return 1.0
    return float((0.1 * weight * math.log(factor) + 1.0) ** 2)
