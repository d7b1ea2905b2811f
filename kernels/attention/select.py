"""Selects the attention backend, once, by name or by device and shape.

A backend that is named and not installed is an error that says how to get it. "auto" is one that is
installed; a warning says if another one would be faster.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from kernels.attention.installed import installed_or_triton
from kernels.attention.latent import LatentShape
from kernels.attention.names import AttentionName, AttentionNames, BackendUnavailable
from kernels.attention.phased import PhasedAttention, Phases
from kernels.attention.protocol import AttentionBackend, AttentionShape, GraphAttention
from kernels.attention.reference import ReferenceAttention
from kernels.attention.select_latent import Target, build_latent_attention
from kernels.device import DeviceProperties, device_properties

_Phase = Literal["prefill", "decode"]
_TRITON_HEAD_DIMS = (64, 128, 256)
_MEASURED_HEAD_DIM = 128  # the largest with which backends were compared
_TRITON_DTYPES = (torch.bfloat16, torch.float16)
_TRITON_BLOCK_MULTIPLE = 16
_HOPPER = (9, 0)
_ANY_MASK = ("flex", "reference")  # backends with more than causal masks and windows
_SOFTCAP = ("flash_attn_4", "triton", "flex", "reference")
_PROMPTS_ALONE = ("flash_attn_4",)
# Backends that read e4m3 numbers.
_FP8: dict[_Phase, tuple[str, ...]] = {
    "prefill": ("triton", "flash_attn", "reference"),
    "decode": ("triton", "reference"),
}
_NO_FP8 = "it is used with K and V as the model computes them, not with cache.kv_dtype fp8_e4m3"
_NO_FP8_DECODE = "with cache.kv_dtype fp8_e4m3 it is for prompts"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """The model, KV layout and device that a backend has to serve."""

    shape: AttentionShape
    block_size: int
    dtype: torch.dtype
    device: torch.device
    is_fp8: bool = False  # K and V are stored as e4m3 numbers


def build_attention(
    names: AttentionNames,
    shape: AttentionShape | LatentShape,
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    fixed_tile: bool,
    is_fp8: bool = False,
) -> Phases:
    """The combined backends of both phases.

    fixed_tile: a request's results are bitwise equal in any batch; only "triton" supports that.
    is_fp8: K and V, or latents, are stored as e4m3 numbers; for prompts "flash_attn", for both
    phases "triton" and "reference" read them.
    Raises BackendUnavailable if a named (or automatic) backend cannot serve this model here.
    """
    if isinstance(shape, LatentShape):
        of_latents = Target(
            shape=shape, block_size=block_size, dtype=dtype, device=device, is_fp8=is_fp8
        )
        return build_latent_attention(names, of_latents, fixed_tile=fixed_tile)
    target = _Target(shape=shape, block_size=block_size, dtype=dtype, device=device, is_fp8=is_fp8)
    return _build_paged(names, target, fixed_tile=fixed_tile)


def _build_paged(names: AttentionNames, target: _Target, *, fixed_tile: bool) -> PhasedAttention:
    """Of attention over K and V."""
    if fixed_tile:
        _check_fixed_tile(names, target)
        triton = _build_triton(target, fixed_tile=True)
        return PhasedAttention(prefill=triton, decode=triton, graph=triton, prompt_graph=triton)
    prefill_name = _resolve(names.prefill, "prefill", target)
    decode_name = _resolve(names.decode, "decode", target)
    graph = _build_graph(decode_name, "decode", target)
    decode = graph or _build_eager(decode_name, target)
    if prefill_name == decode_name and decode_name != "flashinfer":
        return PhasedAttention(prefill=decode, decode=decode, graph=graph, prompt_graph=graph)
    # FlashInfer needs two objects even for both phases: one plan suits one kind of rows.
    prompt_graph = _build_graph(prefill_name, "prefill", target)
    prefill = prompt_graph or _build_eager(prefill_name, target)
    return PhasedAttention(prefill=prefill, decode=decode, graph=graph, prompt_graph=prompt_graph)


def automatic_name(phase: _Phase, shape: AttentionShape, device: DeviceProperties) -> AttentionName:
    """The meaning of "auto" by device and shape, where all packages are installed.

    On Hopper the fastest measured for the phase. On other GPUs, where FlashAttention-3 does not
    run, the Triton kernels: of the backends that are left they alone compute prompts in CUDA
    graphs. They have caps on scores, which FlashAttention-3 here lacks, and were measured with
    attention sinks.
    """
    if not device.is_gpu or shape.head_dim not in _TRITON_HEAD_DIMS:
        return "reference"
    is_measured = device.capability == _HOPPER and shape.head_dim <= _MEASURED_HEAD_DIM
    is_plain = not shape.has_sinks and shape.softcap is None
    can_flash = is_measured and is_plain
    return "flash_attn" if phase == "prefill" and can_flash else "triton"


def why_not(
    name: AttentionName,
    shape: AttentionShape,
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> str | None:
    """Why backend `name` cannot serve this model on this machine; None = it can."""
    target = _Target(shape=shape, block_size=block_size, dtype=dtype, device=device)
    return _why_not(name, target)


def _resolve(name: AttentionName, phase: _Phase, target: _Target) -> str:
    chosen = name
    if name == "auto":
        device = device_properties(target.device)
        chosen = installed_or_triton(automatic_name(phase, target.shape, device))
    reason = _why_not_phase(chosen, phase, target)
    if reason is None:
        return chosen
    if name == "auto":
        reason += " (auto chose it for this device and head size)"
    raise _unavailable(chosen, phase, reason, target)


def _unavailable(name: str, phase: _Phase, reason: str, target: _Target) -> BackendUnavailable:
    others = [
        other
        for other in _WHY_NOT
        if other != name and _why_not_phase(other, phase, target) is None
    ]
    return BackendUnavailable(
        f"{name} cannot compute attention's {phase} phase here: {reason}. "
        f"What would work for {phase}: {', '.join(others)}"
    )


def _check_fixed_tile(names: AttentionNames, target: _Target) -> None:
    for phase, name in (("prefill", names.prefill), ("decode", names.decode)):
        if name not in ("auto", "triton"):
            raise BackendUnavailable(
                f"{name} cannot compute attention's {phase} phase with the same bits in any batch. "
                f"What would work for {phase}: triton"
            )
    reason = _why_not("triton", target)
    if reason is not None:
        raise BackendUnavailable(
            f"triton alone gives the same bits in any batch, and cannot here: {reason}"
        )


# ---- backends; each module is imported only when it is needed ------------------------------------


def _why_not_phase(name: str, phase: _Phase, target: _Target) -> str | None:
    if phase == "decode" and name in _PROMPTS_ALONE:
        return "it is for prompts"
    if target.is_fp8 and name not in _FP8[phase]:
        return _NO_FP8 if name not in _FP8["prefill"] else _NO_FP8_DECODE
    return _why_not(name, target)


def _why_not(name: str, target: _Target) -> str | None:
    assert name in get_args(AttentionName), f"attention backend {name!r}"
    if name not in _ANY_MASK and not target.shape.has_windows_only:
        function = target.shape.mask_function
        what = "layers that see chunks" if function is None else f"the mask {function.name}"
        return f"its kernels have causal masks and windows of them, not {what}"
    if name not in _SOFTCAP and target.shape.softcap is not None:
        return "it is used without a cap on scores"
    return _WHY_NOT[name](target)


def _why_not_triton(target: _Target) -> str | None:
    if target.device.type != "cuda":
        return "the Triton kernels need a GPU"
    if target.dtype not in _TRITON_DTYPES:
        return f"the Triton kernels compute in bfloat16 and float16, not {target.dtype}"
    if target.shape.head_dim not in _TRITON_HEAD_DIMS:
        return f"the Triton kernels have heads of 64, 128 and 256, not {target.shape.head_dim}"
    if target.block_size % _TRITON_BLOCK_MULTIPLE:
        return f"block size {target.block_size} is not a multiple of {_TRITON_BLOCK_MULTIPLE}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; `pip install triton` brings it"
    return None


def _why_not_flashinfer(target: _Target) -> str | None:
    from kernels.attention import flashinfer

    return flashinfer.why_not(target.shape, target.block_size, target.dtype, target.device)


def _why_not_flash_attn(target: _Target) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; `pip install triton` brings it"
    from kernels.attention import flash_attn

    return flash_attn.why_not(target.shape, target.block_size, target.dtype, target.device)


def _why_not_flash_attn_4(target: _Target) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; `pip install triton` brings it"
    from kernels.attention import flash_attn_4

    return flash_attn_4.why_not(target.shape, target.dtype, target.device)


def _why_not_flex(target: _Target) -> str | None:
    from kernels.attention import flex

    return flex.why_not(target.shape, target.dtype, target.device)


def _build_eager(name: str, target: _Target) -> AttentionBackend:
    """A backend whose steps cannot be captured."""
    if name == "flex":
        from kernels.attention.flex import FlexAttention

        return FlexAttention(
            target.shape, block_size=target.block_size, dtype=target.dtype, device=target.device
        )
    return ReferenceAttention(
        target.shape,
        block_size=target.block_size,
        dtype=target.dtype,
        device=target.device,
        is_fp8=target.is_fp8,
    )


def _build_graph(name: str, phase: _Phase, target: _Target) -> GraphAttention | None:
    """The backend as a `GraphAttention`; None for one that cannot be captured."""
    try:
        match name:
            case "triton":
                return _build_triton(target, fixed_tile=False)
            case "flashinfer":
                return _build_flashinfer(target)
            case "flash_attn":
                return _build_flash_attn(target)
            case "flash_attn_4":
                return _build_flash_attn_4(target)
    except (ImportError, ValueError) as error:  # installed, but built for another torch or older
        raise _unavailable(name, phase, str(error), target) from error
    return None


def _build_triton(target: _Target, *, fixed_tile: bool) -> GraphAttention:
    from kernels.attention.triton import TritonAttention

    return TritonAttention(
        target.shape,
        block_size=target.block_size,
        dtype=target.dtype,
        device=target.device,
        fixed_tile=fixed_tile,
    )


def _build_flashinfer(target: _Target) -> GraphAttention:
    from kernels.attention.flashinfer import FlashInferAttention

    return FlashInferAttention(
        target.shape, block_size=target.block_size, dtype=target.dtype, device=target.device
    )


def _build_flash_attn(target: _Target) -> GraphAttention:
    if target.is_fp8:
        from kernels.attention.widened import WidenedAttention

        return WidenedAttention(
            target.shape, block_size=target.block_size, dtype=target.dtype, device=target.device
        )
    from kernels.attention.flash_attn import FlashAttention

    return FlashAttention(
        target.shape, block_size=target.block_size, dtype=target.dtype, device=target.device
    )


def _build_flash_attn_4(target: _Target) -> GraphAttention:
    from kernels.attention.flash_attn_4 import FlashAttention4

    return FlashAttention4(
        target.shape, block_size=target.block_size, dtype=target.dtype, device=target.device
    )


_WHY_NOT: dict[str, Callable[[_Target], str | None]] = {
    "flash_attn": _why_not_flash_attn,
    "flash_attn_4": _why_not_flash_attn_4,
    "flashinfer": _why_not_flashinfer,
    "triton": _why_not_triton,
    "flex": _why_not_flex,
    "reference": lambda _: None,
}
