"""A step computed as two batches gives what it gives as one: to the bit where sums are exact."""

import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch
from torch import Tensor

from engine.kv.tables import BlockTables
from engine.layers.context import SINGLE_RANK
from engine.layers.moe import TorchExperts
from engine.layers.operations import Flow, Lane, Op
from engine.layers.schedules import InlineLanes
from engine.models.llama import Export
from engine.models.registry import build_model
from engine.plan import StepResult
from engine.ranks.rank import WHOLE_MODEL
from engine.runner.dp_meetings import Meeting
from engine.runner.inputs import InputBatch
from engine.runner.overlap.batch_splits import BatchSplit
from engine.runner.overlap.rule import OverlapRule
from engine.runner.overlap.two_batches import TwoBatches, first_half, second_half
from kernels.attention.protocol import build_step
from tests.engine.ranks.exact_models import (
    SnappingOps,
    build_exact,
    save_whole_numbers,
    snapped_mixtures,
)
from tests.engine.ranks.rank_stories import EVERY_STEP, tell
from tests.engine.runner.graph_story import KINDS
from tests.engine.runner.step_driver import StepDriver
from tests.harness.tiny_models import save_model

MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"num_hidden_layers": 3},
    "MistralForCausalLM": {"sliding_window": 6},
    "Qwen2MoeForCausalLM": {"num_hidden_layers": 3, "mlp_only_layers": [0]},
    "Qwen3MoeForCausalLM": {},
}
# Latent attention, sinks, and layers that normalise what they return.
OTHERS = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "GptOssForCausalLM",
    "Gemma3ForCausalLM",
)
NEVER = OverlapRule(min_prompt_tokens=None, min_decode_rows=None)


@pytest.fixture(params=MODELS, scope="module")
def exact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    save_model(folder, request.param, **MODELS[request.param])
    save_whole_numbers(folder, seed=3)
    return folder


def _same(ours: list[Tensor | StepResult], theirs: list[Tensor | StepResult]) -> bool:
    return all(
        torch.equal(one, other)
        if isinstance(one, Tensor) and isinstance(other, Tensor)
        else one == other
        for one, other in zip(ours, theirs, strict=True)
    )


def test_chunks_decodes_and_scores_are_those_of_whole_steps(exact: Path) -> None:
    assert _same(tell(SINGLE_RANK, exact, overlaps=True), tell(SINGLE_RANK, exact))


class _Left:
    """A sum that is left to the norm after it, as kernels leave that of a token's experts."""

    num_normed = num_summed = 0

    def __init__(self, total: Tensor) -> None:
        self._total = total

    def sum(self) -> Tensor:
        _Left.num_summed += 1
        return self._total

    def add_norm(self, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        _Left.num_normed += 1
        return SnappingOps().rms_norm_add(self._total, residual, weight, eps)


@pytest.mark.parametrize("overlaps", [False, True])
def test_sums_left_to_the_norm_are_those_of_experts(
    overlaps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path, "Qwen2MoeForCausalLM", **MODELS["Qwen2MoeForCausalLM"])
    save_whole_numbers(tmp_path, seed=3)
    whole = tell(SINGLE_RANK, tmp_path)
    monkeypatch.setattr(
        TorchExperts, "unsummed", lambda *given: _Left(TorchExperts.__call__(*given))
    )
    monkeypatch.setattr(_Left, "num_normed", 0)
    monkeypatch.setattr(_Left, "num_summed", 0)
    assert _same(tell(SINGLE_RANK, tmp_path, overlaps=overlaps), whole)
    assert _Left.num_normed > 0
    assert _Left.num_summed == 0


def _story(driver: StepDriver, seed: int) -> list[StepResult]:
    """Random chunks of random prompts, one of them behind another's prefix, then decode steps."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(130) for _ in range(draw.choice([1, 3, 17, 40]))] for _ in range(6)]
    for row, prompt in enumerate(prompts):
        driver.admit(row, prompt, params=draw.choice(KINDS))
    results = []
    while any(driver.num_computed[row] < len(driver.tokens[row]) for row in range(6)):
        left = {r: len(driver.tokens[r]) - driver.num_computed[r] for r in range(6)}
        rows = [r for r in left if left[r] > 0 and draw.random() < 0.8]
        if rows:
            results.append(driver.sample({r: draw.randint(1, left[r]) for r in rows}))
        if len(results) > 14:
            break
    driver.release(5)
    shared = [*prompts[4], 7, 8, 9] if len(prompts[4]) >= 4 else [*prompts[4], *range(9)]
    num_shared = len(prompts[4]) // driver.block_size
    driver.admit(
        5,
        shared,
        shared_blocks=driver.blocks[4][:num_shared],
        num_computed=num_shared * driver.block_size,
    )
    results.append(driver.sample({5: len(shared) - driver.num_computed[5]}))
    return [msgspec.structs.replace(result, duration_s=None) for result in results]


@pytest.mark.parametrize("believes_tensors", [False, True])
@pytest.mark.parametrize("threshold", [0.48, 0.1])
def test_random_steps_are_those_of_whole_steps(
    threshold: float, believes_tensors: bool, tmp_path: Path
) -> None:
    """With an attention that reads rows on the host, and with one that reads their tensors only."""
    save_model(tmp_path, "Qwen3ForCausalLM", num_hidden_layers=3)
    save_whole_numbers(tmp_path, seed=5)
    skips = patch("engine.runner.executor._MIN_TOKENS_TO_SKIP_QUERIES", 23)
    for seed in range(2):
        drivers = []
        for rule in (EVERY_STEP, NEVER):
            model, attention = build_exact(tmp_path, WHOLE_MODEL, captures=believes_tensors)
            driver = StepDriver(model, seed=1, phased=attention)
            driver.executor.overlap_two_batches(rule, threshold=threshold)
            drivers.append(driver)
        with skips:
            ours, theirs = (_story(driver, seed) for driver in drivers)
        assert ours == theirs
        split, whole = (driver.executor.statistics().two_batches for driver in drivers)
        assert split is not None
        assert whole is not None
        assert split.num_split_prompts > 0
        assert whole.num_split_prompts + whole.num_split_decodes == 0


@pytest.mark.parametrize("architecture", [*MODELS, *OTHERS])
def test_logits_differ_less_than_the_demanded_tolerance(architecture: str, tmp_path: Path) -> None:
    save_model(tmp_path, architecture, seed=8, **MODELS.get(architecture, {}))
    model = build_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    found = []
    for rule in (EVERY_STEP, NEVER):
        driver = StepDriver(model, seed=2)
        driver.executor.overlap_two_batches(rule, threshold=0.48)
        for row, length in enumerate((9, 50, 2, 1)):
            driver.admit(row, [(5 * place + row) % 130 for place in range(length)])
        steps: tuple[dict[int, int], ...] = ({0: 8, 1: 30}, {1: 19, 2: 1, 3: 1}, {0: 1, 1: 1, 2: 1})
        found.append([line for step in steps for line in driver.logits(step).values()])
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() < 1e-4


class _Kept:
    """An `ExportKeeper` that keeps all lines."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []

    def keep(self, exported: Tensor, batch: InputBatch, blocks: BlockTables) -> None:
        self.steps.append(exported[: batch.num_tokens].clone())


def test_streams_of_inner_layers_are_those_of_whole_steps(tmp_path: Path) -> None:
    """As an EAGLE-3 head reads them, in the order that it asks for."""
    save_model(tmp_path, "Qwen3ForCausalLM", num_hidden_layers=3)
    save_whole_numbers(tmp_path, seed=7)
    found = []
    for rule in (EVERY_STEP, NEVER):
        model, attention = build_exact(tmp_path, WHOLE_MODEL)
        model.export(Export(layers=(0, 2, 1)))
        driver, kept = StepDriver(model, seed=1, phased=attention), _Kept()
        driver.executor.keep_exports(kept)
        driver.executor.overlap_two_batches(rule, threshold=0.48)
        _story(driver, seed=3)
        found.append(kept.steps)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert found[0][0].shape[1] == 3 * model.spec.hidden_size
    model.export(None)
    assert not any(op.name == "export" for ops in model.operations for op in ops)


def test_a_broken_row_ends_alone_in_either_half(tmp_path: Path) -> None:
    made = save_model(tmp_path, num_hidden_layers=2)
    with torch.no_grad():
        made.get_parameter("model.embed_tokens.weight")[101] = torch.nan
    made.save_pretrained(tmp_path)
    model = build_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    for broken in (0, 1):
        driver = StepDriver(model, seed=2)
        driver.executor.overlap_two_batches(EVERY_STEP, threshold=0.48)
        for row in (0, 1):
            driver.admit(row, [101 if row == broken else 3, 4, 5])
        assert driver.sample({0: 3, 1: 3}).is_finite == [row != broken for row in (0, 1)]


class LateLanes(InlineLanes):
    """Sends as late as it may: when the flow waits. Meanwhile `x` holds nothing usable."""

    def __init__(self) -> None:
        self.num_late = 0
        self._sent: dict[int, tuple[Op, Tensor]] = {}

    def issue(self, op: Op, flow: Flow) -> None:
        lane = flow.ctx.lane
        if Lane.SEND in op.waits:
            sent, x = self._sent.pop(lane)
            flow.x = x
            sent.run(flow)
        assert lane not in self._sent, f"{op.name} runs before the sum has ended"
        if op.lane is Lane.SEND:
            self.num_late += 1
            self._sent[lane] = op, flow.x
            flow.x = torch.full_like(flow.x, torch.nan)
        else:
            op.run(flow)


def test_nothing_reads_a_sum_before_it_waits(exact: Path) -> None:
    late = LateLanes()
    whole = tell(SINGLE_RANK, exact)
    with patch("engine.runner.overlap.two_batches.InlineLanes", lambda: late):
        assert _same(tell(SINGLE_RANK, exact, overlaps=True), whole)
    assert late.num_late > 0


def test_a_cut_row_is_two_rows_to_attention() -> None:
    step = build_step([1, 3, 9], [6, 0, 5], [[4, 7], [1], [3, 2, 0, 9]], "cpu")
    split = BatchSplit(row=2, row_tokens=3, token=7)
    first, second = first_half(step, split, block_size=4), second_half(step, split)
    assert first.num_new_tokens.tolist() == [1, 3, 3]
    assert first.num_computed_tokens.tolist() == [6, 0, 5]
    assert first.cu_blocks.tolist() == first.device_rows.cu_blocks.tolist() == [0, 2, 3, 5]
    assert first.device_rows.cu_tokens.tolist() == [0, 1, 4, 7]
    assert first.device_rows.num_keys.tolist() == [7, 3, 8]
    assert second.num_new_tokens.tolist() == [6]
    assert second.num_computed_tokens.tolist() == [8]
    assert second.cu_blocks.tolist() == second.device_rows.cu_blocks.tolist() == [3, 7]
    assert second.device_rows.cu_tokens.tolist() == [0, 6]
    assert second.device_rows.num_keys.tolist() == [14]
    assert (first.num_single_rows, second.num_single_rows) == (1, 0)
    assert step.device_rows.num_keys.tolist() == [7, 3, 14]  # the whole is unchanged


def test_halves_keep_the_order_of_single_rows_and_all_of_their_tokens() -> None:
    draw = random.Random(3)
    for _ in range(200):
        singles = sorted(draw.randint(0, 30) for _ in range(draw.randint(0, 4)))
        chunks = [draw.randint(2, 20) for _ in range(draw.randint(1, 4))]
        num_new = [1] * len(singles) + chunks
        num_computed = singles + [draw.randint(0, 9) for _ in chunks]
        blocks = [[0] * -(-(n + c) // 4) for n, c in zip(num_new, num_computed, strict=True)]
        step = build_step(num_new, num_computed, blocks, "cpu")
        row = draw.randrange(len(num_new))
        cut = draw.randint(2, num_new[row]) % num_new[row] if num_new[row] > 2 else 0
        token = sum(num_new[:row]) + cut
        if token == 0:
            continue
        split = BatchSplit(row=row, row_tokens=cut, token=token)
        halves = first_half(step, split, block_size=4), second_half(step, split)
        for half in halves:
            alone = (half.num_new_tokens == 1).tolist()
            assert alone == [True] * half.num_single_rows + [False] * alone.count(False)
            counts = half.device_rows.cu_tokens.diff()
            assert counts.tolist() == half.num_new_tokens.tolist()
            keys = half.num_new_tokens + half.num_computed_tokens
            assert half.device_rows.num_keys.tolist() == keys.tolist()
        assert sum(half.num_tokens for half in halves) == step.num_tokens


def test_a_step_that_does_not_pay_is_not_split(exact: Path) -> None:
    with snapped_mixtures():
        model, attention = build_exact(exact, WHOLE_MODEL)
        driver = StepDriver(model, seed=1, phased=attention)
        rule = OverlapRule(min_prompt_tokens=9, min_decode_rows=None)
        driver.executor.overlap_two_batches(rule, threshold=0.48)
        for row in range(4):
            driver.admit(row, list(range(row, row + 4)))
        driver.sample({0: 4, 1: 4})
        driver.sample({0: 1, 1: 1, 2: 4, 3: 3})
        driver.sample({0: 1, 1: 1, 2: 1, 3: 1})
    split = driver.executor.statistics().two_batches
    assert split is not None
    assert (split.num_steps, split.num_split_prompts, split.num_split_decodes) == (3, 1, 0)


def test_samples_of_a_cut_row_must_lie_in_one_half(exact: Path) -> None:
    """Rows that sample at several of their last tokens: then the step stays whole."""
    with snapped_mixtures():
        model, attention = build_exact(exact, WHOLE_MODEL)
        driver = StepDriver(model, seed=1, phased=attention)
        driver.admit(0, list(range(10)))
        plan = driver.plan({0: 10}, samples=True)
        driver.executor._apply_rows(plan)
        batch = driver.executor._write_batch(plan, driver.executor._buffers)
    batches = TwoBatches(model, EVERY_STEP, threshold=0.48, block_size=4)
    assert batches.split(batch) == BatchSplit(row=0, row_tokens=5, token=5)
    several = msgspec.structs.replace(batch, sampling=batch.sampling.repeat(6))
    assert batches.split(several) is None
    assert batches.split(msgspec.structs.replace(batch, sampling=batch.sampling.repeat(5)))


def test_a_step_that_other_ranks_split_is_not_computed_whole(exact: Path) -> None:
    """They would exchange rows with it by halves."""
    with snapped_mixtures():
        model, attention = build_exact(exact, WHOLE_MODEL)
        driver = StepDriver(model, seed=1, phased=attention)
        driver.admit(0, list(range(10)))
        executor = driver.executor
        plan = driver.plan({0: 10}, samples=True)
        executor._apply_rows(plan)
        batch = executor._write_batch(plan, executor._buffers)
        split = BatchSplit(row=0, row_tokens=5, token=5)
        meeting = Meeting(graphs=None, size=None, exchanges=(), split=split)
        with pytest.raises(AssertionError, match="no step is computed as two batches"):
            executor._passes.forward(batch, executor._table.flat, meeting=meeting)


def test_rows_that_verify_are_split_between_rows(exact: Path) -> None:
    """As if every token were a sample: 3 rows of 4 are not cut, though 4 and 8 are uneven."""
    with snapped_mixtures():
        model, attention = build_exact(exact, WHOLE_MODEL)
        driver = StepDriver(model, seed=1, phased=attention)
        for row in range(3):
            driver.admit(row, list(range(row, row + 4)))
        plan = driver.plan(dict.fromkeys(range(3), 4), samples=True)
        driver.executor._apply_rows(plan)
        batch = driver.executor._write_batch(plan, driver.executor._buffers)
    batches = TwoBatches(model, EVERY_STEP, threshold=0.48, block_size=4)
    assert batches.split(batch) == BatchSplit(row=1, row_tokens=2, token=6)
    verifying = msgspec.structs.replace(batch, sampling=batch.sampling.repeat(4))
    assert batches.split(verifying) == BatchSplit(row=1, token=4, is_decode=True)
    # Where others compute prompts, a cut that would part a row's samples moves to the rows' border.
    beside = msgspec.structs.replace(batch, sampling=batch.sampling[1:].repeat(4))
    assert batches.split(beside) == BatchSplit(row=2, token=8)
