"""FlashAttention-4: what is around the library on a CPU, with a stand-in for it; all on a GPU."""

import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention import flash_attn_4
from kernels.attention.flash_attn_4 import FlashAttention4, why_not
from kernels.attention.gathering import Reads
from kernels.attention.names import AttentionNames, BackendUnavailable
from kernels.attention.protocol import AttentionShape
from kernels.attention.select import build_attention
from tests.kernels.attention.attention_cases import (
    ROW_SETS,
    FixedRows,
    Problem,
    assert_close,
    build_problem,
    check,
    run_layer,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SHAPE = AttentionShape(num_heads=6, num_kv_heads=2, head_dim=16, layer_windows=(None, 3, 20))
GPU_ROWS = {
    "fresh": [(0, 2), (0, 129), (0, 1000), (0, 128)],
    "history": [(63, 65), (1000, 31), (17, 500), (5000, 2)],
    "long": [(8000, 2500)],
    "many": [(number % 40, 2 + number % 3) for number in range(300)],
}


class _Library:
    """`flash_attn_varlen_func` in plain torch: its conventions, and the limits of what it takes."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor | None = None,
        seqused_k: Tensor | None = None,
        page_table: Tensor | None = None,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int | None, int | None],
        learnable_sink: Tensor | None,
        softcap: float,
    ) -> tuple[Tensor, None]:
        assert causal, "every mask is causal"
        assert (page_table is None) == (seqused_k is None) == (cu_seqlens_k is not None)
        num_rows = len(cu_seqlens_q) - 1
        for lengths in (cu_seqlens_q, cu_seqlens_k, seqused_k, page_table):
            assert lengths is None or (lengths.dtype == torch.int32 and lengths.stride(-1) == 1)
        assert page_table is None or len(page_table) == num_rows
        self.calls.append({"table": page_table, "window": window_size, "rows": num_rows, "k": k})
        out = torch.zeros(q.shape, dtype=q.dtype)
        for row in range(num_rows):
            start, end = cu_seqlens_q[row : row + 2].tolist()
            if page_table is not None and seqused_k is not None:
                pages = page_table[row].long()
                keys, values = (t[pages].flatten(0, 1)[: seqused_k[row]] for t in (k, v))
            else:
                assert cu_seqlens_k is not None
                first, last = cu_seqlens_k[row : row + 2].tolist()
                keys, values = k[first:last], v[first:last]
            attended = _attend(
                q[start:end], keys, values, softmax_scale, softcap, window_size, learnable_sink
            )
            out[start:end] = attended
        return out, None


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    softcap: float,
    window_size: tuple[int | None, int | None],
    sinks: Tensor | None,
) -> Tensor:
    """Of one row; a query's own key is as far from the last key as it is from the last query."""
    num_groups = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(num_groups, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
    left = window_size[0]
    is_seen = (distance >= 0) & (distance <= (len(k) if left is None else left))
    scores = scores.masked_fill(~is_seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(q), 1)), -1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> _Library:
    """In place of the package; and any device is good enough."""
    made = _Library()
    monkeypatch.setattr(flash_attn_4, "why_not", lambda *_: None)
    monkeypatch.setattr(flash_attn_4, "_import_library", lambda: made)
    return made


def _backend(problem: Problem, reads: Reads | None = None) -> FlashAttention4:
    return FlashAttention4(
        problem.shape,
        block_size=problem.block_size,
        dtype=problem.store.dtype,
        device=problem.store.device,
        reads=reads,
    )


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("reads", [Reads.TABLE, Reads.GATHERED, None])
@pytest.mark.parametrize("rows", ROW_SETS.values(), ids=ROW_SETS)
def test_keys_reach_the_library_whatever_way(
    rows: list[tuple[int, int]], reads: Reads | None, has_sinks: bool
) -> None:
    shape = replace(SHAPE, has_sinks=has_sinks, softcap=2.0 if has_sinks else None)
    problem = build_problem(rows, shape, block_size=4, dtype=torch.float32)
    for layer in range(len(shape.layer_windows)):
        check(_backend(problem, reads), problem, layer)


@pytest.mark.parametrize(
    ("rows", "block_size", "head_dim", "expected"),
    [
        ([(0, 5), (0, 40)], 16, 16, Reads.FRESH),
        ([(0, 5), (1, 40)], 16, 16, Reads.GATHERED),
        ([(0, 5), (1, 40)], 128, 16, Reads.TABLE),
        ([(0, 5), (1, 40)], 128, 136, Reads.GATHERED),
        ([(0, 5), (128, 73)], 16, 16, Reads.TABLE),
    ],
)
def test_the_way_is_chosen_by_history_and_block_size(
    rows: list[tuple[int, int]],
    block_size: int,
    head_dim: int,
    expected: Reads,
    library: _Library,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flash_attn_4, "MAX_GATHERED_KEYS", 200)
    shape = replace(SHAPE, head_dim=head_dim)
    problem = build_problem(rows, shape, block_size=block_size, dtype=torch.float32)
    backend = _backend(problem)
    assert backend.plan(problem.step).reads is expected
    check(backend, problem, 1)
    assert all((call["table"] is not None) == (expected is Reads.TABLE) for call in library.calls)


def test_keys_before_a_window_are_not_gathered(library: _Library) -> None:
    problem = build_problem([(90, 5), (30, 4)], SHAPE, block_size=4, dtype=torch.float32)
    backend = _backend(problem)
    metadata = backend.plan(problem.step)
    for layer in range(3):
        run_layer(backend, problem, layer, metadata)
    assert [len(call["k"]) for call in library.calls] == [129, 7 + 6, 24 + 23]


@pytest.mark.usefixtures("library")
def test_a_graphs_metadata_follows_its_rows() -> None:
    """Rows are padded, and may have more new tokens than keys."""
    fixed = FixedRows(6, 80, CPU)
    problem = build_problem([(0, 9)], SHAPE, block_size=4, dtype=torch.float32)
    backend = _backend(problem)
    metadata = backend.open_graph(fixed.rows, max_keys=60, max_tokens=48)
    assert backend.can_capture_prompts
    for rows in ([(0, 9)], [(3, 1), (40, 17), (0, 8)], [(5, 1), (5, 1), (55, 5)]):
        problem = build_problem(rows, SHAPE, block_size=4, dtype=torch.float32)
        fixed.load(problem.step, 48)
        backend.begin(metadata)
        backend.refresh(metadata, problem.step)
        num_tokens = problem.step.num_tokens
        for layer in range(3):
            q, k, v = torch.split(problem.qkv(layer), [6, 2, 2], 1)
            padded = [
                torch.nn.functional.pad(t, (0, 0, 0, 0, 0, 48 - num_tokens)) for t in (q, k, v)
            ]
            problem.store.nan_to_num_()  # padding reads block 0
            out = backend.run(*padded, layer, problem.store, metadata)
            assert_close(out[:num_tokens], problem.exact(layer), 1e-5)


@pytest.mark.parametrize(("max_rows", "counts"), [(256, {2}), (257, {2, 257})])
def test_every_form_is_called_before_the_first_step(
    max_rows: int, counts: set[int], library: _Library
) -> None:
    problem = build_problem(
        [(0, 2)], replace(SHAPE, has_sinks=True), block_size=2, dtype=torch.float32
    )
    _backend(problem).prepare(max_rows=max_rows, max_row_tokens=100, max_row_keys=200)
    forms = {(call["rows"], call["window"], call["table"] is None) for call in library.calls}
    windows = {(None, None), (2, 0), (19, 0)}
    assert forms == {
        (rows, window, kind) for rows in counts for window in windows for kind in (0, 1)
    }


def test_a_compiler_that_fails_ends_the_start_with_what_to_do(
    library: _Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = build_problem([(0, 2)], SHAPE, block_size=2, dtype=torch.float32)
    backend = _backend(problem)
    monkeypatch.setattr(backend, "_attend", _fails_to_compile)
    with pytest.raises(BackendUnavailable, match=r"no such op; .*quack-kernels.* flash_attn or t"):
        backend.prepare(max_rows=4, max_row_tokens=100, max_row_keys=200)


def _fails_to_compile(*_: object, **__: object) -> None:
    raise AttributeError("no such op\nand a traceback of MLIR")


# ---- what it refuses -----------------------------------------------------------------------------


def _find(monkeypatch: pytest.MonkeyPatch, *, is_installed: bool) -> None:
    find_spec = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        if name != "flash_attn.cute":
            return find_spec(name, package)
        if not is_installed:
            raise ModuleNotFoundError("No module named 'flash_attn'")
        return ModuleSpec(name, None)

    monkeypatch.setattr(importlib.util, "find_spec", find)


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The GPU's compute capability, to be changed in place; the package is there."""
    value = [9, 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: tuple(value))
    _find(monkeypatch, is_installed=True)
    return value  # type: ignore[return-value]


def test_what_it_cannot_do_is_said_before_it_is_built(
    capability: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = replace(SHAPE, has_sinks=True)
    brain, wide = torch.bfloat16, replace(shape, head_dim=256)
    assert why_not(shape, brain, GPU) is why_not(wide, torch.float16, GPU) is None
    assert "float32" in str(why_not(shape, torch.float32, GPU))
    assert "heads of 20" in str(why_not(replace(shape, head_dim=20), brain, GPU))
    assert "capability 9 or 10" in str(why_not(shape, brain, CPU))
    for major, head_dim, reason in (
        (8, 64, "capability"),
        (12, 64, "capability"),
        (10, 192, "192"),
    ):
        capability[0] = major
        assert reason in str(why_not(replace(shape, head_dim=head_dim), brain, GPU))
    capability[0] = 10
    assert why_not(wide, brain, GPU) is None
    _find(monkeypatch, is_installed=False)
    assert "pip install 'flash-attn-4[cu13]" in str(why_not(shape, brain, GPU))


def _select(prefill: str, decode: str, **options: bool) -> None:
    build_attention(
        AttentionNames(prefill=prefill, decode=decode),  # type: ignore[arg-type]
        replace(SHAPE, head_dim=64),
        block_size=16,
        dtype=torch.bfloat16,
        device=GPU,
        fixed_tile=options.get("fixed_tile", False),
    )


@pytest.mark.usefixtures("capability")
def test_it_is_for_prompts_and_for_no_fixed_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendUnavailable, match=r"flash_attn_4 .*decode phase.*is for prompts"):
        _select("triton", "flash_attn_4")
    with pytest.raises(BackendUnavailable, match=r"flash_attn_4 .*same bits"):
        _select("flash_attn_4", "auto", fixed_tile=True)
    monkeypatch.setattr(importlib.util, "find_spec", _without_vllm(importlib.util.find_spec))
    with pytest.raises(BackendUnavailable, match=r"for prefill: .*flash_attn_4"):
        _select("flash_attn", "triton")


def _without_vllm(find_spec: Any) -> Any:
    return lambda name, package=None: None if "vllm" in name else find_spec(name, package)


@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize("error", [ImportError("no cutlass"), RuntimeError("no CTK flavor")])
def test_a_package_that_does_not_work_ends_the_start(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> ModuleType:
        assert name.startswith("flash_attn.cute")
        raise error

    monkeypatch.setattr(flash_attn_4.importlib, "import_module", fail)
    with pytest.raises(ValueError, match=rf"does not work: {error}; it needs nvidia-cutlass-dsl"):
        flash_attn_4._import_library()


@pytest.mark.parametrize("asked", [False, True])
def test_compiled_code_is_kept_on_disk(asked: bool, tmp_path: Path) -> None:
    """Unless the operator's environment has asked for it already, who then says where."""
    cache_utils = SimpleNamespace(
        CUTE_DSL_CACHE_ENABLED=asked,
        CUTE_DSL_CACHE_DIR="elsewhere",
        get_jit_cache=lambda name: (cache_utils.CUTE_DSL_CACHE_DIR, name),
    )
    names = ("_flash_attn_fwd", "_compute_tile_cumsum", "_compute_blocks_to_batch")
    interface = SimpleNamespace(**{name: SimpleNamespace(compile_cache=None) for name in names})
    flash_attn_4._keep_compiled(interface, cache_utils, tmp_path)
    caches = [getattr(interface, name).compile_cache for name in names]
    kept = [(str(tmp_path), kind) for kind in ("fwd", "tile_cumsum", "blocks_to_batch")]
    assert caches == ([None] * 3 if asked else kept)


def test_a_cache_that_cannot_be_written_is_named_with_what_to_do() -> None:
    def refuse(name: str) -> None:
        raise PermissionError(f"no writing to {name}")

    cache_utils = SimpleNamespace(CUTE_DSL_CACHE_ENABLED=False, get_jit_cache=refuse)
    interface = SimpleNamespace(
        _flash_attn_fwd=None, _compute_tile_cumsum=None, _compute_blocks_to_batch=None
    )
    with pytest.raises(ValueError, match=r"no writing to fwd; .*CUTE_DSL_CACHE_DIR"):
        flash_attn_4._keep_compiled(interface, cache_utils, Path("/nowhere"))


def test_each_gpu_has_a_folder_of_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for gpu in ("NVIDIA H200", "NVIDIA B200"):
        for version in ("0.6.5", "0.7.0"):
            monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu=gpu: gpu)
            monkeypatch.setattr(
                flash_attn_4.importlib.metadata, "version", lambda _, version=version: version
            )
            names.add(flash_attn_4._cache_name())
    assert len(names) == 4
    assert "NVIDIA-H200_quack-0.6.5" in names


# ---- on a GPU ------------------------------------------------------------------------------------


def _gpu_problem(
    rows: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    *,
    has_sinks: bool,
    dtype: torch.dtype = torch.bfloat16,
    softcap: float | None = None,
) -> Problem:
    shape = AttentionShape(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        layer_windows=(None, 100, 3000),
        has_sinks=has_sinks,
        softcap=softcap,
    )
    reason = why_not(shape, dtype, GPU)
    if reason is not None:
        pytest.skip(reason)
    return build_problem(rows, shape, block_size=block_size, dtype=dtype, device="cuda")


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("rows", GPU_ROWS.values(), ids=GPU_ROWS)
@pytest.mark.parametrize("block_size", [16, 48, 128])
@pytest.mark.parametrize(
    ("heads", "head_dim", "has_sinks", "dtype"),
    [
        ((32, 8), 128, False, torch.bfloat16),
        ((32, 8), 128, True, torch.bfloat16),
        ((14, 2), 64, True, torch.float16),
        ((4, 4), 256, False, torch.bfloat16),
    ],
)
def test_every_way_equals_float64(
    heads: tuple[int, int],
    head_dim: int,
    has_sinks: bool,
    dtype: torch.dtype,
    block_size: int,
    rows: list[tuple[int, int]],
) -> None:
    problem = _gpu_problem(rows, heads, head_dim, block_size, has_sinks=has_sinks, dtype=dtype)
    for reads in (None, Reads.TABLE, Reads.GATHERED):
        backend = _backend(problem, reads)
        for layer in range(3):
            check(backend, problem, layer)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
def test_scores_may_be_capped() -> None:
    for rows in (GPU_ROWS["fresh"], GPU_ROWS["history"]):
        problem = _gpu_problem(rows, (8, 4), 256, 16, has_sinks=False, softcap=5.0)
        for layer in range(3):
            check(_backend(problem), problem, layer)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("block_size", [16, 128])
def test_nothing_compiles_after_prepare(block_size: int) -> None:
    problem = _gpu_problem([(0, 2)], (32, 8), 128, block_size, has_sinks=True)
    backend = _backend(problem)
    backend.prepare(max_rows=300, max_row_tokens=4096, max_row_keys=8192)
    interface = importlib.import_module("flash_attn.cute.interface")
    functions = (
        interface._flash_attn_fwd,
        interface._compute_tile_cumsum,
        interface._compute_blocks_to_batch,
    )
    before = [len(function.compile_cache.cache) for function in functions]
    for rows in GPU_ROWS.values():
        problem = _gpu_problem(rows, (32, 8), 128, block_size, has_sinks=True)
        for layer in range(3):
            check(backend, problem, layer)
    assert [len(function.compile_cache.cache) for function in functions] == before


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("block_size", [16, 128])
def test_blocks_beyond_2_31_elements_are_found(block_size: int) -> None:
    problem = _gpu_problem([(900, 100), (0, 300)], (32, 8), 128, block_size, has_sinks=False)
    per_block = 3 * 2 * block_size * 8 * 128
    store = torch.empty(
        (2**31 // per_block * 3 // 2, 3, 2, block_size, 8, 128), dtype=torch.bfloat16, device="cuda"
    )
    large = build_problem(
        [(900, 100), (0, 300)],
        problem.shape,
        block_size=block_size,
        dtype=torch.bfloat16,
        device="cuda",
        store=store,
    )
    assert int(large.step.block_ids.max()) * per_block > 2**31
    for reads in (Reads.TABLE, Reads.GATHERED):
        check(_backend(large, reads), large, 2)
