"""Fresh inputs for every run, with the seed to repeat a failure in its captured output."""

import secrets

import pytest
import torch


@pytest.fixture
def generator() -> torch.Generator:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)
