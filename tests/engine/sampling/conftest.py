"""Fresh inputs for every run, with the seed to repeat a failure in its captured output."""

import pytest
import torch

from tests.harness.seeds import fresh_seed


@pytest.fixture
def generator() -> torch.Generator:
    seed = fresh_seed()
    return torch.Generator().manual_seed(seed)
