"""The ranks of one model: the first is this process, the others are processes beside it.

They are forked from a server that has imported torch once, so that more ranks cost little.
"""

import gc
import os
import select
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from engine.layers.context import Comm
from engine.ranks.meeting import connect_ranks
from engine.ranks.rank import Rank
from tests.harness.forks import FORKS

T = TypeVar("T")

STAGED = "staged"
TIMEOUT_S = 100.0  # of an operation between ranks, on a machine that is busy with other tests
_ANSWER_S = 200.0  # what a function may take on the other ranks, at most


class RankProcesses:
    """`size` ranks that run functions together, for as long as the context is open."""

    def __init__(self, size: int, folder: Path, device: str = "cpu") -> None:
        """folder: an empty one, where the ranks find each other.

        device: cpu; cuda = a GPU for each; STAGED = the first GPU for all, sums in host memory.
        """
        self.comm: Comm
        self._size = size
        self._given = str(folder / "store"), device
        self._num_calls = 0
        self._connections: list[Connection] = []
        self._processes: list[Any] = []

    def __enter__(self) -> Self:
        for index in range(1, self._size):
            ours, theirs = FORKS.Pipe()
            process = FORKS.Process(
                target=_serve,
                args=(theirs, os.getpid(), Rank(index, self._size), *self._given),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        self.comm = _connect(Rank(0, self._size), *self._given)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        gc.collect()  # an engine's graphs hold operations of the group, whose end waits for them
        self.comm.close()
        for connection, process in zip(self._connections, self._processes, strict=True):
            if process.is_alive():
                connection.send(None)
            connection.close()
            process.join(_ANSWER_S)

    def start(self, fn: Callable[..., Any], *args: object) -> None:
        """Run `fn(comm, *args)` on every other rank; `answers` waits for it."""
        self._num_calls += 1
        for connection in self._connections:
            connection.send((self._num_calls, fn, args))

    def answers(self) -> list[Any]:
        """What the other ranks' functions returned. Raises AssertionError where one failed."""
        found = [
            self._answer(index, connection)
            for index, connection in enumerate(self._connections, start=1)
        ]
        for index, (is_right, answer) in enumerate(found, start=1):
            assert is_right, f"rank {index}: {answer}"
        return [answer for _, answer in found]

    def _answer(self, index: int, connection: Connection) -> tuple[bool, Any]:
        """Of the last call: a test that failed has left those of its own."""
        while connection.poll(_ANSWER_S):
            number, is_right, answer = connection.recv()
            if number == self._num_calls:
                return is_right, answer
        raise AssertionError(f"rank {index} did not answer")

    def say(self, message: object) -> None:
        """To functions that run on the other ranks, which take it by `hear`."""
        for connection in self._connections:
            connection.send(message)

    def run(self, fn: Callable[..., T], *args: object) -> list[T]:
        """`fn(comm, *args)` of every rank, this process's first; all at the same time."""
        self.start(fn, *args)
        try:
            own = fn(self.comm, *args)
        except Exception as error:
            self.answers()  # the other ranks' error may be the cause
            raise error
        return [own, *self.answers()]

    def kill(self, index: int) -> None:
        """As the kernel ends a process that takes too much memory."""
        process = self._processes[index - 1]
        process.kill()
        process.join(_ANSWER_S)


_parent: list[Connection] = []  # of a process that is another rank than the first


def hear() -> Any:
    """On another rank than the first: the next message of `RankProcesses.say`."""
    return _parent[0].recv()


class StagedRanks:
    """Ranks on one GPU, which NCCL refuses: exchanges go through host memory, never in graphs."""

    fused_sums = None

    def __init__(self, host: Comm) -> None:
        self.rank = host.rank
        self._host = host
        self.gather_bytes = host.gather_bytes
        self.close = host.close

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._host.all_reduce(x.cpu()).to(x.device)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._host.all_gather(x.cpu()).to(x.device)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self._host.reduce_scatter(x.cpu()).to(x.device)

    def all_to_all(self, x: Tensor) -> Tensor:
        return self._host.all_to_all(x.cpu()).to(x.device)

    def exchange_rows(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        return self._host.exchange_rows(x.cpu(), sent, received).to(x.device)


def _connect(rank: Rank, path: str, kind: str) -> Comm:
    device = torch.device("cuda", rank.index) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    comm = connect_ranks(rank, dist.FileStore(path, rank.size), device, TIMEOUT_S)
    return StagedRanks(comm) if kind == STAGED else comm


def _end_with(pid: int) -> None:
    """Ends this process after another, though it waits for a GPU that never ends."""
    with suppress(ProcessLookupError):  # it has ended
        select.select([os.pidfd_open(pid)], [], [])
    os._exit(1)


def _serve(connection: Connection, tests_pid: int, rank: Rank, path: str, device: str) -> None:
    threading.Thread(target=_end_with, args=(tests_pid,), daemon=True).start()
    torch.set_num_threads(1)
    _parent.append(connection)
    comm = _connect(rank, path, device)
    while (call := connection.recv()) is not None:
        number, fn, args = call
        try:
            answer = number, True, fn(comm, *args)
        except Exception:  # noqa: BLE001 - the test's process shows it
            answer = number, False, traceback.format_exc()
        connection.send(answer)
    gc.collect()
    comm.close()
