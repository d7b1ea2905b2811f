"""A server on this machine for a measurement: a process that is started, awaited and ended.

What it prints is in a file. Knows nothing of what it serves.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from load_tests.http_load.client import LoadError, Server, UnreachableError, get
from load_tests.lab.child_processes import bound_to_parent

ROOT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"
END_S = 60.0  # to shut down on request
LOOK_EVERY_S = 0.5
LOG_LINES = 30  # shown of a server that did not start


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """How to start a server, and how to see that it is ready."""

    name: str
    words: Sequence[str]
    port: int
    ready_path: str  # answered with 200 once it is ready
    environment: Mapping[str, str] = field(default_factory=dict)  # besides that of this process

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"


class ServerProcess:
    """A server that runs, with whatever it starts in its session.

    It gets SIGINT when the thread that started it ends, so also when this process is killed.
    """

    def __init__(self, command: ServerCommand, log: Path) -> None:
        """Starts it. Raises LoadError where something answers at its URL already."""
        self.command = command
        self._server = Server(url=command.url)
        self._log = log
        self._is_asked = False
        if _answers(self._server):
            raise LoadError(
                f"something answers at {command.url} already: stop it, or take another --port"
            )
        settings = (f"{name}={value}" for name, value in command.environment.items())
        with log.open("w") as output:
            # A session of its own, so that an interrupt of the bench does not reach it twice.
            self._process = subprocess.Popen(
                bound_to_parent(["env", *settings, *command.words], signal.SIGINT),
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self, until_s: float) -> None:
        """Waits until it is ready, and no longer than `until_s` of `time.monotonic`.

        Raises LoadError, with the end of its log, for one that is late or has ended.
        """
        while not self._is_ready():
            ended = self._process.poll()
            if ended is not None or time.monotonic() > until_s:
                what = "not ready in time" if ended is None else f"ended with {ended}"
                lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
                name = self.command.name
                raise LoadError("\n".join([f"{name} {what}; the end of its log:", *lines]))
            time.sleep(LOOK_EVERY_S)

    def ask_to_end(self) -> None:
        """Interrupts it once, as a person would: a second time would cut its end short."""
        if not self._is_asked and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        self._is_asked = True

    def end(self, patience_s: float = END_S) -> None:
        """Asks it to end; what is still there of its group after `patience_s` is killed."""
        self.ask_to_end()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _is_ready(self) -> bool:
        try:
            get(self._server, self.command.ready_path)
        except LoadError:
            return False
        return True


def end_all(processes: Iterable[ServerProcess], patience_s: float = END_S) -> None:
    """Ends servers at the same time; all have gone within `patience_s`."""
    remaining = list(processes)
    for process in remaining:
        process.ask_to_end()
    until_s = time.monotonic() + patience_s
    for process in remaining:
        process.end(max(0.0, until_s - time.monotonic()))


def _answers(server: Server) -> bool:
    try:
        get(server, "/health")
    except UnreachableError:
        return False
    except LoadError:
        return True
    return True
