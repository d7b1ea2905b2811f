"""Which safetensors files a model folder consists of. Opens no weights and knows no tensors."""

from collections.abc import Iterator
from pathlib import Path

from engine.errors import ConfigError
from engine.models.config_file import ConfigFile

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def weight_files(folder: Path) -> Iterator[tuple[Path, frozenset[str] | None]]:
    """Each weights file with the names the index places there (None: whatever it holds).

    Raises ConfigError: no weights, an index that cannot be used, or a shard that is missing.
    """
    if (folder / SINGLE_FILE).exists():
        yield folder / SINGLE_FILE, None
        return
    if not (folder / INDEX_FILE).exists():
        raise ConfigError(
            f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors weights are"
            " read, convert pickled ones first"
        )
    index = ConfigFile.read(folder / INDEX_FILE)
    weight_map = index.section("weight_map")
    if weight_map is None:
        raise index.error("weight_map", "is missing")
    names_of: dict[str, set[str]] = {}
    for name in weight_map.keys:
        names_of.setdefault(weight_map.text(name), set()).add(name)
    for file_name, names in sorted(names_of.items()):
        if Path(file_name).name != file_name:
            raise index.error("weight_map", f"points outside the folder: {file_name!r}")
        path = folder / file_name
        if not path.exists():
            raise ConfigError(f"{path}: this shard of {INDEX_FILE} is missing")
        yield path, frozenset(names)
