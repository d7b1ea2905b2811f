"""Chooses the backends of latent attention (MLA) by name, device and shape.

"auto" is `triton` for single tokens and, on Hopper with heads of FlashAttention-3's sizes,
`flash_attn` for prompts, else `triton`; `reference` on a CPU and for numbers of 32 bits. Where
FlashAttention-3 is not installed it is `triton` with a warning.
"""

import importlib.util
from dataclasses import dataclass

import torch

from kernels.attention.installed import installed_or_triton
from kernels.attention.latent import (
    FLASH_HEADS,
    GraphLatent,
    LatentBackend,
    LatentShape,
    PhasedLatent,
)
from kernels.attention.latent_reference import ReferenceLatent
from kernels.attention.names import AttentionName, AttentionNames, BackendUnavailable
from kernels.device import device_properties

_BLOCK_MULTIPLE = 16
_LEAST_LINE = 16
_DTYPES = (torch.bfloat16, torch.float16)
_HOPPER = (9, 0)
_NAMES = {"prefill": ("reference", "triton", "flash_attn"), "decode": ("reference", "triton")}
_FIXED_TILE = ("triton",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The model, KV layout and device that a backend has to serve."""

    shape: LatentShape
    block_size: int
    dtype: torch.dtype
    device: torch.device
    is_fp8: bool = False  # the store has e4m3 numbers


def build_latent_attention(
    names: AttentionNames, target: Target, *, fixed_tile: bool
) -> PhasedLatent:
    """As `build_attention`. Raises BackendUnavailable likewise."""
    prefill_name = _resolve(names.prefill, "prefill", target, fixed_tile=fixed_tile)
    decode_name = _resolve(names.decode, "decode", target, fixed_tile=fixed_tile)
    graph = _build_triton(target, fixed_tile=fixed_tile) if decode_name == "triton" else None
    decode = graph or _build(decode_name, target)
    prefill = decode if prefill_name == decode_name else _build(prefill_name, target)
    return PhasedLatent(prefill=prefill, decode=decode, graph=graph, prompt_graph=graph)


def build_latent_verification(
    name: AttentionName, target: Target, *, max_queries: int
) -> tuple[LatentBackend, GraphLatent | None]:
    """The decode backend for rows of up to `max_queries` new tokens; again if it can be captured.

    name: of the decode phase. Raises BackendUnavailable as `build_attention` does.
    """
    if _resolve(name, "decode", target, fixed_tile=False) == "reference":
        return _build("reference", target), None
    from kernels.attention.latent_verify import LatentVerify

    verify = LatentVerify(target.shape, max_queries=max_queries, device=target.device)
    return verify, verify


def automatic_name(phase: str, target: Target) -> AttentionName:
    """The meaning of "auto", where all packages are installed."""
    device = device_properties(target.device)
    if not device.is_gpu or target.dtype not in _DTYPES or not _has_sizes(target):
        return "reference"
    can_flash = device.capability == _HOPPER and target.shape.head_sizes == FLASH_HEADS
    return "flash_attn" if phase == "prefill" and can_flash else "triton"


def _why_not_triton(target: Target) -> str | None:
    if target.device.type != "cuda":
        return "the Triton kernels need a GPU; choose reference"
    if target.dtype not in _DTYPES:
        return f"the Triton kernels compute in bfloat16 and float16, not {target.dtype}"
    if target.block_size % _BLOCK_MULTIPLE:
        return f"block size {target.block_size} is not a multiple of {_BLOCK_MULTIPLE}"
    if not _has_sizes(target):
        return (
            f"the Triton kernels need powers of two from {_least_size(target)} on; latents have"
            f" {target.shape.rank} and rotated keys {target.shape.rope_dim} numbers"
        )
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; `pip install triton` brings it"
    return None


def _has_sizes(target: Target) -> bool:
    sizes = target.shape.rank, target.shape.rope_dim
    return all(size >= _least_size(target) and not size & (size - 1) for size in sizes)


def _least_size(target: Target) -> int:
    """The shortest line of an operand; e4m3 numbers are read two at a time."""
    return 2 * _LEAST_LINE if target.is_fp8 else _LEAST_LINE


def _resolve(name: AttentionName, phase: str, target: Target, *, fixed_tile: bool) -> str:
    """The backend that `name` stands for. Raises BackendUnavailable if it cannot serve."""
    works = _FIXED_TILE if fixed_tile else _NAMES[phase]
    if name == "auto":
        chosen = "triton" if fixed_tile else installed_or_triton(automatic_name(phase, target))
    elif name in works:
        chosen = name
    else:
        raise BackendUnavailable(
            f"{name} cannot compute latent attention's {phase} phase"
            f"{' with the same bits in any batch' if fixed_tile else ''};"
            f" choose {' or '.join(works)}"
        )
    reason = _why_not(chosen, target)
    if reason is None:
        return chosen
    raise BackendUnavailable(f"{chosen} cannot compute latent attention here: {reason}")


def _why_not(name: str, target: Target) -> str | None:
    if name == "reference":
        return None
    reason = _why_not_triton(target)
    if reason is not None or name == "triton":
        return reason
    from kernels.attention import latent_flash

    return latent_flash.why_not(target.shape, target.block_size, target.dtype, target.device)


# ---- each module is imported only when it is needed ----------------------------------------------


def _build(name: str, target: Target) -> LatentBackend:
    match name:
        case "triton":
            return _build_triton(target, fixed_tile=False)
        case "flash_attn":
            return _build_flash(target)
    return ReferenceLatent(
        target.shape,
        block_size=target.block_size,
        dtype=target.dtype,
        device=target.device,
        is_fp8=target.is_fp8,
    )


def _build_triton(target: Target, *, fixed_tile: bool) -> GraphLatent:
    from kernels.attention.latent_triton import TritonLatent

    return TritonLatent(
        target.shape,
        block_size=target.block_size,
        dtype=target.dtype,
        device=target.device,
        fixed_tile=fixed_tile,
    )


def _build_flash(target: Target) -> LatentBackend:
    from kernels.attention.latent_flash import FlashLatent

    try:
        return FlashLatent(
            target.shape, block_size=target.block_size, dtype=target.dtype, device=target.device
        )
    except (ImportError, ValueError) as error:  # installed, but built for another torch or older
        raise BackendUnavailable(
            f"flash_attn cannot compute latent attention's prefill phase here: {error}; choose"
            " triton or reference"
        ) from error
