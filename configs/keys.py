"""API keys from a file and from the environment, kept as SHA-256 digests by name.

An entry is a key as clients send it, or `name:digest` with the key's SHA-256 in hex. A key without
a name is called after its digest, so that it is the same in logs wherever it stands. Plain keys are
forgotten here: no record, log line or message of this project holds one.
"""

import hashlib
import re
import stat
from collections.abc import Iterable
from pathlib import Path

import msgspec

from configs.errors import ConfigFileError
from configs.schema import EVERY_KEY, ApiConfig

KEYS_VARIABLE = "LAPS_API_KEYS"
NAME_DIGITS = 8  # of the digest, in the name of a key that has none

_NAMED_DIGEST = re.compile(r"(?P<name>[A-Za-z0-9_.-]{1,64}):(?P<digest>[0-9a-fA-F]{64})")
_PLAIN_KEY = re.compile(r"[\x21-\x7e]+")  # what an Authorization header can carry


def with_keys(api: ApiConfig, path: Path | None, variable: str | None) -> ApiConfig:
    """`api` with the keys of its file and of the variable beside those it has.

    path: where `api.keys_file` is; None = it was not found, or none is named. variable: the value
    of LAPS_API_KEYS, entries separated by commas or white space; None = it is not set. Raises
    ConfigFileError, which never quotes an entry: a source without keys (an empty one would open
    the server that it was to close), a file that others may read, a repeated key, limits of a key
    that does not exist.
    """
    keys = dict(api.keys)
    if api.keys_file is not None:
        _add(keys, _file_entries(api.keys_file, path), f"api.keys_file: {api.keys_file}")
    if variable is not None:
        _add(keys, list(enumerate(re.split(r"[\s,]+", variable.strip(" ,\n\t")), 1)), KEYS_VARIABLE)
    unknown = sorted(set(api.limits) - set(keys) - {EVERY_KEY})
    if unknown:
        raise ConfigFileError(
            f"api.limits: {', '.join(unknown)}: no API key has this name; allowed:"
            f" {', '.join([EVERY_KEY, *sorted(keys)])}"
        )
    return msgspec.structs.replace(api, keys=keys)


def _file_entries(named: str, path: Path | None) -> list[tuple[int, str]]:
    """(line number, entry) of every line but comments and empty ones."""
    source = f"api.keys_file: {named}"
    if path is None:
        raise ConfigFileError(f"{source}: there is no such file; name one with a key per line")
    try:
        mode = path.stat().st_mode
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigFileError(f"{source}: cannot be read: {reason}") from error
    if mode & stat.S_IROTH:
        raise ConfigFileError(f"{source}: everybody may read it; chmod 600 {path}")
    entries = [(number, line.strip()) for number, line in enumerate(lines, 1)]
    return [(number, entry) for number, entry in entries if entry and not entry.startswith("#")]


def _add(keys: dict[str, str], entries: Iterable[tuple[int, str]], source: str) -> None:
    num_before = len(keys)
    for number, entry in entries:
        where = f"{source}: entry {number}"
        if not entry:
            continue
        if not _PLAIN_KEY.fullmatch(entry):
            raise ConfigFileError(
                f"{where}: a key has printable ASCII characters only, and no space"
            )
        found = _NAMED_DIGEST.fullmatch(entry)
        digest = found["digest"].lower() if found else hashlib.sha256(entry.encode()).hexdigest()
        name = found["name"] if found else f"key-{digest[:NAME_DIGITS]}"
        if name in keys or digest in keys.values():
            raise ConfigFileError(f"{where}: this key, or its name {name}, was given before")
        keys[name] = digest
    if len(keys) == num_before:
        raise ConfigFileError(
            f"{source}: holds no key; put one in (for example from `openssl rand -hex 32`), or"
            " leave the setting out to serve everybody"
        )
