"""What a worker is told to do at a step or a piece of KV: to send a signal, or to pause.

A test that waits for such a moment from outside comes too late if its own process stands still.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from actors.kv_transfer.contracts import IncomingData, PieceStore, StagedPiece
from engine.core import Executor, PendingStep
from engine.plan import StepPlan

CHECK_EVERY_S = 0.01


class Moment(Protocol):
    """A step or piece, and what happens before it."""

    @property
    def number(self) -> int:
        """From 1, counted from when the worker was told."""
        ...

    def happen(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A signal to a process. Of several workers that are told, the first one sends it, once."""

    number: int
    signal: signal.Signals
    sent: Path  # a file that the sender makes
    pid: int | None = None  # None = the sender's own

    def happen(self) -> None:
        try:
            self.sent.touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(self.pid or os.getpid(), self.signal)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """The worker makes a file, and waits for another one: for less than any deadline, please."""

    number: int
    begun: Path
    over: Path

    def happen(self) -> None:
        self.begun.touch()
        while not self.over.exists():
            time.sleep(CHECK_EVERY_S)


def before_step(moment: Moment) -> Callable[[Any], None]:
    """Returns what to call in workers that run nothing; see `Application.call_in_workers`."""
    return partial(_tell_steps, moment)


def before_piece(moment: Moment) -> Callable[[Any], None]:
    """Likewise of pieces that a decode worker writes into its store."""
    return partial(_tell_pieces, moment)


def _tell_steps(moment: Moment, worker: Any) -> None:  # noqa: ANN401 - of any role
    worker._host.engine.core.wrap_executor(lambda executor: _Steps(executor, moment))


def _tell_pieces(moment: Moment, worker: Any) -> None:  # noqa: ANN401 - its class is Ray's
    receiver = worker._host.connector.receiver
    receiver._store = _Pieces(receiver._store, moment)


class _Steps:
    """An executor that counts its launches."""

    def __init__(self, executor: Executor, moment: Moment) -> None:
        self._executor = executor
        self._moment = moment
        self._num_launches = 0

    def launch(self, plan: StepPlan) -> PendingStep:
        self._num_launches += 1
        if self._num_launches == self._moment.number:
            self._moment.happen()
        return self._executor.launch(plan)


class _Pieces:
    """A store that counts the pieces written into it."""

    def __init__(self, store: PieceStore, moment: Moment) -> None:
        self._store = store
        self._moment = moment
        self._num_writes = 0

    async def write(self, block_ids: Sequence[int], piece: StagedPiece[IncomingData]) -> bool:
        self._num_writes += 1
        if self._num_writes == self._moment.number:
            await asyncio.to_thread(self._moment.happen)
        return await self._store.write(block_ids, piece)
