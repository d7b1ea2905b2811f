"""Reads a model's JSON file with type checks. Does not know what the keys mean."""

import json
import math
from pathlib import Path

from engine.errors import ConfigError
from engine.file_checks import check_file


class ConfigFile:
    """One JSON object of a model folder; every error names the file and the key.

    `null` counts as absent, as it does for the writers of these files. `has_key` distinguishes the
    two where a model family gives them different meanings.
    """

    def __init__(self, path: Path, values: dict[str, object], section: str = "") -> None:
        self.path = path
        self._values = values
        self._section = section

    @classmethod
    def read(cls, path: Path) -> "ConfigFile":
        """Raises ConfigError when the file is missing, unreadable or not a JSON object."""
        check_file(path)
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: not readable as JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: a JSON object is expected, found {_kind(values)}")
        return cls(path, values)

    def error(self, key: str, problem: str) -> ConfigError:
        """The error to raise about `key`."""
        return ConfigError(f"{self.path}: {self._section}{key} {problem}")

    def has_key(self, key: str) -> bool:
        return key in self._values

    @property
    def keys(self) -> list[str]:
        return list(self._values)

    def section(self, key: str) -> "ConfigFile | None":
        """The nested object under `key`, or None when absent or empty."""
        value = self._values.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self.error(key, f"must be an object, found {_kind(value)}")
        return ConfigFile(self.path, value, f"{self._section}{key}.")

    def around(self, key: str, defaults: dict[str, object]) -> "ConfigFile":
        """This object with the keys of the one under `key`, and `defaults` where neither has one.

        Raises ConfigError if there is no object under `key`.
        """
        nested = self.section(key)
        if nested is None:
            raise self.error(key, "is missing")
        return ConfigFile(self.path, {**defaults, **nested._values, **self._values}, self._section)

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """An integer; required unless `default` is given."""
        found = self.optional_integer(key, minimum=minimum)
        if found is not None:
            return found
        if default is None:
            raise self.error(key, "is missing; an integer is required")
        return default

    def optional_integer(self, key: str, *, minimum: int = 1) -> int | None:
        value = self._values.get(key)
        if value is None:
            return None
        # Whole floats appear in hand-edited files and are unambiguous.
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"must be an integer, found {_kind(value)}")
        if value < minimum:
            raise self.error(key, f"must be at least {minimum}, found {value}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number; required unless `default` is given."""
        found = self.optional_number(key)
        if found is not None:
            return found
        if default is None:
            raise self.error(key, "is missing; a number is required")
        return default

    def optional_number(self, key: str) -> float | None:
        value = self._values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, f"must be a number, found {_kind(value)}")
        if not math.isfinite(value) or value <= 0:
            raise self.error(key, f"must be positive and finite, found {value}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false. null means false, which for a `default` of true is refused: it may be
        meant as absent.
        """
        value = self._values.get(key)
        if value is None and default and self.has_key(key):
            raise self.error(key, "is null, which may mean true or false; write one of the two")
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, found {_kind(value)}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string; required unless `default` is given."""
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, found {_kind(value)}")
        return value

    def is_text(self, key: str) -> bool:
        """Whether the key is there with a string, where it may have an object too."""
        return isinstance(self._values.get(key), str)

    def texts(self, key: str, *, may_be_nested: bool = False) -> tuple[str, ...] | None:
        """A list of strings, or None when absent.

        may_be_nested: entries may be lists of strings; theirs are returned in their places.
        """
        value = self._values.get(key)
        if value is None:
            return None
        items = value
        if may_be_nested and isinstance(value, list):
            lists = [entry if isinstance(entry, list) else [entry] for entry in value]
            items = [item for entries in lists for item in entries]
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise self.error(key, f"must be a list of strings, found {_kind(value)}")
        return tuple(items)

    def integers(self, key: str, *, minimum: int = 1) -> tuple[int, ...]:
        """A list of integers of at least `minimum`, 0 or 1; empty when absent."""
        value = self._values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(
            type(item) is int and item >= minimum for item in value
        ):
            kind = "positive integers" if minimum else "integers from 0 on"
            raise self.error(key, f"must be a list of {kind}, found {_kind(value)}")
        return tuple(value)

    def ids(self, key: str) -> tuple[int, ...]:
        """Token ids written as one integer or as a list; empty when absent."""
        value = self._values.get(key)
        if value is None:
            return ()
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            raise self.error(key, f"must be a token id or a list of them, found {value!r}")
        return tuple(items)


def _kind(value: object) -> str:
    shown = repr(value)
    return f"{type(value).__name__} {shown if len(shown) <= 40 else shown[:37] + '...'}"
