"""The other ranks of a worker with several, seen from the worker, which is rank 0.

A gang starts whole and ends whole. Rank 0 creates an actor for every other rank, each in its own
bundle of the worker's placement group. The death of one, its last words, or a step that one does
not finish end all: rank 0 kills the others and exits, Ray starts it anew, and it creates new ones.
An incarnation of rank 0 has its own name for the ring and the keys of the store, so that ranks of
two never meet.
"""

import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import ray

from actors.lifecycle.deployment import DeploymentSpec, rank_name, rank_options
from actors.lifecycle.placement_groups import in_own_bundle
from actors.rpc.handles import ActorStart, create_actor
from actors.worker.rank_worker import START_S, MakeHeadsWork, RankPlace, RankWorker
from engine.core import DraftingExecutor, Executor
from engine.errors import WorkerError
from engine.messages import Role, encode
from engine.ranks.board import open_board
from engine.ranks.heartbeat import Heartbeat
from engine.ranks.leading import COMPARE_EVERY, LeadingExecutor
from engine.ranks.plan_ring import PlanRing, RingError
from engine.ranks.rank import Rank
from engine.ranks.rank_reports import RankEnd, RankReports
from engine.ranks.rank_tasks import RankTasks
from engine.ranks.step_counts import StepCounts
from engine.request import Constraint

if TYPE_CHECKING:
    from engine.kv.host.movers import BlockMover
    from engine.layers.context import Comm
    from engine.ranks.block_parts import BlockParts
    from engine.ranks.own_moves import OwnBlocks

logger = logging.getLogger(__name__)

NAME_IS_FREE_S = 30.0  # Ray ends the ranks of a dead rank 0 in much less
LOOK_EVERY_S = 0.05
LOOK_AT_STARTS_S = 1.0
LAST_WORDS_S = 2.0  # until the reason is here, after an operation between ranks has failed


class OtherRanks(Protocol):
    """What an engine host needs of the ranks beside its own."""

    def join(self) -> "Comm":
        """Starts the others and connects to them; blocks. Raises WorkerError, ConfigError."""
        ...

    def lead(self, executor: Executor) -> Executor:
        """An executor whose plans the others launch, too."""
        ...

    def lead_drafts(self, executor: DraftingExecutor) -> DraftingExecutor:
        """Likewise of the model that drafts, if any; call it after `lead`."""
        ...

    def lead_moves(self, mover: "BlockMover", parts: "BlockParts | OwnBlocks") -> "BlockMover":
        """Likewise of what moves blocks to and from the host tier.

        parts: of the tier's blocks.
        """
        ...

    @property
    def steps(self) -> StepCounts:
        """How far rank 0 is; counts nothing while it is the only rank."""
        ...

    @property
    def rank_tasks(self) -> RankTasks | None:
        """By which rank 0 asks the others for work beside steps; None = there are no others."""
        ...

    @property
    def compiles(self) -> bool:
        """Whether `compile` has to be called for a constraint before a request brings it."""
        ...

    def compile(self, constraint: Constraint) -> None:
        """Tells the others to compile it; on the engine thread, once it is led."""
        ...

    def cause_of(self, error: Exception) -> Exception:
        """The error of another rank that is behind an error of this one, or the error itself."""
        ...

    def kill(self) -> None:
        """Ends the others at once, whatever they do; from any thread, any number of times."""
        ...


class NoOtherRanks:
    """Of a worker that holds the whole model."""

    compiles = False
    rank_tasks = None

    def __init__(self) -> None:
        self.steps = StepCounts()

    def join(self) -> "Comm":
        from engine.layers.context import SINGLE_RANK  # imports torch, which takes seconds

        return SINGLE_RANK

    def lead(self, executor: Executor) -> Executor:
        return executor

    def lead_drafts(self, executor: DraftingExecutor) -> DraftingExecutor:
        return executor

    def lead_moves(self, mover: "BlockMover", parts: "BlockParts | OwnBlocks") -> "BlockMover":
        return mover

    def compile(self, constraint: Constraint) -> None:
        """There is nobody."""

    def cause_of(self, error: Exception) -> Exception:
        return error

    def kill(self) -> None:
        """There is nobody."""


class Gang:
    """Ranks 1 and up of a worker."""

    compiles = True

    def __init__(
        self,
        spec: DeploymentSpec,
        name: str,
        role: Role,
        incarnation: str,
        on_end: Callable[[RankEnd], object],
        make_heads_work: MakeHeadsWork | None,
    ) -> None:
        """on_end: called with the first end of a rank, on a thread of the gang's.

        make_heads_work: what the ranks do with heads, if asked.
        """
        self._spec = spec
        self._name = name
        self._role = role
        self._incarnation = incarnation
        self._on_end = on_end
        self._make_heads_work = make_heads_work
        self._size = spec.config.workers.num_ranks[role]
        self.steps = StepCounts()
        self.rank_tasks: RankTasks | None = None  # None = they have not joined
        self._actors: list[Any] = []  # a rank lives as long as rank 0 has its handle
        self._processes: list[int] = []  # pidfds: a number may be another process's by now
        self._ring: PlanRing | None = None
        self._reports: RankReports | None = None
        self._leading: LeadingExecutor | None = None
        self._heartbeat: Heartbeat | None = None

    def join(self) -> "Comm":
        stall_s = self._spec.config.workers.stall_s
        self._ring = ring = PlanRing(self._incarnation, self._size - 1, stall_s)
        self._reports = RankReports(ring, self._size, self._on_end)
        self.rank_tasks = RankTasks(ring.write, self._reports.wait_answers)
        others = {reader + 1: partial(ring.beats, reader) for reader in range(self._size - 1)}
        self._heartbeat = Heartbeat(ring.beat, others, stall_s, self._on_silence)
        self._heartbeat.start()
        board = open_board()
        self._actors = [self._create(rank, board) for rank in range(1, self._size)]
        import torch  # it takes seconds, in which the others' processes start

        from engine.ranks.meeting import join_ranks

        self._wait_connected(ring)
        self._reports.start()
        model = self._spec.config.model
        return join_ranks(
            Rank(0, self._size),
            board,
            self._incarnation,
            torch.device(model.device),
            start_s=START_S,
            timeout_s=stall_s,
            in_rank_order=model.deterministic,
        )

    def _wait_connected(self, ring: PlanRing) -> None:
        """Until every rank's process is connected to the ring.

        Raises RingError after START_S. One that is dead before that ends the gang.
        """
        starts = {rank: ActorStart(actor) for rank, actor in enumerate(self._actors, start=1)}
        until_s = time.monotonic() + START_S
        while starts:
            try:
                reader = ring.accept(LOOK_AT_STARTS_S)
            except RingError as error:
                if time.monotonic() > until_s:
                    late = f"ranks {sorted(starts)} did not start within {START_S:.0f} s"
                    raise RingError(late) from error
                for rank, start in starts.items():
                    if failure := start.failure():
                        self._on_end(RankEnd(rank=rank, reason=failure, is_dead=True))
                continue
            del starts[reader + 1]
            with suppress(ProcessLookupError):  # its end is noticed by the ring
                self._processes.append(os.pidfd_open(ring.pid(reader)))
            logger.info("%s: rank %d runs (pid %d)", self._name, reader + 1, ring.pid(reader))

    def _create(self, rank: int, board: str) -> Any:  # noqa: ANN401 - a handle of Ray's
        """An actor for a rank; that of another incarnation, which has its name, is ended.

        Raises WorkerError if the name does not become free.
        """
        spec, name = self._spec, rank_name(self._name, rank)
        place = RankPlace(
            worker=self._name,
            role=self._role,
            rank=rank,
            size=self._size,
            incarnation=self._incarnation,
            board=board,
        )
        options = rank_options(spec, name) | in_own_bundle(rank)
        until_s = time.monotonic() + NAME_IS_FREE_S
        while True:
            try:
                rank_worker = ray.remote(RankWorker)
                return create_actor(
                    rank_worker, options, spec, name, encode(place), self._make_heads_work
                )
            except ValueError as error:
                if time.monotonic() > until_s:
                    raise WorkerError(f"{name} of another incarnation does not end") from error
            with suppress(ValueError):
                ray.kill(ray.get_actor(name, spec.namespace), no_restart=True)
            time.sleep(LOOK_EVERY_S)

    def lead(self, executor: Executor) -> Executor:
        assert self._ring is not None, "ranks join before they are led"
        assert self._reports is not None, "ranks join before they are led"
        assert self._heartbeat is not None, "ranks join before they are led"
        self._heartbeat.loaded()
        self._leading = LeadingExecutor(
            executor,
            self._ring,
            self._reports,
            compare_every=1 if self._spec.config.debug else COMPARE_EVERY,
            patience_s=self._spec.config.workers.stall_s,
            steps=self.steps,
        )
        return self._leading

    def lead_drafts(self, executor: DraftingExecutor) -> DraftingExecutor:
        assert self._leading is not None, "the others are led first"
        return self._leading.lead_drafts(executor)

    def lead_moves(self, mover: "BlockMover", parts: "BlockParts | OwnBlocks") -> "BlockMover":
        assert self.rank_tasks is not None, "ranks join before they are led"
        return parts.lead(mover, self.rank_tasks, self.steps)

    def compile(self, constraint: Constraint) -> None:
        assert self._leading is not None, "the others are led first"
        self._leading.compile(constraint)

    def _on_silence(self, rank: int) -> None:
        self._on_end(RankEnd(rank=rank, reason="it stands still", is_dead=True))

    def cause_of(self, error: Exception) -> Exception:
        if self._reports is None or not isinstance(error, WorkerError):
            return error
        end = self._reports.wait_end(LAST_WORDS_S)
        return error if end is None else end.error()

    def kill(self) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)


def other_ranks(
    spec: DeploymentSpec,
    name: str,
    role: Role,
    incarnation: str,
    on_end: Callable[[RankEnd], object],
    make_heads_work: MakeHeadsWork | None = None,
) -> OtherRanks:
    """Those that the configuration asks for."""
    if spec.config.workers.num_ranks[role] == 1:
        return NoOtherRanks()
    return Gang(spec, name, role, incarnation, on_end, make_heads_work)
