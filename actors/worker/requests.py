"""The requests of one worker: submitted, aborted, or given up because their ingress is silent.

Changes of the scheduler are posted to the engine thread; everything here is called on the actor's
event loop unless it says otherwise.
"""

import asyncio
from typing import TYPE_CHECKING

from actors.worker.draining import Draining
from actors.worker.engine_thread import EngineThread
from actors.worker.gang import OtherRanks
from actors.worker.kv_connector import KvConnector
from engine.clock import Clock
from engine.errors import RequestError
from engine.messages import Submit
from engine.request import Request, RequestKey

if TYPE_CHECKING:
    from engine.engine import Engine

MAX_ABORTED_KEYS = 4096


class WorkerRequests:
    """The requests of an engine that has loaded."""

    def __init__(
        self,
        engine: "Engine",
        thread: EngineThread,
        connector: KvConnector,
        draining: Draining,
        clock: Clock,
        ranks: OtherRanks,
    ) -> None:
        self._engine = engine
        self._thread = thread
        self._connector = connector
        self._draining = draining
        self._clock = clock
        self._ranks = ranks
        # Aborted before they were submitted; oldest first.
        self._aborted: dict[RequestKey, None] = {}

    async def submit(self, submit: Submit) -> None:
        """Queue a request. Raises RequestError if it can never fit, CapacityError if not now."""
        engine, params = self._engine, submit.spec.params
        self._draining.check(submit.key)
        if len(submit.token_ids) >= engine.max_model_len:
            raise RequestError(
                f"This model's maximum context length is {engine.max_model_len} tokens.",
                code="context_length_exceeded",
            )
        engine.check_kind(params)
        engine.check_ids(submit.token_ids, params)
        if params.constraint is not None:  # compiled here, because the sampler must not wait for it
            compiled = engine.grammars.prepare(params.constraint)
            if self._ranks.compiles:  # beside this rank: they, too, are not to wait for it later
                constraint = params.constraint
                await self._thread.call(lambda: self._ranks.compile(constraint))
            # Shielded: other requests may share the compilation.
            await asyncio.shield(asyncio.wrap_future(compiled))
        request = Request(
            key=submit.key,
            ingress_id=submit.ingress_id,
            spec=submit.spec,
            tokens=list(submit.token_ids),
            num_prompt_tokens=submit.num_prompt_tokens,
            num_emitted_tokens=len(submit.token_ids) - submit.num_prompt_tokens,
            arrival_s=self._clock.now_s(),
            age_s=submit.age_s,
            decode_worker=submit.decode_worker,
        )

        def add() -> None:
            self._draining.check(request.key)  # again: draining may have begun meanwhile
            if request.key not in self._aborted:  # a small abort may overtake a large submit
                engine.core.scheduler.add(request)

        await self._thread.call(add)

    def abort(self, key: RequestKey) -> None:
        """Forget a request in any phase; idempotent."""

        def abort() -> None:
            if not self._engine.core.scheduler.abort(key):
                self._aborted[key] = None
                if len(self._aborted) > MAX_ABORTED_KEYS:
                    del self._aborted[next(iter(self._aborted))]

        self._thread.post(abort)
        self._connector.cancel(key)

    def drop_ingress(self, ingress_id: str) -> None:
        """Forget every request of an ingress."""
        self._thread.post(lambda: self._abort_all(ingress_id))
        self._connector.drop_ingress(ingress_id)

    async def hand_over(self, ingress_id: str) -> list[RequestKey]:
        """Forget every request of an ingress; returns those that another worker may continue."""
        keys = await self._thread.call(lambda: self._keys_given_up(ingress_id))
        self._connector.drop_ingress(ingress_id)
        return keys

    def _keys_given_up(self, ingress_id: str) -> list[RequestKey]:
        """Returns the requests that an ingress has given up; runs on the engine thread."""
        keys = self._abort_all(ingress_id)
        return keys + [key for key in self._connector.keys_of(ingress_id) if key not in keys]

    def _abort_all(self, ingress_id: str) -> list[RequestKey]:
        """Aborts what the scheduler has of an ingress; runs on the engine thread."""
        scheduler = self._engine.core.scheduler
        keys = scheduler.requests_of(ingress_id)
        for key in keys:
            scheduler.abort(key)
        return keys
