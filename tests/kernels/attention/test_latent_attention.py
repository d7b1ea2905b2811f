"""Latent attention against float64 with every head's keys and values written out.

The torch backend everywhere; the Triton kernels interpreted, at small sizes, and on a GPU.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention import reference as reference_attention
from kernels.attention import select_latent
from kernels.attention.latent import LatentShape, PhasedLatent
from kernels.attention.latent_reference import ReferenceLatent
from kernels.attention.names import AttentionNames, BackendUnavailable
from kernels.attention.protocol import AttentionStep, build_step
from kernels.attention.select import build_attention
from kernels.attention.token_rows import expand_rows_torch, open_token_rows
from kernels.device import device_properties
from kernels.kv.scales import KvScales, of_latent
from tests.harness.gpus import gpu
from tests.harness.seeds import fresh_seed
from tests.kernels.attention.attention_cases import ROW_SETS, TOLERANCES, FixedRows, assert_close
from tests.kernels.interpreter import drawn, run_interpreted

NUM_LAYERS = 2
Rows = Sequence[tuple[int, int]]


def _shape(num_heads: int, rank: int, rope: int, nope: int, value: int) -> LatentShape:
    return LatentShape(
        num_layers=NUM_LAYERS, num_heads=num_heads, rank=rank, rope_dim=rope, nope_dim=nope,
        value_dim=value, scale=1.1 * (nope + rope) ** -0.5,
    )  # fmt: skip


SMALL = _shape(3, 32, 16, 24, 20)
V2_LITE = _shape(16, 512, 64, 128, 128)
V3 = _shape(128, 512, 64, 128, 128)
GLM = _shape(20, 512, 64, 192, 256)  # GLM-4.7-Flash


@dataclass(kw_only=True)
class LatentProblem:
    """One step whose latents, queries and up-projection are known."""

    shape: LatentShape
    block_size: int
    step: AttentionStep
    store: Tensor
    up: Tensor  # [heads, nope + value, rank]
    q: Tensor  # [T, heads, nope + rope], tokens strided
    latent_new: Tensor
    vectors: list[Tensor]  # per row [layers, keys, width]
    scales: KvScales | None = None  # of a store of e4m3 numbers

    def in_e4m3(self) -> "LatentProblem":
        """The same in a store of e4m3 numbers, with scales that differ so much that a wrong one
        shows; exact results are those of the numbers.
        """
        generator = torch.Generator().manual_seed(fresh_seed())
        drawn_scales = 0.003 * 30.0 ** torch.rand((NUM_LAYERS, 2, 1), generator=generator)
        scales = KvScales.of(drawn_scales.to(self.store.device))
        sizes = self.shape.rank, self.shape.rope_dim
        of_layers = torch.stack([of_latent(layer, *sizes) for layer in scales.scale])
        store = (self.store.float() / of_layers[:, None, None, None]).clamp(-448, 448)
        vectors = []
        for row in self.vectors:
            numbers = (row.float() / of_layers[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
            vectors.append(numbers.double() * of_layers[:, None].double())
        store = store.to(torch.float8_e4m3fn).view(torch.uint8)
        return replace(self, store=store, vectors=vectors, scales=scales)

    def exact(self, layer: int) -> Tensor:
        """[T, heads * value] in float64."""
        shape, outs, start = self.shape, [], 0
        for vectors, new in zip(self.vectors, self.step.num_new_tokens.tolist(), strict=True):
            latents, rotated = vectors[layer].double().split([shape.rank, shape.rope_dim], dim=1)
            made = torch.einsum("kr,hdr->khd", latents, self.up.double())
            k_nope, v = made.split([shape.nope_dim, shape.value_dim], dim=2)
            k = torch.cat((k_nope, rotated[:, None].expand(-1, shape.num_heads, -1)), 2)
            q = self.q[start : start + new].double()
            scores = torch.einsum("qhd,khd->hqk", q, k) * shape.scale
            keys = torch.arange(len(k), device=k.device)
            seen = keys <= keys[len(k) - new :, None]
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            outs.append(torch.einsum("hqk,khv->qhv", weights, v).flatten(1))
            start += new
        return torch.cat(outs)


def build_problem(
    rows: Rows,
    shape: LatentShape,
    *,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int | None = None,
) -> LatentProblem:
    """Random tokens for `rows`, (computed, new) each; memory of nobody is NaN."""
    generator = torch.Generator(device).manual_seed(fresh_seed() if seed is None else seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    counts = [-(-sum(row) // block_size) for row in rows]
    size = (sum(counts) + 3, NUM_LAYERS, 1, block_size, 1, shape.width)
    store = torch.full(size, torch.nan, dtype=dtype, device=device)
    free = torch.randperm(len(store), generator=generator, device=device).tolist()
    row_blocks = [[free.pop() for _ in range(count)] for count in counts]
    vectors = []
    for (computed, new), blocks in zip(rows, row_blocks, strict=True):
        row = draw(NUM_LAYERS, computed + new, shape.width).to(dtype)
        positions = torch.arange(computed + new, device=device)
        block_of = torch.tensor(blocks, device=device)[positions // block_size]
        store[blocks[-1]] = 50.0  # what a row's own last block holds after its keys is finite
        store[block_of, :, 0, positions % block_size, 0] = row.transpose(0, 1)
        vectors.append(row)
    num_tokens = sum(new for _, new in rows)
    wide = draw(num_tokens, shape.num_heads * shape.query_dim + 7).to(dtype)
    q = wide[:, : shape.num_heads * shape.query_dim].view(num_tokens, shape.num_heads, -1)
    up = draw(shape.num_heads, shape.nope_dim + shape.value_dim, shape.rank) * shape.rank**-0.5
    return LatentProblem(
        shape=shape,
        block_size=block_size,
        step=build_step([n for _, n in rows], [c for c, _ in rows], row_blocks, device),
        store=store,
        up=up.to(dtype),
        q=q,
        latent_new=torch.cat([row[0, -new:] for row, (_, new) in zip(vectors, rows, strict=True)])[
            :, None
        ],
        vectors=vectors,
    )


def run(backend: Any, problem: LatentProblem, layer: int, metadata: Any) -> Tensor:
    new = [n for _, n in zip(problem.vectors, problem.step.num_new_tokens.tolist(), strict=True)]
    fresh = torch.cat([row[layer, -n:] for row, n in zip(problem.vectors, new, strict=True)])
    if problem.scales is not None:  # what is stored counts
        fresh = torch.full_like(fresh, torch.nan)
    fresh = fresh[:, None].to(problem.q.dtype)
    out: Tensor = backend.run(
        problem.q, fresh, problem.up, layer, problem.store, metadata, None, problem.scales
    )
    return out


def check(backend: Any, problem: LatentProblem, tolerance: float | None = None) -> None:
    metadata = backend.plan(problem.step)
    for layer in (NUM_LAYERS - 1, 0):
        out = run(backend, problem, layer, metadata)
        assert out.dtype == problem.q.dtype
        assert_close(out, problem.exact(layer), tolerance or TOLERANCES[out.dtype])


# ---- torch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ROW_SETS)
@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "written out"])
def test_the_reference_is_exact(is_fused: bool, rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_attention, "is_fused_exact", lambda *_: is_fused)
    problem = build_problem(ROW_SETS[rows], SMALL, block_size=4)
    reference = ReferenceLatent(
        SMALL, block_size=4, dtype=torch.float32, device=torch.device("cpu")
    )
    check(reference, problem)
    check(PhasedLatent(prefill=reference, decode=reference, graph=None), problem)
    other = ReferenceLatent(SMALL, block_size=4, dtype=torch.float32, device=torch.device("cpu"))
    check(PhasedLatent(prefill=reference, decode=other, graph=None), problem)


@pytest.mark.parametrize("rows", ROW_SETS)
def test_the_reference_attends_to_e4m3_numbers(rows: str) -> None:
    problem = build_problem(ROW_SETS[rows], SMALL, block_size=4).in_e4m3()
    first, other = (
        ReferenceLatent(
            SMALL, block_size=4, dtype=torch.float32, device=torch.device("cpu"), is_fp8=True
        )
        for _ in range(2)
    )
    check(first, problem)
    check(PhasedLatent(prefill=first, decode=other, graph=None), problem)


@pytest.mark.parametrize(
    ("name", "fixed_tile", "said"),
    [
        ("flashinfer", False, "flashinfer cannot compute latent.*reference or triton"),
        ("flash_attn", False, "flash_attn cannot compute latent.*needs a GPU|need a GPU"),
        ("reference", True, "with the same bits in any batch; choose triton"),
        ("triton", False, "need a GPU; choose reference"),
        ("auto", True, "need a GPU"),
    ],
)
def test_what_cannot_compute_latents_says_what_can(name: Any, fixed_tile: bool, said: str) -> None:
    with pytest.raises(BackendUnavailable, match=said):
        build_attention(
            AttentionNames(prefill=name, decode=name), SMALL, block_size=16, dtype=torch.float32,
            device=torch.device("cpu"), fixed_tile=fixed_tile,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("gpu_name", "shape", "dtype", "wanted"),
    [
        ("H200", V2_LITE, torch.bfloat16, ("flash_attn", "triton")),
        ("H200", SMALL, torch.bfloat16, ("triton", "triton")),
        ("H200", V3, torch.float32, ("reference", "reference")),
        ("L4", V2_LITE, torch.float16, ("triton", "triton")),
        ("L4", _shape(3, 24, 16, 8, 8), torch.float16, ("reference", "reference")),
        ("CPU", V3, torch.bfloat16, ("reference", "reference")),
    ],
)
def test_what_auto_means(
    monkeypatch: pytest.MonkeyPatch,
    gpu_name: str,
    shape: LatentShape,
    dtype: torch.dtype,
    wanted: tuple[str, str],
) -> None:
    cpu = torch.device("cpu")
    device = device_properties(cpu) if gpu_name == "CPU" else gpu(gpu_name)
    monkeypatch.setattr(select_latent, "device_properties", lambda _: device)
    target = select_latent.Target(shape=shape, block_size=16, dtype=dtype, device=cpu)
    found = tuple(select_latent.automatic_name(phase, target) for phase in ("prefill", "decode"))
    assert found == wanted


# ---- Triton --------------------------------------------------------------------------------------


def _triton(problem: LatentProblem, **options: Any) -> Any:
    # Imported late: the interpreter is chosen when Triton is.
    from kernels.attention.latent_triton import TritonLatent

    return TritonLatent(
        problem.shape,
        block_size=problem.block_size,
        dtype=problem.q.dtype,
        device=problem.store.device,
        **options,
    )


def _small_tiles(num_tiles: int = 1, num_chunks: int = 1, joined_from: int = 3) -> dict[str, Any]:
    """Tiles so small that short rows are split, masked, combined and cut into pieces."""
    from kernels.attention.decode_items import DecodeConfig
    from kernels.attention.latent_prefill import LatentPrefillConfig
    from kernels.attention.latent_work import LatentConfig

    return {
        "decode_config": LatentConfig(
            decode=DecodeConfig(tile_keys=16, min_part_tiles=1, num_programs=24),
            num_tiles=num_tiles,
            num_chunks=num_chunks,
            joined_from=joined_from,
        ),
        "prefill_config": LatentPrefillConfig(tile_queries=16, tile_keys=16),
    }


# Heads of one tile, of two and of a number with few divisors; sizes of no tile.
IN_E4M3 = _shape(3, 64, 32, 24, 20)
INTERPRETED = [SMALL, _shape(16, 16, 16, 20, 36), _shape(72, 16, 16, 16, 16)]


def check_some() -> None:
    problem = build_problem([(2, 1), (35, 1), (0, 7), (18, 9)], SMALL)
    made = SMALL.num_heads * (SMALL.nope_dim + SMALL.value_dim) + SMALL.width
    check(_triton(problem, **_small_tiles(num_chunks=2), piece_bytes=4 * made * 11), problem)
    _triton(problem, **_small_tiles()).prepare(max_rows=1, max_row_tokens=5, max_row_keys=5)
    check(_triton(problem, fixed_tile=True), problem)
    _check_wide_heads()
    _check_e4m3([(35, 1), (18, 9)], IN_E4M3, piece_bytes=4 * made * 11)
    _check_joined([(2, 1), (150, 1), (95, 1)], SMALL, **_small_tiles(num_chunks=2))
    _check_prompt_replays(1)


def _check_wide_heads() -> None:
    """Heads as wide as GLM's, in the tiles that they have."""
    from kernels.attention.latent_prefill import config_for

    wide = _shape(3, 32, 64, 192, 256)
    assert config_for(wide) == config_for(GLM) != config_for(V3)
    problem = build_problem([(35, 1), (18, 39)], wide)
    check(_triton(problem, **_small_tiles() | {"prefill_config": config_for(wide)}), problem)


def test_memory_is_counted_for_a_piece_and_for_what_pieces_leave_to_the_next() -> None:
    from kernels.attention.latent_prefill import made_keys, plan_prefill, prefill_bytes

    problem = build_problem([(18, 9)], SMALL)
    work = plan_prefill(
        problem.step, 0, SMALL, _small_tiles()["prefill_config"], block_size=16, max_piece_keys=27
    )
    made = made_keys(problem.up, 0, problem.store, work.pieces[0], SMALL, None)
    one = prefill_bytes(SMALL, torch.float32, num_tokens=9, num_keys=27, max_piece_keys=27)
    assert one == sum(part.nbytes for part in made)
    two = prefill_bytes(SMALL, torch.float32, num_tokens=9, num_keys=54, max_piece_keys=27)
    assert two - one == 9 * SMALL.num_heads * (SMALL.value_dim + 1) * 4


def _check_e4m3(
    rows: Rows,
    shape: LatentShape,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    **options: Any,
) -> None:
    problem = build_problem(rows, shape, dtype=dtype, device=device).in_e4m3()
    if device == "cpu":
        options |= _small_tiles(2 if shape.num_heads > 64 else 1, shape.rank // 32)
    check(_triton(problem, **options), problem)
    check(_triton(problem, fixed_tile=True), problem)


def _check_joined(
    rows: Rows,
    shape: LatentShape,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> None:
    """Parts of many rows, which the last to end joins, step after step."""
    problem = build_problem(rows, shape, device=device, dtype=dtype)
    backend = _triton(problem, **options)
    metadata = backend.plan(problem.step)
    work = metadata.decode
    assert work.joins_last
    assert work.split.items[None][:, 2].max() > 1, "no row has two parts"
    for layer in (1, 0, 1):
        out = run(backend, problem, layer, metadata)
        assert_close(out, problem.exact(layer), TOLERANCES[dtype])
        assert not work.split.num_arrived.any(), "the next step begins with none"


def check_all() -> None:
    for shape in INTERPRETED:
        for name in drawn(list(ROW_SETS), 3):
            problem = build_problem(ROW_SETS[name], shape)
            small = _small_tiles(2 if shape.num_heads > 64 else 1, shape.rank // 16)
            check(_triton(problem, **small), problem)
            keys = random.choice((7, 16, 40))
            made = shape.num_heads * (shape.nope_dim + shape.value_dim) + shape.width
            check(_triton(problem, **small, piece_bytes=4 * made * keys), problem)
            fixed = _triton(problem, fixed_tile=True)
            check(fixed, problem)
    for shape in (IN_E4M3, _shape(72, 32, 32, 16, 16)):
        for dtype in (torch.float32, torch.float16):
            _check_e4m3(ROW_SETS[drawn(list(ROW_SETS), 1)[0]], shape, dtype, piece_bytes=9000)
    tiles = _small_tiles(2, 1)
    _check_joined([(2, 1), (150, 1), (95, 1)], _shape(72, 16, 16, 16, 16), **tiles)
    _check_fixed_bits()
    _check_replays()
    _check_products()
    _check_joined_keys()
    _check_prompt_replays()


def _check_fixed_bits(device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
    """A token has the same bits in a prompt, as an output, alone and beside others."""
    rows = [(19, 1), (33, 1), (0, 11), (14, 7)]
    problem = build_problem(rows, SMALL, device=device, dtype=dtype)
    backend = _triton(problem, fixed_tile=True)
    whole = run(backend, problem, 1, backend.plan(problem.step))
    start = 0
    blocks = [problem.step.row_blocks(row).tolist() for row in range(len(rows))]
    for row, (computed, new) in enumerate(rows):
        for i in range(new):
            alone = build_step([1], [computed + i], [blocks[row]], device)
            token = slice(start + i, start + i + 1)
            found = backend.run(
                problem.q[token], problem.latent_new[token], problem.up, 1, problem.store,
                backend.plan(alone),
            )  # fmt: skip
            assert torch.equal(found, whole[token]), f"row {row}, token {i}"
        start += new


def _check_replays(device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
    """Fixed buffers, whose rows change in number and length, as replays of a graph see them."""
    fixed: FixedRows | None = None
    for rows in ([(5, 1), (70, 1), (90, 1)], [(2, 1), (33, 1)], [(0, 1), (1, 1), (47, 1), (48, 1)]):
        problem = build_problem(rows, SMALL, device=device, dtype=dtype)
        backend = _triton(problem, **_small_tiles())
        fixed = fixed or FixedRows(5, 60, device)
        metadata = backend.open_graph(fixed.rows, max_keys=96)
        for _ in range(2):
            fixed.load(problem.step)
            backend.begin(metadata)
            padding = 5 - len(rows)
            q = torch.cat((problem.q, torch.zeros_like(problem.q[:1]).expand(padding, -1, -1)))
            out = backend.run(q, None, problem.up, 0, problem.store, metadata)
            assert_close(out[: len(rows)], problem.exact(0), TOLERANCES[out.dtype])


def _check_prompt_replays(
    count: int = 4, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> None:
    """Rows of any number of tokens in fixed buffers, every token as a row of its own."""
    fixed: FixedRows | None = None
    for rows in ([(3, 9), (40, 1), (17, 6)], [(0, 16)], [(50, 1)], [(0, 2), (90, 5), (1, 1)])[
        :count
    ]:
        problem = build_problem(rows, SMALL, device=device, dtype=dtype)
        backend = _triton(problem, **_small_tiles())
        fixed = fixed or FixedRows(5, 60, device)
        metadata = backend.open_graph(fixed.rows, max_keys=96, max_tokens=18)
        for _ in range(2):
            fixed.load(problem.step)
            backend.begin(metadata)
            num_tokens = problem.step.num_tokens
            q = torch.cat((problem.q, torch.zeros_like(problem.q[:1]).expand(18, -1, -1)))[:18]
            out = backend.run(q, None, problem.up, 0, problem.store, metadata)
            assert_close(out[:num_tokens], problem.exact(0), TOLERANCES[out.dtype])
            found = metadata.decode.split.rows
            assert found.num_keys[num_tokens:].sum() == 0, "padding sees something"
            twin = open_token_rows(fixed.rows, 18)
            expand_rows_torch(fixed.rows, twin)
            assert torch.equal(twin.num_keys, found.num_keys)
            assert torch.equal(twin.cu_blocks, found.cu_blocks)


def _check_products(device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
    from kernels.linear.by_head import product_by_head

    for num_tokens, num_heads, num_inner, num_columns in (
        (1, 3, 20, 70),
        (17, 2, 65, 33),
        (5, 2, 64, 40),
    ):
        x = torch.randn(num_tokens, num_heads, num_inner + 5, device=device).to(dtype)[..., 2:-3]
        w = torch.randn(num_heads, num_columns, num_inner, device=device).to(dtype)
        exact = torch.einsum("thk,hnk->thn", x.double(), w.double())
        for is_deterministic in (False, True):
            out = torch.full(exact.shape, torch.nan, device=device).to(dtype)
            product_by_head(x, w.transpose(1, 2), out, is_deterministic=is_deterministic)
            assert_close(out, exact, TOLERANCES[dtype])


def _check_joined_keys(device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
    from kernels.attention.latent_keys import join_keys, join_keys_torch

    for num_keys, shape in ((1, SMALL), (5, _shape(17, 16, 6, 20, 9)), (0, SMALL)):
        made = torch.randn(num_keys, shape.num_heads, shape.nope_dim + shape.value_dim)
        vectors = torch.randn(num_keys, shape.width)
        tensors = made.to(device, dtype), vectors.to(device, dtype)
        assert torch.equal(join_keys(*tensors, shape), join_keys_torch(*tensors, shape))


@pytest.mark.slow
def test_some_sizes_in_the_interpreter() -> None:
    run_interpreted("tests.kernels.attention.test_latent_attention:check_some")


@pytest.mark.nightly
def test_more_sizes_bits_and_replays_in_the_interpreter() -> None:
    run_interpreted("tests.kernels.attention.test_latent_attention:check_all")


# ---- on a GPU ------------------------------------------------------------------------------------

LONG_ROWS = [(63, 1), (64, 1), (1000, 1), (4159, 1), (0, 129), (700, 65), (127, 2)]


def test_wide_heads_are_written_out_on_a_gpu() -> None:
    gpu_0, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert not reference_attention.is_fused_exact(V3.absorbed(), gpu_0)
    assert reference_attention.is_fused_exact(V3.absorbed(), cpu)
    assert reference_attention.is_fused_exact(_shape(24, 96, 32, 48, 80).absorbed(), gpu_0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [V2_LITE, _shape(24, 128, 32, 48, 80)], ids=str)
def test_the_reference_on_a_gpu(shape: LatentShape, dtype: torch.dtype) -> None:
    for rows in (*ROW_SETS.values(), LONG_ROWS, [(0, 129), (70, 65)]):
        problem = build_problem(rows, shape, dtype=dtype, device="cuda")
        given: dict[str, Any] = {"block_size": 16, "dtype": dtype, "device": torch.device("cuda")}
        check(ReferenceLatent(shape, **given), problem)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [V2_LITE, V3, GLM, _shape(24, 128, 32, 48, 80)], ids=str)
def test_the_kernels_on_a_gpu(shape: LatentShape, dtype: torch.dtype) -> None:
    for rows in (*ROW_SETS.values(), LONG_ROWS):
        problem = build_problem(rows, shape, dtype=dtype, device="cuda")
        check(_triton(problem), problem)
        check(_triton(problem, piece_bytes=64 * 2**20), problem)
        check(_triton(problem, fixed_tile=True), problem)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [V2_LITE, V3, GLM, _shape(24, 128, 32, 48, 80)], ids=str)
def test_the_kernels_on_a_gpu_read_e4m3_numbers(shape: LatentShape) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for rows in (ROW_SETS["everything"], LONG_ROWS, [(n // 2, 1) for n in range(300)]):
            _check_e4m3(rows, shape, dtype, "cuda")
            _check_e4m3(rows, shape, dtype, "cuda", piece_bytes=64 * 2**20)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [V2_LITE, V3], ids=str)
def test_flash_attention_on_a_gpu(shape: LatentShape, dtype: torch.dtype) -> None:
    pytest.importorskip("vllm")
    from kernels.attention.latent_flash import FlashLatent

    for rows in (*ROW_SETS.values(), LONG_ROWS):
        problem = build_problem(rows, shape, dtype=dtype, device="cuda")
        for options in ({}, {"piece_bytes": 64 * 2**20}):
            flash = FlashLatent(
                shape, block_size=16, dtype=dtype, device=torch.device("cuda"), **options
            )
            for case in (problem, problem.in_e4m3()):
                check(flash, case)
                check(PhasedLatent(prefill=flash, decode=_triton(case), graph=None), case)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [70, 256])
def test_parts_of_many_rows_are_joined_on_a_gpu(num_rows: int, dtype: torch.dtype) -> None:
    rows = [(137 * row % 3000, 1) for row in range(num_rows)]
    _check_joined(rows, V2_LITE, "cuda", dtype)


@pytest.mark.gpu
def test_bits_and_replays_on_a_gpu() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        _check_fixed_bits("cuda", dtype)
        _check_replays("cuda", dtype)
        _check_products("cuda", dtype)
        _check_joined_keys("cuda", dtype)
        _check_prompt_replays(4, "cuda", dtype)


@pytest.mark.gpu
def test_a_captured_decode_step_sees_its_rows_as_they_are() -> None:
    problem = build_problem(
        [(5, 1), (900, 1), (901, 1)], V2_LITE, dtype=torch.bfloat16, device="cuda"
    )
    backend = _triton(problem)
    fixed = FixedRows(3, 200, "cuda")
    metadata = backend.open_graph(fixed.rows, max_keys=1024)
    fixed.load(problem.step)
    graph = torch.cuda.CUDAGraph()
    for _ in range(2):  # the first compiles
        backend.begin(metadata)
        run(backend, problem, 1, metadata)
    with torch.cuda.graph(graph):
        backend.begin(metadata)
        out = run(backend, problem, 1, metadata)
    blocks = [problem.step.row_blocks(row).tolist() for row in range(3)]
    for computed in ([5, 900, 901], [0, 411, 530], [3, 890, 896]):
        step = build_step([1] * 3, computed, blocks, "cuda")
        shown = replace(
            problem,
            step=step,
            vectors=[row[:, : n + 1] for row, n in zip(problem.vectors, computed, strict=True)],
        )
        fixed.load(step)
        graph.replay()
        assert_close(out, shown.exact(1), TOLERANCES[torch.bfloat16])
