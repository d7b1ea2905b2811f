"""Numbers of ranks, a GPU each, with which a test runs where so many GPUs are."""

import pytest
import torch

GPU_RANKS = [
    pytest.param(
        size,
        id=f"{size}-ranks",
        marks=pytest.mark.skipif(torch.cuda.device_count() < size, reason=f"needs {size} GPUs"),
    )
    for size in (2, 4)
]
