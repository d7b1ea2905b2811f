"""A deployment is another one when the folder of what drafts has changed."""

from pathlib import Path

import pytest

from actors.lifecycle.deployment import DeploymentSpec, describe_deployment, served_fingerprint
from configs.load import load_config
from engine.errors import ConfigError


def _describe(drafter: str, folder: Path) -> DeploymentSpec:
    keys = {"speculation.drafter": drafter, "speculation.model_path": str(folder)}
    return describe_deployment(load_config(None, keys))


@pytest.mark.parametrize("drafter", ["draft_model", "eagle3"])
def test_other_weights_of_what_drafts_are_another_deployment(drafter: str, tmp_path: Path) -> None:
    """Blocks that a head's vectors are in are found only by engines of the same head."""
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"old")
    old, same = _describe(drafter, tmp_path), _describe(drafter, tmp_path)
    weights.write_bytes(b"newer")
    new = _describe(drafter, tmp_path)
    assert old.hash == same.hash
    assert old.hash != new.hash
    assert served_fingerprint(old) == served_fingerprint(same)
    assert (served_fingerprint(old) != served_fingerprint(new)) == (drafter == "eagle3")


def test_a_folder_without_what_drafts_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"speculation\.model_path.*no config\.json"):
        _describe("eagle3", tmp_path)
