"""The calibration: which steps it runs, for how long, and that an engine goes by what it found."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from engine.clock import ManualClock
from engine.cost_model import StepWork
from engine.kv.layout import KvLayout
from engine.plan import StepPlan, StepResult
from engine.request import SamplingParams
from engine.runner.auto import StepSizes
from engine.runner.calibration import BUDGET_S, calibrate, chunk_lengths, work_of
from engine.runner.executor import Executor
from engine.runner.warm_up import DummyRow
from tests.harness.in_process import answer, start_engine
from tests.harness.tiny_models import save_model

AUTO = {
    "scheduler__max_num_seqs": "auto",
    "scheduler__max_num_batched_tokens": "auto",
    "laps__queue": "laps",
    "laps__mix": "fill",
    "laps__max_step_ms": "auto",
    "laps__max_mixed_step_ms": "auto",
    "laps__max_busy_step_ms": "auto",
    "laps__batch_prefill_max_rows": "auto",
    "edge__max_queued_tokens": "auto",
}


class _Launched:
    """A step that takes its time when it is waited for."""

    def __init__(self, replica: "_Replica", plan: StepPlan, seconds: float | None) -> None:
        self._replica, self._plan, self._seconds = replica, plan, seconds

    def wait(self) -> StepResult:
        self._replica.num_in_flight -= 1
        if self._seconds is not None:
            self._replica.clock.advance(self._seconds)
        return StepResult(step=0, tokens=[], logprobs=[], is_finite=[], duration_s=self._seconds)


class _Replica:
    """An executor that takes a time by its step's tokens, and checks what it is told to do."""

    def __init__(
        self, *, decode_s: float, token_s: float, num_blocks: int, block_size: int = 16
    ) -> None:
        self.clock = ManualClock()
        self.layout = KvLayout.with_heads(
            num_layers=1, num_kv_heads=1, head_dim=8, block_size=block_size, dtype="float32"
        )
        self.plans: list[StepPlan] = []
        self.num_in_flight = 0
        self.most_in_flight = 0
        self._decode_s, self._token_s = decode_s, token_s
        self._num_blocks = num_blocks
        self.row_blocks: dict[int, list[int]] = {}

    def launch(self, plan: StepPlan) -> _Launched:
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        for row in plan.released_rows:
            del self.row_blocks[row]
        if not plan.rows:
            return _Launched(self, plan, None)
        self.plans.append(plan)
        for admission in plan.admissions:
            self.row_blocks[admission.row] = list(admission.block_ids)
        for row, new in zip(plan.rows, plan.new_block_ids, strict=True):
            self.row_blocks[row] += new
        held = [block for row in plan.rows for block in self.row_blocks[row]]
        assert len(held) == len(set(held)), "two rows write to one block"
        assert max(held) < self._num_blocks
        ends = zip(plan.rows, plan.num_computed_tokens, plan.num_new_tokens, strict=True)
        for row, num_computed, num_new in ends:
            assert num_computed + num_new <= len(self.row_blocks[row]) * self.layout.block_size
        seconds = self._decode_s + self._token_s * plan.num_tokens
        # The host is part of the first step after a wait.
        return _Launched(self, plan, seconds + (0.003 if self.num_in_flight == 1 else 0.0))

    def calibrate(self, sizes: StepSizes, max_row_tokens: int = 1000) -> Any:
        return calibrate(
            cast("Executor", self),
            sizes,
            num_blocks=self._num_blocks,
            max_row_tokens=max_row_tokens,
            clock=self.clock,
        )


SIZES = StepSizes(max_rows=256, max_tokens=8192, max_graph_rows=128)


def test_lengths_double_up_to_exactly_the_most() -> None:
    assert chunk_lengths(8192, 40_000) == [16, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
    assert chunk_lengths(1000, 100) == [16, 64, 128, 256, 512, 1000]
    assert chunk_lengths(64, 100) == [16, 64]
    assert chunk_lengths(40, 7) == [7, 40]
    assert chunk_lengths(5, 100) == [5]


def test_a_fast_device_is_measured_up_to_its_largest_step_within_the_budget() -> None:
    replica = _Replica(decode_s=0.0046, token_s=22e-6, num_blocks=2000)
    found = replica.calibrate(SIZES)
    assert found.decode_s == pytest.approx(0.0046 + 16 * 22e-6), "the host's part is not counted"
    assert [n for n, _ in found.chunks] == chunk_lengths(8192, 1000)
    for num_tokens, seconds in found.chunks[:-1]:
        assert seconds == pytest.approx(0.0046 + 22e-6 * num_tokens)
    assert found.took_s <= BUDGET_S
    assert found.took_s == pytest.approx(replica.clock.now_s())
    assert replica.most_in_flight == 2, "a step is launched while the one before it computes"
    assert replica.row_blocks == {}
    assert len(found.samples) >= 16
    for work, seconds in found.samples:
        assert seconds == pytest.approx(0.0046 + 22e-6 * work.num_new_tokens, abs=0.0031)
    # Prompts longer than a row are several rows.
    longest = max(replica.plans, key=lambda plan: plan.num_tokens)
    assert longest.num_new_tokens == [1000] * 8 + [192]


def test_a_slow_device_is_measured_for_about_as_long_with_shorter_steps() -> None:
    replica = _Replica(decode_s=0.055, token_s=360e-6, num_blocks=400)
    found = replica.calibrate(StepSizes(max_rows=24, max_tokens=2048, max_graph_rows=24))
    assert [n for n, _ in found.chunks] == [16, 64, 128, 256, 512, 1024]
    assert 0.5 * BUDGET_S < found.took_s <= BUDGET_S
    hopeless = _Replica(decode_s=5.0, token_s=1.0, num_blocks=400).calibrate(SIZES)
    assert [n for n, _ in hopeless.chunks] == [16, 64]


@pytest.mark.parametrize("block_size", [1, 3, 16, 1024])
@pytest.mark.parametrize("num_blocks", [2, 10])
@pytest.mark.parametrize("max_row_tokens", [5, 999])
def test_few_blocks_bound_what_is_tried(
    block_size: int, num_blocks: int, max_row_tokens: int
) -> None:
    replica = _Replica(decode_s=0.001, token_s=1e-6, num_blocks=num_blocks, block_size=block_size)
    sizes = StepSizes(max_rows=4, max_tokens=256, max_graph_rows=4)
    found = replica.calibrate(sizes, max_row_tokens)
    longest = max(num_tokens for num_tokens, _ in found.chunks)
    assert longest <= min(256, num_blocks * block_size, 4 * max_row_tokens)
    assert max(max(plan.num_new_tokens) for plan in replica.plans) <= max_row_tokens
    if block_size == 1024 and max_row_tokens == 999:
        assert longest == 256


def test_work_is_counted_as_the_scheduler_counts_it() -> None:
    decode = DummyRow(num_computed_tokens=255, num_new_tokens=1)
    prompt = DummyRow(num_computed_tokens=0, num_new_tokens=70)
    assert work_of([decode] * 3) == StepWork(num_decode_rows=3, num_decode_keys=768)
    assert work_of([prompt, prompt]) == StepWork.of_prompts([(70, 0), (70, 0)])
    single = DummyRow(num_computed_tokens=0, num_new_tokens=1)
    assert work_of([single]) == StepWork.of_prompts([(1, 0)])


@pytest.mark.slow
def test_an_engine_on_a_cpu_goes_by_what_it_measured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_model(tmp_path)
    with caplog.at_level(logging.INFO, logger="engine.build"):
        engine = start_engine(model__path=str(tmp_path), cache__num_blocks=512, **AUTO)
    limits = engine.limits
    [line] = [r.message for r in caplog.records if r.name == "engine.build"]
    assert f"scheduler.max_num_seqs {limits.scheduler.max_num_seqs} (" in line
    assert "steps measured in" in line
    assert limits.scheduler.max_num_seqs == 32  # 512 blocks of 16 tokens, 256 tokens a row
    assert 64 <= limits.scheduler.max_num_batched_tokens <= 512
    laps = limits.laps
    assert laps.max_mixed_step_ms is not None
    assert laps.max_busy_step_ms is not None
    assert 8 <= laps.max_mixed_step_ms < laps.max_step_ms < laps.max_busy_step_ms <= 500
    assert limits.max_queued_tokens >= 100
    scheduler = engine.core.scheduler
    assert scheduler.costs.is_fitted, "the cost model begins with what was measured"
    assert scheduler.num_free_rows == 32
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    work: Sequence[Any] = [(list(range(3, 3 + n)), params) for n in (1, 7, 60, 120)]
    plain = start_engine(model__path=str(tmp_path), cache__num_blocks=512)
    expected = [found.tokens for found in answer(plain, work)]
    assert [found.tokens for found in answer(engine, work)] == expected
