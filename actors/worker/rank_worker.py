"""One of the further ranks of a worker: an actor that launches what rank 0 launches.

It is created by rank 0, for one incarnation of it, and ends with it: Ray ends what a dead actor
owns, and the ring says within a moment that rank 0 is dead, whatever this process is doing. It ends
at its first error, and rank 0 with it, which is killed if it stands still; nobody repairs a rank.
"""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import msgspec

from actors.lifecycle.deployment import DeploymentSpec, served_fingerprint
from actors.lifecycle.threads import share_interpreter
from actors.observability.logs import set_up_logging
from actors.worker.faulty_steps import FaultySteps
from actors.worker.loading import EngineLoader
from actors.worker.stall_watch import EXIT_FAILED
from configs.faults import parse_faults
from engine.clock import MonotonicClock
from engine.core import Executor
from engine.errors import WorkerError
from engine.messages import Role, decode
from engine.ranks.following import Follower, report_failure
from engine.ranks.heartbeat import Heartbeat
from engine.ranks.plan_ring import PlanRingReader, RingError
from engine.ranks.rank import Rank
from engine.ranks.rank_tasks import Begin, TaskThreads, Work, in_thread
from engine.ranks.ring_messages import RankTask, TaskKind

if TYPE_CHECKING:
    from engine.engine import Engine

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsWork:
    """What a rank does with heads of KV, beside its steps; None = nobody asks it for that."""

    give: Callable[[bytes], object] | None = None  # an order of a rank of another worker -> heads
    pull: Work | None = None  # for rank 0, from ranks of another worker


# A deployment, a loaded rank and the name of its actor -> its work with heads.
MakeHeadsWork = Callable[[DeploymentSpec, "Engine", Rank, str], HeadsWork]

START_S = 120.0  # until every rank's process runs and has imported what it needs
LEADER_ENDS_S = 1.0  # rank 0, once it was told that a rank ends


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Which rank of which incarnation of a worker an actor is, and where it meets the others."""

    worker: str
    role: Role
    rank: int  # from 1
    size: int
    incarnation: str  # of rank 0
    board: str  # path of the file in which rank 0 has its store


class RankWorker:
    """Answers rank 0, by the ring, and who asks for heads."""

    def __init__(
        self,
        spec: DeploymentSpec,
        name: str,
        place: bytes,
        make_heads_work: MakeHeadsWork | None = None,
    ) -> None:
        """place: a RankPlace, encoded. make_heads_work: what this rank does with heads, if asked.

        Raises RingError when rank 0 is dead already.
        """
        set_up_logging(spec.config.log_level)
        share_interpreter()
        self._spec = spec
        self._name = name
        self._make_heads_work = make_heads_work
        self._heads = HeadsWork()  # until the model is loaded
        self._place = decode(place, RankPlace)
        stall_s = spec.config.workers.stall_s
        # Before torch is imported: from now on rank 0 knows when this process dies, and vice versa.
        incarnation, reader = self._place.incarnation, self._place.rank - 1
        self._ring = PlanRingReader(incarnation, reader, START_S, stall_s)
        threading.Thread(target=self._end_with_leader, name="leader's end", daemon=True).start()
        leader = {0: lambda: self._ring.writer_beats}
        self._heartbeat = Heartbeat(self._ring.beat, leader, stall_s, self._on_silence)
        self._heartbeat.start()
        EngineLoader(
            name,
            build=self._build,
            clock=MonotonicClock(),
            on_loaded=self._follow,
            on_failed=self._fail,
        ).start()

    def __repr__(self) -> str:
        """What Ray prints before this actor's log lines."""
        return self._name

    async def ping(self) -> None:
        """A supervisor of another deployment asks every actor that it finds."""

    async def give(self, order: bytes) -> object:
        """Gives a rank of another worker heads of this one. Raises HandoffError, WorkerError."""
        if self._heads.give is None:
            raise WorkerError(f"{self._name} is still loading its model, or has nothing to give")
        return await asyncio.to_thread(self._heads.give, order)

    def _build(self) -> "Engine":
        """Builds this rank's part of the model, on the loader's thread."""
        import torch  # which takes seconds

        from engine.build import build_engine
        from engine.ranks.meeting import join_ranks

        spec, place = self._spec, self._place
        comm = join_ranks(
            Rank(place.rank, place.size),
            place.board,
            place.incarnation,
            torch.device(spec.config.model.device),
            start_s=START_S,
            timeout_s=spec.config.workers.stall_s,
            in_rank_order=spec.config.model.deterministic,
        )
        return build_engine(
            spec.config,
            served_fingerprint(spec),
            MonotonicClock(),
            _ignore,
            spec.block_key,
            role=place.role,
            comm=comm,
        )

    def _follow(self, engine: "Engine") -> None:
        """Launches what rank 0 launches, for as long as it lives; on the loader's thread."""
        self._heartbeat.loaded()
        executor: Executor = engine.executor
        config, place = self._spec.config, self._place
        faults = parse_faults(config.faults) if config.debug else ()
        ours = [fault for fault in faults if fault.befalls(place.role, place.worker, place.rank)]
        if ours:
            executor = FaultySteps(executor, ours)
        try:
            shared = engine.kv_store.shared
            on_step_end = None if shared is None else shared.count_step
            Follower(
                executor,
                self._ring,
                engine.grammars.prepare,
                on_step_end,
                self._begin_task(engine),
                engine.drafting_executor,
            ).run()
        except Exception as error:  # noqa: BLE001 - rank 0 ends all ranks
            self._tell(error)
            self._end_leader(LEADER_ENDS_S, "does not end")
        _exit(0)

    def _begin_task(self, engine: "Engine") -> Callable[[RankTask], None] | None:
        """What begins the work that rank 0 asks for beside the steps; None = there is none."""
        works: dict[TaskKind, Begin] = {}
        if self._make_heads_work is not None:
            rank = Rank(self._place.rank, self._place.size)
            self._heads = self._make_heads_work(self._spec, engine, rank, self._name)
        if self._heads.pull is not None:
            works["heads"] = in_thread(self._heads.pull)
        if (part := engine.below_device.part) is not None:
            works |= {"host save": part.begin, "host load": part.begin}
        return TaskThreads(self._ring, works, self._fail).begin if works else None

    def _on_silence(self, _: int) -> None:
        self._end_leader(0.0, "stands still")

    def _end_leader(self, patience_s: float, why: str) -> NoReturn:
        """Ends with rank 0, which is killed if it has not ended within `patience_s`."""
        if not self._ring.wait_end(patience_s):
            logger.critical("%s: rank 0 %s, and is killed", self._name, why)
            os.kill(self._ring.writer_pid, signal.SIGKILL)
        _exit(EXIT_FAILED)

    def _fail(self, error: Exception) -> None:
        """Ends, and rank 0 with it; while the model loads, that one lives on to say why."""
        self._tell(error)
        _exit(EXIT_FAILED)

    def _tell(self, error: Exception) -> None:
        if not isinstance(error, RingError):
            logger.critical("%s failed, exiting", self._name, exc_info=error)
            report_failure(self._ring, error)

    def _end_with_leader(self) -> None:
        """A thread of its own: the other may hang in a collective whose peer is dead."""
        self._ring.wait_end()
        _exit(EXIT_FAILED)


def _ignore(_: object) -> None:
    """Only rank 0 sends KV on."""


def _exit(code: int) -> NoReturn:
    """Without cleanup, which may wait for ranks that are dead."""
    logging.shutdown()
    os._exit(code)
