"""Embeddings from padded and replayed steps, against transformers over each whole prompt.

A CPU has no graphs: see `test_prompt_graphs`.
"""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.models.registry import build_model
from engine.request import SamplingParams
from engine.runner.graph_sizes import PromptSizes, ragged_sizes
from engine.runner.grid_sizes import grid_sizes
from engine.sampling.embeddings import Embeddings
from tests.engine.runner.graph_story import RerunRecorder, row_tensor_attention
from tests.engine.runner.step_driver import StepDriver
from tests.harness.tiny_models import reference_embedding, save_embedding_model

EMBED = SamplingParams(max_tokens=0, temperature=0.0, wants_embedding=True)
MAX_ROWS = 8
FORMS = {
    "grid": grid_sizes((1, 2, 4, 8), (2, 5, 9), max_row_tokens=12),
    "ragged": ragged_sizes(MAX_ROWS, 64),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    save_embedding_model(made, seed=21)
    return made


@pytest.mark.parametrize("form", FORMS)
def test_a_replayed_step_gives_the_embedding_of_the_whole_prompt(folder: Path, form: str) -> None:
    driver = _driver(folder, FORMS[form])
    for row, length in enumerate((1, 1, 2, 5, 9, 13, 20, 1)):
        driver.admit(row, random.choices(range(3, 100), k=length), params=EMBED)
    num_found = 0
    while driver.tokens:
        left = {row: len(ids) - driver.num_computed[row] for row, ids in driver.tokens.items()}
        num_new = {row: random.randint(1, min(n, 8)) for row, n in left.items()}
        result = driver.sample(num_new)
        assert result.tokens == [[]] * len(num_new)
        ended = [row for row in num_new if num_new[row] == left[row]]
        assert sorted(result.embeddings) == [list(num_new).index(row) for row in ended]
        for row in ended:
            found = np.frombuffer(result.embeddings[list(num_new).index(row)], dtype=np.float32)
            expected = reference_embedding(folder, driver.tokens[row])
            expected = torch.nn.functional.normalize(expected, dim=0)
            assert found == pytest.approx(expected.numpy(), rel=1e-4, abs=1e-4)
            driver.release(row)
            num_found += 1
    assert num_found == MAX_ROWS
    steps = driver.executor.statistics().prompt_steps
    assert steps is not None
    assert steps.num_replayed > 0


def _driver(folder: Path, prompts: PromptSizes) -> StepDriver:
    model = build_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    driver = StepDriver(
        model,
        seed=5,
        max_rows=MAX_ROWS,
        sampler=Embeddings(is_normalised=True),
        phased=row_tensor_attention(model),
    )
    driver.executor.capture_graphs(RerunRecorder(), lambda _: None, prompts=prompts)
    return driver
