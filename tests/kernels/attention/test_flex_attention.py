"""FlexAttention and the reference under every kind of mask, against float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.attention.flex import CPU_PACKING, GPU_PACKING, FlexAttention
from kernels.attention.flex_packing import PackedMask, Packing, SlotSizes
from kernels.attention.masks import MaskFunction, load_mask_function
from kernels.attention.names import BackendUnavailable
from kernels.attention.protocol import AttentionBackend, AttentionShape
from kernels.attention.reference import ReferenceAttention
from tests.harness import attention_masks
from tests.harness.seeds import fresh_seed
from tests.kernels.attention.attention_cases import (
    ROW_SETS,
    TOLERANCES,
    Problem,
    assert_close,
    build_problem,
    check,
    run_layer,
)

CPU = torch.device("cpu")
MASKS = "tests.harness.attention_masks"
FUNCTIONS = {
    "none": None,
    "near_and_even": MaskFunction(name="near", test=attention_masks.near_and_even),
    "sections": MaskFunction(name="sections", test=attention_masks.sections_of_forty),
}
# Causal; a window; chunks; chunks smaller and larger than the tiles below.
SHAPE = AttentionShape(
    num_heads=6,
    num_kv_heads=2,
    head_dim=10,
    layer_windows=(None, 3, None, 20, None),
    layer_chunks=(None, None, 7, None, 40),
)
SMALL_PACKING = Packing(
    tile=16,
    query_sizes=SlotSizes(first=32, factor=4, most=128),
    key_sizes=SlotSizes(first=64, factor=4, most=256),
)
LONG_ROWS = [(17, 1), (300, 1), (0, 130), (77, 50), (200, 3)]
GPU_ROWS = {
    "decodes": [(0, 1), (127, 1), (128, 1), (640, 1), (5000, 1)],
    "fresh": [(0, 1000), (0, 129), (0, 128)],
    "mixed": [(31, 1), (2049, 1), (0, 7), (300, 128), (1000, 2500)],
    "many": [(number, 3) for number in range(200)],
}


def _problem(
    rows: list[tuple[int, int]], function: str, *, has_sinks: bool = False, **changes: object
) -> Problem:
    shape = replace(SHAPE, mask_function=FUNCTIONS[function], has_sinks=has_sinks, **changes)  # type: ignore[arg-type]
    return build_problem(rows, shape, block_size=4, dtype=torch.float32)


def _check_all(backend: AttentionBackend, problem: Problem) -> None:
    for layer in range(len(problem.shape.layer_windows)):
        check(backend, problem, layer)


def _flex(problem: Problem, packing: Packing | None = None, **options: bool) -> FlexAttention:
    return FlexAttention(
        problem.shape,
        block_size=problem.block_size,
        dtype=problem.store.dtype,
        device=problem.store.device,
        packing=packing,
        is_compiled=options.get("is_compiled"),
    )


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("rows", ROW_SETS.values(), ids=ROW_SETS)
def test_the_reference_computes_any_mask(
    rows: list[tuple[int, int]], function: str, softcap: float | None
) -> None:
    problem = _problem(rows, function, softcap=softcap)
    reference = ReferenceAttention(problem.shape, block_size=4, dtype=torch.float32, device=CPU)
    _check_all(reference, problem)


@pytest.mark.parametrize(
    ("function", "has_sinks", "softcap"),
    [("none", True, None), ("near_and_even", False, 2.0), ("sections", True, 5.0)],
)
def test_flex_computes_any_mask_on_a_cpu(
    function: str, has_sinks: bool, softcap: float | None
) -> None:
    rows = [(2, 1), (19, 1), (0, 11), (16, 16)]
    problem = _problem(rows, function, has_sinks=has_sinks, softcap=softcap)
    _check_all(_flex(problem), problem)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_rows_that_share_padded_calls_keep_to_themselves(function: str) -> None:
    problem = _problem(LONG_ROWS, function, layer_windows=(20, None), layer_chunks=(None, 40))
    backend = _flex(problem, SMALL_PACKING)
    _check_all(backend, problem)
    for calls in backend.plan(problem.step).by_mask.values():
        assert 1 < len(calls) < len(LONG_ROWS)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_tiles_of_a_pack_are_those_that_its_queries_see(function: str) -> None:
    """Every seen key is in a listed tile; a tile that is listed as whole is seen by all."""
    problem = _problem(LONG_ROWS, function)
    for mask in problem.shape.layer_masks:
        packed = PackedMask(mask, SMALL_PACKING, CPU)
        packed.classify(100)  # longer rows make it grow
        for pack in SMALL_PACKING.packs(problem.step, mask):
            shape = packed.shape(pack.rows, with_tiles=True)
            keys = torch.arange(shape.num_key_slots)
            first, last, origin = (t[:, None] for t in (shape.first, shape.last, shape.origin))
            is_seen = (keys >= first) & (keys <= last)
            if mask.function is not None:
                positions = (last - origin).clamp(min=0), (keys - origin).clamp(min=0)
                is_seen &= mask.function.test(*positions)
            tiled = is_seen.view(shape.num_query_slots // 16, 16, shape.num_key_slots // 16, 16)
            assert shape.tiles is not None
            in_part = _dense(shape.tiles.num_partial, shape.tiles.partial)
            whole = _dense(shape.tiles.num_full, shape.tiles.full)
            # Only where all queries of a tile are tokens; elsewhere nobody reads the result.
            is_token = (shape.last >= 0).view(-1, 16).all(1)
            assert not (in_part & whole).any()
            assert not (tiled.any(3).any(1) & ~in_part & ~whole).any()
            assert tiled.all(3).all(1)[whole & is_token[:, None]].all()


def _dense(counts: torch.Tensor, lists: torch.Tensor) -> torch.Tensor:
    found = torch.zeros(lists.shape, dtype=torch.bool)
    for row, count in enumerate(counts.tolist()):
        found[row, lists[row, :count].long()] = True
    return found


def test_every_size_is_known_before() -> None:
    sizes = set(GPU_PACKING.all_sizes(max_row_tokens=8192, max_row_keys=40_000))
    mask = replace(SHAPE, layer_windows=(None,), layer_chunks=()).layer_masks[0]
    generator = np.random.default_rng(fresh_seed())
    for _ in range(20):
        num_new = generator.integers(1, 8193, size=generator.integers(1, 40))
        num_new.sort()
        rows = [(int(generator.integers(0, 40_001 - new)), int(new)) for new in num_new]
        step = build_problem(
            rows[:1], SHAPE, block_size=4, dtype=torch.float32
        ).step  # its host arrays are replaced
        step = replace(
            step,
            num_new_tokens=np.array([new for _, new in rows]),
            num_computed_tokens=np.array([computed for computed, _ in rows]),
        )
        packs = list(GPU_PACKING.packs(step, mask))
        assert sum(len(pack.rows) for pack in packs) == len(rows)
        assert {GPU_PACKING.sizes(pack.rows) for pack in packs} <= sizes


def test_nothing_is_prepared_on_a_cpu() -> None:
    problem = _problem([(0, 3)], "none")
    backend = _flex(problem, CPU_PACKING)
    backend.prepare(max_rows=300, max_row_tokens=10**6, max_row_keys=10**6)
    _check_all(backend, problem)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("function", ["none", "near_and_even"])
def test_compiled_code_goes_by_the_listed_tiles_and_fits_every_step(function: str) -> None:
    """On a CPU as on a GPU, but for sinks; nothing compiles after `prepare`."""
    from torch._dynamo.utils import counters

    packing = Packing(
        tile=32,
        query_sizes=SlotSizes(first=128, factor=4, most=128),
        key_sizes=SlotSizes(first=1024, factor=4, most=1024),
    )
    shape = replace(SHAPE, head_dim=16)
    backend = _flex(_problem([(0, 3)], function, head_dim=16), packing, is_compiled=True)
    backend.prepare(max_rows=300, max_row_tokens=60, max_row_keys=900)
    num_graphs = counters["stats"]["unique_graphs"]
    for rows in (*ROW_SETS.values(), [*LONG_ROWS[:2], (200, 50), (800, 60)]):
        problem = _problem(rows, function, head_dim=shape.head_dim)
        with torch.inference_mode():
            _check_all(backend, problem)
    assert counters["stats"]["unique_graphs"] == num_graphs


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.filterwarnings("default")
def test_a_mask_that_cannot_be_compiled_is_named() -> None:
    mask = load_mask_function(f"{MASKS}:by_a_file", 100)
    shape = replace(SHAPE, head_dim=16, mask_function=mask)
    problem = build_problem([(0, 3)], shape, block_size=4, dtype=torch.float32)
    backend = _flex(problem, SMALL_PACKING, is_compiled=True)
    with pytest.raises(BackendUnavailable, match=r"cannot compile mask .*by_a_file"):
        backend.prepare(max_rows=2, max_row_tokens=8, max_row_keys=8)


def test_a_mask_that_fails_where_it_computes_is_named() -> None:
    """As a function does on a GPU that reads a table of its own on the CPU; nothing compiles."""

    def fails(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("two devices")

    mask = MaskFunction(name="mine:fails", test=fails)
    shape = replace(SHAPE, head_dim=16, mask_function=mask)
    problem = build_problem([(0, 3)], shape, block_size=4, dtype=torch.float32)
    backend = _flex(problem, SMALL_PACKING, is_compiled=True)
    with pytest.raises(BackendUnavailable, match=r"cannot compile mask mine:fails: two devices"):
        backend.prepare(max_rows=2, max_row_tokens=8, max_row_keys=8)


# ---- mask functions ------------------------------------------------------------------------------


def test_a_mask_function_is_loaded_by_name() -> None:
    mask = load_mask_function(f"{MASKS}:near_and_even", 1000)
    assert mask.test is attention_masks.near_and_even
    assert mask.name == f"{MASKS}:near_and_even"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such_module:mask", "No module named"),
        (f"{MASKS}:no_such_function", "no attribute"),
        (f"{MASKS}:blind", "position 100 does not see its own key"),
        (f"{MASKS}:number", "bool tensor"),
        (f"{MASKS}:by_shape", "not elementwise"),
        (f"{MASKS}:branching", "raised RuntimeError"),
        (f"{MASKS}:Tensor", "raised TypeError"),
    ],
)
def test_what_is_no_mask_is_refused(name: str, reason: str) -> None:
    with pytest.raises(BackendUnavailable, match=reason):
        load_mask_function(name, 1000)


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("heads", "head_dim", "function", "has_sinks"),
    [
        ((32, 8), 128, "none", False),
        ((32, 8), 128, "none", True),
        ((32, 8), 128, "near_and_even", False),
        ((14, 2), 64, "sections", True),
    ],
)
def test_compiled_kernels_equal_float64(
    heads: tuple[int, int], head_dim: int, function: str, has_sinks: bool
) -> None:
    shape = AttentionShape(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        layer_windows=(None, 100, None),
        layer_chunks=(None, None, 1000),
        mask_function=FUNCTIONS[function],
        has_sinks=has_sinks,
        softcap=5.0 if function == "sections" else None,
    )
    for rows in GPU_ROWS.values():
        problem = build_problem(rows, shape, block_size=16, dtype=torch.bfloat16, device="cuda")
        _check_all(_flex(problem), problem)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
def test_nothing_compiles_after_prepare_on_a_gpu() -> None:
    from torch._dynamo.utils import counters

    shape = AttentionShape(
        num_heads=16,
        num_kv_heads=4,
        head_dim=128,
        layer_windows=(None, 100),
        mask_function=FUNCTIONS["near_and_even"],
        has_sinks=True,
    )

    def make(rows: list[tuple[int, int]]) -> Problem:
        return build_problem(rows, shape, block_size=16, dtype=torch.bfloat16, device="cuda")

    backend = _flex(make([(0, 2)]))
    backend.prepare(max_rows=300, max_row_tokens=4096, max_row_keys=8192)
    num_graphs = counters["stats"]["unique_graphs"]
    for rows in GPU_ROWS.values():
        problem = make(rows)
        with torch.inference_mode():
            metadata = backend.plan(problem.step)
            outputs = [run_layer(backend, problem, layer, metadata) for layer in range(2)]
        for layer, out in enumerate(outputs):
            assert_close(out, problem.exact(layer), TOLERANCES[torch.bfloat16])
    assert counters["stats"]["unique_graphs"] == num_graphs
