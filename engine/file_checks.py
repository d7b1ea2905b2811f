"""Checks whether a file of a model folder is usable, by its size and first bytes alone."""

from pathlib import Path

from engine.errors import ConfigError

_POINTER_START = b"version https://git-lfs"


def check_file(path: Path) -> None:
    """Raises ConfigError, with the remedy, for a path that is not a file with content.

    That is: a missing file, a folder, an empty file, an unreadable file, or the pointer that Git
    LFS leaves in place of a large file.
    """
    if path.is_dir():
        raise ConfigError(f"{path}: a folder stands where a file is expected; remove it")
    try:
        with path.open("rb") as file:
            start = file.read(len(_POINTER_START))
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file; a Hugging Face model folder is expected"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if not start:
        raise ConfigError(f"{path}: the file is empty; download it again")
    if start == _POINTER_START:
        raise ConfigError(
            f"{path}: a Git LFS pointer, not the file itself; run `git lfs pull` in the folder"
        )
