"""What an engine is built with, by its configuration and its role."""

import pytest

from engine import build
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
