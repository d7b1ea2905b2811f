"""Linear kernels for some tokens, with or without gate, against float64 and against themselves."""

import random
from dataclasses import replace

import pytest
import torch
import triton
from torch import Tensor

from engine.runner.warm_up import LINEAR_TOKENS
from kernels.compilation import CompilationCounter
from kernels.linear.medium import (
    MediumConfig,
    choose_config,
    faster_for,
    medium_gated_linear,
    medium_linear,
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

H200_MULTIPROCESSORS = 132
# T, N, K: sizes that are and are not whole tiles, one and two tiles of tokens.
SIZES = [(33, 4096, 4096), (64, 6144, 4096), (57, 4096, 12288), (64, 24576, 4096)]
SIZES += [(65, 272, 720), (100, 28672, 1040), (128, 24576, 4096), (5, 144, 128), (127, 1040, 144)]


def _case(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, K] between NaNs, weight [N, K] and bias; shape: T, N, K."""
    num_tokens, num_rows, num_columns = shape
    around = torch.full((num_tokens + 128, num_columns + 24), torch.nan, device=device, dtype=dtype)
    x = around[:num_tokens, 8:-16]
    x.copy_(torch.randn(num_tokens, num_columns, device=device))
    # Products of about 1, where a gate is neither open nor shut.
    weight = (torch.randn(num_rows, num_columns, device=device) * num_columns**-0.5).to(dtype)
    return x, weight, torch.randn(num_rows, device=device).to(dtype)


# ---- on a CPU ------------------------------------------------------------------------------------


def check_interpreted() -> None:
    for dtype in (torch.float32, torch.float16):
        for shape in [(35, 80, 96), (7, 64, 48), (70, 144, 80)]:
            for first, second, x_by_tma in [(32, 0, True), (32, 16, False), (16, 16, True)]:
                cut = replace(
                    choose_config(shape[0], shape[1], 4),
                    block_m=32,
                    block_k=32,
                    first=first,
                    second=second,
                    x_by_tma=x_by_tma,
                )
                x, weight, bias = _case(shape, dtype, CPU)
                exact = exact_product(x, weight, bias)
                assert_near(medium_linear(x, weight, bias, cut), exact, dtype)
                assert_near(medium_linear(x, weight, None, cut), exact - bias.double(), dtype)
                gated = exact_gated(x, weight, bias)
                assert_near(medium_gated_linear(x, weight, bias, cut), gated, dtype)


@pytest.mark.slow
def test_interpreted_products_are_their_formula() -> None:
    run_interpreted("tests.kernels.linear.test_linear_medium:check_interpreted")


@pytest.mark.parametrize(
    ("num_rows", "height"), [(24576, 192), (4096, 32), (6144, 48), (28672, 128)]
)
def test_tiles_are_as_many_as_multiprocessors_or_just_fewer(num_rows: int, height: int) -> None:
    cut = choose_config(64, num_rows, H200_MULTIPROCESSORS)
    assert cut.first + cut.second == height
    num_tiles = -(-num_rows // height)
    waves = -(-num_tiles // H200_MULTIPROCESSORS)
    assert num_tiles / (waves * H200_MULTIPROCESSORS) > 0.84


def test_every_cut_fits_a_multiprocessor() -> None:
    for _ in range(200):
        num_tokens, num_rows = random.randrange(33, 129), 16 * random.randrange(8, 4000)
        cut = choose_config(num_tokens, num_rows, random.randrange(4, 160))
        assert cut.second in (0, cut.first // 2)
        assert cut.first & (cut.first - 1) == 0
        assert cut.num_stages >= 3
        assert (
            2 * cut.block_k * (cut.block_m + cut.first + cut.second) * cut.num_stages < 227 * 1024
        )
        assert cut.block_m >= num_tokens


@pytest.mark.parametrize(
    ("num_rows", "num_columns", "gated", "expected"),
    [
        (151936, 4096, False, range(0)),
        (4096, 12288, False, range(33, 65)),
        (24576, 4096, True, range(33, 129)),
        (25600, 5120, True, range(33, 129)),
        (5120, 12800, False, range(56, 65)),
    ],
)
def test_a_vocabulary_and_few_tokens_of_idle_tilings_are_left_to_others(
    num_rows: int, num_columns: int, gated: bool, expected: range
) -> None:
    weight = torch.empty(num_rows, num_columns, device="meta")
    assert faster_for(weight, H200_MULTIPROCESSORS, gated=gated) == expected


def test_x_is_loaded_by_pointers_where_more_than_an_eighth_of_its_rows_is_missing() -> None:
    by_tma = [n for n in range(33, 129) if choose_config(n, 4096, H200_MULTIPROCESSORS).x_by_tma]
    assert by_tma == [*range(56, 65), *range(112, 129)]


def test_a_warm_up_runs_every_form() -> None:
    every, run = (
        {choose_config(number, 24576, H200_MULTIPROCESSORS) for number in numbers}
        for numbers in (range(33, 129), LINEAR_TOKENS)
    )
    assert run == every


def test_no_tokens_give_no_rows() -> None:
    x, weight, bias = _case((0, 64, 32), torch.bfloat16, CPU)
    cut = choose_config(64, 64, 4)
    assert medium_linear(x, weight, bias, cut).shape == (0, 64)
    assert medium_gated_linear(x, weight, bias, cut).shape == (0, 32)


def test_operands_that_cannot_be_read_are_refused() -> None:
    x, weight, _ = _case((3, 64, 32), torch.bfloat16, CPU)
    cut = choose_config(64, 64, 4)
    with pytest.raises(AssertionError, match="adjacent"):
        medium_linear(x[:, ::2], weight[:, :16].contiguous(), None, cut)
    with pytest.raises(AssertionError, match="16 bytes"):
        medium_linear(torch.zeros(3, 33).bfloat16()[:, :32], weight, None, cut)
    with pytest.raises(AssertionError, match="against"):
        medium_linear(x.half(), weight, None, cut)


# ---- on a GPU ------------------------------------------------------------------------------------


def _cut(shape: tuple[int, int, int]) -> MediumConfig:
    return choose_config(shape[0], shape[1], H200_MULTIPROCESSORS)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_are_as_in_float64(
    dtype: torch.dtype, shape: tuple[int, int, int], with_bias: bool
) -> None:
    x, weight, bias = _case(shape, dtype, GPU)
    used_bias = bias if with_bias else None
    poison(shape[0] * shape[1])
    exact = exact_product(x, weight, used_bias)
    assert_near(medium_linear(x, weight, used_bias, _cut(shape)), exact, dtype)
    poison(shape[0] * shape[1])
    gated = exact_gated(x, weight, used_bias)
    assert_near(medium_gated_linear(x, weight, used_bias, _cut(shape)), gated, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("first", "second"), [(16, 0), (32, 16), (64, 32), (128, 0), (128, 64)])
def test_every_cut_gives_the_same_product(first: int, second: int) -> None:
    x, weight, bias = _case((201, 2064, 1040), torch.bfloat16, GPU)
    for num_tokens in (40, 64, 96, 128):
        cut = replace(choose_config(num_tokens, 2064, 4), first=first, second=second, num_stages=3)
        assert_near(medium_linear(x, weight, bias, cut), exact_product(x, weight, bias), x.dtype)
        gated = medium_gated_linear(x, weight, bias, cut)
        assert_near(gated, exact_gated(x, weight, bias), x.dtype)


@pytest.mark.gpu
def test_a_product_is_the_same_bits_in_every_run() -> None:
    shape = (61, 4096, 4096)
    x, weight, bias = _case(shape, torch.bfloat16, GPU)
    plain = medium_linear(x, weight, bias, _cut(shape))
    gated = medium_gated_linear(x, weight, bias, _cut(shape))
    for _ in range(30):
        assert torch.equal(medium_linear(x, weight, bias, _cut(shape)), plain)
        assert torch.equal(medium_gated_linear(x, weight, bias, _cut(shape)), gated)


@pytest.mark.gpu
def test_another_number_of_tokens_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = _case((64, 1040, 528), torch.bfloat16, GPU)

    def run(num_tokens: int) -> None:
        cut = choose_config(num_tokens, 1040, H200_MULTIPROCESSORS)
        medium_linear(x[:num_tokens], weight, bias, cut)
        medium_gated_linear(x[:num_tokens].clone(), weight, bias, cut)

    run(40)
    run(64)
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", None)
    counter = CompilationCounter()
    counter.install()
    for num_tokens in (1, 16, 33, 48, 63, 64):
        run(num_tokens)
    assert counter.names == []


@pytest.mark.gpu
def test_chained_products_in_a_graph_wait_for_each_other() -> None:
    """Each product starts before its input is there; a missing wait would read old values."""
    x, gate_up, _ = _case((64, 2 * 3072, 1024), torch.bfloat16, GPU)
    down = _case((64, 1024, 3072), torch.bfloat16, GPU)[1]
    gated_cut, down_cut = _cut((64, 2 * 3072, 1024)), _cut((64, 1024, 3072))

    def chain() -> Tensor:
        y = x
        for _ in range(3):
            y = medium_linear(
                medium_gated_linear(y, gate_up, None, gated_cut), down, None, down_cut
            )
        return y

    expected = chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain()
    for _ in range(20):
        y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(y, expected)
