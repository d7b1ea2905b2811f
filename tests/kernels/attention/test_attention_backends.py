"""Every attention backend against float64, in eager steps, split by phase and in CUDA graphs."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.attention.names import AttentionName, AttentionNames
from kernels.attention.phased import PhasedAttention
from kernels.attention.protocol import AttentionShape, AttentionStep, RowTensors
from kernels.attention.reference import ReferenceAttention, ReferenceMetadata
from kernels.attention.select import automatic_name, build_attention, why_not
from kernels.device import device_properties
from tests.kernels.attention.attention_cases import (
    ROW_SETS,
    TOLERANCES,
    FixedRows,
    Problem,
    assert_close,
    build_problem,
    check,
    run_layer,
)
from tests.kernels.interpreter import run_interpreted

# What a library warns of while it is imported must not fail, and so break, the import.
pytestmark = pytest.mark.filterwarnings("default")

GPU_NAMES: list[AttentionName] = ["flash_attn", "flashinfer", "triton"]
# Lengths around tiles and blocks, and rows long enough to be split.
GPU_ROW_SETS = {
    "decodes": [(0, 1), (15, 1), (16, 1), (127, 1), (128, 1), (640, 1), (5000, 1)],
    "many_decodes": [(number // 2, 1) for number in range(300)],
    "chunks": [(0, 2), (0, 129), (63, 65), (1000, 31), (17, 500)],
    "mixed": [(0, 1), (31, 1), (2049, 1), (0, 7), (300, 128), (16, 48)],
}
WINDOWS = {"full": (None, None), "windowed": (None, 100)}


def _shape(num_heads: int, num_kv_heads: int, head_dim: int, windows: str) -> AttentionShape:
    return AttentionShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layer_windows=WINDOWS[windows],
    )


def _build(prefill: AttentionName, decode: AttentionName, problem: Problem) -> PhasedAttention:
    """Skips what a backend says it cannot do; that a package is there has its own test."""
    store = problem.store
    for name in (prefill, decode):
        reason = why_not(
            name,
            problem.shape,
            block_size=problem.block_size,
            dtype=store.dtype,
            device=store.device,
        )
        if reason is not None:
            pytest.skip(f"{name}: {reason}")
    return build_attention(
        AttentionNames(prefill=prefill, decode=decode),
        problem.shape,
        block_size=problem.block_size,
        dtype=store.dtype,
        device=store.device,
        fixed_tile=False,
    )


# ---- on any machine ------------------------------------------------------------------------------


class _Recorder(ReferenceAttention):
    """Notes the steps it was given."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(
            problem.shape,
            block_size=problem.block_size,
            dtype=problem.store.dtype,
            device=problem.store.device,
        )
        self.steps: list[AttentionStep] = []

    def plan(self, step: AttentionStep) -> ReferenceMetadata:
        self.steps.append(step)
        return super().plan(step)


@pytest.mark.parametrize("rows", ROW_SETS.values(), ids=ROW_SETS)
def test_a_step_split_by_phase_equals_the_whole(rows: list[tuple[int, int]]) -> None:
    shape = AttentionShape(num_heads=6, num_kv_heads=2, head_dim=10, layer_windows=(None, 3))
    problem = build_problem(rows, shape, block_size=4, dtype=torch.float32)
    prefill, decode = _Recorder(problem), _Recorder(problem)
    phased = PhasedAttention(prefill=prefill, decode=decode, graph=None)
    for layer in range(2):
        check(phased, problem, layer)
    num_singles = sum(new == 1 for _, new in rows)
    assert all(step.num_rows == num_singles for step in decode.steps)
    assert all(step.num_rows == len(rows) - num_singles for step in prefill.steps)
    assert bool(decode.steps) == (num_singles > 0)
    assert bool(prefill.steps) == (num_singles < len(rows))
    for step in decode.steps + prefill.steps:
        _assert_consistent(step, problem)


def _assert_consistent(step: AttentionStep, problem: Problem) -> None:
    """The device's rows say what the host's say, tokens counted from the step's first."""
    rows = step.device_rows
    assert rows.cu_tokens.tolist() == [0, *step.num_new_tokens.cumsum().tolist()]
    assert rows.num_keys.tolist() == (step.num_computed_tokens + step.num_new_tokens).tolist()
    assert rows.cu_blocks.tolist() == step.cu_blocks.tolist()
    assert rows.block_ids.tolist() == problem.step.block_ids.tolist()


def test_one_object_for_both_phases_plans_the_step_once() -> None:
    shape = AttentionShape(num_heads=2, num_kv_heads=2, head_dim=8, layer_windows=(None,))
    problem = build_problem(ROW_SETS["everything"], shape, block_size=4, dtype=torch.float32)
    both = _Recorder(problem)
    check(PhasedAttention(prefill=both, decode=both, graph=None), problem, 0)
    assert [step.num_rows for step in both.steps] == [problem.step.num_rows]


def test_the_reference_refuses_to_be_captured() -> None:
    shape = AttentionShape(num_heads=2, num_kv_heads=2, head_dim=8, layer_windows=(None,))
    problem = build_problem([(3, 1)], shape, block_size=4, dtype=torch.float32)
    reference = _Recorder(problem)
    phased = PhasedAttention(prefill=reference, decode=reference, graph=None)
    assert not phased.can_capture
    assert not phased.can_capture_prompts
    for max_tokens in (None, 7):
        with pytest.raises(AssertionError, match="cannot be captured"):
            phased.open_graph(problem.step.device_rows, max_keys=4, max_tokens=max_tokens)


def _random_rows(num_rows: int, longest: int, device: str) -> RowTensors:
    """Rows of 0 to `longest` blocks, in views that are not aligned to 16 bytes."""
    num_blocks = torch.randint(0, longest + 1, (num_rows,), dtype=torch.int32)
    num_blocks[num_rows // 2] = longest
    fixed = FixedRows(num_rows, num_rows * longest, device).rows
    fixed.cu_blocks[1:] = num_blocks.cumsum(0)
    fixed.block_ids.copy_(torch.randint(1, 10**6, (num_rows * longest,)))
    return fixed


def _check_expansion(device: str) -> None:
    from kernels.attention.flash_attn import expand_blocks, expand_blocks_torch

    for num_rows, longest, num_columns in [(1, 1, 1), (5, 7, 9), (3, 1500, 1501), (2, 1024, 1024)]:
        rows = _random_rows(num_rows, longest, device)
        ours, theirs = (
            torch.full((num_rows, num_columns), -1, dtype=torch.int32, device=device)
            for _ in range(2)
        )
        expand_blocks(rows, ours)
        expand_blocks_torch(rows, theirs)
        for row in range(num_rows):
            first, last = rows.cu_blocks[row : row + 2].tolist()
            expected = rows.block_ids[first:last].tolist()
            assert theirs[row].tolist() == expected + [0] * (num_columns - len(expected))
        assert torch.equal(ours, theirs)


def check_expansion_interpreted() -> None:
    """Runs in a process whose Triton interprets."""
    _check_expansion("cpu")


@pytest.mark.slow
def test_block_ids_are_expanded_to_a_table() -> None:
    run_interpreted("tests.kernels.attention.test_attention_backends:check_expansion_interpreted")


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_block_ids_are_expanded_to_a_table_on_a_gpu() -> None:
    _check_expansion("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", GPU_ROW_SETS.values(), ids=GPU_ROW_SETS)
@pytest.mark.parametrize("block_size", [16, 48, 64])
@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(32, 8, 128), (14, 2, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", GPU_NAMES)
def test_backend_equals_its_definition(
    name: AttentionName,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    windows: str,
    block_size: int,
    rows: list[tuple[int, int]],
) -> None:
    shape = _shape(num_heads, num_kv_heads, head_dim, windows)
    problem = build_problem(rows, shape, block_size=block_size, dtype=dtype, device="cuda")
    backend = _build(name, name, problem)
    for layer in range(2):
        check(backend, problem, layer)


@pytest.mark.gpu
@pytest.mark.parametrize("decode", [*GPU_NAMES, "reference"])
@pytest.mark.parametrize("prefill", [*GPU_NAMES, "reference"])
def test_any_two_backends_share_a_mixed_step(prefill: AttentionName, decode: AttentionName) -> None:
    shape = _shape(16, 4, 128, "full")
    problem = build_problem(
        GPU_ROW_SETS["mixed"], shape, block_size=16, dtype=torch.bfloat16, device="cuda"
    )
    backend = _build(prefill, decode, problem)
    assert backend.can_capture == (decode != "reference")
    for layer in range(2):
        check(backend, problem, layer)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_NAMES)
def test_plans_of_several_steps_may_be_alive_at_once(name: AttentionName) -> None:
    # More plans than FlashInfer has staging memory, all made before the first is used.
    shape = _shape(16, 4, 128, "full")
    problems = [
        build_problem(rows, shape, block_size=16, dtype=torch.bfloat16, device="cuda")
        for rows in [*GPU_ROW_SETS.values(), *ROW_SETS.values()]
    ]
    backend = _build(name, name, problems[0])
    torch.cuda.synchronize()
    plans = [backend.plan(problem.step) for problem in problems]
    for problem, plan in zip(problems, plans, strict=True):
        out = run_layer(backend, problem, 1, plan)
        assert_close(out, problem.exact(1), TOLERANCES[torch.bfloat16])


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_NAMES)
def test_every_backend_works_on_this_machine(name: AttentionName) -> None:
    device = torch.device("cuda")
    shape = _shape(32, 8, 128, "full")
    properties = device_properties(device)
    chosen = {automatic_name(phase, shape, properties) for phase in ("prefill", "decode")}
    assert chosen == {"flash_attn", "triton"}
    reason = why_not(name, shape, block_size=16, dtype=torch.bfloat16, device=device)
    assert reason is None, reason


MAX_KEYS = 3000
GRAPH_STEPS = [
    [(0, 1)],
    [(63, 1), (64, 1), (65, 1), (2999, 1)],
    [(7, 1)] * 13,
    [(number * 11, 1) for number in range(24)],
    [(1500, 1), (2999, 1)],
]


# Chunks, whole prompts, re-prefills on a history and single tokens, up to 24 rows and 700 tokens.
PROMPT_STEPS = [
    [(0, 700)],
    [(0, 64)],
    [(2000, 32)] * 4,
    [(0, 1), (5, 1), (2999, 1), (0, 100), (1000, 77), (0, 3), (2500, 499)],
    [(number * 7, 1) for number in range(20)] + [(0, 16)] * 4,
    [(17, 5)],
]


class _Captured:
    """One layer of attention over fixed rows in a CUDA graph."""

    def __init__(
        self,
        backend: PhasedAttention,
        problem: Problem,
        num_rows: int,
        max_tokens: int | None = None,
    ) -> None:
        self._backend = backend
        self._store = problem.store
        num_blocks = num_rows * -(-MAX_KEYS // problem.block_size)
        self._fixed = FixedRows(num_rows, num_blocks, problem.store.device)
        self._max_tokens = max_tokens
        num_tokens = max_tokens or num_rows
        self._qkv = torch.zeros_like(problem.qkv(0)[:1].expand(num_tokens, -1, -1).contiguous())
        self._num_heads = problem.shape.num_heads
        self._metadata = backend.open_graph(
            self._fixed.rows, max_keys=MAX_KEYS, max_tokens=max_tokens
        )
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._out = self._run()

    def _run(self) -> Tensor:
        num_kv_heads = (self._qkv.shape[1] - self._num_heads) // 2
        q, k, v = torch.split(self._qkv, [self._num_heads, num_kv_heads, num_kv_heads], 1)
        self._backend.begin(self._metadata)
        return self._backend.run(q, k, v, 1, self._store, self._metadata)

    def replay(self, problem: Problem) -> Tensor:
        """[tokens of the problem's step, heads * head_dim]"""
        num_tokens = problem.step.num_tokens
        self._qkv.fill_(torch.nan)
        self._qkv[:num_tokens] = problem.qkv(1)
        self._fixed.load(problem.step, self._max_tokens)
        self._out.fill_(torch.nan)
        step = replace(problem.step, device_rows=self._fixed.rows)
        self._backend.refresh(self._metadata, step)
        self._graph.replay()
        return self._out[:num_tokens].clone()


@pytest.mark.gpu
@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("name", ["triton", "flash_attn", "flash_attn_4"])
def test_a_captured_prompt_step_follows_its_rows(name: AttentionName, windows: str) -> None:
    shape = _shape(32, 8, 128, windows)

    def make(rows: list[tuple[int, int]], store: Tensor | None) -> Problem:
        dtype = torch.bfloat16
        return build_problem(rows, shape, block_size=16, dtype=dtype, device="cuda", store=store)

    first = make([(2999, 1)] * 24, None)
    backend = _build(name, "triton", first)
    assert backend.can_capture_prompts
    first.store.zero_()  # what a warm-up reads is finite
    captured = [
        _Captured(backend, first, num_rows, max_tokens)
        for num_rows, max_tokens in ((24, 768), (64, 1024))
    ]
    for rows in [*PROMPT_STEPS, *PROMPT_STEPS[::-1]]:
        problem = make(rows, first.store)
        for graph in captured:
            out = graph.replay(problem)
            assert_close(out, problem.exact(1), TOLERANCES[torch.bfloat16])


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("name", GPU_NAMES)
def test_a_captured_step_follows_its_rows(
    name: AttentionName, windows: str, block_size: int
) -> None:
    shape = _shape(32, 8, 128, windows)

    def make(rows: list[tuple[int, int]], store: Tensor | None) -> Problem:
        return build_problem(
            rows,
            shape,
            block_size=block_size,
            dtype=torch.bfloat16,
            device="cuda",
            store=store,
        )

    first = make([(2999, 1)] * 24, None)
    backend = _build("reference", name, first)
    first.store.zero_()  # what a warm-up reads is finite
    captured = [_Captured(backend, first, num_rows) for num_rows in (32, 24)]
    for rows in [*GRAPH_STEPS, *GRAPH_STEPS[::-1]]:
        problem = make(rows, first.store)
        for graph in captured:
            out = graph.replay(problem)
            assert_close(out, problem.exact(1), TOLERANCES[torch.bfloat16])
