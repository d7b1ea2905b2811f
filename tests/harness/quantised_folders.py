"""Quantised folders of small models, and what their numbers stand for; each is made once."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from load_tests.testbed.quantised_folders import write_quantised
from tests.harness.tiny_models import save_model


def write_folders(
    path: Path, form: str, architecture: str, settings: Mapping[str, Any]
) -> tuple[Path, Path]:
    """Write a quantised folder and one with what its numbers stand for; returns both.

    Beside them is `dense`, which was quantised.
    """
    for name, content in _made(form, architecture, tuple(settings.items())).items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path / "quantised", path / "stands_for"


@lru_cache(maxsize=48)
def _made(
    form: str, architecture: str, settings: tuple[tuple[str, Any], ...]
) -> Mapping[Path, bytes]:
    """Of each file, by its path."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder / "dense", architecture, **dict(settings))
        quantised, stands_for = folder / "quantised", folder / "stands_for"
        write_quantised(folder / "dense", form, quantised, stands_for=stands_for)
        files = [path for path in folder.rglob("*") if path.is_file()]
        return {path.relative_to(folder): path.read_bytes() for path in files}
