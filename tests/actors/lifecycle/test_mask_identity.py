"""The source of a mask function is part of what identifies a deployment, and its workers' KV."""

import importlib
from pathlib import Path

import pytest

from actors.lifecycle.deployment import DeploymentSpec, describe_deployment, served_fingerprint
from configs.errors import ConfigFileError
from configs.load import load_config
from engine.errors import ConfigError
from engine.kv.hashes import RequestHasher


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a module that a configuration may name; not imported."""
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "masks_of_mine.py"
    file.write_text("raise RuntimeError('imported')\n")
    importlib.invalidate_caches()
    return file


def _spec(mask: str | None) -> DeploymentSpec:
    return describe_deployment(load_config(None, {"model.attention.mask": mask}))


def test_another_mask_or_source_is_another_deployment_with_other_blocks(source: Path) -> None:
    specs = [_spec(None), _spec("masks_of_mine:one"), _spec("masks_of_mine:two")]
    names = [served_fingerprint(spec) for spec in specs]
    again = _spec("masks_of_mine:one")
    assert (again.hash, served_fingerprint(again)) == (specs[1].hash, names[1])
    assert names[0] == specs[0].model
    source.write_text("CHANGED = 1\n")
    # The machine's own source counts, not that of the machine which described the deployment.
    assert served_fingerprint(specs[1]) != names[1]
    changed = _spec("masks_of_mine:one")
    assert len({spec.hash for spec in [*specs, changed]}) == 4
    roots = {
        RequestHasher(bytes(32), model=name, dtype="float32", block_size=16).hash_params.model
        for name in [*names, served_fingerprint(changed)]
    }
    assert len(roots) == 4


def test_a_mask_without_a_module_ends_the_start(source: Path) -> None:
    with pytest.raises(ConfigError, match=r"no_such_package\.masks:one: there is no such Python"):
        _spec("no_such_package.masks:one")
    source.unlink()
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match="masks_of_mine:one"):
        _spec("masks_of_mine:one")


@pytest.mark.parametrize("name", ["masks", "masks:", ":one", "../masks:one", "a b:one", ""])
def test_a_mask_is_named_as_module_and_function(name: str) -> None:
    with pytest.raises(ConfigFileError, match=r"model\.attention\.mask"):
        load_config(None, {"model.attention.mask": name})
