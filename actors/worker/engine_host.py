"""What every worker has, whatever its role: an engine in its thread, and streams to the ingresses.

A worker actor is a shell around this and its side of the handoff. This file has a worker's life and
health; loading is in loading.py, requests are in requests.py. torch is imported only where the
model loads.
"""

import asyncio
import logging
import os
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from actors.lifecycle.deployment import DeploymentSpec, served_fingerprint
from actors.lifecycle.liveness import Lifeline, exit_for_good
from actors.lifecycle.threads import share_interpreter
from actors.observability.logs import set_up_logging
from actors.worker.cache_reports import CacheReports, TierReports
from actors.worker.draining import Draining
from actors.worker.engine_thread import EngineThread
from actors.worker.faulty_steps import FaultySteps
from actors.worker.gang import other_ranks
from actors.worker.kv_connector import KvConnector
from actors.worker.loading import EngineLoader, why_not_started
from actors.worker.rank_worker import MakeHeadsWork
from actors.worker.requests import WorkerRequests
from actors.worker.stall_watch import StallWatch, exit_failed, exit_stalled
from actors.worker.token_streams import TokenStreams
from configs.faults import parse_faults
from engine.clock import MonotonicClock
from engine.errors import WorkerError
from engine.host_id import host_id
from engine.kv.cache import check_blocks, num_held
from engine.kv.host.shared_file import claimed, name_for
from engine.messages import (
    CacheReport,
    FailureRecord,
    LoadReport,
    Role,
    TiersAfter,
    WorkerIdentity,
    WorkerLimits,
    WorkerStatus,
)
from engine.ranks.rank_reports import RankEnd
from engine.ranks.rank_tasks import RankTasks
from engine.ranks.step_counts import StepCounts
from engine.request import RequestKey
from engine.scheduling.contracts import StepOutput

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.kv.transfer import OutgoingEvent

logger = logging.getLogger(__name__)
T = TypeVar("T")

HOUSEKEEPING_S = 0.25
INGRESS_PREFIX = "ingress-"  # streams of other clients (the allocator) do not delay a leave
NO_LOAD = LoadReport(queued_tokens=0, num_waiting=0, num_running=0, num_free_blocks=0, num_blocks=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """What a worker has once its model is loaded, until its process ends."""

    engine: "Engine"
    thread: EngineThread
    requests: WorkerRequests


class EngineHost:
    """The engine, its thread and its token streams inside one worker process."""

    def __init__(
        self,
        spec: DeploymentSpec,
        name: str,
        role: Role,
        make_connector: Callable[["EngineHost", "Engine"], KvConnector],
        make_heads_work: MakeHeadsWork | None = None,
    ) -> None:
        """Starts loading at once. Must be created on the actor's event loop.

        make_heads_work: what this worker's other ranks do with heads, if asked.
        """
        set_up_logging(spec.config.log_level)
        share_interpreter()
        self.spec = spec
        self.name = name
        self.role = role
        self.config = spec.config
        self.namespace = spec.namespace
        faults = parse_faults(spec.config.faults) if spec.config.debug else ()
        self.faults = [fault for fault in faults if fault.befalls(role, name)]
        self.model = served_fingerprint(spec)
        self._block_key = spec.block_key
        self.clock = MonotonicClock()
        self.incarnation = uuid.uuid4().hex
        self._cache_reports = CacheReports(self.incarnation)
        self._tier_reports = TierReports(self.incarnation)
        self._ranks = other_ranks(
            spec, name, role, self.incarnation, self._on_rank_end, make_heads_work
        )
        self.connector = KvConnector()
        self._make_connector = make_connector
        self._loop = asyncio.get_running_loop()
        self._is_leaving = False  # for good, and other ranks with it
        self._lifeline = Lifeline.of(spec, self._leave_alone)
        self._running: Running | None = None  # None = the model still loads, or cannot be loaded
        self._failure: str | None = None  # why it cannot be loaded
        self.draining = Draining(name, self.clock, self._hand_over)
        self._report = NO_LOAD
        self.streams = TokenStreams(
            worker=name,
            incarnation=self.incarnation,
            config=spec.config.lifetimes,
            clock=self.clock,
            load=self._load_report,
            on_silent=self._drop_ingress,
            on_overflow=self._drop_slow_request,
        )
        self._housekeeper = self._loop.create_task(self._keep_house())
        self._load()

    # ---- life -----------------------------------------------------------------------------------

    def heartbeat(self) -> WorkerStatus:
        """Heartbeat of the supervisor; returns this worker's status."""
        self._lifeline.beat()
        # The housekeeper should never end: without it, silent peers are kept for ever.
        if self._housekeeper.done():
            self._on_engine_failure(self._housekeeper.exception() or RuntimeError("cancelled"))
        if self._failure is not None:
            return WorkerStatus(identity=None, state="failed", detail=self._failure)
        if self._running is None:
            return WorkerStatus(identity=None, state="starting")
        state: Literal["draining", "ready"] = "draining" if self.draining.is_begun else "ready"
        return WorkerStatus(identity=self.identity_of(self._running.engine), state=state)

    def drain(self, grace_s: float) -> None:
        """Take nothing new; exit for good once nothing runs, or after `grace_s` and a hand-over."""
        if not self.draining.is_begun:
            logger.info("%s drains: others take over", self.name)
        self.draining.begin(grace_s)

    def _load_report(self) -> LoadReport:
        if not self.draining.is_begun:
            return self._report
        return msgspec.structs.replace(self._report, is_draining=True)

    def identity_of(self, engine: "Engine") -> WorkerIdentity:
        """Returns what others are told of this worker with its loaded engine."""
        return WorkerIdentity(
            name=self.name,
            incarnation=self.incarnation,
            role=self.role,
            model=self.model,
            layout=engine.whole_layout,
            max_model_len=engine.max_model_len,
            pid=os.getpid(),
            host=host_id(),
            limits=WorkerLimits(
                max_step_ms=engine.limits.laps.max_step_ms,
                max_queued_tokens=engine.limits.max_queued_tokens,
            ),
            block_key=self._block_key,
        )

    @property
    def running(self) -> Running:
        """Raises WorkerError while the model is still loading, and if it cannot be loaded."""
        if self._running is None:
            raise self._not_running()
        return self._running

    def _not_running(self) -> WorkerError:
        if self._failure is not None:
            return WorkerError(f"{self.name} cannot start: {self._failure}")
        return WorkerError(f"{self.name} is still loading its model")

    @property
    def engine(self) -> "Engine":
        """Raises WorkerError as `running` does."""
        return self.running.engine

    @property
    def steps(self) -> StepCounts:
        """Of this worker's engine, if it has several ranks."""
        return self._ranks.steps

    @property
    def rank_tasks(self) -> RankTasks | None:
        """By which this worker gives its other ranks tasks, if it has some."""
        return self._ranks.rank_tasks

    # ---- requests -------------------------------------------------------------------------------

    def abort(self, key: RequestKey) -> None:
        """Forget a request in any phase; idempotent."""
        if self._running is not None:
            self._running.requests.abort(key)

    def read(self, ingress_id: str) -> AsyncGenerator[bytes, None]:
        """Yields encoded StepMessages for one client. Raises WorkerError as `running` does.

        A client regards a worker whose stream it reads as ready for work.
        """
        if self._running is None:
            raise self._not_running()
        return self.streams.read(ingress_id)

    def acknowledge(self, client_id: str, step_seq: int) -> None:
        """Notes that a client has every message up to `step_seq`.

        A message of an ingress counts as a heartbeat of the application, like the supervisor's:
        Serve may take longer to replace a supervisor than a worker waits for one.
        """
        if client_id.startswith(INGRESS_PREFIX):
            self._lifeline.beat()
        self.streams.acknowledge(client_id, step_seq)

    def fail(self, ingress_id: str, failure: FailureRecord) -> None:
        """Tells a request's ingress that this attempt has failed."""
        self.streams.publish([], [(ingress_id, failure)])

    async def call(self, fn: Callable[[], T]) -> T:
        """Run `fn` between two steps on the engine thread (the EngineCalls of the handoff)."""
        return await self.running.thread.call(fn)

    async def cache_report(self, after: int | None, tiers_after: TiersAfter) -> CacheReport:
        """Returns what the prefix cache gained and lost since `after`; see `CacheReports.since`.

        So it does of the tiers in `tiers_after`.
        """
        engine = self.engine
        blocks = await self.call(lambda: self._cache_reports.since(engine.cache, after))
        costs = engine.core.scheduler.costs
        levels = [] if engine.host_tier is None else engine.host_tier.levels()
        return CacheReport(
            costs=costs if costs.is_fitted else None,
            blocks=blocks,
            tiers=[self._tier_reports.of(level, tiers_after) for level in levels],
        )

    async def statistics(self) -> dict[str, object]:
        """Returns counters and held resources, from the engine thread; checks the block pool first.

        Raises AssertionError, with every term, if the conservation law does not hold.
        """
        engine, connector = self.engine, self.connector

        def look() -> dict[str, object]:
            owners = dict(engine.core.scheduler.owners()) | connector.owners()
            check_blocks(engine.cache, owners.items())
            return {
                "held_blocks": num_held(owners.items()),
                "scheduler": asdict(engine.core.scheduler.statistics()),
                "step_times": asdict(engine.core.statistics()),
                "execution": asdict(engine.executor.statistics()),
                "free_rows": engine.core.scheduler.num_free_rows,
                "available_blocks": engine.cache.num_available,
                "blocks": engine.cache.num_blocks,
            }

        seen = await self.call(look)
        own = {
            "streams": asdict(self.streams.statistics()),
            "tasks": len(asyncio.all_tasks()),
            "num_requests": self._num_requests,
        }
        return seen | connector.statistics() | own

    # ---- loading and stepping -------------------------------------------------------------------

    def _load(self) -> None:
        EngineLoader(
            self.name,
            build=self._build,
            clock=self.clock,
            on_loaded=lambda engine: self._loop.call_soon_threadsafe(self._begin, engine),
            on_failed=self._cannot_start,
        ).start()

    def _build(self) -> "Engine":
        """Builds the engine on the loader's thread. Raises ConfigError."""
        try:
            with claimed(name_for(self._block_key)):
                # First: the other ranks' processes start beside what follows.
                comm = self._ranks.join()
                from engine.build import build_engine  # imports torch, which takes seconds

                return build_engine(
                    self.config,
                    self.model,
                    self.clock,
                    self._on_outgoing,
                    self._block_key,
                    role=self.role,
                    comm=comm,
                )
        except WorkerError as error:
            raise self._ranks.cause_of(error) from error

    def _begin(self, engine: "Engine") -> None:
        """Lets the loaded engine run; on the actor's event loop, without a pause.

        One that cannot start, or whose other ranks could not, leaves the host tier: its process
        lives on to say why.
        """
        if self._failure is None:
            self._connect(engine)
        if self._failure is not None:
            engine.close()
            return
        self._wrap_executors(engine)
        if engine.executor.expert_loads is not None:
            self.streams.report_experts(engine.expert_totals)
        self._report = engine.load()  # from now on requests may be routed here
        self.streams.open()
        thread = EngineThread(
            engine.core, on_step=self._on_step, on_failure=self._on_engine_failure
        )
        if engine.host_tier is not None:
            engine.host_tier.on_progress(thread.wake)
        requests = WorkerRequests(
            engine, thread, self.connector, self.draining, self.clock, self._ranks
        )
        self._running = Running(engine=engine, thread=thread, requests=requests)
        thread.start()
        StallWatch(self.config.workers.stall_s, lambda: thread.turn, self._on_stall).start()

    def _connect(self, engine: "Engine") -> None:
        try:
            self.connector = self._make_connector(self, engine)
        except Exception as error:  # noqa: BLE001 - kept for the supervisor
            self._cannot_start(error)

    def _wrap_executors(self, engine: "Engine") -> None:
        """Lets the other ranks take part in steps, passes and moves; then puts faults around."""
        engine.core.wrap_executor(self._ranks.lead)
        if engine.draft_passes is not None:
            engine.draft_passes.wrap_executor(self._ranks.lead_drafts)
        if engine.host_tier is not None and (parts := engine.below_device.parts) is not None:
            engine.host_tier.wrap_mover(lambda mover: self._ranks.lead_moves(mover, parts))
        if self.faults:
            engine.core.wrap_executor(lambda executor: FaultySteps(executor, self.faults))

    def _cannot_start(self, error: Exception) -> None:
        """Keeps the reason for the supervisor; a worker that ran before is restarted instead."""
        if self._failure is not None:
            return  # another rank's, which was first
        self._failure = why_not_started(self.name, error, may_restart=not self.draining.is_begun)
        self._ranks.kill()

    def _on_step(self, output: StepOutput) -> None:
        """Takes a step's output on the engine thread, after every turn of its loop."""
        self._report = self.engine.load()
        if output.num_scheduled_tokens or output.failures or output.left:
            self._loop.call_soon_threadsafe(self._deliver, output)

    def _deliver(self, output: StepOutput) -> None:
        self.streams.publish(output.tokens, output.failures)
        self.connector.on_step()

    def _on_outgoing(self, event: "OutgoingEvent") -> None:
        """Takes a handoff's event on the engine thread: a prompt started, finished or ended."""
        self._loop.call_soon_threadsafe(self.connector.on_outgoing, event)

    def _on_engine_failure(self, error: BaseException) -> None:
        self._ranks.kill()
        exit_failed(self.name, error)

    def _on_stall(self) -> None:
        self._ranks.kill()
        exit_stalled(self.name, self.config.workers.stall_s)

    def _on_rank_end(self, end: RankEnd) -> None:
        """Another rank is dead, or said why it ends: this worker ends, and is started anew whole.

        What a rank says while the model loads is kept for the supervisor, like this rank's failure.
        """
        if self._failure is not None or self._is_leaving:
            return  # it is the end of all of them
        if self._running is None and not end.is_dead:
            self._cannot_start(end.error())
        else:
            self._on_engine_failure(end.error())

    # ---- giving up on others --------------------------------------------------------------------

    def _drop_ingress(self, ingress_id: str) -> None:
        if self._running is None:
            return
        self._running.requests.drop_ingress(ingress_id)
        if ingress_id.startswith(INGRESS_PREFIX):
            logger.warning("%s: %s went silent; its requests are dropped", self.name, ingress_id)

    def _drop_slow_request(self, ingress_id: str, key: RequestKey) -> None:
        reason = "its tokens were not acknowledged"
        logger.warning("%s: %s is cancelled: %s", self.name, key, reason)
        self.abort(key)
        self.fail(ingress_id, FailureRecord(key=key, reason=reason, retryable=False))

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            self.streams.expire_silent()
            if await self._may_leave():
                logger.info("%s has drained and exits", self.name)
                self._is_leaving = True
                self._leave_host_tier()
                exit_for_good()

    def _leave_alone(self) -> bool:
        """Nobody was heard: the last act of this worker, on the lifeline's thread."""
        self._is_leaving = True
        self._leave_host_tier()
        return True

    def _leave_host_tier(self) -> None:
        """The last worker removes the arena; one that is killed leaves that to others."""
        if self._running is not None and (tier := self._running.engine.host_tier) is not None:
            tier.leave()

    async def _may_leave(self) -> bool:
        is_wanted = self.streams.is_awaited or self.streams.has_reader(INGRESS_PREFIX)
        is_idle = self._failure is not None or (self._num_requests == 0 and not is_wanted)
        return await self.draining.may_leave(is_idle=is_idle, has_unread=self.streams.has_unread)

    async def _hand_over(self) -> None:
        """Gives up running requests; their ingresses continue them elsewhere."""
        if self._running is None:
            return
        reason = f"{self.name} is drained"
        for ingress_id in self.streams.clients():
            for key in await self._running.requests.hand_over(ingress_id):
                self.fail(ingress_id, FailureRecord(key=key, reason=reason, retryable=True))

    @property
    def _num_requests(self) -> int:
        return self._report.num_waiting + self._report.num_running + self.connector.num_handoffs
