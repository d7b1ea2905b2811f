"""The numbers of the clamped gate between the products of experts (form.py); no tensors."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedGate:
    """inner = (u' + 1) * g' * sigmoid(alpha g'), with g' and u' within the limit."""

    alpha: float
    limit: float  # above 0
