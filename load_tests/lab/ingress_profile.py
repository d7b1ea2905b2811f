"""Where the ingress's time goes: samples of py-spy, each put under one kind of work.

The innermost frame of the project decides, so that what Ray does for a call of ours counts as that
call; without one, the innermost frame of a library; and without that, in code that is not Python,
the thread.
"""

import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

SAMPLES_PER_S = 200
REST = "the rest"
GATE = "KeyGate.__call__"  # it stands around every request: what it calls is not its work

# A group and parts of `function (file:line)`; the first group that a frame fits counts.
Groups = Sequence[tuple[str, tuple[str, ...]]]
OURS: Groups = (
    ("text out of tokens", ("text/detokenizing", "text/output_text", "text/stop_strings")),
    ("metrics and times", ("actors/observability/", "_count (actors/ingress/pipeline")),
    ("API keys, admission, rates", ("ingress/auth", "ingress/rate_limits", "ingress/admission")),
    ("calls: tokenize, place, submit", ("Handle.route", "Handle.submit", "Handle.tokenize")),
    ("calls: awaiting their answers, and messages", ("_answer (actors", "_decoded (actors")),
    ("calls: their frames", ("rpc/connection", "rpc/frames", "rpc/server")),
    ("messages of tokens", ("rpc/handles", "routing/worker_links", "Mailbox.")),
    ("messages of tokens", ("decode (engine/messages", "_dispatch (")),
    ("tokens to deltas: coroutines", ("_events (", "actors/ingress")),
    ("JSON and SSE of the answer", ("_writers", "response_objects", "response_parts")),
    ("reading and checking the body", ("actors/openai/",)),
)
LIBRARIES: Groups = (
    ("event loop", ("_run_user_code_event_loop", "asyncio/", "contextvars")),
    ("HTTP: uvicorn", ("uvicorn/", "httptools")),
    ("HTTP: Starlette and FastAPI", ("starlette/", "fastapi/", "anyio/")),
    ("HTTP: Serve's replica", ("ray/serve/",)),
    ("Ray: streams of items, in threads", ("concurrent/futures/thread",)),
    ("Ray, the rest", ("ray/",)),
)
THREADS: Groups = (
    ("Ray: streams of items, in threads", ("ThreadPoolExecutor",)),
    ("event loop", ("AsyncIO Thread",)),
    ("Ray, the rest", ("thread (",)),
)


@dataclass(slots=True)
class Profile:
    """Filled when the block that measures is left."""

    shares: dict[str, float] = field(default_factory=dict)  # group -> of all samples


def group_of(stack: str) -> str:
    """The work that a stack (`thread;outer;...;inner`) is part of."""
    thread, *frames = stack.split(";")
    inner_first = [frame for frame in frames[::-1] if not frame.startswith(GATE)]
    found = _first(inner_first, OURS) or _first(inner_first, LIBRARIES) or _first([thread], THREADS)
    return found or REST


def _first(frames: Sequence[str], groups: Groups) -> str | None:
    for frame in frames:
        for group, marks in groups:
            if any(mark in frame for mark in marks):
                return group
    return None


def shares_of(folded: Iterable[str]) -> dict[str, float]:
    """Group -> share, from lines `stack count`. Raises ValueError when there are none."""
    counts: Counter[str] = Counter()
    for line in folded:
        stack, _, count = line.rstrip().rpartition(" ")
        counts[group_of(stack)] += int(count)
    if not counts:
        raise ValueError("py-spy took no samples: was the process idle?")
    return {group: num / counts.total() for group, num in counts.items()}


@contextmanager
def profiled(pid: int, seconds: float) -> Iterator[Profile]:
    """Sample a process while the block runs, which must take at least `seconds`.

    Raises FileNotFoundError without py-spy (constraints.txt has its version), RuntimeError if it
    may not look at the process.
    """
    profile = Profile()
    spy = Path(sys.executable).with_name("py-spy")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stacks"
        how = ["--rate", str(SAMPLES_PER_S), "--format", "raw", "--nonblocking", "--threads"]
        target = ["--pid", str(pid), "--duration", str(int(seconds)), "-o", str(path)]
        recorder = subprocess.Popen(
            [str(spy), "record", *how, *target], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        yield profile
        _, said = recorder.communicate()
        if recorder.returncode:
            raise RuntimeError(f"py-spy failed: {said.decode()}")
        profile.shares = shares_of(path.read_text().splitlines())
