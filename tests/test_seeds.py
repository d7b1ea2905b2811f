"""What a test draws at random follows from TEST_SEED and its own name, and from nothing else."""

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.harness.seeds import TEST_SEED, aside, fresh_random, seed_libraries, seed_of

ROOT = Path(__file__).parents[1]


def _draw() -> tuple[float, float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(())), fresh_random().random()


@pytest.fixture(scope="module")
def shared() -> float:
    return random.random()


def test_a_test_draws_by_its_name(request: pytest.FixtureRequest) -> None:
    found = _draw()
    seed_libraries(seed_of(request.node.nodeid))
    assert found == _draw()
    assert found != _draw()


def test_a_shared_fixture_draws_by_its_own_name_and_leaves_a_test_its_draws(
    shared: float, request: pytest.FixtureRequest
) -> None:
    found = _draw()
    with aside("tests/test_seeds.py shared 0"):
        assert shared == random.random()
    seed_libraries(seed_of(request.node.nodeid))
    assert found == _draw()


def test_what_is_drawn_aside_moves_no_generator() -> None:
    seed_libraries(5)
    found = _draw()
    seed_libraries(5)
    with aside("a name"):
        assert _draw() != found
    assert _draw() == found


def test_another_process_of_the_run_draws_the_same_by_a_name() -> None:
    def drawn(test_seed: str) -> int:
        command = [
            sys.executable,
            "-c",
            "from tests.harness.seeds import *; print(seed_of('a name'))",
        ]
        environment = {**os.environ, "TEST_SEED": test_seed}
        return int(subprocess.check_output(command, env=environment, cwd=ROOT, timeout=60))

    assert drawn(TEST_SEED) == seed_of("a name") != drawn(f"not {TEST_SEED}")
