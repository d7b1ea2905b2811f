"""FlashAttention-3 with keys that lie one after the other, against float64."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kernels.attention import flash_attn
from kernels.attention.flash_attn import CopiedKeysMetadata, FlashAttention
from kernels.attention.gathering import MAX_GATHERED_KEYS, Reads, copied_bytes, gather
from kernels.attention.protocol import AttentionShape, build_step
from tests.kernels.attention.attention_cases import Problem, build_problem, check
from tests.kernels.attention.test_widened import library_attention

SHAPE = AttentionShape(num_heads=6, num_kv_heads=2, head_dim=64, layer_windows=(None, 3, 20))
FRESH = [(0, 7), (0, 66), (0, 2)]
HISTORY = [(9, 70), (0, 64), (100, 90)]
GPU_ROWS = {
    "fresh": [(0, 2), (0, 129), (0, 1000), (0, 128)],
    "history": [(63, 65), (1000, 131), (17, 500), (5000, 64)],
    "long": [(8000, 2500)],
}


def _backend(problem: Problem, reads: Reads | None) -> FlashAttention:
    return FlashAttention(
        problem.shape,
        block_size=problem.block_size,
        dtype=problem.store.dtype,
        device=problem.store.device,
        reads=reads,
    )


@pytest.fixture
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of vLLM's; and any device is good enough."""
    made = SimpleNamespace(
        flash_attn_varlen_func=library_attention, get_scheduler_metadata=lambda **_: None
    )
    monkeypatch.setattr(flash_attn, "why_not", lambda *_: None)
    monkeypatch.setattr(flash_attn, "import_library", lambda **_: made)


@pytest.mark.usefixtures("_library")
@pytest.mark.parametrize(
    ("rows", "reads"),
    [(FRESH, Reads.FRESH), (FRESH, Reads.GATHERED), (HISTORY, Reads.GATHERED), (HISTORY, None)],
)
def test_keys_one_after_the_other_are_attended_as_float64_does(
    rows: list[tuple[int, int]], reads: Reads | None
) -> None:
    problem = build_problem(rows, SHAPE, block_size=4, dtype=torch.float32)
    for layer in range(len(SHAPE.layer_windows)):
        check(_backend(problem, reads), problem, layer)


@pytest.mark.usefixtures("_library")
@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(0, 1), (0, 40)], Reads.FRESH),
        ([(0, 64), (1, 640)], Reads.GATHERED),
        # Of rows with drafts the host knows bounds of the lengths; and few queries pay no copy.
        ([(1, 63), (1, 640)], Reads.TABLE),
        ([(MAX_GATHERED_KEYS - 99, 100)], Reads.TABLE),
    ],
)
def test_keys_are_copied_for_rows_of_many_tokens(
    rows: list[tuple[int, int]], expected: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FlashAttention, "begin", lambda *_: None)
    problem = build_problem([(0, 2)], SHAPE, block_size=16, dtype=torch.float32)
    blocks = [[0] * -(-sum(row) // 16) for row in rows]
    step = build_step([new for _, new in rows], [old for old, _ in rows], blocks, "cpu")
    metadata = _backend(problem, None).plan(step)
    is_copied = isinstance(metadata, CopiedKeysMetadata)
    assert is_copied == (expected is not Reads.TABLE)
    if isinstance(metadata, CopiedKeysMetadata):
        assert (metadata.gathered is not None) == (expected is Reads.GATHERED)
    assert not isinstance(_backend(problem, Reads.TABLE).plan(step), CopiedKeysMetadata)


@pytest.mark.usefixtures("_library")
def test_copies_take_the_memory_that_is_counted_for_them() -> None:
    shape = replace(SHAPE, layer_windows=(None, 10**6))  # the wider one sees all keys, too
    problem = build_problem(HISTORY, shape, block_size=4, dtype=torch.float32)
    gathered = gather(
        problem.step, shape.layer_windows, block_size=4, num_layers=2, device=torch.device("cpu")
    )
    num_keys = sum(sum(row) for row in HISTORY)
    taken = [*gathered[None].keys(problem.store, 0), *(one.lines for one in gathered.values())]
    assert copied_bytes(shape, torch.float32, num_keys) == sum(one.nbytes for one in taken)
    limits = {"max_tokens": 1, "max_rows": 10**6, "max_row_keys": 10**6}
    most = copied_bytes(shape, torch.float32, MAX_GATHERED_KEYS)
    assert _backend(problem, None).working_bytes(**limits) == most
    assert _backend(problem, Reads.TABLE).working_bytes(**limits) == 0


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("rows", GPU_ROWS.values(), ids=GPU_ROWS)
@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size", "has_sinks"),
    [
        ((32, 8), 128, 16, False),
        ((8, 2), 64, 48, False),
        ((4, 2), 256, 16, False),
        ((64, 8), 64, 16, True),
    ],
)
def test_every_way_equals_float64(
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    has_sinks: bool,
    rows: list[tuple[int, int]],
) -> None:
    windows = (None,) if head_dim == 256 else (None, 100, 3000)
    shape = AttentionShape(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        layer_windows=windows,
        has_sinks=has_sinks,
    )
    problem = build_problem(rows, shape, block_size=block_size, dtype=torch.bfloat16, device="cuda")
    if problem.sinks is not None:
        problem.sinks = problem.sinks.bfloat16().float()
    for reads in (None, Reads.TABLE, Reads.GATHERED):
        backend = _backend(problem, reads)
        for layer in range(len(windows)):
            check(backend, problem, layer)


def test_heads_of_256_have_no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attn, "why_not_here", lambda of_heads, *_: of_heads)
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=256, layer_windows=(None, None))
    given = 16, torch.bfloat16, torch.device("cuda")
    assert flash_attn.why_not(shape, *given) is None
    windows = replace(shape, layer_windows=(None, 3000))
    assert "wrongly" in str(flash_attn.why_not(windows, *given))
