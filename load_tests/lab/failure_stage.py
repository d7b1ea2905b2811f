"""One request in the phase in which something is to go wrong, and what its client saw of it."""

import contextlib
import itertools
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from load_tests.http_load.client import Answer, LoadError, RefusedError, Server
from load_tests.lab.soak_cases import Case
from load_tests.lab.soak_clients import ERROR_EVENT, PATH
from load_tests.testbed.system import ProcessId, System

TIMEOUT_S = 600.0  # of an answer: a machine that is short of cores is slow, not broken
PATIENCE_S = 60.0
LOOK_EVERY_S = 0.02
NUM_OCCUPANTS = 2  # streams that fill a decode worker of so many rows


class Phase(Enum):
    """Of a request between its two workers."""

    BEFORE = "before the transfer"
    MOVE = "mid transfer"
    STREAM = "mid stream"


class PhaseMissedError(Exception):
    """The request did not come into its phase in time, or ended before: no result."""


class _Cuttable(Answer):
    """An answer whose client may hang up while it waits for more."""

    def hang_up(self) -> None:
        """From any thread. Raises PhaseMissedError if the answer has ended."""
        sock = self._connection.sock
        if not isinstance(sock, socket.socket):
            raise PhaseMissedError("the answer ended before its client left")
        sock.shutdown(socket.SHUT_RDWR)


class Ask:
    """One streamed request on a thread of its own, with the time of every chunk."""

    def __init__(self, system: System, case: Case, salt: str) -> None:
        self._system = system
        self.case = case
        body = case.body(system.application.model, is_stream=True, salt=salt)
        server = Server(url=system.url)
        self._answer = _Cuttable(server, server.path(PATH), body, TIMEOUT_S)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._may_read = threading.Event()
        self._may_read.set()
        self.tokens: list[int] = []
        self.at_s: list[float] = []  # on `time.perf_counter`, of every chunk
        self.error: LoadError | None = None
        self.has_left = False
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Until it has ended, however. Raises PhaseMissedError when it does not."""
        self._thread.join(TIMEOUT_S)
        if self._thread.is_alive():
            raise PhaseMissedError(f"a client hangs after {len(self.tokens)} tokens")

    def leave(self) -> None:
        """Hang up, whatever it waits for."""
        self.has_left = True
        self._answer.hang_up()

    @contextlib.contextmanager
    def slow(self) -> Iterator[None]:
        """Reads nothing inside the block."""
        self._may_read.clear()
        yield
        self._may_read.set()

    def _read(self) -> None:
        try:
            for chunk in self._answer.chunks():
                self.tokens += chunk.token_ids
                self.at_s.append(chunk.at_s)
                self._may_read.wait()
        except LoadError as error:
            self.error = None if self.has_left else error
        finally:
            self._answer.close()

    def view(self) -> str:
        """What the client saw, in words."""
        expected, num = self.case.expected, len(self.tokens)
        tokens = f"{num} of {len(expected)} tokens, {'right' if self.is_right else 'WRONG'}"
        if self.error is not None:
            return f"{self.error}" if not num else f"{tokens}, then {self.error}"
        return f"left after {tokens}" if self.has_left else tokens

    @property
    def is_whole(self) -> bool:
        return self.error is None and self.tokens == self.case.expected

    @property
    def is_right(self) -> bool:
        """As far as it went."""
        return self.tokens == self.case.expected[: len(self.tokens)]

    @property
    def has_clear_error(self) -> bool:
        """The server said in words that it failed."""
        is_event = str(self.error).startswith(ERROR_EVENT)
        return isinstance(self.error, RefusedError) or (self.error is not None and is_event)

    def silence_s(self, fault_s: float) -> float | None:
        """The longest wait for a token after the fault; None if none came."""
        after = [fault_s, *(at_s for at_s in self.at_s if at_s > fault_s)]
        waits = (later - earlier for earlier, later in itertools.pairwise(after))
        return max(waits, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cases:
    """What is asked."""

    subject: Case  # its prompt takes many steps, and many pieces
    talker: Case  # its answer is long
    occupants: list[Case]  # that hold every row of the decode worker


@dataclass(slots=True, kw_only=True)
class Stage:
    """A system, and the requests that are under way in it."""

    system: System
    cases: Cases
    salts: Iterator[str]
    occupants: list[Ask] = field(default_factory=list)
    killed: set[ProcessId] = field(default_factory=set)

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """To an actor's process, which is to be replaced. Raises PhaseMissedError if it is away."""
        pid = self.system.send(name, number)
        if pid is None:
            raise PhaseMissedError(f"{name} is away already")
        self.killed.add(ProcessId(name=name, pid=pid))

    def signs(self) -> object:
        """What is not the same after a fault on demand that no client has noticed."""
        retries = self.system.metric("laps_request_retries")
        sent_again = self._sum("prefill", "sender", "num_retries")
        return retries, sent_again, frozenset(self.system.processes())

    def is_restored(self) -> bool:
        """Every part answers, from another process if it was killed."""
        return self.system.is_whole() and self.killed.isdisjoint(self.system.processes())

    def reach(self, phase: Phase) -> Ask:
        """A request that is in the phase now. Raises PhaseMissedError."""
        self.occupants = []
        if phase is Phase.BEFORE:  # its reservation waits for a row: nothing has moved
            self.occupants = [self.ask(case) for case in self.cases.occupants]
            self._wait(
                lambda: self._sum("decode", "scheduler", "num_running") >= NUM_OCCUPANTS,
                self.occupants[0],
                "every row is held",
            )
            ask = self.ask(self.cases.subject)
            self._wait(lambda: self._sum("decode", "receiver", "num_waiting") > 0, ask, "in line")
        elif phase is Phase.MOVE:
            before = self._sum("decode", "receiver", "num_pieces")
            ask = self.ask(self.cases.subject)
            self._wait(
                lambda: self._sum("decode", "receiver", "num_pieces") > before + 2, ask, "moves"
            )
        else:
            ask = self.ask(self.cases.talker)
            self._wait(lambda: len(ask.tokens) > 5, ask, "streams")
        return ask

    def ask(self, case: Case) -> Ask:
        return Ask(self.system, case, next(self.salts))

    def worker_of(self, role: str) -> str:
        """The worker that has the request now; the first if none has it."""
        seen = self.system.statistics()
        names = sorted(name for name in seen if name.startswith(role))
        return next((n for n in reversed(names) if seen[n]["num_requests"]), names[0])

    def _sum(self, role: str, part: str, key: str) -> int:
        seen: dict[str, dict[str, Any]] = self.system.statistics()
        return sum(int(seen[name][part][key]) for name in seen if name.startswith(role))

    def _wait(self, holds: Callable[[], bool], ask: Ask, what: str) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while not holds():
            if ask.is_over or time.monotonic() > until_s:
                raise PhaseMissedError(f"never seen: {what} ({ask.view()})")
            time.sleep(LOOK_EVERY_S)
