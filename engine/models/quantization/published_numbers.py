"""From published tensors of a quantised linear map to its numbers, scales and zero points.

Every function takes suffix -> tensor, as `published_tensors` lists them, and returns `Numbers`. The
numbers of FP8 weights are copied to their place as they are, and are not seen here.
The layouts are those that the formats' own writers produce:

- compressed-tensors: 4-bit numbers and zero points q - 8 in [-8, 7], stored as q; eight in a word,
  the first in the lowest bits; numbers along the inputs, zero points along the outputs. Those of 8
  bits likewise, q - 128, four in a word; not packed they are stored as they are (int-quantized).
- AWQ (gemm): words along the outputs; bits 4 i hold output [0, 2, 4, 6, 1, 3, 5, 7][i] of eight.
- GPTQ: numbers in words along the inputs, zero points along the outputs; in the first format a word
  of zero points is stored less a word of ones, so that a zero point of 0 borrows from the next.
  Numbers of 8 bits likewise, four in a word.
- MXFP4, NVFP4: numbers in e2m1 (a sign, two bits of exponent, one of mantissa), two in a byte along
  the inputs, the first in the lower bits. NVFP4's scales are e4m3; one more number divides
  (compressed-tensors) or multiplies (ModelOpt) all of a tensor's.
- bitsandbytes: places in a table, two in a byte along the inputs, the first in the higher bits; a
  scale a block of 64, which may be a place in a second table, times a factor, plus an offset.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.models.quantization.published_tensors import state_name
from engine.models.quantization.scheme import (
    BITS_AND_BYTES_GROUP,
    MXFP4_PACKINGS,
    Packing,
    Quantization,
)

Tensors = Mapping[str, Tensor]
_WORD_BITS = 32
_ONE_OF_EACH = {4: 0x11111111, 8: 0x01010101}  # bits of a number -> a word of ones
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # output -> its place in the word
_MAX_FP8 = 448.0  # of e4m3


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """A published linear map, or a share of it, outputs by rows and inputs in their order."""

    # [out, in] e4m3, int8, fp32, or uint8 of 0 to 15 (8 bits: 255); None = placed already
    numbers: Tensor | None
    scales: Tensor  # [out tiles, in tiles] fp32; with numbers of e2m1, e8m0 or e4m3
    zeros: Tensor | None = None  # as `scales`, uint8
    groups: Tensor | None = None  # [in]: the group of each input; None = in order
    factor: Tensor | None = None  # fp32, one number: by which all scales are multiplied


def read_numbers(quantization: Quantization, tensors: Tensors) -> Numbers:
    """The numbers of one published map; all tensors on one device."""
    match quantization.packing:
        case Packing.FP8:
            scales = _by_tiles(quantization, tensors[quantization.scale_name])
            return Numbers(numbers=None, scales=scales)
        case Packing.ONLINE_FP8:
            return quantize_rows(tensors["weight"])
        case Packing.INT8:
            scales = _by_tiles(quantization, tensors["weight_scale"])
            return Numbers(numbers=tensors["weight"], scales=scales)
        case Packing.BITS_AND_BYTES:
            return _bits_and_bytes(quantization, tensors)
        case Packing.COMPRESSED_INT:
            return _compressed(quantization, tensors)
        case Packing.AWQ:
            return _awq(tensors)
        case Packing.GPTQ:
            return _gptq(quantization, tensors)
        case Packing.MXFP4 | Packing.QUARK_MXFP4 | Packing.NVFP4 | Packing.MODELOPT_NVFP4:
            return _fp4(quantization, tensors)


def _fp4(quantization: Quantization, tensors: Tensors) -> Numbers:
    is_packed = quantization.packing in (Packing.MXFP4, Packing.NVFP4)
    numbers = _pairs(tensors["weight_packed" if is_packed else "weight"])
    scales = tensors["weight_scale"]
    if quantization.packing in MXFP4_PACKINGS:
        return Numbers(numbers=numbers, scales=scales.view(torch.float8_e8m0fnu))
    if quantization.packing is Packing.NVFP4:
        factor = 1 / tensors["weight_global_scale"].float()
    else:
        factor = tensors["weight_scale_2"].float()
    return Numbers(numbers=numbers, scales=scales, factor=factor)


def quantize_rows(weight: Tensor) -> Numbers:
    """weight: [out, in]; the largest number of a row becomes e4m3's largest, 448."""
    largest = weight.float().abs().amax(dim=1, keepdim=True)
    scales = torch.where(largest > 0, largest / _MAX_FP8, torch.ones_like(largest))
    numbers = (weight.float() / scales).clamp(-_MAX_FP8, _MAX_FP8).to(torch.float8_e4m3fn)
    return Numbers(numbers=numbers, scales=scales)


def _by_tiles(quantization: Quantization, scales: Tensor) -> Tensor:
    """[out tiles, in tiles] fp32, of scales whose dimensions of 1 may be left out."""
    if quantization.has_exponents:
        scales = scales.view(torch.float8_e8m0fnu)
    num_tiles = 1 if quantization.tile_rows is None else scales.shape[0]
    return scales.float().reshape(num_tiles, -1)


def _unpacked(words: Tensor, dim: int, bits: int = 4) -> Tensor:
    """The numbers of each word, the lowest bits first, along `dim`; uint8."""
    shifts = torch.arange(0, _WORD_BITS, bits, dtype=torch.int32, device=words.device)
    numbers = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    if dim == 0:
        numbers = numbers.movedim(-1, 1)
    return numbers.to(torch.uint8).flatten(dim, dim + 1)


def _pairs(packed: Tensor) -> Tensor:
    """Two numbers of each byte, the lower bits first; [out, in] uint8."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


def _compressed(quantization: Quantization, tensors: Tensors) -> Numbers:
    bits, zeros = quantization.bits, tensors.get("weight_zero_point")
    return Numbers(
        numbers=_unpacked(tensors["weight_packed"], dim=1, bits=bits),
        scales=_by_tiles(quantization, tensors["weight_scale"]),
        zeros=None if zeros is None else _unpacked(zeros.reshape(len(zeros), -1), dim=0, bits=bits),
        groups=tensors.get("weight_g_idx"),
    )


def _bits_and_bytes(quantization: Quantization, tensors: Tensors) -> Numbers:
    """All of the map. Raises ConfigError if it describes itself in a way that is not known."""
    state = _read_state(tensors[state_name(quantization)])
    packed = tensors["weight"].reshape(state.shape[0], -1)
    places = torch.stack((packed >> 4, packed & 15), dim=-1).flatten(1)
    absmax = tensors["weight.absmax"].flatten()
    if quantization.has_nested_scales:
        factors = tensors["weight.nested_absmax"].repeat_interleave(state.nested_blocksize)
        absmax = tensors["weight.nested_quant_map"][absmax.long()] * factors[: len(absmax)]
        absmax = absmax + state.nested_offset
    return Numbers(
        numbers=tensors["weight.quant_map"][places.long()],
        scales=absmax.reshape(state.shape[0], -1),
    )


class _State(msgspec.Struct, frozen=True):
    """bitsandbytes' description of a map."""

    blocksize: int
    shape: tuple[int, int]
    nested_blocksize: int = 256
    nested_offset: float = 0.0


def _read_state(tensor: Tensor) -> _State:
    try:
        state = msgspec.json.decode(tensor.cpu().numpy().tobytes(), type=_State)
    except msgspec.DecodeError as error:
        raise ConfigError(f"bitsandbytes: a quant_state is not readable: {error}") from error
    if (state.blocksize, state.nested_blocksize) != (BITS_AND_BYTES_GROUP, 256):
        raise ConfigError(
            f"bitsandbytes: blocks of {state.blocksize} and {state.nested_blocksize} are not"
            f" supported; supported: {BITS_AND_BYTES_GROUP} and 256"
        )
    return state


def _awq(tensors: Tensors) -> Numbers:
    return Numbers(
        numbers=_deinterleaved(_unpacked(tensors["qweight"], dim=1)),
        scales=tensors["scales"].float().T.contiguous(),
        zeros=_deinterleaved(_unpacked(tensors["qzeros"], dim=1)),
    )


def _deinterleaved(numbers: Tensor) -> Tensor:
    """[x, out] in the places of words -> [out, x] in the order of outputs."""
    places = torch.tensor(_AWQ_PLACES, device=numbers.device)
    words = numbers.reshape(len(numbers), -1, len(_AWQ_PLACES))
    return torch.flatten(words[:, :, places], 1).T.contiguous()


def _gptq(quantization: Quantization, tensors: Tensors) -> Numbers:
    bits = quantization.bits
    ones = quantization.zero_offset * _ONE_OF_EACH[bits]
    return Numbers(
        numbers=_unpacked(tensors["qweight"], dim=0, bits=bits).T.contiguous(),
        scales=tensors["scales"].float().T.contiguous(),
        zeros=_unpacked(tensors["qzeros"] + ones, dim=1, bits=bits).T.contiguous(),
        groups=tensors.get("g_idx"),
    )
