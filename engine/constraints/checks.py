"""Checks in child processes whether constraints can be used, so that a bad one harms nothing else.

A constraint is the client's program for the compiler: it can be impossible, huge or endless. It is
refused if its check takes too much time or memory; other checks run at the same time. Verdicts are
cached, including refusals.
"""

import subprocess
import sys
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock

import msgspec

from engine.errors import CapacityError, WorkerError
from engine.request import Constraint

MAX_CHILDREN = 2
MAX_UNCHECKED = 32  # waiting or being checked
MAX_VERDICTS = 1024
_START = (
    "import sys; sys.path[:] = sys.argv[1].split('\\n');"
    " from engine.constraints.check_child import main; main(sys.argv[2:])"
)


class ConstraintChecks:
    """Checks for one model folder. Children start with the first constraint and are reused."""

    def __init__(self, model_path: str) -> None:
        self._model_path = str(Path(model_path).resolve())
        self._threads = ThreadPoolExecutor(MAX_CHILDREN, thread_name_prefix="constraint checks")
        self._idle: SimpleQueue[_Child] = SimpleQueue()
        self._lock = Lock()
        self._verdicts: OrderedDict[Constraint, str] = OrderedDict()  # "" = accepted
        self._under_way: dict[Constraint, Future[str]] = {}

    def check(self, constraint: Constraint) -> "Future[str]":
        """The problem with the constraint, as a message for the client; "" = none. Never waits.

        The future raises WorkerError if the check cannot be made. Raises CapacityError if too many
        others wait.
        """
        with self._lock:
            known = self._verdicts.get(constraint)
            if known is not None:
                self._verdicts.move_to_end(constraint)
                done: Future[str] = Future()
                done.set_result(known)
                return done
            if constraint in self._under_way:
                return self._under_way[constraint]
            if len(self._under_way) >= MAX_UNCHECKED:
                raise CapacityError("too many new constraints are being checked", status=429)
            future = self._threads.submit(self._check, constraint)
            self._under_way[constraint] = future
        # Outside the lock: a future that is already done calls back at once.
        future.add_done_callback(lambda _: self._forget(constraint))
        return future

    def close(self) -> None:
        """Stop the children once their checks are over."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        while (child := self._take_idle()) is not None:
            child.close()

    # ---- on the threads -------------------------------------------------------------------------

    def _check(self, constraint: Constraint) -> str:
        child = self._take_idle() or _Child(self._model_path)
        verdict = child.check(constraint)
        if child.has_ended:
            child.close()
        else:
            self._idle.put(child)
        if verdict is None:
            verdict = (
                f"The constraint on the output ({constraint.kind.value}) takes too long or too much"
                " memory to compile; make it smaller."
            )
        with self._lock:
            self._verdicts[constraint] = verdict
            if len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        return verdict

    def _take_idle(self) -> "_Child | None":
        """An idle child that is alive; a child that died while idle is no fault of a constraint."""
        try:
            while not (child := self._idle.get_nowait()).is_alive:
                child.close()
        except Empty:
            return None
        return child

    def _forget(self, constraint: Constraint) -> None:
        with self._lock:
            self._under_way.pop(constraint, None)


class _Child:
    """One child process, for one thread at a time. It limits its own time, so reads never hang."""

    def __init__(self, model_path: str) -> None:
        """Raises WorkerError if the process does not start."""
        self.has_ended = False
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, "\n".join(sys.path), model_path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._read()
        if self.has_ended:
            code = self.close()
            raise WorkerError(f"the process that checks constraints did not start (exit {code})")

    def check(self, constraint: Constraint) -> str | None:
        """The verdict; None if the constraint ended the process that tried it."""
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(msgspec.json.encode(constraint) + b"\n")
            stdin.flush()
        except BrokenPipeError:
            self.has_ended = True
            return None
        return self._read()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> int:
        """Stop the process; returns its exit status."""
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):  # input that the child did not read is still buffered
                stream.close()
        return self._process.wait()

    def _read(self) -> str | None:
        stdout = self._process.stdout
        assert stdout is not None
        line = stdout.readline()
        if not line.endswith(b"\n"):
            self.has_ended = True
            return None
        return msgspec.json.decode(line, type=str | None)
