"""What an engine is built with, by its configuration and its role."""

import pytest
import torch

from engine import build
from engine.clock import MonotonicClock
from engine.errors import ConfigError
from engine.layers.context import SINGLE_RANK
from engine.messages import Role
from engine.model_folder import read_folder
from tests.engine.runner.test_auto import config_of
from tests.harness.gpus import gpu


@pytest.mark.parametrize(
    ("role", "verifies"), [("unified", True), ("decode", True), ("prefill", False)]
)
def test_a_worker_that_decodes_nothing_has_no_graphs_of_steps_with_drafts(
    role: Role, verifies: bool
) -> None:
    config = config_of(speculation__drafter="ngram")
    folder = read_folder(config, SINGLE_RANK.rank)
    sizes = build._choose_sizes(config, folder, gpu("H200"), SINGLE_RANK, role)
    assert (sizes.max_verify_tokens > 0) == verifies


def test_a_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    config = config_of(model__device="cuda")
    with pytest.raises(ConfigError, match=r"^model\.device: cuda, but torch .* without CUDA"):
        build.build_engine(config, "", MonotonicClock(), lambda event: None)
