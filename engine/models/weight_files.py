"""Which safetensors files a model folder consists of, and whether they hold the model.

Reads headers only: a folder of any size takes milliseconds.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from engine.errors import ConfigError
from engine.models.config_file import ConfigFile
from engine.models.spec import ModelSpec
from engine.models.weight_header import DTYPE_BYTES, StoredTensor, read_header
from engine.models.weight_shapes import HEAD, published_shapes

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Tensors some exporters leave in that carry no information of their own.
_HARMLESS = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
_MISMATCH = "the weights and config.json describe different models"


def check_weights(folder: Path, spec: ModelSpec) -> dict[Path, list[str]]:
    """Each weights file with those of the model's tensors that it holds, in order of their data.

    Raises ConfigError naming file, tensor, expected and found shape. A tensor that the model does
    not have is refused, but for leftovers without information: what else it is, a bias or a
    layer, would change the answers.
    """
    missing = published_shapes(spec)
    found: dict[Path, list[str]] = {}
    for path, indexed in _weight_files(folder):
        header = read_header(path)
        absent = sorted((indexed or frozenset()) & missing.keys() - header.keys())
        if absent:
            raise ConfigError(f"{path}: tensor {absent[0]!r} is in {INDEX_FILE} but not here")
        found[path] = []
        for name, tensor in header.items():
            if name in missing:
                _check_tensor(path, name, tensor, missing.pop(name))
                found[path].append(name)
            elif any(name in names for names in found.values()):
                raise ConfigError(f"{path}: tensor {name!r} stands in another file as well")
            elif not _is_harmless(name, spec):
                raise ConfigError(
                    f"{path}: unexpected tensor {name!r} for {spec.architecture}; {_MISMATCH}"
                )
    if missing:
        name, shape = next(iter(missing.items()))
        raise ConfigError(
            f"{folder}: {len(missing)} tensors are missing, the first is {name!r} with shape"
            f" {list(shape)}; a download is not complete, or {_MISMATCH}"
        )
    return found


def _check_tensor(path: Path, name: str, tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ConfigError(
            f"{path}: tensor {name!r} has shape {list(tensor.shape)}, config.json means"
            f" {list(shape)}; {_MISMATCH}"
        )
    if tensor.dtype not in DTYPE_BYTES:
        raise ConfigError(
            f"{path}: tensor {name!r} has dtype {tensor.dtype}; supported:"
            f" {', '.join(DTYPE_BYTES)}; use unquantized weights"
        )


def _is_harmless(name: str, spec: ModelSpec) -> bool:
    is_duplicate_head = name == HEAD and spec.has_tied_embeddings
    return is_duplicate_head or _HARMLESS.search(name) is not None


def _weight_files(folder: Path) -> Iterator[tuple[Path, frozenset[str] | None]]:
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
            raise ConfigError(f"{path}: this shard of {INDEX_FILE} is missing; download it again")
        yield path, frozenset(names)
