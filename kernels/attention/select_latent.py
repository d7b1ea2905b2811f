"""Chooses the backends of latent attention (MLA) by name, device and shape.

"auto" is `reference` everywhere: the Triton kernels (`triton`) have not been measured on a GPU yet,
so they are used where they are asked for, and in deterministic mode, which nothing else computes.
"""

import importlib.util

import torch

from kernels.attention.latent import GraphLatent, LatentShape, PhasedLatent
from kernels.attention.latent_reference import ReferenceLatent
from kernels.attention.names import AttentionNames, BackendUnavailable

_BLOCK_MULTIPLE = 16
_DTYPES = (torch.bfloat16, torch.float16)


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
    reference = ReferenceLatent(shape, block_size=block_size, dtype=dtype, device=device)
    wanted = ("prefill", names.prefill), ("decode", names.decode)
    for phase, name in wanted:
        works = ("auto", "triton") if fixed_tile else ("auto", "reference", "triton")
        if name not in works:
            raise BackendUnavailable(
                f"{name} cannot compute latent attention's {phase} phase"
                f"{' with the same bits in any batch' if fixed_tile else ''};"
                f" choose {' or '.join(works[1:])}"
            )
    uses_triton = fixed_tile or "triton" in (names.prefill, names.decode)
    if not uses_triton:
        return PhasedLatent(prefill=reference, decode=reference, graph=None)
    reason = why_not_triton(shape, block_size=block_size, dtype=dtype, device=device)
    if reason is not None:
        raise BackendUnavailable(f"triton cannot compute latent attention here: {reason}")
    triton = _build_triton(shape, block_size, dtype, device, fixed_tile=fixed_tile)
    decodes = fixed_tile or names.decode == "triton"
    prefills = fixed_tile or names.prefill == "triton"
    return PhasedLatent(
        prefill=triton if prefills else reference,
        decode=triton if decodes else reference,
        graph=triton if decodes else None,
    )


def why_not_triton(
    shape: LatentShape, *, block_size: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why the Triton kernels cannot serve this model on this machine; None = they can."""
    if device.type != "cuda":
        return "the Triton kernels need a GPU; choose reference"
    if dtype not in _DTYPES:
        return f"the Triton kernels compute in bfloat16 and float16, not {dtype}"
    if block_size % _BLOCK_MULTIPLE:
        return f"block size {block_size} is not a multiple of {_BLOCK_MULTIPLE}"
    for what, size in (("latents", shape.rank), ("rotated keys", shape.rope_dim)):
        if size < _BLOCK_MULTIPLE or size & (size - 1):
            return f"the Triton kernels need powers of two from 16 on; {what} have {size} numbers"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; `pip install triton` brings it"
    return None


def _build_triton(
    shape: LatentShape,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    fixed_tile: bool,
) -> GraphLatent:
    from kernels.attention.latent_triton import TritonLatent

    return TritonLatent(
        shape, block_size=block_size, dtype=dtype, device=device, fixed_tile=fixed_tile
    )
