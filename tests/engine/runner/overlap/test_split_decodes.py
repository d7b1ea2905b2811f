"""Decode steps captured as two batches, and shared experts in a second stream, change no bit."""

import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from engine.errors import ConfigError
from engine.layers.context import SINGLE_RANK
from engine.layers.operations import Flow, Lane, Op
from engine.layers.schedules import InlineLanes
from engine.models.registry import build_model
from engine.ranks.rank import WHOLE_MODEL
from engine.runner.executor_options import ExecutorOptions
from engine.runner.graph_sizes import decode_sizes, ragged_sizes
from engine.runner.overlap.rule import OverlapRule
from engine.runner.overlap.split_decodes import halves_of_rows, split_of
from engine.runner.shared_stream import SharedExpertStream
from kernels.attention.protocol import build_step
from tests.engine.ranks.exact_models import build_exact, save_whole_numbers, snapped_mixtures
from tests.engine.ranks.rank_stories import tell
from tests.engine.runner.graph_story import RerunRecorder, decode_ahead
from tests.engine.runner.overlap.test_two_batches import LateLanes, _same
from tests.engine.runner.step_driver import StepDriver
from tests.harness.tiny_models import save_model

MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "Qwen2MoeForCausalLM": {"num_hidden_layers": 3, "mlp_only_layers": [0]},
}


@pytest.fixture(params=MODELS, scope="module")
def exact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    save_model(folder, request.param, **MODELS[request.param])
    save_whole_numbers(folder, seed=4)
    return folder


def test_captured_halves_give_the_bits_of_whole_steps(exact: Path) -> None:
    whole = tell(SINGLE_RANK, exact)
    assert _same(tell(SINGLE_RANK, exact, captures=True, overlaps=True), whole)
    with patch("engine.runner.overlap.two_batches.InlineLanes", LateLanes):
        assert _same(tell(SINGLE_RANK, exact, captures=True, overlaps=True), whole)


def test_a_run_of_decodes_may_go_from_whole_graphs_to_split_ones(exact: Path) -> None:
    """The rule takes some sizes and not others; steps are launched ahead, rows come and go."""
    told = []
    with snapped_mixtures():
        for min_rows in (None, 2, 4):
            model, attention = build_exact(exact, WHOLE_MODEL, captures=True)
            driver = StepDriver(model, seed=2, phased=attention)
            if min_rows is not None:
                rule = OverlapRule(min_prompt_tokens=None, min_decode_rows=min_rows)
                driver.executor.overlap_two_batches(rule, threshold=0.48)
            driver.executor.capture_graphs(
                RerunRecorder(), lambda _: None, prompts=ragged_sizes(8, 32)
            )
            if min_rows is not None:
                driver.executor.capture_split_decodes(
                    RerunRecorder(), lambda _: None, min_rows=min_rows
                )
            told.append(decode_ahead(driver, random.Random(7)))
            two = driver.executor.statistics().two_batches
            assert (two is not None and two.num_replayed > 0) == (min_rows is not None)
    assert told[1] == told[0]
    assert told[2] == told[0]


def test_every_size_has_rows_in_both_halves() -> None:
    for max_rows in range(1, 400):
        sizes = decode_sizes(max_rows)
        for num_rows in range(2, max_rows + 1):
            size = next(s for s in sizes if s.num_rows >= num_rows)
            assert 0 < split_of(size).row < num_rows, f"{num_rows} rows of at most {max_rows}"


def test_halves_of_a_graph_are_views_that_count_from_their_own_first_token() -> None:
    keys = [3, 5, 9, 14, 2]
    rows = build_step([1] * 5, [n - 1 for n in keys], [[n] * -(-n // 4) for n in keys], "cpu")
    first, second = halves_of_rows(rows.device_rows)
    assert [half.num_keys.tolist() for half in (first, second)] == [keys[:2], keys[2:]]
    assert [half.cu_tokens.tolist() for half in (first, second)] == [[0, 1, 2], [0, 1, 2, 3]]
    assert second.cu_blocks.tolist() == rows.cu_blocks[2:].tolist()
    rows.device_rows.num_keys.add_(1)  # as the next step does
    assert second.num_keys.tolist() == [n + 1 for n in keys[2:]]
    assert np.array_equal(rows.cu_blocks, [0, 1, 3, 6, 10, 11])


class LateSecondStream(InlineLanes):
    """Computes what is in the second stream as late as it may."""

    def __init__(self) -> None:
        self.num_late = 0
        self._late: list[Op] = []

    def issue(self, op: Op, flow: Flow) -> None:
        if op.lane is Lane.SECOND_STREAM:
            self._late.append(op)
            return
        if Lane.SECOND_STREAM in op.waits:
            self.num_late += len(self._late)
            for late in self._late:
                late.run(flow)
            self._late = []
        op.run(flow)


@pytest.mark.parametrize("architecture", ["Qwen2MoeForCausalLM", "DeepseekV2ForCausalLM"])
def test_a_shared_expert_in_a_second_stream_gives_the_same_bits(
    architecture: str, tmp_path: Path
) -> None:
    save_model(tmp_path, architecture, seed=8, num_hidden_layers=3)
    model = build_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    drivers = [StepDriver(model, seed=2) for _ in range(3)]
    late = LateSecondStream()
    with patch("engine.runner.shared_stream.InlineLanes", lambda: late):
        forwards = SharedExpertStream(model, 1024).forward, model.forward
    found = []
    for driver, forward in zip(drivers, (model.forward, forwards[0], forwards[1]), strict=True):
        for row, length in enumerate((9, 1)):
            driver.admit(row, [(5 * place + row) % 130 for place in range(length)])
        with patch.object(model, "forward", forward):
            told = driver.sample({0: 4}), driver.sample({0: 5, 1: 1}), driver.sample({0: 1, 1: 1})
            found.append([(step.tokens, step.is_finite) for step in told])
            found[-1] += [line.tolist() for line in driver.logits({0: 1, 1: 1}).values()]
    assert found[0] == found[1] == found[2]
    num_mixtures = 3 if architecture.startswith("Qwen") else 2  # the first layer is dense
    assert late.num_late == 4 * num_mixtures - 1  # the first chunk ends with K and V


def test_only_graphs_of_few_tokens_use_a_second_stream(tmp_path: Path) -> None:
    save_model(tmp_path, "Qwen2MoeForCausalLM", num_hidden_layers=2)
    save_whole_numbers(tmp_path, seed=5)
    found = []
    with snapped_mixtures():
        for max_tokens in (0, 4):
            model, attention = build_exact(tmp_path, WHOLE_MODEL, captures=True)
            options = ExecutorOptions(second_stream_tokens=max_tokens)
            driver = StepDriver(model, seed=2, phased=attention, options=options)
            with patch.object(
                SharedExpertStream, "forward", autospec=True, side_effect=SharedExpertStream.forward
            ) as dual:
                driver.executor.capture_graphs(RerunRecorder(), lambda _: None, prompts=None)
                assert dual.call_count == (3 if max_tokens else 0)  # of sizes 1, 2, 4 and 8
                found.append(decode_ahead(driver, random.Random(3)))
                assert (dual.call_count > 3) == bool(max_tokens)
    assert found[0] == found[1]


def test_a_model_without_shared_experts_says_so(tmp_path: Path) -> None:
    save_model(tmp_path, "Qwen3MoeForCausalLM")
    model = build_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(ConfigError, match="no shared experts"):
        SharedExpertStream(model, 1024)
