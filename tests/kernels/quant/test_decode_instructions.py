"""The GPU instructions that decode weights, executed by a model of them on every input there is.

The model is written from the PTX ISA's descriptions of the few instructions that are used.
"""

import re

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.quant.decode import RAISE_INT4, WIDEN_E2M1, WIDEN_E4M3

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


def _prmt(a: Words, b: Words, selector: int) -> Words:
    """Byte i of the result is that byte of b:a which hexadecimal digit i of the selector names.

    With 8 added to the digit it is eight copies of the byte's sign.
    """
    found = np.zeros_like(a)
    for place in range(4):
        digit = selector >> (4 * place) & 15
        source = a if digit & 7 < 4 else b
        byte = source >> np.uint32(8 * (digit % 4)) & np.uint32(255)
        if digit >= 8:
            byte = (byte >> np.uint32(7)) * np.uint32(255)
        found |= byte << np.uint32(8 * place)
    return found


def _lop3(a: Words, b: Words, c: Words, table: int) -> Words:
    """Bit by bit: bit (a, b, c) of the table, a being the highest."""
    found = np.zeros_like(a)
    for index in range(8):
        if table >> index & 1:
            term = a if index & 4 else ~a
            term = term & (b if index & 2 else ~b)
            found |= term & (c if index & 1 else ~c)
    return found


def _execute(assembly: str, pairs: Words, num_outputs: int) -> list[Words]:
    """The outputs of instructions whose last operand, a pair of bytes, is `pairs`."""
    registers = {f"${num_outputs}": pairs}

    def read(name: str) -> Words:
        return registers[name] if name in registers else np.full_like(pairs, int(name, 0))

    for line in re.findall(r"^([a-z][^;]*);", assembly, re.MULTILINE):
        word, _, rest = line.partition(" ")
        target, *names = [name.strip() for name in rest.split(",")]
        match word:
            case "mov.b32" | "cvt.u32.u16":
                registers[target] = read(names[0])
            case "prmt.b32":
                registers[target] = _prmt(read(names[0]), read(names[1]), int(names[2], 0))
            case "shr.b32":
                registers[target] = read(names[0]) >> np.uint32(int(names[1]))
            case "shl.b32":
                registers[target] = read(names[0]) << np.uint32(int(names[1]))
            case "and.b32":
                registers[target] = read(names[0]) & read(names[1])
            case "lop3.b32":
                a, b, c = (read(name) for name in names[:3])
                registers[target] = _lop3(a, b, c, int(names[3], 0))
            case "fma.rn.bf16x2":
                a, b, c = (read(name) for name in names)
                registers[target] = _fma_bf16x2(a, b, c)
            case _:
                raise AssertionError(f"no model of {word}")
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


def test_instructions_raise_every_number_of_four_bits() -> None:
    low, high = _execute(RAISE_INT4, EVERY_PAIR, 2)
    for shift, codes in ((0, EVERY_PAIR & 255), (16, EVERY_PAIR >> 8)):
        for words, numbers in ((low, codes & 15), (high, codes >> 4)):
            ours = _bf16(words >> np.uint32(shift)).float().numpy()
            assert np.array_equal(ours, 128 + numbers)


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
