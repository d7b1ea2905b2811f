"""The GPU instructions that decode weights, executed by a model of them on every input there is.

The model is written from the PTX ISA's descriptions of the few instructions that are used.
"""

import re
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from engine.layers.quantized_weight import e2m1_values
from kernels.quant.dequantize import (
    RAISE_INT4,
    SCALE_E2M1,
    WIDEN_E2M1,
    WIDEN_E4M3,
    WIDEN_E4M3_OR_NAN,
    WIDEN_INT4,
)
from kernels.quant.e2m1_words import DECODE_WORD, pack_scales, pack_words

Words = NDArray[np.uint32]
EVERY_PAIR: Words = np.arange(2**16, dtype=np.uint32)


def _bf16(halves: Words) -> torch.Tensor:
    bits = torch.from_numpy((halves & 0xFFFF).astype(np.uint16).view(np.int16))
    return bits.view(torch.bfloat16)


def _fma_bf16x2(a: Words, b: Words, c: Words) -> Words:
    """Each half of the words: a b + c, rounded once, subnormal numbers kept."""
    found = np.zeros_like(a)
    for shift in (0, 16):
        x, y, z = (_bf16(word >> np.uint32(shift)).double() for word in (a, b, c))
        rounded = (x * y + z).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        found |= rounded.astype(np.uint32) << np.uint32(shift)
    return found


def _prmt(a: Words, b: Words, selectors: Words) -> Words:
    """Byte i of the result is that byte of b:a which hexadecimal digit i of the selector names.

    With 8 added to the digit it is eight copies of the byte's sign.
    """
    found, selector = np.zeros_like(a), int(selectors[0])
    for place in range(4):
        digit = selector >> (4 * place) & 15
        source = a if digit & 7 < 4 else b
        byte = source >> np.uint32(8 * (digit % 4)) & np.uint32(255)
        if digit >= 8:
            byte = (byte >> np.uint32(7)) * np.uint32(255)
        found |= byte << np.uint32(8 * place)
    return found


def _lop3(a: Words, b: Words, c: Words, tables: Words) -> Words:
    """Bit by bit: bit (a, b, c) of the table, a being the highest."""
    found, table = np.zeros_like(a), int(tables[0])
    for index in range(8):
        if table >> index & 1:
            term = a if index & 4 else ~a
            term = term & (b if index & 2 else ~b)
            found |= term & (c if index & 1 else ~c)
    return found


_MODELS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda a: a,
    "cvt.u32.u16": lambda a: a,
    "prmt.b32": _prmt,
    "shr.b32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
    "and.b32": lambda a, b: a & b,
    "mul.lo.u32": lambda a, b: a * b,
    "lop3.b32": _lop3,
    "fma.rn.bf16x2": _fma_bf16x2,
}


def _execute(
    assembly: str, pairs: Words, num_outputs: int, more: dict[str, Words] | None = None
) -> list[Words]:
    """The outputs of instructions whose first input is `pairs`; more: other inputs by name."""
    registers = {f"${num_outputs}": pairs, **(more or {})}

    def read(name: str) -> Words:
        return registers[name] if name in registers else np.full_like(pairs, int(name, 0))

    for line in re.findall(r"^([a-z][^;]*);", assembly, re.MULTILINE):
        word, _, rest = line.partition(" ")
        if rest.startswith("{"):  # a word taken apart
            low, high, name = re.findall(r"[$\w]+", rest)
            registers[low], registers[high] = read(name), read(name) >> np.uint32(16)
            continue
        target, *names = [name.strip() for name in rest.split(",")]
        assert word in _MODELS, f"no model of {word}"
        registers[target] = _MODELS[word](*(read(name) for name in names))
    return [registers[f"${index}"] for index in range(num_outputs)]


def test_instructions_widen_every_number_of_e4m3_exactly() -> None:
    (found,) = _execute(WIDEN_E4M3, EVERY_PAIR, 1)
    for half, codes in ((found, EVERY_PAIR & 255), (found >> 16, EVERY_PAIR >> 8)):
        is_number = codes & 127 != 127
        exact = torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn).float()
        ours = _bf16(half).float()
        keep = torch.from_numpy(is_number)
        assert torch.equal(ours[keep], exact[keep])
        assert torch.equal(ours[keep].signbit(), exact[keep].signbit())


def test_instructions_keep_a_nan_of_e4m3_where_it_may_be_one() -> None:
    (found,), (plain,) = (_execute(each, EVERY_PAIR, 1) for each in (WIDEN_E4M3_OR_NAN, WIDEN_E4M3))
    for shift, codes in ((0, EVERY_PAIR & 255), (16, EVERY_PAIR >> 8)):
        ours, others = (_bf16(words >> np.uint32(shift)).float() for words in (found, plain))
        is_nan = torch.from_numpy(codes & 127 == 127)
        assert torch.equal(ours.isnan(), is_nan)
        assert torch.equal(ours[~is_nan], others[~is_nan])
        assert torch.equal(ours[~is_nan].signbit(), others[~is_nan].signbit())


def test_instructions_raise_every_number_of_four_bits() -> None:
    low, high = _execute(RAISE_INT4, EVERY_PAIR, 2)
    for shift, codes in ((0, EVERY_PAIR & 255), (16, EVERY_PAIR >> 8)):
        for words, numbers in ((low, codes & 15), (high, codes >> 4)):
            ours = _bf16(words >> np.uint32(shift)).float().numpy()
            assert np.array_equal(ours, 128 + numbers)


def test_instructions_widen_every_number_of_four_bits_to_fp32() -> None:
    words = EVERY_PAIR | (EVERY_PAIR[::-1] << np.uint32(16))
    found = _execute(WIDEN_INT4, words, 8)
    for place, bits in enumerate(found):
        factor, shift = (256, 0) if place < 4 else (16, 4)
        numbers = words >> np.uint32(8 * (place % 4) + shift) & np.uint32(15)
        assert np.array_equal(bits.view(np.float32), 1 + numbers / factor)


def test_instructions_widen_every_number_of_e2m1_exactly() -> None:
    low, high = _execute(WIDEN_E2M1, EVERY_PAIR, 2)
    sizes = torch.tensor((0, 0.5, 1, 1.5, 2, 3, 4, 6))
    exact = torch.cat((sizes, -sizes))
    for shift, codes in ((0, EVERY_PAIR & 255), (16, EVERY_PAIR >> 8)):
        for words, numbers in ((low, codes & 15), (high, codes >> 4)):
            ours = _bf16(words >> np.uint32(shift)).float()
            theirs = exact[torch.from_numpy(numbers.astype(np.int64))]
            assert torch.equal(ours, theirs)
            assert torch.equal(ours.signbit(), theirs.signbit())


def test_instructions_scale_numbers_of_e2m1_exactly() -> None:
    """By every power of two up to 2; two kinds of factors at once show which is used where."""
    low_widened, high_widened = (_bf16(words) for words in _execute(WIDEN_E2M1, EVERY_PAIR, 2))
    for code in range(129):
        words = [f"{((c + 126) << 7) * 0x10001:#x}" for c in (code, 128 - code)]
        scaling = SCALE_E2M1.replace("$3", words[0]).replace("$4", words[1])
        low, high = _execute(scaling, EVERY_PAIR, 2)
        for ours, widened, exponent in (
            (_bf16(low), low_widened, code - 127),
            (_bf16(high), high_widened, 1 - code),
        ):
            assert torch.equal(ours.double(), widened.double() * 2.0**exponent)


def test_instructions_decode_words_of_eight_numbers_exactly() -> None:
    numbers = torch.randint(16, (512, 128), dtype=torch.uint8)
    numbers[:16] = torch.arange(16, dtype=torch.uint8)[:, None]  # every number at every place
    codes = torch.randint(129, (512, 4), dtype=torch.uint8)
    words, factors = pack_words(numbers), pack_scales(codes)
    assert words.shape == (512, 4, 4)
    exact = e2m1_values(numbers).double() * torch.exp2(codes.double() - 127).repeat_interleave(
        32, 1
    )
    for group in range(4):
        halves = factors[:, group // 2].numpy().view(np.uint32) >> np.uint32(16 * (group % 2))
        factor = ((halves & 0xFFFF) * np.uint32(0x10001)).astype(np.uint32)
        for word in range(4):
            bits = words[:, group, word].numpy().view(np.uint32)
            places = [32 * group + 16 * i + 4 * word + j for i in range(2) for j in range(4)]
            halves_found = _execute(DECODE_WORD, bits, 8, {"$9": factor})
            for found, place in zip(halves_found, places, strict=True):
                assert torch.equal(_bf16(found).double(), exact[:, place])
