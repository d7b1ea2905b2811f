"""Grouped products with quantised experts, against float64 of the same quantised numbers."""

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from engine.layers.linear import LinearWeight
from engine.layers.quantized_weight import Scales
from kernels.moe.align import align
from kernels.moe.coded import CodedExperts
from kernels.moe.grouped import by_block, grouped_down, grouped_gate_up
from kernels.moe.mxfp4 import Mxfp4Experts, mxfp4_experts
from kernels.moe.routes import Routes
from kernels.moe.tiles import Tile
from tests.harness.gpus import gpu
from tests.kernels.interpreter import run_interpreted
from tests.kernels.moe.moe_cases import (
    assert_near,
    exact_inner,
    exact_outputs,
    has_expert,
    random_routes,
    random_tensor,
)
from tests.kernels.quant.quant_cases import Case, fp4_case, fp8_case, int4_case

MODULE = "tests.kernels.moe.test_coded_experts"
CPU, GPU = torch.device("cpu"), torch.device("cuda")

# shape [1, N, K], dtype, device -> a weight and its exact matrix
Make = Callable[[tuple[int, int, int], torch.dtype, torch.device], Case]
WORDS = "mxfp4 words"  # on a GPU and in bfloat16 "mxfp4" is that too
FORMS: dict[str, Make] = {
    "fp8 tiles": lambda shape, dtype, device: fp8_case(shape, (16, 32), dtype, device),
    "fp8 wide tiles": lambda shape, dtype, device: fp8_case(shape, (8, 128), dtype, device),
    "fp8 rows": lambda shape, dtype, device: fp8_case(shape, (1, shape[2]), dtype, device),
    "int4 groups": lambda shape, dtype, device: int4_case(shape, 32, dtype, device),
    "int4 halves": lambda shape, dtype, device: int4_case(
        shape, 64, dtype, device, has_zeros=False
    ),
    "int4 rows": lambda shape, dtype, device: int4_case(shape, shape[2], dtype, device),
    WORDS: lambda shape, dtype, device: fp4_case(shape, 32, dtype, device),
    "mxfp4": lambda shape, dtype, device: fp4_case(shape, 32, dtype, device),
    "mxfp4 large": lambda shape, dtype, device: fp4_case(shape, 32, dtype, device, has_large=True),
    "nvfp4": lambda shape, dtype, device: fp4_case(shape, 16, dtype, device),
}


def _experts(
    form: str, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> tuple[LinearWeight, Tensor]:
    """sizes: experts, N, K; the weight by expert, and float64 of it."""
    num_experts, num_rows, num_columns = sizes
    case = FORMS[form]((1, num_experts * num_rows, num_columns), dtype, device)
    return case.weight.by_expert(num_experts), case.exact.view(sizes)


def _operand(
    form: str, weight: LinearWeight, tile: Tile, *, is_gated: bool = False
) -> tuple[CodedExperts | Mxfp4Experts, Tile]:
    from engine.layers.moe_cuda import coded_operand

    operand = coded_operand(weight, is_gated=is_gated)
    if form == WORDS and isinstance(operand, CodedExperts):
        operand = mxfp4_experts(operand.data, operand.scales, is_gated=is_gated)
    return operand, operand.fit(tile, gpu("H200"))


def _check_products(
    form: str, num_tokens: int, sizes: tuple[int, int, int, int], dtype: torch.dtype, tile: Tile,
    device: torch.device,
) -> None:  # fmt: skip
    """sizes: experts, active ones, hidden, inner."""
    num_experts, num_active, hidden, inner = sizes
    # The kernels' dtype is that of the inputs: the interpreter's may be fp32.
    weight_dtype = torch.float16 if dtype is torch.float32 else dtype
    gate_up, exact_up = _experts(form, (num_experts, 2 * inner, hidden), weight_dtype, device)
    down, exact_down = _experts(form, (num_experts, hidden, inner), weight_dtype, device)
    x = random_tensor(num_tokens, hidden, dtype=dtype, device=device.type)
    routes = random_routes(num_tokens, num_experts, num_active, device.type)
    blocks = align(routes.ids, num_experts, tile.block_m)
    operand, cut = _operand(form, gate_up, tile, is_gated=True)
    assert operand.shape == (num_experts, 2 * inner, hidden)
    exact = exact_inner(x, exact_up, routes)
    lines = by_block(exact, blocks)
    is_line = ~lines[:, 0].isnan()
    ours = grouped_gate_up(x, operand, routes, blocks, cut)
    assert_near(ours[is_line], lines[is_line], dtype)
    operand, cut = _operand(form, down, tile)
    rounded = exact.to(dtype)
    outputs = grouped_down(by_block(rounded, blocks), operand, routes, blocks, cut)
    exact_out = exact_outputs(rounded, exact_down, routes)
    used = has_expert(routes)
    assert_near(outputs.flatten(0, 1)[used], exact_out.flatten(0, 1)[used], dtype)


TILE = Tile(16, 32, 64, 2, 4, 2)


def check_products() -> None:
    for form in ("fp8 tiles", "int4 groups", "nvfp4", WORDS):
        _check_products(form, 5, (3, 2, 64, 64), torch.float32, TILE, CPU)


def check_all_products() -> None:
    for form in FORMS:
        _check_products(form, 9, (3, 2, 128, 64), torch.float32, TILE, CPU)
        # Rows and columns that fill no tile; runs have to fill columns.
        hidden, inner = (112, 48) if form.startswith("fp8") else (192, 192)
        half = replace(TILE, block_n=64, group_m=1)
        _check_products(form, 7, (5, 3, hidden, inner), torch.float16, half, CPU)


def _part(routes: Routes, start: int, end: int) -> Routes:
    ids, weights = routes.ids[start:end], routes.weights[start:end]
    return Routes(ids=ids.contiguous(), weights=weights.contiguous())


def check_layer() -> None:
    """The layer as it is built: the same tokens alone and together, and mixed formats."""
    from engine.layers.moe_cuda import TritonExperts

    routes = random_routes(20, 4, 2, "cpu")
    for up_form, down_form in (("fp8 tiles", "fp8 tiles"), ("nvfp4", "mxfp4"), ("int4 rows", "")):
        gate_up, exact_up = _experts(up_form, (4, 128, 64), torch.float16, CPU)
        if down_form:
            down, exact_down = _experts(down_form, (4, 64, 64), torch.float16, CPU)
        else:
            down = LinearWeight(random_tensor(4, 64, 64, dtype=torch.float16, device="cpu"))
            exact_down = down.data.double()
        x = random_tensor(20, 64, dtype=torch.float16, device="cpu")
        inner = exact_inner(x, exact_up, routes).half()
        exact = exact_outputs(inner, exact_down, routes).sum(dim=1)
        plain = TritonExperts(gate_up, down, num_active=2, is_deterministic=False)
        assert 0 not in plain.token_sizes
        assert_near(plain(x, routes, None), exact, torch.float16)
        fixed = TritonExperts(gate_up, down, num_active=2, is_deterministic=True)
        whole = fixed(x, routes, None)
        assert_near(whole, exact, torch.float16)
        for start, end in ((0, 1), (5, 17)):
            part = fixed(x[start:end], _part(routes, start, end), None)
            assert torch.equal(part, whole[start:end])


def _in_orders(weight: LinearWeight, exact: Tensor) -> tuple[LinearWeight, Tensor]:
    """The same numbers for inputs in another order, each expert's its own."""
    num_experts, _, num_columns = exact.shape
    assert weight.scales is not None
    order = torch.stack([torch.randperm(num_columns) for _ in range(num_experts)])
    order = order.to(exact.device)
    moved = torch.empty_like(exact)
    for expert in range(num_experts):
        moved[expert].index_copy_(1, order[expert], exact[expert])
    return replace(weight, scales=replace(weight.scales, order=order)), moved


def check_orders(device: torch.device = CPU, dtype: torch.dtype = torch.float16) -> None:
    """Of both weights, of one, of one beside a weight that is not quantised; and by matrices."""
    from engine.layers.moe_cuda import TritonExperts

    for ordered_up, ordered_down, dense_up in (
        (True, True, False),
        (True, False, False),
        (False, True, True),
    ):
        gate_up, exact_up = _experts("int4 groups", (4, 2 * 128, 64), dtype, device)
        down, exact_down = _experts("int4 halves", (4, 64, 128), dtype, device)
        if dense_up:
            gate_up = LinearWeight(random_tensor(4, 2 * 128, 64, dtype=dtype, device=device.type))
            exact_up = gate_up.data.double()
        if ordered_up:
            gate_up, exact_up = _in_orders(gate_up, exact_up)
        if ordered_down:
            down, exact_down = _in_orders(down, exact_down)
        for is_deterministic in (False, True):
            given = [
                replace(w, data=w.data.clone(), scales=w.scales and _cloned(w.scales))
                for w in (gate_up, down)
            ]
            experts = TritonExperts(*given, num_active=2, is_deterministic=is_deterministic)
            for num_tokens in (1, 20):
                routes = random_routes(num_tokens, 4, 2, device.type)
                x = random_tensor(num_tokens, 64, dtype=dtype, device=device.type)
                rounded = exact_inner(x, exact_up, routes).to(dtype)
                exact = exact_outputs(rounded, exact_down, routes).sum(dim=1)
                assert_near(experts(x, routes, None), exact, dtype)


def _cloned(scales: Scales) -> Scales:
    zeros = None if scales.zeros is None else scales.zeros.clone()
    return replace(scales, values=scales.values.clone(), zeros=zeros)


def _check_matrices(
    form: str, num_tokens: int, sizes: tuple[int, int, int, int], dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    """sizes: experts, active ones, hidden, inner. So many tokens that matrices are made."""
    from engine.layers.moe_cuda import TritonExperts

    num_experts, num_active, hidden, inner = sizes
    gate_up, exact_up = _experts(form, (num_experts, 2 * inner, hidden), dtype, device)
    down, exact_down = _experts(form, (num_experts, hidden, inner), dtype, device)
    routes = random_routes(num_tokens, num_experts, num_active, device.type)
    x = random_tensor(num_tokens, hidden, dtype=dtype, device=device.type)
    experts = TritonExperts(gate_up, down, num_active=num_active, is_deterministic=False)
    turn = next(size for size in experts.token_sizes if size + 1 >= num_tokens)
    assert turn + 1 == num_tokens, f"matrices are made from {turn + 1} tokens"
    exact = exact_outputs(exact_inner(x, exact_up, routes).to(dtype), exact_down, routes)
    assert_near(experts(x, routes, None), exact.sum(dim=1), dtype)


def check_words() -> None:
    """Matrices are what words stand for, in every bit."""
    for is_gated in (False, True):
        weight, exact = _experts(WORDS, (2, 48, 192), torch.float16, CPU)
        operand, _ = _operand(WORDS, weight, TILE, is_gated=is_gated)
        assert operand.shape == exact.shape
        assert torch.equal(operand.matrices(torch.float32).double(), exact)


def check_matrices() -> None:
    small = {"_MATRIX_ROUTES": 8, "_MATRIX_TILE": Tile(16, 32, 64, 2, 4, 2)}
    with patch.multiple("kernels.moe.tiles", **small):
        for form in ("int4 groups", "int4 rows", "nvfp4", "mxfp4"):
            _check_matrices(form, 16, (4, 2, 64, 128), torch.float16, CPU)


def check_refused() -> None:
    from engine.errors import ConfigError
    from engine.layers.moe_cuda import coded_operand

    for weight, named in (
        (fp8_case((1, 4 * 24, 64), (1, 64), torch.float16, CPU).weight.by_expert(4), "24 outputs"),
        (fp8_case((1, 4 * 32, 64), (1, 64), torch.float32, CPU).weight.by_expert(4), "float32"),
    ):
        with pytest.raises(ConfigError, match=named):
            coded_operand(weight, is_gated=False)
    for form, code in (("fp8 rows", 0x7F), ("fp8 tiles", 0xFF), ("mxfp4", 0xFF), ("nvfp4", 0x7F)):
        weight, _ = _experts(form, (3, 32, 64), torch.float16, CPU)
        assert weight.scales is not None
        coded_operand(weight, is_gated=False)
        held = weight.data if form.startswith("fp8") else weight.scales.values
        held.view(torch.uint8)[2, 31, -1] = code
        with pytest.raises(ConfigError, match="NaN"):
            coded_operand(weight, is_gated=False)


NIGHTLY = pytest.mark.nightly


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "products",
        "words",
        "refused",
        "orders",
        *(pytest.param(n, marks=NIGHTLY) for n in ("all_products", "layer", "matrices")),
    ],
)
def test_interpreted_products_of_quantised_experts_are_their_formula(name: str) -> None:
    run_interpreted(f"{MODULE}:check_{name}")


# ---- compiled for GPUs that are not here ---------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["A100 40GB", "H200"])
def test_products_of_quantised_experts_compile_within_the_shared_memory(name: str) -> None:
    from kernels.moe import grouped
    from kernels.moe.align import Blocks
    from kernels.moe.tiles import ExpertShape, build_coded_plan
    from tests.kernels.cross_compile import compiled_for

    device = gpu(name)
    shape = ExpertShape(num_experts=8, num_active=2, hidden=256, inner=256)
    routes = Routes(ids=torch.zeros(8, 2, dtype=torch.int32), weights=torch.ones(8, 2))
    x = torch.empty(8, 256, dtype=torch.bfloat16)
    with compiled_for(device, grouped) as found:
        for form in ("fp8 wide tiles", "int4 halves", "mxfp4", "nvfp4", WORDS):
            weight, _ = _experts(form, (8, 512, 256), torch.bfloat16, CPU)
            up, _ = _operand(form, weight, TILE, is_gated=True)
            down, _ = _operand(form, weight, TILE)

            def fit(tile: Tile, operand: CodedExperts | Mxfp4Experts = up) -> Tile:
                return operand.fit(tile, device)

            for pair in build_coded_plan(shape, fit, fit, is_mxfp4=form == WORDS).pairs:
                blocks = Blocks(
                    routes=torch.zeros(16, pair.gate_up.block_m, dtype=torch.int32),
                    experts=torch.zeros(16, dtype=torch.int32),
                )
                y = grouped.grouped_gate_up(x, up, routes, blocks, pair.gate_up)
                grouped.grouped_down(y, down, routes, blocks, pair.down)
    assert set(found) == {"_moe_grouped_kernel"}
    assert max(found.values()) <= device.shared_memory_per_block_bytes


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "tile",
    [
        Tile(16, 64, 128, 1, 4, 4),
        Tile(16, 64, 128, 1, 4, 3, unroll=3),
        Tile(64, 64, 128, 8, 4, 3),
        Tile(128, 128, 64, 16, 8, 4),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_products_of_quantised_experts_on_a_gpu(form: str, tile: Tile, dtype: torch.dtype) -> None:
    for num_tokens, sizes in (
        (1, (128, 8, 2048, 768)),
        (37, (60, 4, 512, 192)),
        (130, (16, 8, 256, 320)),
        (1100, (4, 1, 64, 64)),
    ):
        _check_products(form, num_tokens, sizes, dtype, tile, GPU)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tile",
    [
        Tile(8, 16, 32, 1, 1, 4, unroll=3),
        Tile(8, 32, 32, 1, 2, 4, unroll=3, prefetch_k=2048),
        Tile(16, 64, 32, 1, 2, 3, unroll=3),
        Tile(64, 64, 32, 8, 2, 3),
    ],
)
def test_products_of_words_on_a_gpu(tile: Tile) -> None:
    for num_tokens, sizes in (
        (1, (128, 8, 2048, 768)),
        (37, (60, 4, 512, 192)),
        (300, (8, 2, 2880, 2880)),
    ):
        _check_products(WORDS, num_tokens, sizes, torch.bfloat16, tile, GPU)


@pytest.mark.gpu
@pytest.mark.parametrize("form", [form for form in FORMS if not form.startswith("fp8")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_matrices_of_quantised_experts_on_a_gpu(form: str, dtype: torch.dtype) -> None:
    _check_matrices(form, 1024, (8, 2, 512, 320), dtype, GPU)
    _check_matrices(form, 2048, (32, 4, 2880, 2880), dtype, GPU)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_quantised_experts_in_a_graph_wait_for_each_other(form: str) -> None:
    """Each product starts before its input is there; a missing wait would read old values."""
    from engine.layers.moe_cuda import TritonExperts

    gate_up, _ = _experts(form, (8, 512, 512), torch.bfloat16, GPU)
    down, _ = _experts(form, (8, 512, 256), torch.bfloat16, GPU)
    layer = TritonExperts(gate_up, down, num_active=2, is_deterministic=False)
    for num_tokens in (1, 16, 200):
        routes = random_routes(num_tokens, 8, 2, "cuda")
        x = random_tensor(num_tokens, 512, dtype=torch.bfloat16, device="cuda")

        def chain(x: Tensor = x, routes: Routes = routes) -> Tensor:
            y = x
            for _ in range(3):
                y = layer(y, routes, None)
            return y

        expected = chain()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = chain()
        for _ in range(10):
            y.fill_(torch.nan)
            graph.replay()
            assert torch.equal(y, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_a_token_of_quantised_experts_has_the_same_bits_in_any_batch(form: str) -> None:
    from engine.layers.moe_cuda import TritonExperts

    gate_up, _ = _experts(form, (8, 512, 512), torch.bfloat16, GPU)
    down, _ = _experts(form, (8, 512, 256), torch.bfloat16, GPU)
    layer = TritonExperts(gate_up, down, num_active=2, is_deterministic=True)
    routes = random_routes(700, 8, 2, "cuda")
    x = random_tensor(700, 512, dtype=torch.bfloat16, device="cuda")
    whole = layer(x, routes, None)
    for start, end in ((0, 1), (5, 22), (100, 163), (300, 700)):
        part = layer(x[start:end].contiguous(), _part(routes, start, end), None)
        differs = (part != whole[start:end]).nonzero().tolist()
        assert differs == [], f"{len(differs)} of tokens {start} to {end}: {differs[:5]}"


@pytest.mark.gpu
def test_experts_with_orders_of_their_own_on_a_gpu() -> None:
    check_orders(GPU, torch.bfloat16)
