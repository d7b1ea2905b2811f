"""The other ranks of an engine in this process: processes that build and launch what it does.

    python -m load_tests.lab.following FILE RANK        (started by `Following`)

Each sees one GPU, as a worker's ranks do, and follows the same ring by the same loop. Both sides
note when a message was written, read and launched, so that the cost of following can be told.
"""

import logging
import os
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import msgspec
import torch

from configs.schema import AppConfig
from engine.build import build_engine
from engine.clock import MonotonicClock
from engine.core import Executor, PendingStep
from engine.layers.context import Comm
from engine.plan import StepPlan
from engine.ranks.board import open_board
from engine.ranks.leading import (
    COMPARE_EVERY,
    Follower,
    LeadingExecutor,
    RankEnd,
    RankReports,
    report_failure,
)
from engine.ranks.meeting import join_ranks
from engine.ranks.plan_ring import PlanRing, PlanRingReader
from engine.ranks.rank import Rank
from load_tests.lab.pinned_routing import build_pinned
from load_tests.tables import Figure, median_figure

START_S = 120.0  # until the other processes run
STUCK_S = 60.0  # of anything between ranks
NUM_TOLD_STEPS = 256  # the last ones: figures are of these
FINGERPRINT = "bench"
LOG_FORMAT = "%(process)d %(relativeCreated)6d ms %(message)s"


class Followed(msgspec.Struct, frozen=True, kw_only=True):
    """What another rank is started with."""

    config: AppConfig
    ring: str
    board: str
    size: int
    pinned: int | None  # the seed of pinned routing
    uses_peer_memory: bool


class RankTimes(msgspec.Struct, kw_only=True):
    """Of one rank, by message or launch, on a clock that all processes share."""

    read_s: list[float] = []
    launch_s: list[tuple[float, float]] = []  # began, ended


class Following:
    """Starts the other ranks of a model and connects to them; a context manager."""

    comm: Comm

    def __init__(
        self,
        config: AppConfig,
        folder: Path,
        *,
        pinned: int | None = None,
        uses_peer_memory: bool = True,
    ) -> None:
        """folder: where the ranks leave what they timed; pinned: the seed of pinned routing.

        uses_peer_memory: else NCCL alone.
        """
        self._pinned = pinned
        self._size = config.workers.tensor_parallel_size
        self._config = config
        self._folder = folder
        self._uses_peer_memory = uses_peer_memory
        self._written_s: list[tuple[float, float]] = []  # began, ended
        self._processes: list[subprocess.Popen[bytes]] = []
        self._leading: LeadingExecutor | None = None
        self._is_ending = False

    def __enter__(self) -> Self:
        name = f"bench-{uuid.uuid4().hex}"
        self._ring = ring = PlanRing(name, self._size - 1, STUCK_S)
        self._reports = RankReports(ring, self._size, self._on_end)
        board = open_board()
        asked = Followed(
            config=self._config,
            ring=name,
            board=board,
            size=self._size,
            pinned=self._pinned,
            uses_peer_memory=self._uses_peer_memory,
        )
        path = self._folder / "followed.json"
        path.write_bytes(msgspec.json.encode(asked))
        for rank in range(1, self._size):
            command = [sys.executable, "-m", "load_tests.lab.following", str(path), str(rank)]
            sees = self._sees(rank)
            self._processes.append(subprocess.Popen(["env", *sees, *command]))
        for _ in self._processes:
            ring.accept(START_S)
        self._reports.start()
        self.comm = join(asked, 0)
        return self

    def _sees(self, rank: int) -> list[str]:
        if self._config.model.device == "cpu":
            return []
        found = torch.cuda.device_count()
        assert found >= self._size, f"{self._size} ranks need as many GPUs; here are {found}"
        return [f"CUDA_VISIBLE_DEVICES=GPU-{torch.cuda.get_device_properties(rank).uuid}"]

    def lead(self, executor: Executor) -> Executor:
        """An executor whose plans the other ranks launch, too."""
        write = self._ring.write

        def timed(message: bytes) -> None:
            began_s = time.perf_counter()
            write(message)
            self._written_s.append((began_s, time.perf_counter()))

        self._ring.write = timed  # type: ignore[method-assign]
        self._leading = LeadingExecutor(
            executor,
            self._ring,
            self._reports,
            compare_every=COMPARE_EVERY,
            patience_s=STUCK_S,
        )
        return self._leading

    def end(self) -> list[Figure]:
        """Stop the other ranks; what following cost in the last NUM_TOLD_STEPS steps."""
        assert self._leading is not None, "nobody was led"
        self._is_ending = True
        self._leading.stop()
        for process in self._processes:
            process.wait(STUCK_S)
        figures = [_figure("leader: write to the ring", _spans_us(self._written_s))]
        for rank in range(1, self._size):
            data = _times_path(self._folder, rank).read_bytes()
            figures += self._figures_of(rank, msgspec.json.decode(data, type=RankTimes))
        return figures

    def _figures_of(self, rank: int, times: RankTimes) -> list[Figure]:
        """The order to stop is a message, too, and no step."""
        assert len(times.read_s) == len(self._written_s), "not every message was read"
        began_s = [began for began, _ in self._written_s]
        way = [1e6 * (read - at) for read, at in zip(times.read_s, began_s, strict=True)][:-1]
        until_launched = [
            1e6 * (ended - read)
            for read, (_, ended) in zip(times.read_s[:-1], times.launch_s, strict=True)
        ]
        return [
            *_p50_and_p99(f"ring to rank {rank}", way[-NUM_TOLD_STEPS:]),
            _figure(f"rank {rank}: message to launched", until_launched),
            _figure(f"rank {rank}: launch", _spans_us(times.launch_s)),
        ]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_ending = True
        for process in self._processes:
            process.kill()
            process.wait()
        if error is None:  # else it could wait for the dead
            self._reports.wait_end(STUCK_S)  # then nobody looks at the ring
            self._ring.close()
            self.comm.close()

    def _on_end(self, end: RankEnd) -> None:
        """On a thread; the other may be in an operation that never ends."""
        if not self._is_ending:
            print(f"rank {end.rank}: {end.reason}", file=sys.stderr, flush=True)
            for process in self._processes:
                process.kill()
            os._exit(1)


def join(asked: Followed, rank: int) -> Comm:
    """Meet the other ranks."""
    return join_ranks(
        Rank(rank, asked.size),
        asked.board,
        asked.ring,
        torch.device(asked.config.model.device),
        start_s=START_S,
        timeout_s=STUCK_S,
        uses_peer_memory=asked.uses_peer_memory,
    )


def _figure(name: str, values_us: Sequence[float]) -> Figure:
    return median_figure(name, values_us[-NUM_TOLD_STEPS:], "us/step")


def _p50_and_p99(name: str, values_us: Sequence[float]) -> list[Figure]:
    p99 = sorted(values_us)[min(len(values_us) - 1, int(0.99 * len(values_us)))]
    return [
        Figure(name=f"{name}, p50", value=statistics.median(values_us), unit="us"),
        Figure(name=f"{name}, p99", value=p99, unit="us"),
    ]


def _spans_us(spans_s: Sequence[tuple[float, float]]) -> list[float]:
    return [1e6 * (ended - began) for began, ended in spans_s]


def _times_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


# ---- another rank --------------------------------------------------------------------------------


class _TimedReader:
    """A ring's reader that notes when it returned."""

    def __init__(self, ring: PlanRingReader, times: RankTimes) -> None:
        self._times = times
        self._read: Callable[[float | None], bytes | None] = ring.read
        self.report = ring.report
        self.report_in_turn = ring.report_in_turn

    def read(self, timeout_s: float | None = None) -> bytes | None:
        message = self._read(timeout_s)
        if message is not None:
            self._times.read_s.append(time.perf_counter())
        return message


class _TimedExecutor:
    def __init__(self, executor: Executor, times: RankTimes) -> None:
        self._executor = executor
        self._times = times

    def launch(self, plan: StepPlan) -> PendingStep:
        began_s = time.perf_counter()
        step = self._executor.launch(plan)
        self._times.launch_s.append((began_s, time.perf_counter()))
        return step


def follow(path: Path, rank: int) -> NoReturn:
    """Build, launch what rank 0 launches until it says stop, and leave the times in a file."""
    asked = msgspec.json.decode(path.read_bytes(), type=Followed)
    ring = PlanRingReader(asked.ring, rank - 1, START_S, STUCK_S)
    threading.Thread(target=_end_with_leader, args=(ring,), daemon=True).start()
    times = RankTimes()
    try:
        comm, model = join(asked, rank), None
        if asked.pinned is not None:
            model = build_pinned(asked.config, asked.pinned, comm.rank)
        engine = build_engine(
            asked.config, FINGERPRINT, MonotonicClock(), _no_handoff, model=model, comm=comm
        )
        del model  # the engine's alone
        reader, executor = _TimedReader(ring, times), _TimedExecutor(engine.executor, times)
        Follower(executor, reader, engine.grammars.prepare).run()  # type: ignore[arg-type]
    except Exception as error:
        report_failure(ring, error)
        raise
    _times_path(path.parent, rank).write_bytes(msgspec.json.encode(times))
    os._exit(0)  # without cleanup, which may wait for other ranks


def _end_with_leader(ring: PlanRingReader) -> None:
    ring.wait_end()
    os._exit(1)


def _no_handoff(event: object) -> None:
    raise AssertionError(f"{event} in a unified engine")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    follow(Path(sys.argv[1]), int(sys.argv[2]))
