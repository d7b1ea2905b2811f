"""Linear kernels for few tokens and for any number, against float64 and against themselves."""

from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor

from kernels.ops import Ops
from tests.kernels.interpreter import run_interpreted
from tests.kernels.linear.linear_cases import (
    CPU,
    GPU,
    assert_near,
    exact_gated,
    exact_product,
    poison,
)

Case = tuple[Tensor, Tensor, Tensor | None]


def _case(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, *, with_bias: bool
) -> Case:
    """x [T, K] with a gap between its rows, weight [N, K] and bias; shape: T, N, K."""
    num_tokens, num_rows, num_columns = shape
    x = torch.randn(num_tokens, num_columns + 24, device=device).to(dtype)[:, 8:-16]
    # Scaled, or a gate times an up would leave float16's range.
    weight = (num_columns**-0.5 * torch.randn(num_rows, num_columns, device=device)).to(dtype)
    bias = 9 * torch.randn(num_rows, device=device).to(dtype) if with_bias else None
    return x, weight, bias


# ---- on a CPU ------------------------------------------------------------------------------------


def check_small_interpreted() -> None:
    from kernels.linear.small import SmallConfig, small_gated_linear, small_linear, tile_counters

    counters = tile_counters(CPU)
    cuts = [
        SmallConfig(block_n=32, block_k=32),
        SmallConfig(block_n=32, block_k=32, split_k=3),
        SmallConfig(block_n=64, block_k=16, split_k=2, is_swapped=True),
    ]
    for num_tokens, cut, dtype in (
        (1, cuts[0], torch.float32),
        (5, cuts[1], torch.float32),
        (19, cuts[2], torch.float16),
    ):
        for num_rows, num_columns, with_bias in ((96, 96, True), (80, 112, False)):
            shape = (num_tokens, num_rows, num_columns)
            case = _case(shape, dtype, CPU, with_bias=with_bias)
            assert_near(small_linear(*case, counters, cut), exact_product(*case), dtype)
            assert_near(small_gated_linear(*case, counters, cut), exact_gated(*case), dtype)
            assert not counters.any(), "a call left its counts behind"


def check_invariant_interpreted() -> None:
    from kernels.linear.invariant import InvariantConfig, invariant_linear

    cut = InvariantConfig(
        block_m=16, block_n=32, block_k=32, num_warps=4, num_stages=3, group_m=2
    )  # 3 token tiles: the last group has one only
    for shape, dtype in (((35, 80, 96), torch.float32), ((7, 64, 48), torch.float16)):
        case = _case(shape, dtype, CPU, with_bias=True)
        assert_near(invariant_linear(*case, cut), exact_product(*case), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["small", "invariant"])
def test_interpreted_products_are_their_formula(name: str) -> None:
    run_interpreted(f"tests.kernels.linear.test_linear_kernels:check_{name}_interpreted")


# ---- on a GPU ------------------------------------------------------------------------------------

# Odd token counts in every bucket, rows and columns that are and are not whole tiles, each kind of
# weight: narrow, deep, very many rows.
SIZES = [(1, 4096, 4096), (3, 6144, 4096), (16, 4096, 12288), (17, 1040, 4112), (31, 2064, 80)]
SIZES += [(33, 4096, 12288), (64, 6144, 4096), (63, 272, 720), (7, 32784, 144), (50, 32800, 1040)]
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def _small_product(*, gated: bool) -> Product:
    from kernels.linear.small import small_gated_linear, small_linear, tile_counters

    counters = tile_counters(GPU)
    kernel = small_gated_linear if gated else small_linear
    return lambda x, weight, bias: kernel(x, weight, bias, counters)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gated", [False, True])
def test_few_tokens_are_multiplied_as_in_float64(dtype: torch.dtype, gated: bool) -> None:
    product = _small_product(gated=gated)
    for index, shape in enumerate(SIZES):
        case = _case(shape, dtype, GPU, with_bias=index % 2 == 0)
        poison(8 * shape[0] * shape[1])
        ours = product(*case)
        exact = exact_gated(*case) if gated else exact_product(*case)
        assert_near(ours, exact, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 32, 64])
def test_a_split_product_is_the_same_bits_in_every_run(num_tokens: int) -> None:
    product = _small_product(gated=False)
    case = _case((num_tokens, 4096, 12288), torch.bfloat16, GPU, with_bias=True)
    first = product(*case)
    for _ in range(50):
        assert torch.equal(product(*case), first)


@pytest.mark.gpu
def test_chained_products_in_a_graph_wait_for_each_other() -> None:
    """Each product starts before its input is there; a missing wait would read old values."""
    product, gated = _small_product(gated=False), _small_product(gated=True)
    scale = 4096**-0.5
    up, narrow, down = (
        (torch.randn(n, k, device=GPU) * scale).bfloat16()
        for n, k in ((24576, 4096), (4096, 4096), (4096, 12288))
    )
    x = torch.randn(5, 4096, device=GPU).bfloat16()

    def chain() -> Tensor:
        y = x
        for _ in range(3):
            y = product(gated(product(y, narrow, None), up, None), down, None)
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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [*SIZES, (333, 4112, 1040), (2049, 8208, 4096)])
def test_any_number_of_tokens_is_multiplied_as_in_float64(
    dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    from kernels.linear.invariant import invariant_linear

    case = _case(shape, dtype, GPU, with_bias=True)
    poison(shape[0] * shape[1])
    assert_near(invariant_linear(*case), exact_product(*case), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [4096, 24576])
def test_a_token_has_the_same_bits_in_any_batch(num_rows: int) -> None:
    from kernels.linear.invariant import invariant_linear

    x, weight, bias = _case((4099, num_rows, 4096), torch.bfloat16, GPU, with_bias=True)
    whole = invariant_linear(x, weight, bias)
    for start, end in ((0, 1), (5, 6), (1, 18), (100, 163), (77, 334), (4000, 4099)):
        part = invariant_linear(x[start:end], weight, bias)
        assert torch.equal(part, whole[start:end]), f"tokens {start} to {end} differ"


@pytest.mark.gpu
@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 64, 65, 300])
def test_layers_choose_by_number_of_tokens(num_tokens: int, is_deterministic: bool) -> None:
    from engine.layers.build_linear import build_gated, build_linear
    from engine.layers.linear import LinearWeight

    x, weight, bias = _case((num_tokens, 768, 256), torch.bfloat16, GPU, with_bias=True)
    linear = build_linear(LinearWeight(weight, bias), is_deterministic=is_deterministic)
    gated = build_gated(
        LinearWeight(weight, bias), _two_step_gate(), is_deterministic=is_deterministic
    )
    assert_near(linear(x), exact_product(x, weight, bias), torch.bfloat16)
    assert_near(gated(x), exact_gated(x, weight, bias), torch.bfloat16)


@pytest.mark.gpu
def test_a_weight_that_has_no_invariant_product_is_refused() -> None:
    from engine.errors import ConfigError
    from engine.layers.build_linear import build_linear
    from engine.layers.linear import LinearWeight

    with pytest.raises(ConfigError, match="batch-invariant"):
        build_linear(LinearWeight(torch.zeros(8, 24, device=GPU)), is_deterministic=True)


def test_a_gate_on_a_cpu_is_two_steps() -> None:
    from engine.layers.build_linear import build_gated
    from engine.layers.linear import LinearWeight

    x, weight, bias = _case((5, 96, 40), torch.float32, CPU, with_bias=True)
    gated = build_gated(LinearWeight(weight, bias), _two_step_gate())
    assert_near(gated(x), exact_gated(x, weight, bias), torch.float32)


class _TwoStepGate:
    """The one operation of `kernels.ops.Ops` that a gated map uses."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        return torch.nn.functional.silu(gate) * up


def _two_step_gate() -> Ops:
    return cast("Ops", _TwoStepGate())
