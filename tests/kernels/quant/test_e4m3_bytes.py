"""Numbers to e4m3 and back, for every number of 16 bits."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.eight_bits import widen_pairs
from kernels.instructions import knows_e4m3
from kernels.kv.scales import from_e4m3, to_e4m3
from kernels.quant.dequantize import decode_e4m3, encode_e4m3
from tests.kernels.interpreter import run_interpreted
from tests.kernels.ops_checks import nearest

ONE = torch.ones(1)


@triton.jit
def _encode_kernel(  # noqa: ANN202
    x_ptr,  # noqa: ANN001
    codes_ptr,  # noqa: ANN001
    back_ptr,  # noqa: ANN001
    half_ptr,  # noqa: ANN001
    TILE: tl.constexpr,  # noqa: N803
    KNOWS_E4M3: tl.constexpr,  # noqa: N803
):
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    codes = encode_e4m3(tl.load(x_ptr + place), KNOWS_E4M3)
    tl.store(codes_ptr + place, codes)
    tl.store(back_ptr + place, decode_e4m3(codes, tl.float32, KNOWS_E4M3, False, True))
    low, high = widen_pairs(codes.to(tl.uint16) * 257, tl.float16, True, KNOWS_E4M3)
    tl.store(half_ptr + 2 * place, low)
    tl.store(half_ptr + 2 * place + 1, high)


def _all_numbers() -> Tensor:
    """All of float16, and of bfloat16 every other, in fp32: 98,304."""
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    return torch.cat((bits.view(torch.float16).float(), bits[::2].view(torch.bfloat16).float()))


def check(device: str = "cpu") -> None:
    x = _all_numbers().to(device)
    codes, back = torch.empty_like(x, dtype=torch.uint8), torch.empty_like(x)
    halves = torch.empty(len(x), 2, dtype=torch.float16, device=device)
    knows = knows_e4m3(x.device)
    _encode_kernel[(len(x) // 4096,)](
        x, codes, back, halves, TILE=4096, KNOWS_E4M3=knows
    )  # fmt: skip
    is_number = x.isfinite()
    expected = to_e4m3(x.view(-1, 1, 1), ONE.to(device)).view(-1)
    assert torch.equal(codes[is_number], expected[is_number])
    assert (codes[~is_number] == 127).all()
    assert back[~is_number].isnan().all()
    assert torch.equal(
        halves.float().nan_to_num(500.0), back[:, None].expand(-1, 2).nan_to_num(500.0)
    )
    assert torch.equal(back[is_number], from_e4m3(expected, torch.float32)[is_number])


def test_torch_rounds_to_the_nearest_and_cuts_off() -> None:
    x = _all_numbers()
    expected = nearest(x.view(1, -1), ONE).view(-1)
    assert torch.equal(to_e4m3(x.view(-1, 1, 1), ONE).view(-1), expected)
    kept = from_e4m3(expected, torch.float64)
    assert kept[x.isfinite()].abs().max() == 448
    assert kept[~x.isfinite()].isnan().all()


def check_interpreted() -> None:
    check()


@pytest.mark.slow
def test_bytes_in_the_interpreter() -> None:
    run_interpreted("tests.kernels.quant.test_e4m3_bytes:check_interpreted")


@pytest.mark.gpu
def test_bytes_on_a_gpu() -> None:
    check("cuda")
