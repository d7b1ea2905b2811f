"""What became of Ray's actors, for the output of a test that fails: later nobody can ask them."""

import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray

# The public form asks the dashboard, which tests do not start.
from ray._private.state import actors
from ray._private.worker import global_worker
from ray.util.placement_group import placement_group_table

MAX_LINES = 30  # of logs
MAX_WIDTH = 240
# Of our own actors, and of Serve's.
LOG_LINE = re.compile(r"[A-Z]+ (?:\d{4}-\d\d-\d\d )?(\d\d:\d\d:\d\d).*")
ACTOR_NAME = re.compile(r":actor_name:(.*)")
ERROR_MESSAGE = re.compile(r'error_message: "(.*)"')


def describe_actors(since_s: float) -> str:
    """Returns lines about actors, placement groups, and the last lines that actors have logged.

    since_s: by time.time(); who died earlier is left out.
    """
    if not ray.is_initialized():
        return "no Ray cluster runs"
    try:
        return "\n".join(line[:MAX_WIDTH] for line in _lines(since_s))
    except Exception as error:  # noqa: BLE001 - what this is about has failed already
        return f"Ray cannot be asked: {error!r}"


def _lines(since_s: float) -> list[str]:
    seen = [a for a in actors().values() if a["State"] != "DEAD" or a["EndTime"] > 1000 * since_s]
    groups = [g for g in placement_group_table().values() if g["state"] != "REMOVED"]
    return [
        *sorted(map(_describe_actor, seen)),
        *sorted(f"placement group {group['name']}: {group['state']}" for group in groups),
        *sorted(_log_lines(since_s))[-MAX_LINES:],
    ]


def _describe_actor(actor: Mapping[str, Any]) -> str:
    cause = ERROR_MESSAGE.search(str(actor["DeathCause"]))
    return (
        f"{actor['Name'] or actor['ActorClassName']}: {actor['State']}, {actor['NumRestarts']}"
        f" restarts, process {actor['Pid']} is {_process_state(actor['Pid'])}"
        f"{f', {cause[1]}' if cause else ''}"
    )


def _process_state(pid: int) -> str:
    """As Linux names it: T is stopped, Z dead; or "gone"."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


def _log_lines(since_s: float) -> Iterator[str]:
    """Time, actor and text of each line that was logged since then."""
    since = time.strftime("%H:%M:%S", time.localtime(since_s))
    node = global_worker.node
    assert node is not None, "only who has started the cluster knows its logs"
    for path in Path(node.get_logs_dir_path()).glob("worker-*.err"):
        if path.stat().st_mtime < since_s:
            continue
        text = path.read_text(errors="replace")
        names = ACTOR_NAME.findall(text)  # the class, and then what the actor calls itself
        for line in LOG_LINE.finditer(text):
            if line[1] >= since:
                yield f"{line[1]} {names[-1] if names else path.stem}: {line[0]}"
