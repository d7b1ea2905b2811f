"""Chooses the backends of latent attention (MLA) by name. Only `reference` computes it so far."""

import torch

from kernels.attention.latent import LatentShape, PhasedLatent
from kernels.attention.latent_reference import ReferenceLatent
from kernels.attention.names import AttentionNames, BackendUnavailable


def build_latent_attention(
    names: AttentionNames,
    shape: LatentShape,
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    fixed_tile: bool,
) -> PhasedLatent:
    """As `build_attention`. Raises BackendUnavailable likewise."""
    for phase, name in (("prefill", names.prefill), ("decode", names.decode)):
        if name not in ("auto", "reference"):
            raise BackendUnavailable(
                f"{name} cannot compute latent attention's {phase} phase; choose reference"
            )
    if fixed_tile:
        raise BackendUnavailable(
            "no backend computes latent attention with the same bits in any batch"
        )
    reference = ReferenceLatent(shape, block_size=block_size, dtype=dtype, device=device)
    return PhasedLatent(prefill=reference, decode=reference, graph=None)
