"""Prompt steps padded to a captured size, of both forms, against the ordinary path.

A CPU has no graphs: what a graph would do is computed again over the same padded buffers, by an
attention that reads nothing else and answers NaN where there is nothing to see.
"""

import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.layers.moe import Mixture
from engine.models.llama import CausalLM
from engine.models.registry import build_model
from engine.plan import StepResult
from engine.runner.graph_sizes import PromptSizes, ragged_sizes
from engine.runner.graphs import GraphOutput
from engine.runner.grid_sizes import grid_sizes
from tests.engine.models.closeness import assert_same_logits
from tests.engine.runner.graph_story import (
    LogitSampler,
    RerunRecorder,
    row_tensor_attention,
    tell,
)
from tests.engine.runner.step_driver import StepDriver
from tests.harness.tiny_models import save_model

MAX_ROWS = 8
BROKEN_TOKEN = 101  # its embedding is NaN, like that of token 0, which pads
FORMS = {
    "grid": grid_sizes((1, 2, 4, 7), (2, 5, 9), max_row_tokens=12),
    "ragged": ragged_sizes(MAX_ROWS, 40),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return _model(tmp_path_factory.mktemp("model"), "Qwen3ForCausalLM")


def _model(folder: Path, architecture: str) -> CausalLM:
    hf_model = save_model(folder, architecture, seed=21)
    with torch.no_grad():
        hf_model.get_parameter("model.embed_tokens.weight")[[0, BROKEN_TOKEN]] = torch.nan
        hf_model.get_parameter("lm_head.weight")[[0, BROKEN_TOKEN]] = 0.0  # never the best
    hf_model.save_pretrained(folder)
    return build_model(folder, dtype=torch.float32, device=torch.device("cpu"))


def _driver(model: CausalLM, prompts: PromptSizes | None) -> StepDriver:
    """With graphs where `prompts` are given, on the same blocks as any other driver."""
    driver = StepDriver(
        model,
        seed=5,
        max_rows=MAX_ROWS,
        sampler=LogitSampler(model, MAX_ROWS),
        phased=row_tensor_attention(model) if prompts else None,
    )
    if prompts:
        driver.executor.capture_graphs(RerunRecorder(), lambda _: None, prompts=prompts)
    # What somebody else may have left; whoever reads it shows.
    driver.executor.kv_store.tensor.fill_(50.0)
    return driver


def _logits(driver: StepDriver) -> dict[int, torch.Tensor]:
    sampler = driver.executor._rows.sampler
    assert isinstance(sampler, LogitSampler)
    return sampler.logits


@pytest.mark.parametrize("form", FORMS)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=8, deadline=None)
def test_a_padded_step_gives_what_the_ordinary_path_gives(
    model: CausalLM, form: str, seed: int
) -> None:
    plain, padded = _driver(model, None), _driver(model, FORMS[form])
    blank = plain.executor.kv_store.tensor.clone()

    def check(num_new: dict[int, int], results: list[StepResult]) -> None:
        assert results[0].tokens == results[1].tokens
        assert results[0].is_finite == results[1].is_finite == [True] * len(num_new)
        expected, found = _logits(plain), _logits(padded)
        assert found.keys() == expected.keys()
        if expected:
            assert_same_logits(
                torch.stack([found[row] for row in expected]), torch.stack([*expected.values()])
            )
        stores = [driver.executor.kv_store.tensor for driver in (plain, padded)]
        torch.testing.assert_close(*stores, rtol=1e-4, atol=1e-4)

    tell(
        [plain, padded],
        random.Random(seed),
        num_steps=7,
        lengths=(1, 2, 3, 5, 8, 13, 21),
        decodes=True,
        check=check,
    )
    assert not torch.equal(plain.executor.kv_store.tensor, blank)


@pytest.mark.parametrize("form", FORMS)
def test_padding_of_a_mixture_has_no_expert_and_changes_no_token(form: str, tmp_path: Path) -> None:
    model = _model(tmp_path, "Qwen2MoeForCausalLM")
    num_padding = 0
    for layer in model.layers:
        assert isinstance(layer.mlp, Mixture)

        def route(x: Any, slots: Any, router: Any = layer.mlp.router) -> Any:
            nonlocal num_padding
            routes = router(x, slots)
            if slots is not None:
                num_padding += int((slots < 0).sum())
                assert torch.equal(routes.ids[:, 0] < 0, slots < 0)
            return routes

        layer.mlp.router = route
    plain, padded = _driver(model, None), _driver(model, FORMS[form])

    def check(num_new: dict[int, int], results: list[StepResult]) -> None:
        assert results[0].tokens == results[1].tokens
        assert results[0].is_finite == results[1].is_finite == [True] * len(num_new)

    num_padding = 0
    tell([plain, padded], random.Random(3), num_steps=6, lengths=(1, 2, 5, 13), decodes=True,
         check=check)  # fmt: skip
    assert num_padding > 0


def test_in_the_grid_each_row_lies_at_the_end_of_its_span(model: CausalLM) -> None:
    driver = _driver(model, FORMS["grid"])
    driver.admit(0, [5, 6, 7, 8])
    driver.admit(1, [9, 10, 11, 12, 13])
    driver.admit(2, [14])
    driver.sample({0: 2})
    driver.sample({0: 1, 1: 4, 2: 1})  # batch order: row 2, row 0, row 1; size 4 x 5
    graphs = driver.executor._graphs.prompt
    assert graphs is not None

    def sent(name: str, size: int) -> list[int]:
        values: list[int] = graphs.buffers.on_device(name, size).tolist()
        return values

    assert sent("input_ids", 20) == [0, 0, 0, 0, 14, 0, 0, 0, 0, 7, 0, 9, 10, 11, 12, *[0] * 5]
    assert sent("positions", 20) == [0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 1, 2, 3, *[0] * 5]
    assert [slot >= 0 for slot in sent("slots", 20)] == [
        bool(token_id) for token_id in sent("input_ids", 20)
    ]
    assert sent("cu_tokens", 5) == [0, 5, 10, 15, 20]
    assert sent("num_keys", 4) == [1, 3, 4, 1]
    assert sent("cu_blocks", 5) == [0, 1, 2, 3, 4]
    first_blocks = [driver.blocks[row][0] for row in (2, 0, 1, 2)]
    assert sent("block_ids", 4) == first_blocks
    assert sent("logit_indices", 4) == [4, 0, 0, 0]  # row 2 alone is whole


@pytest.mark.parametrize("form", FORMS)
def test_a_row_that_breaks_is_named_and_its_neighbours_are_not(model: CausalLM, form: str) -> None:
    driver = _driver(model, FORMS[form])
    driver.admit(0, [5, BROKEN_TOKEN, 7])
    driver.admit(1, [8, 9])
    driver.admit(2, [6])
    driver.admit(3, [4, 4, 4, 4, BROKEN_TOKEN])
    result = driver.sample({1: 2, 0: 3, 2: 1, 3: 3})
    assert result.is_finite == [True, False, True, True]
    assert [len(tokens) for tokens in result.tokens] == [1, 0, 1, 0]
    statistics = driver.executor.statistics().prompt_steps
    assert statistics is not None
    assert statistics.num_replayed == 1


def test_replays_are_counted_by_form(model: CausalLM) -> None:
    driver = _driver(model, FORMS["grid"])
    driver.admit(0, [5] * 30)
    driver.admit(1, [6] * 30)
    driver.sample({0: 5, 1: 2})  # 2 rows of 5
    driver.sample({0: 10})  # within 12, longer than any span
    driver.sample({0: 13})  # not meant for the grid
    driver.sample({0: 2})
    driver.sample({1: 9, 0: 1})  # 2 rows of 9, one of them decodes
    driver.sample({0: 1})  # a decode step
    statistics = driver.executor.statistics()
    steps, graphs = statistics.prompt_steps, statistics.prompt_graphs
    assert steps is not None
    assert graphs is not None
    assert statistics.decode_graphs is not None
    assert (steps.form, steps.num_steps) == ("grid", 5)
    assert (steps.num_eligible, steps.num_replayed) == (4, 3)
    assert steps.num_replayed_tokens == 7 + 2 + 10
    assert steps.num_padding_tokens == 3 + 0 + 8
    assert graphs.num_graphs == 12


def test_without_graphs_nothing_is_counted(model: CausalLM) -> None:
    driver = _driver(model, None)
    driver.admit(0, [5, 6])
    driver.sample({0: 2})
    statistics = driver.executor.statistics()
    assert statistics.decode_graphs is None
    assert statistics.prompt_graphs is None
    assert statistics.prompt_steps is None


def test_decode_graphs_do_without_those_of_prompts(model: CausalLM) -> None:
    driver = StepDriver(model, seed=5, phased=row_tensor_attention(model))
    reports: list[str] = []
    driver.executor.capture_graphs(RerunRecorder(), reports.append, prompts=None)
    driver.admit(0, [5, 6])
    driver.sample({0: 2})
    driver.sample({0: 1})
    statistics = driver.executor.statistics()
    assert statistics.decode_graphs is not None
    assert statistics.prompt_graphs is None
    assert statistics.prompt_steps is None
    assert all(report.startswith("decode graphs") for report in reports)


class GarbageNotingRecorder(RerunRecorder):
    """Notes whether the collector could run in the middle of a capture."""

    def __init__(self) -> None:
        self.could_collect: list[bool] = []

    def record(self, run: Callable[[], GraphOutput]) -> Callable[[], GraphOutput]:
        self.could_collect.append(gc.isenabled())
        return super().record(run)


def test_no_garbage_is_collected_while_graphs_are_captured(model: CausalLM) -> None:
    recorder = GarbageNotingRecorder()
    driver = StepDriver(model, seed=5, phased=row_tensor_attention(model))
    driver.executor.capture_graphs(recorder, lambda _: None, prompts=ragged_sizes(MAX_ROWS, 64))
    assert recorder.could_collect
    assert not any(recorder.could_collect)
    assert gc.isenabled()
