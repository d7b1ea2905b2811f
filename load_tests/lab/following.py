"""The other ranks of an engine in this process: processes that build and launch what it does.

    python -m load_tests.lab.following FILE RANK        (started by `Following`)

Each sees one GPU, as a worker's ranks do, and follows the same ring by the same loop. Both sides
note when a message was written, read and launched, so that the cost of following can be told. The
others leave what they note in files, step by step: it can be told at any time, and needs no rank
that ends well.
"""

import faulthandler
import gc
import logging
import math
import os
import statistics
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, NoReturn, Self

import msgspec
import torch

from actors.lifecycle.threads import share_interpreter
from actors.worker.stall_watch import STDERR, StallWatch
from configs.schema import AppConfig
from engine.build import build_engine
from engine.clock import MonotonicClock
from engine.core import Executor, PendingStep
from engine.layers.context import Comm
from engine.plan import StepPlan, StepResult
from engine.ranks.board import open_board
from engine.ranks.following import Follower, report_failure
from engine.ranks.leading import COMPARE_EVERY, LeadingExecutor
from engine.ranks.meeting import join_ranks
from engine.ranks.plan_ring import PlanRing, PlanRingReader, RingError
from engine.ranks.rank import Rank
from engine.ranks.rank_reports import RankEnd, RankReports
from engine.ranks.step_counts import StepCounts
from load_tests.lab.child_processes import die_with_parent
from load_tests.lab.pinned_routing import build_pinned
from load_tests.tables import Figure, median_figure

logger = logging.getLogger(__name__)

START_S = 120.0  # until the other processes run
LOOK_S = 1.0  # at whether they still do, until they are here
STUCK_S = 60.0  # of anything between ranks
END_S = 20.0  # until a process has ended that was told to, or was killed
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


class StepMoments(NamedTuple):
    """When a rank did what with a step, in seconds on a clock that all processes share."""

    read: float  # its message was read from the ring
    launch_began: float
    launch_ended: float
    take_began: float  # its result was taken; NaN = the step had not ended, so this would wait
    take_ended: float


_MOMENTS = struct.Struct(f"<{len(StepMoments._fields)}d")


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
        self._written_s: list[tuple[float, float]] = []  # began, ended; of every step's message
        self._launched_s: list[tuple[float, float]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._leading: LeadingExecutor | None = None
        self._steps = StepCounts()
        self._watch = StallWatch(STUCK_S, self._turn, self._on_stall)
        self._is_ending = False

    def __enter__(self) -> Self:
        name = f"bench-{uuid.uuid4().hex}"
        self._ring = ring = PlanRing(name, self._size - 1, STUCK_S)
        self._reports = RankReports(ring, self._size, self._on_end)
        asked = Followed(
            config=self._config,
            ring=name,
            board=open_board(),
            size=self._size,
            pinned=self._pinned,
            uses_peer_memory=self._uses_peer_memory,
        )
        path = self._folder / "followed.json"
        path.write_bytes(msgspec.json.encode(asked))
        try:
            for rank in range(1, self._size):
                command = [sys.executable, "-m", "load_tests.lab.following", str(path), str(rank)]
                sees = self._sees(rank)
                self._processes.append(subprocess.Popen(["env", *sees, *command]))
            self._wait_connected(ring)
            self._reports.start()
            self.comm = join(asked, 0)
        except BaseException:
            self._kill()
            raise
        return self

    def _sees(self, rank: int) -> list[str]:
        if self._config.model.device == "cpu":
            return []
        found = torch.cuda.device_count()
        assert found >= self._size, f"{self._size} ranks need as many GPUs; here are {found}"
        return [f"CUDA_VISIBLE_DEVICES=GPU-{torch.cuda.get_device_properties(rank).uuid}"]

    def _wait_connected(self, ring: PlanRing) -> None:
        """Raises RingError after START_S, or when a process has ended."""
        num_missing, until_s = len(self._processes), time.monotonic() + START_S
        while num_missing:
            try:
                ring.accept(LOOK_S)
                num_missing -= 1
            except RingError:
                ended = [process.poll() for process in self._processes]
                if any(code is not None for code in ended) or time.monotonic() > until_s:
                    raise

    def lead(self, executor: Executor) -> Executor:
        """An executor whose plans the other ranks launch, too."""
        write = self._ring.write

        def timed(message: bytes) -> None:
            began_s = time.perf_counter()
            write(message)
            self._written_s.append((began_s, time.perf_counter()))

        self._ring.write = timed  # type: ignore[method-assign]
        self._leading = LeadingExecutor(
            _NotedLaunches(executor, self._launched_s),
            self._ring,
            self._reports,
            compare_every=COMPARE_EVERY,
            patience_s=STUCK_S,
            steps=self._steps,
        )
        self._watch.start()
        return self._leading

    def _turn(self) -> int | None:
        """Of steps that have ended; None = all that were launched."""
        num_ended = self._steps.num_ended
        return num_ended if num_ended < self._steps.num_launched else None

    def figures(self) -> list[Figure]:
        """What following cost so far, in the last NUM_TOLD_STEPS steps that ended on every rank."""
        figures = [
            _figure("leader: write to the ring", _spans_us(self._written_s)),
            _figure("leader: launch after that", _spans_us(self._launched_s)),
        ]
        for rank in range(1, self._size):
            figures += self._figures_of(rank, read_moments(_moments_path(self._folder, rank)))
        return figures

    def _figures_of(self, rank: int, steps: Sequence[StepMoments]) -> list[Figure]:
        num_told = len(steps), len(self._written_s)
        assert 0 < num_told[0] <= num_told[1], f"rank {rank} noted {num_told[0]} of {num_told[1]}"
        written = zip(steps, self._written_s, strict=False)  # the last ones have not ended there
        way_us = [1e6 * (step.read - began_s) for step, (began_s, _) in written]
        launched_us = [1e6 * (step.launch_ended - step.read) for step in steps]
        launch_us = [1e6 * (step.launch_ended - step.launch_began) for step in steps]
        take_us = [1e6 * (step.take_ended - step.take_began) for step in steps]
        taken_us = [took_us for took_us in take_us if not math.isnan(took_us)]
        return [
            *_p50_and_p99(f"ring to rank {rank}", way_us[-NUM_TOLD_STEPS:]),
            _figure(f"rank {rank}: message to launched", launched_us),
            _figure(f"rank {rank}: launch", launch_us),
            *([_figure(f"rank {rank}: take a step's result", taken_us)] if taken_us else []),
        ]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Takes a bounded time, whatever the others do: see END_S, and `abort` of comm.py."""
        self._is_ending = True
        self._watch.stop()
        if error is not None:  # else an operation could wait for the dead
            self._kill()
            return
        if self._leading is not None:
            with suppress(RingError):  # one that is dead needs no order to stop
                self._leading.stop()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
        codes = [process.poll() for process in self._processes]
        if any(codes) or None in codes:
            logger.warning("the other ranks ended with %s (None = not at all)", codes)
        self._kill()
        if self._reports.wait_end(END_S) is not None:  # then nobody looks at the ring
            self._ring.close()
        self._leading = None  # it has the engine's executor
        gc.collect()  # the engine's graphs hold operations of the group, whose end waits for them
        self.comm.close()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):  # the kernel has not ended it yet
                process.wait(END_S)

    def _on_end(self, end: RankEnd) -> None:
        """On a thread; the other may be in an operation that never ends."""
        if not self._is_ending:
            self._give_up(f"rank {end.rank}: {end.reason}")

    def _on_stall(self) -> None:
        faulthandler.dump_traceback(file=STDERR, all_threads=True)
        self._give_up(f"no step ended for {STUCK_S:g} s")

    def _give_up(self, reason: str) -> NoReturn:
        print(reason, file=sys.stderr, flush=True)
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


def _moments_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.moments"


def read_moments(path: Path) -> list[StepMoments]:
    """The steps that a rank has noted so far, in their order; the last may be half written."""
    data = path.read_bytes()
    whole = data[: len(data) // _MOMENTS.size * _MOMENTS.size]
    return [StepMoments(*moments) for moments in _MOMENTS.iter_unpack(whole)]


class _NotedLaunches:
    """An executor whose launches are noted: when each began and ended."""

    def __init__(self, executor: Executor, launched_s: list[tuple[float, float]]) -> None:
        self._executor = executor
        self._launched_s = launched_s

    def launch(self, plan: StepPlan) -> PendingStep:
        began_s = time.perf_counter()
        step = self._executor.launch(plan)
        self._launched_s.append((began_s, time.perf_counter()))
        return step


# ---- another rank --------------------------------------------------------------------------------


class StepNotes:
    """Notes the moments of a rank's steps, and leaves them in a file between two messages."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._noted: list[bytes] = []
        self.read_s = 0.0  # when the newest message was read

    def note(self, moments: StepMoments) -> None:
        self._noted.append(_MOMENTS.pack(*moments))

    def write(self) -> None:
        if self._noted:
            self._file.write(b"".join(self._noted))
            self._noted.clear()


class _TimedReader:
    """A ring's reader that notes when it returned."""

    def __init__(self, ring: PlanRingReader, notes: StepNotes) -> None:
        self._notes = notes
        self._read: Callable[[float | None], bytes | None] = ring.read
        self.report = ring.report
        self.report_in_turn = ring.report_in_turn

    def read(self, timeout_s: float | None = None) -> bytes | None:
        self._notes.write()
        message = self._read(timeout_s)
        self._notes.read_s = time.perf_counter()
        return message


class _TimedExecutor:
    def __init__(self, executor: Executor, notes: StepNotes) -> None:
        self._executor = executor
        self._notes = notes

    def launch(self, plan: StepPlan) -> PendingStep:
        read_s, began_s = self._notes.read_s, time.perf_counter()
        step = self._executor.launch(plan)
        return _TimedStep(step, self._notes, (read_s, began_s, time.perf_counter()))


class _TimedStep:
    def __init__(
        self, step: PendingStep, notes: StepNotes, launched: tuple[float, float, float]
    ) -> None:
        """launched: when the step's message was read, its launch began and ended."""
        self._step = step
        self._notes = notes
        self._launched = launched

    @property
    def is_done(self) -> bool:
        return self._step.is_done

    def wait(self) -> StepResult:
        began_s = time.perf_counter() if self._step.is_done else math.nan
        result = self._step.wait()
        self._notes.note(StepMoments(*self._launched, began_s, time.perf_counter()))
        return result


def follow(path: Path, rank: int) -> NoReturn:
    """Build, launch what rank 0 launches until it says stop, and leave the moments in a file."""
    # The thread that waits for the ring's end needs the interpreter's lock, which a call of the
    # driver may hold for ever.
    die_with_parent()
    asked = msgspec.json.decode(path.read_bytes(), type=Followed)
    ring = PlanRingReader(asked.ring, rank - 1, START_S, STUCK_S)
    threading.Thread(target=_end_with_leader, args=(ring,), daemon=True).start()
    notes = StepNotes(_moments_path(path.parent, rank))
    try:
        comm, model = join(asked, rank), None
        if asked.pinned is not None:
            model = build_pinned(asked.config, asked.pinned, comm.rank)
        engine = build_engine(
            asked.config, FINGERPRINT, MonotonicClock(), _no_handoff, model=model, comm=comm
        )
        del model  # the engine's alone
        share_interpreter()  # this, and what comes next, as a rank of a worker does
        gc.collect()
        gc.freeze()
        reader, executor = _TimedReader(ring, notes), _TimedExecutor(engine.executor, notes)
        Follower(executor, reader, engine.grammars.prepare).run()  # type: ignore[arg-type]
    except Exception as error:
        report_failure(ring, error)
        raise
    notes.write()
    os._exit(0)  # without cleanup, which may wait for other ranks


def _end_with_leader(ring: PlanRingReader) -> None:
    ring.wait_end()
    os._exit(1)


def _no_handoff(event: object) -> None:
    raise AssertionError(f"{event} in a unified engine")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    follow(Path(sys.argv[1]), int(sys.argv[2]))
