"""What processes leave on this machine: themselves, and rings of gangs (engine/ranks/plan_ring.py).

Other programs run beside the one that is looked at: nothing is counted that may be theirs.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_UNIX_SOCKETS = Path("/proc/net/unix")
_RING = "@laps-ring-"


def is_gone(pid: int) -> bool:
    """The process has ended; its parent may not have asked for its end yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def rings_of(pids: Iterable[int]) -> set[str]:
    """Names of the rings that these processes hold open."""
    held = {target for pid in pids for target in _open_files(pid)}
    return {name for name, inode in _rings() if f"socket:[{inode}]" in held}


def left_of(rings: Iterable[str]) -> set[str]:
    """Those of the rings that some process still holds open."""
    return set(rings) & {name for name, _ in _rings()}


def _rings() -> set[tuple[str, str]]:
    """Name and inode of each ring's sockets, whoever's they are."""
    lines = [line.split() for line in _UNIX_SOCKETS.read_text().splitlines()]
    return {(line[-1], line[6]) for line in lines if line[-1].startswith(_RING)}


def _open_files(pid: int) -> Iterator[str]:
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            yield os.readlink(link)
