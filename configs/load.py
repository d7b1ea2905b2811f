"""From a YAML file, overrides and the environment to one `AppConfig`.

The only module that reads the LAPS_ variables and a configuration's YAML; what Ray's and Serve's
variables say is read in process_environment.py. It knows the schema's rules; it does not know what
any setting does.
"""

import math
import os
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import msgspec
import yaml
from msgspec.structs import replace

from configs.contradictions import find_contradiction
from configs.errors import ConfigFileError
from configs.keys import KEYS_VARIABLE, with_keys
from configs.schema import AppConfig, CacheConfig, ModelConfig, SpeculationConfig

PROJECT_ROOT = Path(__file__).resolve().parents[1]
DEFAULT_CONFIG = Path("configs/dev_cpu.yaml")
CONFIG_VARIABLE = "LAPS_CONFIG"
MODEL_VARIABLE = "LAPS_MODEL"
HOST_VARIABLE = "LAPS_HOST"
PORT_VARIABLE = "LAPS_PORT"
BUILD_ARGUMENTS = ("config", "model", "host", "port")
MAX_PORT = 65535
# A model of the Hugging Face Hub, as people type it.
HUB_NAME = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*)"
    r"(@(?P<revision>[A-Za-z0-9_./-]+))?"
)
_MODELS = (
    f"set {MODEL_VARIABLE} or model= to a Hugging Face model folder (config.json, tokenizer.json,"
    " *.safetensors), or to a model's name on the Hub (org/name)"
)

_PATH = re.compile(r" - at (`key` in )?`\$\.?(?P<path>[^`]*)`$")
# Keys that had another name, and what to write in their place.
RENAMED = {
    "cache.enable_prefix_cache": "set cache.enable_prefix_caching",
    "cache.gpu_memory_share": "set cache.gpu_memory_utilization",
    "laps.enable_laps_scheduler": "set laps.queue: laps, which alone switches it on",
    "scheduler.max_rows": "set scheduler.max_num_seqs",
    "scheduler.max_step_tokens": "set scheduler.max_num_batched_tokens",
}
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)


def load_config(path: Path | None, overrides: Mapping[str, object]) -> AppConfig:
    """Defaults, then the YAML file, then `overrides` (dotted keys such as "workers.prefill").

    Raises ConfigFileError: unreadable file, bad YAML, unknown or repeated key, wrong type, value
    out of range, or settings that contradict each other.
    """
    source = "overrides" if path is None else str(path)
    data: dict[str, object] = {} if path is None else _read_yaml(path)
    for key, value in overrides.items():
        _set_dotted(data, key, value, source)
    infinite = _first_non_finite(data, [])
    if infinite is not None:
        raise ConfigFileError(f"{source}: {infinite}: must be a finite number")
    try:
        config = msgspec.convert(data, type=AppConfig)
    except msgspec.ValidationError as error:
        raise ConfigFileError(f"{source}: {_explain(str(error))}") from error
    problem = find_contradiction(config)
    if problem is not None:
        raise ConfigFileError(f"{source}: {problem}")
    return config


def config_from_environment(
    args: Mapping[str, str], environ: Mapping[str, str] | None = None
) -> AppConfig:
    """The run's configuration: `args`, else LAPS_CONFIG / LAPS_MODEL, else configs/dev_cpu.yaml.

    API keys come from `api.keys_file` and LAPS_API_KEYS. Relative paths are looked up under the
    project's root (the folder above configs/), then under the working directory. The returned
    `model.path` is absolute, or the name of a model of the Hugging Face Hub, if there is no folder
    of that name. Raises ConfigFileError.
    """
    environ = os.environ if environ is None else environ
    unknown = sorted(set(args) - set(BUILD_ARGUMENTS))
    if unknown:
        raise ConfigFileError(
            f"unknown argument {', '.join(unknown)}; allowed: {', '.join(BUILD_ARGUMENTS)}"
        )
    named = args.get("config") or environ.get(CONFIG_VARIABLE) or str(DEFAULT_CONFIG)
    path = _find(Path(named))
    if path is None or not path.is_file():
        raise ConfigFileError(
            f"{named}: no such configuration file; set {CONFIG_VARIABLE} or config= to one, for"
            f" example {DEFAULT_CONFIG}"
        )
    config = load_config(path, {})
    model = args.get("model") or environ.get(MODEL_VARIABLE) or config.model.path
    keys_file = None if config.api.keys_file is None else _find(Path(config.api.keys_file))
    cache = replace(config.cache, kv_scales=_kv_scales(config.cache, path))
    return replace(
        config,
        cache=cache,
        speculation=_with_drafter(config.speculation),
        model=_with_model(config.model, model, path),
        api=with_keys(config.api, keys_file, environ.get(KEYS_VARIABLE)),
    )


def _kv_scales(cache: CacheConfig, source: Path) -> str | None:
    """The absolute place of cache.kv_scales. Raises ConfigFileError."""
    if cache.kv_scales is None:
        return None
    found = _find(Path(cache.kv_scales))
    if found is None or not found.is_file():
        raise ConfigFileError(f"{source}: cache.kv_scales: there is no file {cache.kv_scales}")
    return str(found)


def _with_drafter(speculation: SpeculationConfig) -> SpeculationConfig:
    """`speculation` with the absolute place of its folder; one that is not there stays as named."""
    if speculation.model_path is None:
        return speculation
    found = _find(Path(speculation.model_path))
    return speculation if found is None else replace(speculation, model_path=str(found))


def _with_model(model: ModelConfig, named: str, source: Path) -> ModelConfig:
    """`model` with the folder or the Hub's model that is named. Raises ConfigFileError."""
    if named.lower().endswith(".gguf"):
        raise ConfigFileError(f"{source}: model.path: {named}: GGUF is not read; {_MODELS}")
    place = _find(Path(named))
    if place is not None and place.is_dir():
        if model.revision is not None:
            raise ConfigFileError(
                f"{source}: model.revision: {model.revision!r} is of a model of the Hugging Face"
                f" Hub, and {named} is a folder; leave it out"
            )
        return replace(model, path=str(place))
    hub = HUB_NAME.fullmatch(named)
    if place is not None or hub is None:
        raise ConfigFileError(f"{source}: model.path: there is no model folder {named}; {_MODELS}")
    asked = {model.revision, hub["revision"]} - {None}
    if len(asked) > 1:
        raise ConfigFileError(
            f"{source}: model.revision: {model.revision!r}, but the model is {named}; leave one out"
        )
    return replace(model, path=hub["name"], revision=next(iter(asked), None))


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenAddress:
    """Where Serve is asked to listen; None = where it does by itself."""

    host: str | None
    port: int | None


def listen_address(
    args: Mapping[str, str], environ: Mapping[str, str] | None = None
) -> ListenAddress | None:
    """Reads `host` and `port` of `args`, else LAPS_HOST and LAPS_PORT.

    Returns None if neither is set. Raises ConfigFileError for what is no port.
    """
    environ = os.environ if environ is None else environ
    host = args.get("host") or environ.get(HOST_VARIABLE) or None
    port = args.get("port") or environ.get(PORT_VARIABLE) or None
    if host is None and port is None:
        return None
    if port is not None and not (port.isdecimal() and 1 <= int(port) <= MAX_PORT):
        raise ConfigFileError(
            f"port: {port!r} is no port; set {PORT_VARIABLE} or port= to a number from 1 to"
            f" {MAX_PORT}"
        )
    return ListenAddress(host=host, port=None if port is None else int(port))


def _find(path: Path) -> Path | None:
    """Absolute place of an existing file or folder, the project's root before the cwd."""
    candidates = [path] if path.is_absolute() else [PROJECT_ROOT / path, Path.cwd() / path]
    return next((candidate.resolve() for candidate in candidates if candidate.exists()), None)


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML lets a key appear twice and keeps the last; here that is an error."""

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, object]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(
                    problem=f"key {key!r} is not a string", problem_mark=key_node.start_mark
                )
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key!r} appears twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _in_one_line(error: Exception) -> str:
    """What is wrong and where. PyYAML's own text has several lines, and names no file."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return str(error).partition("\n")[0]


def _read_yaml(path: Path) -> dict[str, object]:
    try:
        # The loader is a SafeLoader: plain data only.
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except OSError as error:
        raise ConfigFileError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigFileError(f"{path}: not valid YAML: {_in_one_line(error)}") from error
    if data is None:  # an empty file: all defaults
        return {}
    if not isinstance(data, dict):
        raise ConfigFileError(
            f"{path}: must hold sections ({', '.join(_allowed_keys([]))}),"
            f" not a {type(data).__name__}"
        )
    return data


def _set_dotted(data: dict[str, object], key: str, value: object, source: str) -> None:
    *sections, last = key.split(".")
    for name in sections:
        inner = data.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ConfigFileError(f"{source}: {key}: {name} is not a section")
        data = inner
    data[last] = value


def _first_non_finite(value: object, keys: list[str]) -> str | None:
    """Key path of an infinity or NaN: the schema's bounds alone would let `.inf` pass."""
    if isinstance(value, float) and not math.isfinite(value):
        return ".".join(keys)
    if isinstance(value, dict):
        found = (_first_non_finite(inner, [*keys, str(key)]) for key, inner in value.items())
        return next((path for path in found if path is not None), None)
    return None


def _explain(message: str) -> str:
    """A msgspec message as `key.path: what is wrong; what is allowed`."""
    found = _PATH.search(message)
    path = found["path"].replace("[...]", "[]") if found else ""  # a value of a mapping
    problem = message[: found.start()] if found else message
    keys = [key for key in path.split(".") if key]
    unknown = _UNKNOWN.match(problem)
    if unknown:
        where = ".".join([*keys, unknown["name"]])
        if where in RENAMED:
            return f"{where} has another name: {RENAMED[where]}"
        allowed_keys = _allowed_keys(keys)
        close = get_close_matches(unknown["name"], allowed_keys, n=1)
        guess = f"; is {close[0]} meant?" if close else ""
        return f"{where}: unknown key{guess}; allowed: {', '.join(allowed_keys)}"
    values = _allowed_values(keys)
    allowed = f"; allowed: {', '.join(values)}" if values else ""
    return f"{'.'.join(keys) or 'top level'}: {problem}{allowed}"


def _type_at(keys: list[str]) -> msgspec.inspect.Type:
    node: msgspec.inspect.Type = msgspec.inspect.type_info(AppConfig)
    for key in keys:
        assert isinstance(node, msgspec.inspect.StructType), f"{keys} leads through a leaf"
        name, bracket, _ = key.partition("[")  # an element of a list is `name[0]`
        node = next(field.type for field in node.fields if field.name == name)
        if bracket:
            node = _element_type(node)
    return node


def _element_type(node: msgspec.inspect.Type) -> msgspec.inspect.Type:
    if isinstance(node, msgspec.inspect.DictType):
        return node.value_type
    assert isinstance(node, msgspec.inspect.VarTupleType), f"{node} has no elements"
    return node.item_type


def _allowed_keys(keys: list[str]) -> list[str]:
    node = _type_at(keys)
    assert isinstance(node, msgspec.inspect.StructType), f"{keys} is not a section"
    return [field.name for field in node.fields]


def _allowed_values(keys: list[str]) -> list[str]:
    node = _type_at(keys)
    if isinstance(node, msgspec.inspect.StructType):
        return [f"a section with {', '.join(_allowed_keys(keys))}"]
    return _values_of(node)


def _values_of(node: msgspec.inspect.Type) -> list[str]:
    """Returns the values that a key takes, in words; none where its type says it all."""
    match node:
        case msgspec.inspect.UnionType():
            return [value for member in node.types for value in _values_of(member)]
        case msgspec.inspect.LiteralType():
            return [str(value) for value in node.values]
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            kind = "an integer" if isinstance(node, msgspec.inspect.IntType) else "a number"
            bounds = {">=": node.ge, ">": node.gt, "<=": node.le, "<": node.lt}
            return [" ".join([kind, *(f"{op} {n}" for op, n in bounds.items() if n is not None)])]
    return []
