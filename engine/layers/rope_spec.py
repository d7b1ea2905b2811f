"""Defines how rotary frequencies are computed, as plain records. Knows no tensors and no files."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Every frequency divided by `factor` (position interpolation, arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a smooth ramp between.

    A wavelength counts as short below `original_max_tokens / high_freq_factor` and as long above
    `original_max_tokens / low_freq_factor`.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv:2309.00071): interpolates by parts and scales cos and sin.

    Dimensions that turn more than `beta_fast` times within `original_max_tokens` are kept. Those
    that turn less than `beta_slow` times are divided by `factor`.
    """

    factor: float
    original_max_tokens: int
    attention_factor: float  # multiplies cos and sin
    beta_fast: float
    beta_slow: float
    truncate: bool  # round the bounds of the ramp to whole dimensions


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding of a model; `scaling` None is the plain form of arXiv:2104.09864."""

    theta: float
    scaling: RopeScaling | None = None
    # Of a head's numbers, the first ones; the others are not rotated. See head_order.py.
    rotated_share: float = 1.0
