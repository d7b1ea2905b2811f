"""Decode steps that go on from the one before them are written as if from nothing."""

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.layout import KvLayout
from engine.kv.tables import BlockTables
from engine.models.llama import CausalLM
from engine.models.registry import build_model
from engine.plan import StepPlan
from engine.runner.decode_run import DecodeInputs, DecodeRun
from engine.runner.graph_sizes import GraphSize
from engine.runner.inputs import InputBatch, write_input_batch
from engine.runner.request_rows import RequestRows
from engine.runner.step_buffers import StepBuffers
from tests.engine.runner.graph_story import (
    RerunRecorder,
    decode_ahead,
    row_tensor_attention,
)
from tests.engine.runner.step_driver import StepDriver
from tests.harness.seeds import fresh_seed
from tests.harness.tiny_models import save_model

MAX_ROWS, MAX_TOKENS, BLOCK_SIZE = 7, 60, 4
LAYOUT = KvLayout.with_heads(
    num_layers=1, block_size=BLOCK_SIZE, num_kv_heads=1, head_dim=8, dtype="float32"
)


class World:
    """Rows that come, decode and go: all that an executor keeps of them, and no tensors."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.request_rows = RequestRows(max_rows=MAX_ROWS, max_model_len=MAX_TOKENS)
        self.tables = BlockTables(max_rows=MAX_ROWS, max_blocks_per_row=MAX_TOKENS)
        self.buffers = _buffers()
        self.run = DecodeRun(self.buffers, self.request_rows, self.tables, BLOCK_SIZE)
        self.num_computed: dict[int, int] = {}  # by row, in the plan's order
        self.size = GraphSize(num_rows=MAX_ROWS, num_tokens=MAX_ROWS)

    def come(self) -> None:
        """Rows whose newest token is given, as after a handoff; a graph of some size for all."""
        free = [row for row in range(MAX_ROWS) if row not in self.num_computed]
        for row in self.rng.sample(free, self.rng.randrange(len(free) + 1)):
            length = self.rng.randrange(1, 12)
            self.request_rows.add(row, [self.rng.randrange(99) for _ in range(length)])
            self._append(row, -(-length // BLOCK_SIZE))
            self.num_computed[row] = length - 1
        num_rows = self.rng.randrange(max(1, len(self.num_computed)), MAX_ROWS + 1)
        self.size = GraphSize(num_rows=num_rows, num_tokens=num_rows)
        self.run.end()

    def go(self) -> None:
        for row in list(self.num_computed)[: self.rng.randrange(3)]:
            self.request_rows.remove(row)
            self.tables.clear(row)
            del self.num_computed[row]
        self.run.end()

    def compute_elsewhere(self) -> None:
        """A step of some decodes beside prompts: through other buffers."""
        for row in self.rng.sample(list(self.num_computed), len(self.num_computed) // 2):
            self._grow(row)
            self._count(row)

    def plan(self, *, shuffles: bool = False) -> StepPlan:
        """Of all rows; their blocks are appended."""
        rows = list(self.num_computed)
        if shuffles:
            self.rng.shuffle(rows)
        for row in rows:
            self._grow(row)
        return StepPlan(
            step=0,
            rows=rows,
            num_new_tokens=[1] * len(rows),
            num_computed_tokens=[self.num_computed[row] for row in rows],
            num_samples=[1] * len(rows),
            new_block_ids=[[] for _ in rows],
        )

    def write(self, plan: StepPlan, buffers: StepBuffers) -> InputBatch:
        return write_input_batch(
            plan, self.request_rows, self.tables, LAYOUT, buffers, padded_to=self.size
        )

    def sampled(self) -> None:
        for row in self.num_computed:
            self._count(row)

    def _grow(self, row: int) -> None:
        if self.num_computed[row] >= len(self.tables.block_ids(row)) * BLOCK_SIZE:
            self._append(row, 1)

    def _count(self, row: int) -> None:
        self.num_computed[row] += 1
        self.request_rows.count_sampled(np.array([row]))

    def _append(self, row: int, count: int) -> None:
        self.tables.append([row], [count], [self.rng.randrange(10**6) for _ in range(count)])


def _buffers() -> StepBuffers:
    return StepBuffers(
        max_rows=MAX_ROWS,
        max_tokens=MAX_ROWS,
        max_block_ids=MAX_ROWS * MAX_TOKENS,
        device=torch.device("cpu"),
    )


def _sent(buffers: StepBuffers, batch: InputBatch, size: GraphSize) -> dict[str, list[int]]:
    """All that a graph of `size` and the sampler read."""
    lengths = dict.fromkeys(("num_keys", "sampled_rows", "logit_indices"), size.num_rows)
    lengths |= dict.fromkeys(("cu_tokens", "cu_blocks"), size.num_rows + 1)
    lengths |= dict.fromkeys(("input_ids", "positions", "slots"), size.num_tokens)
    lengths |= {"sampled_lines": len(batch.sampling), "block_ids": len(batch.attention.block_ids)}
    return {name: buffers.on_device(name, length).tolist() for name, length in lengths.items()}


def _on_host(batch: InputBatch) -> dict[str, object]:
    attention = batch.attention
    return {
        "plan_rows": batch.plan_rows.tolist(),
        "rows": batch.rows.tolist(),
        "first_tokens": batch.first_tokens.tolist(),
        "sampling": batch.sampling.tolist(),
        "sampled_row_list": batch.sampled_row_list,
        "num_single_rows": attention.num_single_rows,
        "num_new_tokens": attention.num_new_tokens.tolist(),
        "num_computed_tokens": attention.num_computed_tokens.tolist(),
        "cu_blocks": attention.cu_blocks.tolist(),
        "block_ids": attention.block_ids.tolist(),
    }


@given(rng=st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=25)
def test_what_goes_on_is_what_would_be_written_from_nothing(rng: random.Random) -> None:
    world = World(rng)
    for _ in range(40):
        match rng.randrange(14):
            case 0 | 1:
                world.come()
            case 2:
                world.go()
            case 3:
                world.compute_elsewhere()
        if not world.num_computed or max(world.num_computed.values()) > MAX_TOKENS - 3:
            return
        plan = world.plan(shuffles=rng.random() < 0.1)
        found = world.run.go_on(plan)
        if found is None:
            found = DecodeInputs(batch=world.write(plan, world.buffers), size=world.size)
            world.run.begin(plan, found)
        other = _buffers()
        expected = world.write(plan, other)
        assert found.size == world.size
        assert _sent(world.buffers, found.batch, world.size) == _sent(other, expected, world.size)
        assert _on_host(found.batch) == _on_host(expected)
        world.sampled()


def _world_with(lengths: dict[int, int]) -> World:
    world = World(random.Random(0))
    for row, length in lengths.items():
        world.request_rows.add(row, [5] * length)
        world._append(row, -(-length // BLOCK_SIZE))
        world.num_computed[row] = length - 1
    return world


def _begin(world: World) -> None:
    plan = world.plan()
    batch = world.write(plan, world.buffers)
    world.run.begin(plan, DecodeInputs(batch=batch, size=world.size))
    world.sampled()


def test_the_same_rows_go_on_over_the_ends_of_their_blocks() -> None:
    world = _world_with({3: 1, 0: 6, 5: 8})
    _begin(world)
    for _ in range(3 * BLOCK_SIZE):
        assert world.run.go_on(world.plan()) is not None
        world.sampled()


def test_nothing_goes_on_where_more_than_a_token_a_row_has_changed() -> None:
    world = _world_with({3: 1, 0: 6})
    assert world.run.go_on(world.plan()) is None  # there was no step
    _begin(world)
    plan = world.plan()
    wrong = {
        "rows": [0, 3],
        "num_computed_tokens": [1, 7],
        "num_new_tokens": [1, 2],
        "num_samples": [1, 0],
    }
    for name, values in wrong.items():
        assert world.run.go_on(msgspec.structs.replace(plan, **{name: values})) is None
    world.num_computed.pop(0)
    assert world.run.go_on(world.plan()) is None  # a row less
    world.num_computed[0] = 6
    assert world.run.go_on(plan) is not None
    world.sampled()
    world.run.end()
    assert world.run.go_on(world.plan()) is None
    _begin(world)
    world.compute_elsewhere()
    assert world.run.go_on(world.plan()) is None


def test_a_row_without_a_block_for_its_token_is_left_to_the_general_way() -> None:
    world = _world_with({2: BLOCK_SIZE})
    _begin(world)
    plan = world.plan()
    world.tables.clear(2)
    assert world.run.go_on(plan) is None
    with pytest.raises(AssertionError, match="have blocks for"):
        world.write(plan, world.buffers)


# ---- in an executor ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    folder: Path = tmp_path_factory.mktemp("model")
    save_model(folder, "Qwen3ForCausalLM", seed=31)
    return build_model(folder, dtype=torch.float32, device=torch.device("cpu"))


def test_replayed_decodes_of_any_sampling_give_the_tokens_of_the_ordinary_path(
    model: CausalLM,
) -> None:
    seed = fresh_seed()
    outcomes = []
    for replays in (False, True):
        driver = StepDriver(model, seed=4, phased=row_tensor_attention(model))
        if replays:
            driver.executor.capture_graphs(RerunRecorder(), lambda _: None, prompts=None)
        outcomes.append(decode_ahead(driver, random.Random(seed)))
    assert all(token_ids for step in outcomes[0] for token_ids in step)
    assert outcomes[0] == outcomes[1]


def test_a_row_that_breaks_in_a_run_has_no_token_and_the_others_have_theirs(
    model: CausalLM,
) -> None:
    driver = StepDriver(model, seed=4, phased=row_tensor_attention(model))
    driver.executor.capture_graphs(RerunRecorder(), lambda _: None, prompts=None)
    for row in range(3):
        driver.admit(row, [5 + row, 6, 7])
    driver.sample(dict.fromkeys(range(3), 3))
    driver.sample(dict.fromkeys(range(3), 1))
    driver.executor.kv_store.tensor[driver.blocks[1][0]] = torch.nan
    for _ in range(2):
        plan = driver.plan(dict.fromkeys(range(3), 1), samples=True)
        result = driver.executor.launch(plan).wait()
        assert result.is_finite == [True, False, True]
        assert [len(tokens) for tokens in result.tokens] == [1, 0, 1]
        for row, token_ids in enumerate(result.tokens):
            driver.tokens[row] += token_ids or [-1]  # the device goes on with something
