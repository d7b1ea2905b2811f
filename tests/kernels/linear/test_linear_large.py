"""Linear kernels for many tokens, with gate or residual, against float64 and against themselves."""

import pytest
import torch
import triton
from torch import Tensor

from kernels.compilation import CompilationCounter
from kernels.linear.large import (
    LargeConfig,
    faster_from,
    large_gated_linear,
    large_linear,
    supports_large,
)
from tests.kernels.interpreter import run_interpreted
from tests.kernels.linear.linear_cases import (
    CPU,
    GPU,
    assert_near,
    exact_gated,
    exact_product,
    poison,
)

# T, N, K: fewer and more than a tile of each, odd tokens, sizes that are and are not whole tiles.
SIZES = [(1, 4096, 4096), (5, 144, 128), (127, 272, 720), (333, 4112, 1040), (700, 4096, 12288)]
SIZES += [(1025, 6144, 4096), (2049, 8208, 4096), (5001, 528, 144)]


def _rows(num_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random rows with a gap between them."""
    return torch.randn(num_rows, num_columns + 24, device=device).to(dtype)[:, 8:-16]


def _case(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, K], weight [N, K] and bias; shape: T, N, K."""
    num_tokens, num_rows, num_columns = shape
    x = _rows(num_tokens, num_columns, dtype, device)
    # Products of about 1, where a gate is neither open nor shut.
    weight = (torch.randn(num_rows, num_columns, device=device) * num_columns**-0.5).to(dtype)
    return x, weight, torch.randn(num_rows, device=device).to(dtype)


# ---- on a CPU ------------------------------------------------------------------------------------


def check_interpreted() -> None:
    for dtype in (torch.float32, torch.float16):
        for index, shape in enumerate([(35, 80, 96), (7, 64, 48), (70, 144, 80)]):
            # 3 token tiles or more: the last group has fewer.
            cut = LargeConfig(
                block_m=16, block_n=32, block_k=32, group_m=2, num_stores=1 + index % 2
            )
            x, weight, bias = _case(shape, dtype, CPU)
            residual = _rows(shape[0], shape[1], dtype, CPU)
            exact = exact_product(x, weight, bias)
            assert_near(large_linear(x, weight, bias, None, cut), exact, dtype)
            with_residual = large_linear(x, weight, bias, residual, cut)
            assert_near(with_residual, exact + residual.double(), dtype)
            assert_near(large_linear(x, weight, None, None, cut), exact - bias.double(), dtype)
            gated = exact_gated(x, weight, bias)
            assert_near(large_gated_linear(x, weight, bias, cut), gated, dtype)


@pytest.mark.slow
def test_interpreted_products_are_their_formula() -> None:
    run_interpreted("tests.kernels.linear.test_linear_large:check_interpreted")


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 12288), (151936, 4096), (24576, 4096)])
def test_few_tokens_are_left_to_others(shape: tuple[int, int], gated: bool) -> None:
    first = faster_from(torch.empty(shape, device="meta"), gated=gated)
    assert first is None or first > 256


def test_a_weight_on_a_cpu_is_not_supported() -> None:
    assert not supports_large(torch.zeros(64, 64, dtype=torch.bfloat16))


def test_no_tokens_give_no_rows() -> None:
    x, weight, bias = _case((0, 64, 32), torch.bfloat16, CPU)
    assert large_linear(x, weight, bias).shape == (0, 64)
    assert large_gated_linear(x, weight, bias).shape == (0, 32)


def test_operands_that_cannot_be_read_are_refused() -> None:
    x, weight, _ = _case((3, 64, 32), torch.bfloat16, CPU)
    with pytest.raises(AssertionError, match="adjacent"):
        large_linear(x[:, ::2], weight[:, :16].contiguous(), None)
    with pytest.raises(AssertionError, match="16 bytes"):
        large_linear(torch.zeros(3, 33).bfloat16()[:, :32], weight, None)
    with pytest.raises(AssertionError, match="against"):
        large_linear(x.half(), weight, None)
    with pytest.raises(AssertionError, match="against"):
        large_linear(x, weight, None, torch.zeros(3, 32).bfloat16())


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_are_as_in_float64(
    dtype: torch.dtype, shape: tuple[int, int, int], with_bias: bool
) -> None:
    x, weight, bias = _case(shape, dtype, GPU)
    assert supports_large(weight)
    used_bias = bias if with_bias else None
    residual = _rows(shape[0], shape[1], dtype, GPU)
    exact = exact_product(x, weight, used_bias)
    poison(shape[0] * shape[1])
    assert_near(large_linear(x, weight, used_bias), exact, dtype)
    poison(shape[0] * shape[1])
    with_residual = large_linear(x, weight, used_bias, residual)
    assert_near(with_residual, exact + residual.double(), dtype)
    poison(shape[0] * shape[1])
    assert_near(large_gated_linear(x, weight, used_bias), exact_gated(x, weight, used_bias), dtype)


@pytest.mark.gpu
def test_small_weights_are_left_to_others() -> None:
    for shape in ((32, 4096), (4096, 48)):
        assert not supports_large(torch.empty(shape, dtype=torch.bfloat16, device=GPU))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config",
    [
        LargeConfig(block_m=64, block_n=64, block_k=128, num_warps=4, num_stages=6, group_m=1),
        LargeConfig(block_m=64, block_n=64, num_warps=4),
        LargeConfig(num_stages=3),
        LargeConfig(num_stages=3, is_flat=True),
        LargeConfig(num_stores=2),
        LargeConfig(block_m=256, block_n=128, num_stores=2, group_m=8),
        LargeConfig(block_n=128, num_stages=5, num_warps=4, is_flat=True),
    ],
)
def test_every_cut_gives_the_same_product(config: LargeConfig) -> None:
    x, weight, bias = _case((3001, 2064, 1040), torch.bfloat16, GPU)
    assert_near(
        large_linear(x, weight, bias, None, config), exact_product(x, weight, bias), x.dtype
    )
    gated = large_gated_linear(x, weight, bias, config)
    assert_near(gated, exact_gated(x, weight, bias), x.dtype)


@pytest.mark.gpu
def test_a_product_is_the_same_bits_in_every_run() -> None:
    x, weight, bias = _case((2047, 4096, 4096), torch.bfloat16, GPU)
    residual = _rows(2047, 4096, torch.bfloat16, GPU)
    plain, gated = large_linear(x, weight, bias, residual), large_gated_linear(x, weight, bias)
    for _ in range(30):
        assert torch.equal(large_linear(x, weight, bias, residual), plain)
        assert torch.equal(large_gated_linear(x, weight, bias), gated)


@pytest.mark.gpu
def test_outputs_beyond_two_to_the_31_are_in_their_place() -> None:
    x, weight, bias = _case((16383, 151936, 256), torch.bfloat16, GPU)
    y = large_linear(x, weight, bias)
    assert y.numel() > 2**31
    for start in (0, 14000, 16383 - 65):
        exact = exact_product(x[start : start + 65], weight, bias)
        assert_near(y[start : start + 65], exact, torch.bfloat16)


@pytest.mark.gpu
def test_another_number_of_tokens_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = _case((4096, 1040, 528), torch.bfloat16, GPU)
    residual = _rows(4096, 1040, torch.bfloat16, GPU)

    def run(num_tokens: int) -> None:
        large_linear(x[:num_tokens], weight, bias)
        large_linear(x[:num_tokens].clone(), weight, bias, residual[:num_tokens])
        large_gated_linear(x[:num_tokens], weight, bias)

    run(1000)
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", None)
    counter = CompilationCounter()
    counter.install()
    for num_tokens in (1, 2, 16, 17, 128, 129, 2048, 4095, 4096):
        run(num_tokens)
    assert counter.names == []


@pytest.mark.gpu
def test_chained_products_in_a_graph_wait_for_each_other() -> None:
    """Each product starts before its input is there; a missing wait would read old values."""
    num_tokens = 1500
    x, gate_up, _ = _case((num_tokens, 2 * 3072, 1024), torch.bfloat16, GPU)
    down = _case((num_tokens, 1024, 3072), torch.bfloat16, GPU)[1]
    residual = _rows(num_tokens, 1024, torch.bfloat16, GPU)

    def chain() -> Tensor:
        y = x
        for _ in range(3):
            y = large_linear(large_gated_linear(y, gate_up, None), down, None, residual)
        return y

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    # What a replay leaves in the buffers is wrong for the next input.
    for _ in range(10):
        x.normal_()
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, chain())
