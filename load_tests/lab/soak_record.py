"""What the processes of an application were seen to hold over time, and whether it stayed flat."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from load_tests.testbed.system import REPLICA_PREFIX, ProcessId, System

PAGE_KIB = 4
NUM_TASK_LOOKS = 10  # calls come and go
SETTLE_S = 120.0  # of a process's life: blocks are touched, and memory of all sizes is cached
JUDGED_S = 90.0  # a process that was seen for less after that is reported, not judged
MAX_GROWTH_MIB = 48.0  # of memory, from the second to the last quarter of what is judged
MAX_MORE_FDS = 8  # likewise, of open files: connections to partners that were killed since
POOL_KEYS = ("blocks", "available_blocks", "free_rows", "num_requests")


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One process at one moment."""

    at_s: float
    rss_mib: float
    num_fds: int
    num_tasks: int | None = None  # asyncio tasks; None where nobody counts them
    pool: dict[str, int] = field(default_factory=dict)  # of a worker: blocks, rows, requests


@dataclass(slots=True, kw_only=True)
class Track:
    """All looks at one process."""

    process: ProcessId
    looks: list[Look]

    @property
    def role(self) -> str:
        name = self.process.name
        if name.startswith(REPLICA_PREFIX):
            return "ingress"
        return "supervisor" if "::" in name else name.partition(".")[0]

    @property
    def settled(self) -> list[Look]:
        start_s = self.looks[0].at_s + SETTLE_S
        return [look for look in self.looks if look.at_s >= start_s]

    @property
    def is_judged(self) -> bool:
        settled = self.settled
        return len(settled) >= 8 and settled[-1].at_s - settled[0].at_s >= JUDGED_S

    def offences(self) -> list[str]:
        """What grew, in words; nothing if it was seen too shortly to say."""
        if not self.is_judged:
            return []
        middle, last = _quarters(self.settled)
        rss = [statistics.median(look.rss_mib for look in part) for part in (middle, last)]
        fds = [max(look.num_fds for look in part) for part in (middle, last)]
        who, found = f"{self.process.name} (pid {self.process.pid})", []
        if rss[1] - rss[0] > MAX_GROWTH_MIB:
            found.append(f"{who}: memory grew from {rss[0]:.0f} to {rss[1]:.0f} MiB")
        if fds[1] - fds[0] > MAX_MORE_FDS:
            found.append(f"{who}: open files grew from {fds[0]} to {fds[1]}")
        return found

    def row(self) -> str:
        """Of a markdown table: process, seconds seen, memory, its slope, open files, tasks."""
        first, last = self.looks[0], self.looks[-1]
        slope = f"{self._slope_mib_per_min():+.2f}" if self.is_judged else "-"
        tasks = [look.num_tasks for look in self.looks if look.num_tasks is not None]
        return (
            f"| {self.role} {self.process.pid} | {last.at_s - first.at_s:.0f}"
            f" | {first.rss_mib:.0f} to {last.rss_mib:.0f} | {slope}"
            f" | {first.num_fds} to {last.num_fds}"
            f" | {f'{min(tasks)} to {max(tasks)}' if tasks else '-'} |"
        )

    def _slope_mib_per_min(self) -> float:
        """Of its memory, by least squares."""
        times = [look.at_s / 60 for look in self.settled]
        return statistics.linear_regression(times, [look.rss_mib for look in self.settled]).slope


def _quarters(looks: Sequence[Look]) -> tuple[Sequence[Look], Sequence[Look]]:
    """The second and the last."""
    num = len(looks) // 4
    return looks[num : 2 * num], looks[-num:]


class Record:
    """Looks at every process of a system, as often as it is asked to."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._started_s = time.monotonic()
        self._tracks: dict[ProcessId, Track] = {}

    def look(self) -> None:
        """Raises RayTaskError if the books of a worker's blocks do not add up."""
        seen = self._system.statistics()
        for process in self._system.processes():
            look = self._look_at(process, seen.get(process.name))
            if look is not None:
                track = self._tracks.setdefault(process, Track(process=process, looks=[]))
                track.looks.append(look)

    def tracks(self) -> list[Track]:
        return sorted(self._tracks.values(), key=lambda t: (t.role, t.looks[0].at_s))

    def tasks_at_rest(self) -> dict[str, int]:
        """Asyncio tasks by role, of the process with most: the least of a few looks."""
        looks = [self._tasks() for _ in range(NUM_TASK_LOOKS)]
        return {role: min(look.get(role, 0) for look in looks) for role in looks[0]}

    def _tasks(self) -> dict[str, int]:
        most = {"ingress": self._system.ingress_tasks() or 0}
        for name, seen in self._system.statistics().items():
            role = name.partition("-")[0]
            most[role] = max(most.get(role, 0), int(seen["tasks"]))
        return most

    def _look_at(self, process: ProcessId, seen: dict[str, Any] | None) -> Look | None:
        """None if it died meanwhile: a process that nobody has buried yet has no memory."""
        folder = Path("/proc") / str(process.pid)
        try:
            num_pages = int((folder / "statm").read_text().split()[1])
            num_fds = len(list((folder / "fd").iterdir()))
        except (FileNotFoundError, ProcessLookupError):
            return None
        if not num_pages:
            return None
        pool = {key: int(seen[key]) for key in POOL_KEYS} if seen else {}
        is_ingress = process.name.startswith(REPLICA_PREFIX)
        num_tasks = self._system.ingress_tasks() if is_ingress else None
        return Look(
            at_s=time.monotonic() - self._started_s,
            rss_mib=num_pages * PAGE_KIB / 1024,
            num_fds=num_fds,
            num_tasks=int(seen["tasks"]) if seen else num_tasks,
            pool=pool,
        )
