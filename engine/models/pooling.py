"""Reads how a folder of sentence-transformers' layout makes embeddings.

    modules.json             the modules in their order: Transformer, Pooling, perhaps Normalize
    <Pooling>/config.json    of which tokens an embedding is made; supported: of the last one
    config.json              whether embeddings may be shortened (vLLM's keys)

Knows no tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.errors import ConfigError
from engine.file_checks import check_file
from engine.models.config_file import ConfigFile

MODULES_FILE = "modules.json"
SUPPORTED_MODULES = ("Transformer", "Pooling", "Normalize")
SUPPORTED_MODE = "lasttoken"
_MODE_PREFIX = "pooling_mode_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """How a model makes an embedding of a prompt: the final hidden state of its last token."""

    is_normalised: bool  # to a Euclidean length of 1
    # Whether the first numbers of an embedding are one as well (matryoshka).
    can_shorten: bool = False
    num_dimensions: tuple[int, ...] = ()  # that a shortened one may have; () = any number


class _Module(msgspec.Struct, frozen=True):
    """One entry of modules.json; `type` is a Python class, which is named and never imported."""

    type: str
    path: str = ""

    @property
    def kind(self) -> str:
        return self.type.rpartition(".")[2]


def read_pooling(folder: Path, config: ConfigFile) -> Pooling | None:
    """The pooling of the model in `folder`, whose config.json is `config`; None = it generates.

    Raises ConfigError, naming the file, for modules and modes of pooling that are not supported.
    """
    path = folder / MODULES_FILE
    modules = _read_modules(path) if path.exists() else []
    kinds = [module.kind for module in modules]
    if "Pooling" not in kinds:
        return None
    unknown = [kind for kind in kinds if kind not in SUPPORTED_MODULES]
    if unknown or kinds.index("Pooling") != 1 or kinds.count("Pooling") > 1:
        raise ConfigError(
            f"{path}: the modules {', '.join(kinds)} are not supported; supported: Transformer,"
            " Pooling, and Normalize or nothing behind them"
        )
    _check_last_token(_config_of(folder, modules[1]))
    num_dimensions = config.integers("matryoshka_dimensions")
    return Pooling(
        is_normalised="Normalize" in kinds,
        can_shorten=config.flag("is_matryoshka", bool(num_dimensions)),
        num_dimensions=num_dimensions,
    )


def _read_modules(path: Path) -> Sequence[_Module]:
    check_file(path)
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[_Module])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a list of modules: {error}") from error


def _config_of(folder: Path, module: _Module) -> ConfigFile:
    path = folder / module.path / "config.json"
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"{folder / MODULES_FILE}: points outside the folder: {module.path!r}")
    return ConfigFile.read(path)


def _check_last_token(config: ConfigFile) -> None:
    """Raises ConfigError for any other pooling; newer folders write one word, older ones flags."""
    if config.has_key("pooling_mode"):
        modes = [config.text("pooling_mode")]
    else:
        flags = [key for key in config.keys if key.startswith(_MODE_PREFIX)]
        modes = [key.removeprefix(_MODE_PREFIX) for key in flags if config.flag(key, False)]
    if modes != [SUPPORTED_MODE]:
        found = " and ".join(modes) or "none"
        raise config.error("pooling_mode", f"{found} is not supported; supported: {SUPPORTED_MODE}")
