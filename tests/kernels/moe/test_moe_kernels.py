"""The kernels of mixtures against float64 and their twins, interpreted here, compiled on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.moe import held as held_kernels
from kernels.moe import load as load_kernels
from kernels.moe import reference
from kernels.moe.align import align, align_reference, can_join, max_blocks
from kernels.moe.combine import ExpertOutputs, combine
from kernels.moe.few import few_down, few_gate_up
from kernels.moe.grouped import (
    by_block,
    down_reference,
    gate_up_reference,
    grouped_down,
    grouped_gate_up,
)
from kernels.moe.held import held_routes
from kernels.moe.load import count_routes
from kernels.moe.router import route
from kernels.moe.routes import Routes
from kernels.moe.shared import JoinedExperts, SharedMatrices
from kernels.moe.tiles import FewTile, Tile
from kernels.reference import silu_mul
from kernels.rms_norm import rms_norm_add
from tests.harness.gpus import gpu
from tests.kernels.cross_compile import compiled_for
from tests.kernels.interpreter import drawn, run_interpreted
from tests.kernels.moe.moe_cases import (
    assert_near,
    exact_inner,
    exact_outputs,
    has_expert,
    random_routes,
    random_tensor,
)

MODULE = "tests.kernels.moe.test_moe_kernels"
GPU_DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])


@contextmanager
def _poisoned() -> Iterator[None]:
    """`torch.empty` is full of NaN, or of the largest integers."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# ---- routes of one rank --------------------------------------------------------------------------


def _check_held(device: str) -> None:
    for num_tokens, num_active in ((0, 3), (1, 1), (341, 3), (517, 4)):
        ids = torch.randint(-1, 12, (num_tokens, num_active), device=device).int()
        routes = Routes(ids=ids, weights=torch.rand(ids.shape, device=device))
        for held in (range(3), range(4, 9), range(11, 12)):
            with _poisoned():
                ours = held_routes(routes, held)
            theirs = reference.held_routes(routes, held)
            expected = [[i - held.start if i in held else -1 for i in row] for row in ids.tolist()]
            assert ours.ids.dtype == theirs.ids.dtype == torch.int32
            assert ours.ids.tolist() == theirs.ids.tolist() == expected
            assert torch.equal(ours.weights, routes.weights)
            assert torch.equal(theirs.weights, routes.weights)


def _check_load(device: str) -> None:
    for num_tokens, num_active, num_experts in ((0, 2, 3), (1, 1, 1), (341, 3, 7), (700, 4, 40)):
        ids = torch.randint(-1, num_experts, (num_tokens, num_active), device=device).int()
        routes = Routes(ids=ids, weights=torch.rand(ids.shape, device=device))
        counts, twin = (torch.full((num_experts,), 2**40, device=device) for _ in range(2))
        for _ in range(2):
            count_routes(routes, counts)
            reference.count_routes(routes, twin)
        flat = ids.flatten().tolist()
        expected = [2**40 + 2 * flat.count(expert) for expert in range(num_experts)]
        assert counts.tolist() == twin.tolist() == expected


def check_held() -> None:
    _check_held("cpu")
    _check_load("cpu")


@pytest.mark.gpu
def test_routes_to_other_ranks_experts_are_left_out_on_a_gpu() -> None:
    _check_held("cuda")


@pytest.mark.gpu
def test_routes_of_every_expert_are_counted_on_a_gpu() -> None:
    _check_load("cuda")


@pytest.mark.slow
def test_kernels_of_routes_compile_for_a_gpu() -> None:
    ids = torch.zeros(300, 8, dtype=torch.int32)
    routes = Routes(ids=ids, weights=torch.ones(300, 8))
    with compiled_for(gpu("H200"), held_kernels, load_kernels) as found:
        held_routes(routes, range(4, 8))
        count_routes(routes, torch.zeros(128, dtype=torch.int64))
    assert set(found) == {"_moe_held_kernel", "_moe_load_kernel"}


# ---- router --------------------------------------------------------------------------------------


def _check_router(
    num_tokens: int, sizes: tuple[int, int, int], dtype: torch.dtype, device: str
) -> None:
    """sizes: experts, active ones, hidden."""
    num_experts, num_active, hidden = sizes
    x = random_tensor(num_tokens, hidden, dtype=dtype, device=device)
    weight = random_tensor(num_experts, hidden, dtype=dtype, device=device, scale=hidden**-0.5)
    slots = torch.arange(num_tokens, dtype=torch.int32, device=device)
    slots[1::4] = -1
    exact = (x.double() @ weight.double().T).softmax(dim=1)
    for normalises in (True, False):
        for is_deterministic in (True, False):
            with _poisoned():
                ours = route(
                    x, weight, num_active, normalises=normalises, slots=slots,
                    is_deterministic=is_deterministic,
                )  # fmt: skip
            _check_routes(ours, exact, slots, normalises=normalises)
    every = route(x, weight, num_active, normalises=True)
    assert int(every.ids.min()) >= 0


def _check_routes(ours: Routes, exact: Tensor, slots: Tensor, *, normalises: bool) -> None:
    """exact: float64 [T, experts], the shares."""
    num_active = ours.ids.shape[1]
    is_token = slots >= 0
    assert torch.equal(ours.ids[~is_token], torch.full_like(ours.ids[~is_token], -1))
    ids, exact = ours.ids[is_token].long(), exact[is_token]
    best = exact.topk(num_active, dim=1).values
    chosen = exact.gather(1, ids)
    # Another expert is right only if it is as good, up to rounding.
    torch.testing.assert_close(chosen, best, rtol=1e-4, atol=1e-7)
    assert all(len(set(row)) == num_active for row in ids.tolist())
    if normalises:
        chosen = chosen / chosen.sum(dim=1, keepdim=True)
    torch.testing.assert_close(ours.weights[is_token].double(), chosen, rtol=1e-4, atol=1e-7)


def _check_ties(device: str) -> None:
    """Equal experts are taken by their index, as by a stable sort; a broken token stays alone."""
    x = torch.ones(5, 16, device=device)
    weight = torch.zeros(9, 16, device=device)
    weight[3] = weight[7] = 0.5
    weight[5] = -torch.inf  # a share of 0
    assert route(x, weight, 4, normalises=False).ids.tolist() == [[3, 7, 0, 1]] * 5
    every = route(x, weight, 9, normalises=True).ids.tolist()
    assert every == [[3, 7, 0, 1, 2, 4, 6, 8, 5]] * 5
    weight[5] = 0.0
    x[2, 3], x[4, 0] = torch.nan, torch.inf
    for normalises in (True, False):
        broken = route(x, weight, 4, normalises=normalises)
        assert broken.ids[:2].tolist() == [[3, 7, 0, 1]] * 2
        assert broken.weights[[0, 1, 3]].isfinite().all()
        assert broken.weights[[2, 4]].isnan().all()
        assert int(broken.ids.min()) >= 0
        assert int(broken.ids.max()) < 9


def check_router() -> None:
    _check_router(7, (8, 2, 96), torch.float32, "cpu")
    _check_router(34, (60, 4, 40), torch.float32, "cpu")
    _check_router(5, (37, 8, 200), torch.float16, "cpu")
    _check_ties("cpu")
    assert route(torch.empty(0, 8), torch.empty(4, 8), 2, normalises=True).ids.shape == (0, 2)


# ---- align ---------------------------------------------------------------------------------------


def _check_align(ids: Tensor, num_experts: int, block_m: int, num_shared: int = 0) -> None:
    expected = align_reference(ids, num_experts, block_m, num_shared)
    with _poisoned():
        ours = align(ids, num_experts, block_m, num_shared)
    assert torch.equal(ours.experts, expected.experts)
    is_used = expected.experts >= 0  # the others are not read
    assert torch.equal(ours.routes[is_used], expected.routes[is_used])
    listed = ours.routes[is_used]
    listed = listed[listed >= 0].tolist()
    of_shared = ids.new_zeros(len(ids), num_shared)  # every token's
    places = torch.cat((ids, of_shared), dim=1).flatten() >= 0
    assert sorted(listed) == places.nonzero().flatten().tolist()
    for block, expert in zip(
        ours.routes[is_used].tolist(), ours.experts[is_used].tolist(), strict=True
    ):
        for token, place in (
            divmod(index, ids.shape[1] + num_shared) for index in block if index >= 0
        ):
            is_own = place < ids.shape[1]
            assert expert == (ids[token, place] if is_own else num_experts + place - ids.shape[1])


def _check_aligned_cases(device: str, sizes: list[tuple[int, int, int]]) -> None:
    """sizes: tokens, experts, active ones."""
    for num_tokens, num_experts, num_active in sizes:
        for block_m in (16, 64):
            ids = random_routes(num_tokens, num_experts, num_active, device).ids
            _check_align(ids, num_experts, block_m)
            _check_align(torch.full_like(ids, num_experts - 1), num_experts, block_m)
            _check_align(torch.full_like(ids, -1), num_experts, block_m)
            if can_join(ids.numel()):
                _check_align(ids, num_experts, block_m, 2)


def check_align() -> None:
    _check_aligned_cases("cpu", [(1, 8, 2), (5, 30, 8), (131, 5, 1)])
    _check_align(random_routes(700, 13, 7, "cpu").ids, 13, 16)


def test_blocks_are_as_many_as_routes_can_fill() -> None:
    for num_experts, block_m in [(4, 16), (128, 16), (8, 64)]:
        for num_routes in (1, 7, 64, 1000):
            # The worst: one route more than whole blocks, for as many experts as possible.
            used = min(num_experts, num_routes)
            counts = [1] * (used - 1)
            counts.append(num_routes - sum(counts))
            spare, counts = counts[-1] - 1, [*counts[:-1], 1]
            counts[0] += spare // block_m * block_m
            blocks = sum(-(-count // block_m) for count in counts)
            assert blocks <= max_blocks(num_routes, num_experts, block_m) <= num_routes


# ---- products ------------------------------------------------------------------------------------


def _by_tma(device: str, *sizes: int) -> bool:
    """Whether the copy engine can load weights of these sizes; the interpreter takes any."""
    if any(size % 8 for size in sizes):
        return False
    return device == "cpu" or (min(sizes) >= 128 and torch.cuda.get_device_capability() >= (9, 0))


TILE = Tile(16, 32, 32, 2, 4, 2)
FEW = FewTile(16, 32, 4)


def _check_products(
    num_tokens: int, sizes: tuple[int, int, int, int], dtype: torch.dtype, device: str,
    tile: Tile = TILE, few: FewTile = FEW,
) -> None:  # fmt: skip
    """sizes: experts, active ones, hidden, inner."""
    num_experts, num_active, hidden, inner = sizes
    make = {"dtype": dtype, "device": device}
    x = random_tensor(num_tokens, hidden, **make)
    gate_up = random_tensor(num_experts, 2 * inner, hidden, scale=hidden**-0.5, **make)
    down = random_tensor(num_experts, hidden, inner, scale=inner**-0.5, **make)
    routes = random_routes(num_tokens, num_experts, num_active, device)
    blocks = align(routes.ids, num_experts, tile.block_m)
    exact, used = exact_inner(x, gate_up, routes), has_expert(routes)
    assert_near(gate_up_reference(x, gate_up, routes), exact, dtype)
    assert_near(few_gate_up(x, gate_up, routes, few)[used], exact[used], dtype)
    lines = by_block(exact, blocks)
    is_line = ~lines[:, 0].isnan()
    ours = grouped_gate_up(x, gate_up, routes, blocks, tile)
    assert_near(ours[is_line], lines[is_line], dtype)
    by_tma = replace(tile, by_tma=True)
    if _by_tma(device, hidden, inner):
        others = grouped_gate_up(x, gate_up, routes, blocks, by_tma)
        assert torch.equal(others[is_line], ours[is_line])
    rounded = gate_up_reference(x, gate_up, routes)
    exact_out = exact_outputs(rounded, down, routes)
    with _poisoned():
        outputs = grouped_down(by_block(rounded, blocks), down, routes, blocks, tile)
    assert_near(outputs.flatten(0, 1)[used], exact_out.flatten(0, 1)[used], dtype)
    if _by_tma(device, hidden, inner):
        others = grouped_down(by_block(rounded, blocks), down, routes, blocks, by_tma)
        assert torch.equal(others.flatten(0, 1)[used], outputs.flatten(0, 1)[used])
    assert_near(down_reference(rounded, down, routes), exact_out, dtype)
    shared = random_tensor(num_tokens, hidden, **make)
    gate = random_tensor(num_tokens, 1, **make)
    total = exact_out.sum(dim=1)
    with_shared = total + shared.double() / (1 + (-gate.double()).exp())
    assert_near(combine(outputs, routes), total, dtype)
    assert_near(combine(outputs, routes, shared, gate), with_shared, dtype)
    assert_near(few_down(rounded, down, routes, few), total, dtype)
    assert_near(few_down(rounded, down, routes, few, shared, gate), with_shared, dtype)
    assert not combine(outputs, routes)[2:3].any()  # padding
    assert not few_down(rounded, down, routes, few)[2:3].any()


def _joined_weights(
    sizes: tuple[int, int, int, int, int], dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, SharedMatrices]:
    """Gate and up, down, and the shared expert's; sizes as of `_check_shared`."""
    num_experts, _, hidden, inner, num_parts = sizes
    make, units = {"dtype": dtype, "device": device}, num_parts * inner
    return (
        random_tensor(num_experts, 2 * inner, hidden, scale=hidden**-0.5, **make),
        random_tensor(num_experts, hidden, inner, scale=inner**-0.5, **make),
        SharedMatrices(
            gate_up=random_tensor(2 * units, hidden, scale=hidden**-0.5, **make),
            down=random_tensor(hidden, units, scale=units**-0.5, **make),
        ),
    )


def _check_joined(
    num_tokens: int, sizes: tuple[int, int, int, int, int], dtype: torch.dtype, device: str,
    tile: Tile = TILE,
) -> None:  # fmt: skip
    """A shared expert along with sorted routes, the third token padding; sizes as of
    `_check_shared`.
    """
    num_experts, num_active, hidden, _, num_parts = sizes
    x = random_tensor(num_tokens, hidden, dtype=dtype, device=device)
    gate_up, down, shared = _joined_weights(sizes, dtype, device)
    routes = random_routes(num_tokens, num_experts, num_active, device)
    blocks = align(routes.ids, num_experts, tile.block_m, num_parts)
    with _poisoned():
        joined = JoinedExperts(own=gate_up, shared=shared.gate_up)
        lines = grouped_gate_up(x, joined, routes, blocks, tile)
        joined = JoinedExperts(own=down, shared=shared.down)
        outputs = grouped_down(lines, joined, routes, blocks, tile)
    exact = exact_inner(x, gate_up, routes).to(dtype)  # rounded as the kernel does
    total = exact_outputs(exact, down, routes).to(dtype).double().sum(dim=1)
    of_shared = silu_mul(x.double() @ shared.gate_up.double().T).to(dtype).double()
    output = of_shared @ shared.down.double().T
    gate = random_tensor(num_tokens, 1, dtype=dtype, device=device)
    assert_near(combine(outputs, routes), total + output, dtype)
    gated = total + output * gate.double().sigmoid()
    assert_near(combine(outputs, routes, gate=gate), gated, dtype)


def _check_shared(
    sizes: tuple[int, int, int, int, int], dtype: torch.dtype, device: str, few: FewTile = FEW
) -> None:
    """Of three tokens, the last one padding; sizes: experts, active ones, hidden, inner, parts."""
    num_experts, num_active, hidden, inner, num_parts = sizes
    make = {"dtype": dtype, "device": device}
    x = random_tensor(3, hidden, **make)
    gate_up, down, shared = _joined_weights(sizes, dtype, device)
    units = num_parts * inner
    routes = random_routes(3, num_experts, num_active, device)
    lines = few_gate_up(x, gate_up, routes, few, shared=shared).view(3, -1, inner)
    used = has_expert(routes).view(3, num_active)
    exact = exact_inner(x, gate_up, routes).view(3, num_active, inner)
    assert_near(lines[:, :num_active][used], exact[used], dtype)
    exact_shared = silu_mul(x.double() @ shared.gate_up.double().T)
    assert_near(lines[:, num_active:].reshape(3, units), exact_shared, dtype)
    shared_inner = lines[:, num_active:].reshape(3, units).double()
    total = exact_outputs(lines[:, :num_active].flatten(0, 1), down, routes).sum(dim=1)
    output = shared_inner @ shared.down.double().T
    gate = random_tensor(3, 1, **make)
    flat = lines.flatten(0, 1)
    assert_near(few_down(flat, down, routes, few, shared), total + output, dtype)
    gated = total + output * gate.double().sigmoid()
    assert_near(few_down(flat, down, routes, few, shared, gate), gated, dtype)


CHECKS_OF_PRODUCTS = [
    partial(_check_products, 5, (6, 3, 48, 40), torch.float32, "cpu"),
    partial(_check_products, 33, (4, 2, 80, 24), torch.float32, "cpu", replace(TILE, group_m=1)),
    partial(_check_products, 9, (3, 3, 64, 32), torch.float16, "cpu", replace(TILE, block_n=64)),
]


def check_products() -> None:
    """One of the products, drawn anew."""
    _check_drawn_products(1)


def check_all_products() -> None:
    _check_drawn_products(len(CHECKS_OF_PRODUCTS))


def _check_drawn_products(number: int) -> None:
    _check_shared((6, 3, 48, 40, 2), torch.float32, "cpu")
    _check_shared((4, 2, 80, 24, 1), torch.float16, "cpu", FewTile(16, 64, 4))
    _check_joined(19, (5, 3, 48, 40, 2), torch.float32, "cpu")
    _check_joined(3, (4, 2, 80, 24, 3), torch.float16, "cpu", replace(TILE, group_m=1))
    for check in drawn(CHECKS_OF_PRODUCTS, number):
        check()
    _check_combine(131, "cpu")
    _check_combine_norm(5, 40, torch.float32, "cpu")
    _check_combine_norm(3, 130, torch.float16, "cpu", 2)
    _check_integers("cpu")


def _check_combine(num_tokens: int, device: str) -> None:
    """Every tile of the sum, with outputs of which nobody wrote those without expert."""
    outputs = random_tensor(num_tokens, 3, 40, dtype=torch.float32, device=device)
    routes = random_routes(num_tokens, 9, 3, device)
    outputs[2:3] = torch.nan
    exact = outputs.double().nan_to_num().sum(dim=1)
    assert_near(combine(outputs, routes), exact, torch.float32)
    twin = reference.combine(outputs.nan_to_num())
    assert torch.equal(combine(outputs, routes), twin)


def _check_combine_norm(
    num_tokens: int, hidden: int, dtype: torch.dtype, device: str, num_active: int = 3
) -> None:
    """The sum that goes on with the norm has the bits of both apart, and is near float64."""
    make: dict[str, Any] = {"dtype": dtype, "device": device}
    routes = random_routes(num_tokens, 9, num_active, device)
    gate, weight = random_tensor(num_tokens, 1, **make), random_tensor(hidden, **make)
    for num_parts, shared in ((0, None), (0, random_tensor(num_tokens, hidden, **make)), (2, None)):
        outputs = random_tensor(num_tokens, num_active + num_parts, hidden, **make)
        exact = outputs[:, :num_active].double()
        exact[2:3] = 0.0  # padding
        outputs[2:3, :num_active] = torch.nan
        stream = random_tensor(num_tokens, hidden + 8, **make)[:, :hidden]  # strided
        has_shared = num_parts > 0 or shared is not None
        given = ExpertOutputs(
            outputs=outputs, routes=routes, shared=shared, gate=gate if has_shared else None
        )
        of_all = outputs[:, num_active:].double().sum(dim=1)
        of_all = of_all if shared is None else shared.double()
        exact_sum = exact.sum(dim=1) + of_all * gate.double().sigmoid()
        apart = rms_norm_add(given.sum(), stream.clone(), weight, 1e-5)
        residual = stream.clone()
        normed, returned = given.add_norm(residual, weight, 1e-5)
        assert returned is residual
        assert torch.equal(normed, apart[0])
        assert torch.equal(residual, apart[1])
        exact_stream = exact_sum + stream.double()
        assert_near(residual, exact_stream, dtype)
        mean = exact_stream.square().mean(dim=1, keepdim=True)
        assert_near(normed, exact_stream * (mean + 1e-5).rsqrt() * weight.double(), dtype)


def _check_integers(device: str) -> None:
    """Small integers: no rounding anywhere, so that kernels and twins agree bitwise."""
    x = torch.randint(-2, 3, (21, 32), device=device).float()
    down = torch.randint(-2, 3, (5, 24, 32), device=device).float()
    routes = random_routes(21, 5, 2, device)
    routes = Routes(ids=routes.ids, weights=torch.randint(1, 5, (21, 2), device=device).float())
    inner = x.repeat_interleave(2, dim=0)
    expected = reference.combine(down_reference(inner, down, routes))
    blocks = align(routes.ids, 5, TILE.block_m)
    outputs = grouped_down(by_block(inner, blocks), down, routes, blocks, TILE)
    assert torch.equal(combine(outputs, routes), expected)
    assert torch.equal(few_down(inner, down, routes, FEW), expected)


# ---- invariance ----------------------------------------------------------------------------------


def _mixture(x: Tensor, weights: list[Tensor], tile: Tile) -> Tensor:
    """Router to sum, deterministic; weights: router, gate_up, down."""
    routes = route(x, weights[0], 3, normalises=True, is_deterministic=True)
    blocks = align(routes.ids, weights[0].shape[0], tile.block_m)
    inner = grouped_gate_up(x, weights[1], routes, blocks, tile)
    return combine(grouped_down(inner, weights[2], routes, blocks, tile), routes)


def _check_permutation(num_tokens: int, dtype: torch.dtype, device: str, tile: Tile) -> None:
    """Permuted tokens permute outputs bitwise; a token alone has the same bits too."""
    make = {"dtype": dtype, "device": device}
    x = random_tensor(num_tokens, 64, **make)
    weights = [
        random_tensor(7, 64, **make),
        random_tensor(7, 96, 64, scale=0.1, **make),
        random_tensor(7, 64, 48, scale=0.1, **make),
    ]
    whole = _mixture(x, weights, tile)
    assert whole.isfinite().all()
    order = torch.randperm(num_tokens, device=device)
    assert torch.equal(_mixture(x[order].contiguous(), weights, tile), whole[order])
    for token in (0, num_tokens // 2, num_tokens - 1):
        assert torch.equal(_mixture(x[token : token + 1], weights, tile)[0], whole[token])
    assert torch.equal(_mixture(x[: num_tokens // 3], weights, tile), whole[: num_tokens // 3])


def check_permutation() -> None:
    _check_permutation(21, torch.float32, "cpu", TILE)


# ---- interpreted ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    [
        "check_held",
        "check_router",
        "check_align",
        "check_products",
        pytest.param("check_all_products", marks=pytest.mark.nightly),
        "check_permutation",
    ],
)
def test_interpreted_kernels_of_a_mixture_are_their_formulas(check: str) -> None:
    run_interpreted(f"{MODULE}:{check}")


def test_twins_are_the_formulas() -> None:
    x = random_tensor(9, 24, dtype=torch.float32, device="cpu")
    gate_up = random_tensor(5, 32, 24, dtype=torch.float32, device="cpu")
    down = random_tensor(5, 24, 16, dtype=torch.float32, device="cpu")
    routes = random_routes(9, 5, 2, "cpu")
    exact = exact_outputs(exact_inner(x, gate_up, routes), down, routes)
    outputs = reference.experts(x, routes, gate_up, down)
    assert_near(outputs, exact, torch.float32)
    assert_near(reference.combine(outputs), exact.sum(dim=1), torch.float32)


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@GPU_DTYPES
@pytest.mark.parametrize("sizes", [(128, 8, 2048), (8, 2, 4096), (60, 4, 2048), (5, 5, 72)])
@pytest.mark.parametrize("num_tokens", [1, 7, 256, 257, 1000])
def test_the_router_on_a_gpu(
    num_tokens: int, sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    _check_router(num_tokens, sizes, dtype, "cuda")


@pytest.mark.gpu
def test_equal_and_broken_experts_on_a_gpu() -> None:
    _check_ties("cuda")


@pytest.mark.gpu
def test_routes_are_sorted_on_a_gpu() -> None:
    sizes = [(1, 8, 2), (1, 128, 8), (64, 128, 8), (131, 60, 4), (512, 128, 8), (513, 128, 8)]
    _check_aligned_cases("cuda", [*sizes, (5000, 8, 2), (8191, 128, 8), (16999, 128, 8)])


@pytest.mark.gpu
@GPU_DTYPES
@pytest.mark.parametrize(
    ("num_tokens", "sizes"),
    [
        (1, (128, 8, 2048, 768)),
        (4, (8, 2, 1024, 1792)),
        (37, (60, 4, 512, 176)),
        (130, (16, 8, 272, 208)),
        (1100, (4, 1, 64, 48)),
    ],
)
@pytest.mark.parametrize(
    "tile",
    [
        Tile(16, 64, 64, 1, 4, 3),
        Tile(32, 128, 64, 4, 4, 3),
        Tile(64, 128, 32, 8, 4, 3),
        Tile(128, 128, 32, 8, 8, 3),
    ],
)
def test_products_of_experts_on_a_gpu(
    num_tokens: int, sizes: tuple[int, int, int, int], tile: Tile, dtype: torch.dtype
) -> None:
    _check_products(num_tokens, sizes, dtype, "cuda", tile, FewTile(16, 256, 4))


@pytest.mark.gpu
@GPU_DTYPES
@pytest.mark.parametrize("sizes", [(64, 6, 2048, 1408, 2), (9, 3, 250, 72, 1)])
def test_a_shared_expert_is_computed_with_a_tokens_others_on_a_gpu(
    sizes: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    _check_shared(sizes, dtype, "cuda", FewTile(16, 256, 4))
    for num_tokens, tile in ((5, Tile(16, 64, 256, 1, 4, 2)), (256, Tile(64, 128, 64, 8, 4, 3))):
        _check_joined(num_tokens, sizes, dtype, "cuda", tile)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 128, 129, 1025])
def test_the_sum_on_a_gpu(num_tokens: int) -> None:
    _check_combine(num_tokens, "cuda")


@pytest.mark.gpu
@GPU_DTYPES
def test_the_sum_goes_on_with_the_norm_on_a_gpu(dtype: torch.dtype) -> None:
    for num_tokens, hidden, num_active in (
        (1, 2048, 6),
        (64, 2048, 8),
        (300, 2880, 4),
        (7, 250, 3),
    ):
        _check_combine_norm(num_tokens, hidden, dtype, "cuda", num_active)


@pytest.mark.gpu
def test_integers_are_exact_on_a_gpu() -> None:
    _check_integers("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tile", [Tile(16, 64, 64, 1, 4, 3), Tile(64, 128, 64, 8, 4, 3)])
def test_permuted_tokens_permute_outputs_bitwise_on_a_gpu(dtype: torch.dtype, tile: Tile) -> None:
    for num_tokens in (3, 300, 2000):
        _check_permutation(num_tokens, dtype, "cuda", tile)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 2, 40])
@pytest.mark.parametrize("prefetch_k", [0, 256])
def test_layers_in_a_graph_wait_for_each_other(num_tokens: int, prefetch_k: int) -> None:
    """Each kernel starts before its input is there; a missing wait would read old values."""
    make = {"dtype": torch.bfloat16, "device": "cuda"}
    x, router = random_tensor(num_tokens, 512, **make), random_tensor(16, 512, **make)
    gate_up = random_tensor(16, 768, 512, scale=0.1, **make)
    down = random_tensor(16, 512, 384, scale=0.1, **make)
    shared = None
    if num_tokens == 1:
        first, second = gate_up[:2].flatten(0, 1), torch.cat([*down[:2]], dim=1)
        shared = SharedMatrices(gate_up=first, down=second)
    tile, few = Tile(16, 64, 64, 1, 4, 3), FewTile(16, 256, 4)
    by_tma = prefetch_k > 0 and _by_tma("cuda", 512, 384)
    tile = replace(tile, by_tma=by_tma)
    tiles = replace(tile, prefetch_k=prefetch_k), replace(few, prefetch_k=prefetch_k)

    def chain() -> Tensor:
        y = x
        for _ in range(4):
            routes = route(y, router, 4, normalises=True)
            if num_tokens <= 4:
                lines = few_gate_up(y, gate_up, routes, few, shared=shared)
                y = few_down(lines, down, routes, tiles[1], shared)
            else:
                blocks = align(routes.ids, 16, 16)
                inner = grouped_gate_up(y, gate_up, routes, blocks, tile)
                y = combine(grouped_down(inner, down, routes, blocks, tiles[0]), routes)
        return y

    expected = chain()
    assert expected.isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain()
    for _ in range(20):
        y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(y, expected)


@pytest.mark.gpu
def test_weights_past_two_billion_elements_are_reached() -> None:
    num_experts, inner, hidden = 130, 4100, 2048
    gate_up = torch.zeros(num_experts, 2 * inner, hidden, dtype=torch.bfloat16, device="cuda")
    assert gate_up.numel() > 2**31
    gate_up[-1] = random_tensor(2 * inner, hidden, dtype=torch.bfloat16, device="cuda", scale=0.02)
    x = random_tensor(3, hidden, dtype=torch.bfloat16, device="cuda")
    ids = torch.tensor([[129, 0], [5, 129], [129, 1]], dtype=torch.int32, device="cuda")
    routes = Routes(ids=ids, weights=torch.ones(3, 2, device="cuda"))
    exact = exact_inner(x, gate_up, routes)
    tile = Tile(16, 64, 64, 1, 4, 3)
    blocks = align(ids, num_experts, 16)
    lines = by_block(exact, blocks)
    is_line = ~lines[:, 0].isnan()
    ours = grouped_gate_up(x, gate_up, routes, blocks, tile)
    assert_near(ours[is_line], lines[is_line], torch.bfloat16)
    assert_near(few_gate_up(x, gate_up, routes, FewTile(16, 256, 4)), exact, torch.bfloat16)
