"""What every worker has, whatever its role: an engine in its thread, and streams to the ingresses.

A worker actor is a shell around this plus its side of the handoff. The model loads in a thread, so
the actor answers heartbeats meanwhile; torch is imported only there.
"""

import asyncio
import gc
import logging
import os
import threading
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

import ray

from actors.lifecycle.deployment import DeploymentSpec
from actors.lifecycle.liveness import Lifeline, exit_for_good
from actors.lifecycle.placement_groups import remove_unused
from actors.observability.logs import set_up_logging
from actors.worker.cache_reports import CacheReports
from actors.worker.draining import Draining
from actors.worker.engine_thread import EngineThread
from actors.worker.faulty_steps import FaultySteps
from actors.worker.kv_connector import KvConnector
from actors.worker.stall_watch import EXIT_FAILED, StallWatch, exit_failed, exit_stalled
from actors.worker.token_streams import TokenStreams
from configs.faults import parse_faults
from engine.clock import MonotonicClock
from engine.errors import ConfigError, RequestError, WorkerError
from engine.kv.cache import check_blocks, num_held
from engine.messages import (
    CacheReport,
    FailureRecord,
    LoadReport,
    Role,
    Submit,
    WorkerIdentity,
    WorkerStatus,
)
from engine.request import Request, RequestKey
from engine.scheduling.contracts import StepOutput

if TYPE_CHECKING:
    from engine.build import Engine
    from engine.kv.transfer import OutgoingEvent

logger = logging.getLogger(__name__)
T = TypeVar("T")

HOUSEKEEPING_S = 0.25
INGRESS_PREFIX = "ingress-"  # streams of other clients (the allocator) hold nobody back
MAX_ABORTED_KEYS = 4096
NO_LOAD = LoadReport(queued_tokens=0, num_waiting=0, num_running=0, num_free_blocks=0, num_blocks=0)


class EngineHost:
    """The engine, its thread and its token streams inside one worker process."""

    def __init__(
        self,
        spec: DeploymentSpec,
        name: str,
        role: Role,
        make_connector: Callable[["EngineHost", "Engine"], KvConnector],
    ) -> None:
        """Starts loading at once. Must be created on the actor's event loop."""
        set_up_logging()
        self.name = name
        self.role = role
        self.config = spec.config
        self.namespace = spec.namespace
        faults = parse_faults(spec.config.faults) if spec.config.debug else ()
        self.faults = [fault for fault in faults if fault.befalls(role, name)]
        self.model = spec.model
        self._block_key = spec.block_key
        self.clock = MonotonicClock()
        self.incarnation = uuid.uuid4().hex
        self._cache_reports = CacheReports(self.incarnation)
        self.connector = KvConnector()
        self._make_connector = make_connector
        self._loop = asyncio.get_running_loop()
        # First what waits for a device, or it would take the one that is given back here.
        clear = partial(remove_unused, spec.namespace, spec.hash)
        self._lifeline = Lifeline(spec.config.lifetimes.supervisor_silence_s, clear).start()
        self._engine: Engine | None = None
        self._thread: EngineThread | None = None
        self._failure: str | None = None
        self._aborted: dict[RequestKey, None] = {}  # not found when aborted; oldest first
        self.draining = Draining(name, self.clock, self._hand_over)
        self._report = NO_LOAD
        self.streams = TokenStreams(
            worker=name,
            incarnation=self.incarnation,
            config=spec.config.lifetimes,
            clock=self.clock,
            load=lambda: self._report,
            on_silent=self._drop_ingress,
            on_overflow=self._drop_slow_request,
        )
        self._housekeeper = self._loop.create_task(self._keep_house())
        threading.Thread(target=self._load, name="model loader", daemon=True).start()

    # ---- life -----------------------------------------------------------------------------------

    def heartbeat(self) -> WorkerStatus:
        """The supervisor was heard; say how we are."""
        self._lifeline.beat()
        if self._housekeeper.done():  # it never returns: without it, silent peers are kept for ever
            self._on_engine_failure(self._housekeeper.exception() or RuntimeError("cancelled"))
        if self._failure is not None:
            return WorkerStatus(identity=None, state="failed", detail=self._failure)
        if self._engine is None:
            return WorkerStatus(identity=None, state="starting")
        state: Literal["draining", "ready"] = "draining" if self.draining.is_begun else "ready"
        return WorkerStatus(identity=self.identity, state=state)

    def drain(self, grace_s: float) -> None:
        """Take nothing new; exit for good once nothing runs, or after `grace_s` and a hand-over."""
        if not self.draining.is_begun:
            logger.info("%s drains: another deployment takes over", self.name)
        self.draining.begin(grace_s)

    @property
    def identity(self) -> WorkerIdentity:
        engine = self.engine
        return WorkerIdentity(
            name=self.name,
            incarnation=self.incarnation,
            role=self.role,
            model=self.model,
            layout=engine.layout,
            max_model_len=engine.max_model_len,
            pid=os.getpid(),
            block_key=self._block_key,
        )

    @property
    def engine(self) -> "Engine":
        """The loaded engine. Raises WorkerError while the model is still loading."""
        if self._engine is None:
            raise WorkerError(f"{self.name} is still loading its model")
        return self._engine

    # ---- requests -------------------------------------------------------------------------------

    async def submit(self, submit: Submit) -> None:
        """Queue a request. Raises RequestError if it can never fit, CapacityError if not now."""
        engine = self.engine
        self.draining.check(submit.key)
        if len(submit.token_ids) >= engine.max_model_len:
            raise RequestError(
                f"This model's maximum context length is {engine.max_model_len} tokens.",
                code="context_length_exceeded",
            )
        engine.check_ids(submit.token_ids, submit.spec.params)
        constraint = submit.spec.params.constraint
        if constraint is not None:  # the sampler must not wait for the compiler
            compiled = engine.grammars.prepare(constraint)
            await asyncio.shield(asyncio.wrap_future(compiled))  # others may wait for it too
        request = Request(
            key=submit.key,
            ingress_id=submit.ingress_id,
            spec=submit.spec,
            tokens=list(submit.token_ids),
            num_prompt_tokens=submit.num_prompt_tokens,
            num_emitted_tokens=len(submit.token_ids) - submit.num_prompt_tokens,
            arrival_s=self.clock.now_s(),
            age_s=submit.age_s,
            decode_worker=submit.decode_worker,
        )

        def add() -> None:
            self.draining.check(request.key)  # again: what runs may have been handed over meanwhile
            if request.key not in self._aborted:  # a small abort may overtake a large submit
                engine.core.scheduler.add(request)

        await self.call(add)

    def abort(self, key: RequestKey) -> None:
        """Forget a request in any phase; idempotent."""
        if self._engine is None:
            return
        scheduler = self._engine.core.scheduler

        def abort() -> None:
            if not scheduler.abort(key):
                self._aborted[key] = None
                if len(self._aborted) > MAX_ABORTED_KEYS:
                    del self._aborted[next(iter(self._aborted))]

        self._post(abort)
        self.connector.cancel(key)

    def read(self, ingress_id: str) -> AsyncGenerator[bytes, None]:
        """Encoded StepMessages for one client. Raises WorkerError while the model still loads.

        A client takes a worker whose stream it reads for one that can be given work.
        """
        if self._engine is None:
            raise WorkerError(f"{self.name} is still loading its model")
        return self.streams.read(ingress_id)

    def acknowledge(self, client_id: str, step_seq: int) -> None:
        """A client has every message up to `step_seq`.

        An ingress that speaks is a sign of the application's life, as good as the supervisor's:
        Serve may take longer to replace a supervisor than a worker waits for one.
        """
        if client_id.startswith(INGRESS_PREFIX):
            self._lifeline.beat()
        self.streams.acknowledge(client_id, step_seq)

    def fail(self, ingress_id: str, failure: FailureRecord) -> None:
        """Tell a request's ingress that this attempt is over."""
        self.streams.publish([], [(ingress_id, failure)])

    async def call(self, fn: Callable[[], T]) -> T:
        """Run `fn` between two steps on the engine thread (the EngineCalls of the handoff)."""
        if self._thread is None:
            raise WorkerError(f"{self.name} is still loading its model")
        return await self._thread.call(fn)

    async def cache_report(self, after: int | None) -> CacheReport:
        """What the prefix cache gained and lost since report `after`; see `CacheReports.since`."""
        engine = self.engine
        blocks = await self.call(lambda: self._cache_reports.since(engine.cache, after))
        costs = engine.core.scheduler.costs
        return CacheReport(costs=costs if costs.is_fitted else None, blocks=blocks)

    async def statistics(self) -> dict[str, object]:
        """What is held and was done, from the engine thread; the blocks' books are checked first.

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
        """Build the engine; on the loader thread."""
        from engine.build import build_engine  # imports torch, which takes seconds

        started_s = self.clock.now_s()
        try:
            given = self.config, self.model, self.clock, self._on_outgoing, self._block_key
            engine = build_engine(*given, sends_blocks=self.role == "prefill")
        except ConfigError as error:
            self._failure = error.message
            logger.error("%s cannot start: %s", self.name, error.message)
        except Exception as error:  # noqa: BLE001 - reported to the supervisor, which says so
            self._give_up(error)
        else:
            # What stands by now stays: a full collection walks it no more, and takes no 50 ms.
            gc.collect()
            gc.freeze()
            took_s = self.clock.now_s() - started_s
            logger.info("%s loaded in %.1f s: %s", self.name, took_s, engine.describe())
            self._loop.call_soon_threadsafe(self._begin, engine)

    def _begin(self, engine: "Engine") -> None:
        self._engine = engine
        try:
            self.connector = self._make_connector(self, engine)
        except Exception as error:  # noqa: BLE001 - as above
            self._engine = None
            self._give_up(error)
            return
        if self.faults:
            engine.core.wrap_executor(lambda executor: FaultySteps(executor, self.faults))
        self._report = engine.load()  # from now on requests may be placed here
        self.streams.open()
        self._thread = EngineThread(
            engine.core, on_step=self._on_step, on_failure=self._on_engine_failure
        )
        self._thread.start()
        thread, stall_s = self._thread, self.config.workers.stall_s
        StallWatch(stall_s, lambda: thread.turn, lambda: exit_stalled(self.name, stall_s)).start()

    def _give_up(self, error: Exception) -> None:
        """Say at the first start why there is none; later, try again what worked before."""
        logger.error("%s cannot start", self.name, exc_info=error)
        is_restart = ray.get_runtime_context().was_current_actor_reconstructed
        if is_restart and not self.draining.is_begun:
            logging.shutdown()
            os._exit(EXIT_FAILED)
        self._failure = f"{type(error).__name__}: {error}"

    def _on_step(self, output: StepOutput) -> None:
        """On the engine thread, after every turn of its loop."""
        self._report = self.engine.load()
        if output.num_scheduled_tokens or output.failures or output.left:
            self._loop.call_soon_threadsafe(self._deliver, output)

    def _deliver(self, output: StepOutput) -> None:
        self.streams.publish(output.tokens, output.failures)
        self.connector.on_step()

    def _on_outgoing(self, event: "OutgoingEvent") -> None:
        """On the engine thread: a prompt started, finished or ended; see `engine.kv.transfer`."""
        self._loop.call_soon_threadsafe(self.connector.on_outgoing, event)

    def _on_engine_failure(self, error: BaseException) -> None:
        exit_failed(self.name, error)

    # ---- giving up on others --------------------------------------------------------------------

    def _drop_ingress(self, ingress_id: str) -> None:
        if self._engine is None:
            return
        scheduler = self._engine.core.scheduler

        def drop() -> None:
            for key in scheduler.requests_of(ingress_id):
                scheduler.abort(key)

        self._post(drop)
        self.connector.drop_ingress(ingress_id)
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
                exit_for_good()

    async def _may_leave(self) -> bool:
        is_wanted = self.streams.is_awaited or self.streams.has_reader(INGRESS_PREFIX)
        is_idle = self._failure is not None or (self._num_requests == 0 and not is_wanted)
        return await self.draining.may_leave(is_idle=is_idle, has_unread=self.streams.has_unread)

    async def _hand_over(self) -> None:
        """Give up what still runs; its ingresses go on elsewhere, with the tokens they have."""
        reason = f"{self.name} is drained"
        for ingress_id in self.streams.clients():
            for key in await self.call(partial(self._give_up_all, ingress_id)):
                self.fail(ingress_id, FailureRecord(key=key, reason=reason, retryable=True))
            self.connector.drop_ingress(ingress_id)

    def _give_up_all(self, ingress_id: str) -> list[RequestKey]:
        """On the engine thread: forget an ingress's requests; those that another may go on with."""
        scheduler = self.engine.core.scheduler
        keys = scheduler.requests_of(ingress_id)
        for key in keys:
            scheduler.abort(key)
        return keys + [key for key in self.connector.keys_of(ingress_id) if key not in keys]

    @property
    def _num_requests(self) -> int:
        return self._report.num_waiting + self._report.num_running + self.connector.num_handoffs

    def _post(self, fn: Callable[[], object]) -> None:
        if self._thread is not None:
            self._thread.post(fn)
