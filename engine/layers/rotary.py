"""Computes rotary angles: frequencies from a `RopeSpec`, cos and sin by position. Knows no heads.

Angles are computed in fp32 and in the order of operations of transformers. So at every position
they are bitwise equal to the angles that the published models were checked with.
"""

import math
from typing import Any

import torch
from torch import Tensor

from engine.layers.rope_spec import LinearScaling, Llama3Scaling, RopeSpec, YarnScaling
from kernels.ops import Ops


class RotaryTable:
    """cos and sin of every position below `max_tokens`."""

    def __init__(
        self, spec: RopeSpec, *, head_dim: int, max_tokens: int, device: torch.device, ops: Ops
    ) -> None:
        self.max_tokens = max_tokens
        self._ops = ops
        frequencies = inverse_frequencies(spec, head_dim)
        positions = torch.arange(max_tokens, dtype=torch.float32)
        angles = positions[:, None] * frequencies
        scale = torch.ones(len(frequencies))
        if isinstance(spec.scaling, YarnScaling):
            scale[: num_rotated(spec, head_dim) // 2] = spec.scaling.attention_factor
        # [max_tokens, head_dim]: cos | sin, each for half of the dimensions
        self._cos_sin = torch.cat((angles.cos() * scale, angles.sin() * scale), dim=1).to(device)

    def angles(self, positions: Tensor) -> Any:  # noqa: ANN401
        """positions: [T] int32; returns what `Ops.rotate_and_store` needs for them."""
        return self._ops.rotary(self._cos_sin, positions)


class RotaryTables:
    """The tables of a model whose layers may differ: the first, and that of the local layers."""

    def __init__(self, *tables: RotaryTable) -> None:
        self.max_tokens = tables[0].max_tokens
        self._tables = tables

    def angles(self, positions: Tensor) -> tuple[Any, ...]:
        """positions: [T] int32; for each table, what `Ops.rotate_and_store` needs."""
        return tuple(table.angles(positions) for table in self._tables)


def num_rotated(spec: RopeSpec, head_dim: int) -> int:
    """Numbers of a head that are rotated."""
    return int(head_dim * spec.rotated_share)


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """Radians per token of each pair of dimensions, fp32 [head_dim / 2]: 0 behind the rotated."""
    rotated = num_rotated(spec, head_dim)
    frequencies = _frequencies(spec, rotated)
    return torch.cat((frequencies, torch.zeros((head_dim - rotated) // 2)))


def _frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """Of pairs that are all rotated."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    wavelengths = spec.theta**exponents
    match spec.scaling:
        case None:
            return 1.0 / wavelengths
        case LinearScaling(factor=factor):
            return (1.0 / wavelengths) / factor
        case Llama3Scaling() as scaling:
            return _llama3(1.0 / wavelengths, scaling)
        case YarnScaling() as scaling:
            return _yarn(wavelengths, scaling, spec.theta, head_dim)


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    turns = scaling.original_max_tokens / (2 * math.pi / frequencies)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    ramp = (turns - low) / (high - low)
    blended = (1 - ramp) * frequencies / scaling.factor + ramp * frequencies
    slowed = frequencies / scaling.factor
    return torch.where(turns < low, slowed, torch.where(turns > high, frequencies, blended))


def _yarn(wavelengths: Tensor, scaling: YarnScaling, theta: float, head_dim: int) -> Tensor:
    def dimension_turning(num_turns: float) -> float:
        """Index of the pair that turns `num_turns` times within the original context."""
        span = scaling.original_max_tokens / (num_turns * 2 * math.pi)
        return head_dim * math.log(span) / (2 * math.log(theta))

    low, high = dimension_turning(scaling.beta_fast), dimension_turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001  # keeps the ramp finite
    index = torch.arange(head_dim // 2, dtype=torch.float32)
    kept = 1 - torch.clamp((index - low) / width, 0, 1)
    slowed = 1.0 / (scaling.factor * wavelengths)
    return slowed * (1 - kept) + (1.0 / wavelengths) * kept
