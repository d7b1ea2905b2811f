"""A deployment is another one when the folder of what drafts has changed."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from actors.lifecycle.deployment import DeploymentSpec, describe_deployment, served_fingerprint
from configs.load import load_config
from engine.errors import ConfigError

APART: dict[str, object] = {"workers.unified": 0, "workers.prefill": 1, "workers.decode": 1}
MOVES = APART | {"speculation.prompts_on_prefill": True}


def _describe(drafter: str, folder: Path, workers: Mapping[str, object] = {}) -> DeploymentSpec:
    keys: dict[str, object] = {
        "speculation.drafter": drafter,
        "speculation.model_path": str(folder),
    }
    return describe_deployment(load_config(None, {**keys, **workers}))


@pytest.mark.parametrize(
    ("drafter", "workers", "is_in_blocks"),
    [
        ("draft_model", {}, False),
        ("draft_model", APART, False),
        ("draft_model", MOVES, True),
        ("eagle3", {}, True),
    ],
    ids=["draft_model", "draft_model-apart", "draft_model-moves", "eagle3"],
)
def test_other_weights_of_what_drafts_are_another_deployment(
    drafter: str, workers: dict[str, object], is_in_blocks: bool, tmp_path: Path
) -> None:
    """Blocks with what these weights made are found only by engines of the same weights."""
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"old")
    old, same = (_describe(drafter, tmp_path, workers) for _ in range(2))
    weights.write_bytes(b"newer")
    new = _describe(drafter, tmp_path, workers)
    assert old.hash == same.hash
    assert old.hash != new.hash
    assert served_fingerprint(old) == served_fingerprint(same)
    assert (served_fingerprint(old) != served_fingerprint(new)) == is_in_blocks


def test_a_folder_without_what_drafts_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"speculation\.model_path.*no config\.json"):
        _describe("eagle3", tmp_path)
