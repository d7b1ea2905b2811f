"""The life of a request at the ingress, which owns it: route, submit, read, retry, cancel.

    route -> submit -> tokens in index order -> finish
      ^                     |
      '-- attempt + 1, with the tokens emitted so far, when a worker fails under it

The client sees each token exactly once: an attempt's `Mailbox` (mailbox.py) puts tokens in order.
Tokens that wait together are read together: under load that is what keeps one process ahead of its
streams. Knows no HTTP and no text.
"""

import asyncio
import contextvars
import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from actors.ingress.mailbox import HOLDER_LOST, STOPPING, AttemptFailed, Mailbox
from actors.ingress.quarantine import Deaths, Quarantine
from actors.ingress.queue_limit import QueueLimit
from actors.ingress.stopping import stopping_error
from actors.ingress.system_view import block_hasher
from actors.routing.load_view import PlacementView
from actors.routing.router import placement_laps
from actors.routing.worker_links import WorkerLinks
from actors.rpc.handles import AllocatorHandle, WorkerHandle
from configs.schema import AppConfig
from engine.clock import Clock
from engine.errors import CapacityError, NumericsError, PoisonedError, WorkerError
from engine.kv.hashes import RequestHasher
from engine.messages import (
    Assign,
    Hold,
    Placement,
    RouteRequest,
    StepMessage,
    Submit,
    TokenRecord,
    Topology,
)
from engine.request import RequestKey, RequestSpec
from engine.routing.placement import PlacementRules, is_forced, route

logger = logging.getLogger(__name__)

ALLOCATOR_TIMEOUT_S = 2.0  # then the ingress routes by itself
ALLOCATOR_PAUSE_S = 5.0  # and does not ask the allocator again for so long
ABORT_TIMEOUT_S = 5.0
ABORT_RETRY_S = 0.5


def new_request_id() -> str:
    """128 random bits, as 32 hex digits."""
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob:
    """One choice of one prompt, ready to be generated."""

    request_id: str
    child: int
    prompt_ids: list[int]
    block_hashes: list[bytes]  # of the prompt's full blocks; empty = not known
    spec: RequestSpec
    arrived_s: float  # arrival of the request, on this process's clock


@dataclass(slots=True)
class GenerationCounters:
    """Since start; read by the metrics."""

    num_retries: int = 0


class Generations:
    """The requests in progress at one ingress."""

    def __init__(
        self,
        config: AppConfig,
        *,
        ingress_id: str,
        find_worker: Callable[[str], Awaitable[WorkerHandle]],
        find_allocator: Callable[[str], Awaitable[AllocatorHandle]],
        clock: Clock,
    ) -> None:
        self._config = config
        self._ingress_id = ingress_id
        self._clock = clock
        self.queue_limit = QueueLimit(config.edge.max_queued_tokens)
        self._find_allocator = find_allocator
        self._allocator: AllocatorHandle | None = None
        self._allocator_name = ""
        self._no_allocator_until_s = 0.0
        self._hasher: RequestHasher | None = None  # None before a worker has said who it is
        self._is_forced = False  # placement has no choice
        self._mailboxes: dict[RequestKey, Mailbox] = {}
        self._quarantine = Quarantine(clock)
        self._aborts: set[asyncio.Task[None]] = set()
        self._context = contextvars.copy_context()
        self._has_ended = False
        self.counters = GenerationCounters()
        self.links = WorkerLinks(
            ingress_id,
            find=find_worker,
            acknowledge_every_s=config.lifetimes.acknowledge_every_s,
            silence_s=config.lifetimes.ingress_silence_s,
            clock=clock,
            on_message=self._dispatch,
            on_lost=self._lose_worker,
        )
        self._view = PlacementView(self.links, clock)
        self._rules = PlacementRules(
            laps=placement_laps(config.laps, ()), block_size=config.cache.block_size
        )

    @property
    def hasher(self) -> RequestHasher | None:
        """Hashes blocks as the workers do; None while nobody needs hashes.

        That is before a worker has identified itself, and where placement has no choice.
        """
        return None if self._is_forced else self._hasher

    @property
    def num_open(self) -> int:
        """The number of attempts that wait for tokens."""
        return len(self._mailboxes)

    def update(self, topology: Topology) -> None:
        """Takes over the supervisor's topology."""
        self.links.update(topology.roles)
        self._view.note_hosts(topology.workers)
        self.queue_limit.update(topology)
        self._hasher = self._hasher or block_hasher(topology)
        self._is_forced = is_forced(self._view.snapshots())
        if topology.allocator != self._allocator_name:
            self._allocator_name, self._allocator = topology.allocator, None

    def end_all(self) -> None:
        """End every request with `stopping_error`, also those that have not begun."""
        self._has_ended = True
        for mailbox in list(self._mailboxes.values()):
            mailbox.stop()

    async def close(self) -> None:
        await asyncio.gather(*self._aborts, return_exceptions=True)
        await self.links.close()

    async def run(
        self,
        job: GenerationJob,
        on_placed: Callable[[Assign], None],
        on_joined: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[list[TokenRecord], None]:
        """Yields the job's tokens in order, each once, those that wait together; the last carries
        `finish`.

        `on_placed` gets the workers of each attempt, before its first token. `on_joined` is
        called, in every attempt, when its KV has arrived at a decode worker.
        Closing the iterator early cancels the request on every worker. Raises CapacityError
        (nothing can take it now), NumericsError, PoisonedError (workers died under it, or lately
        under one like it), WorkerError (tries are used up), and TimeoutError when the deadline
        passes.
        """
        self._quarantine.check(job.prompt_ids, job.spec.params, job.spec.salt)
        deaths = Deaths()
        emitted: list[int] = []
        avoid: list[str] = []
        last: AttemptFailed | None = None
        for attempt in range(1 + self._config.handoff.tries):
            key = RequestKey(job.request_id, job.child, attempt)
            known_ids = job.prompt_ids + emitted
            assign = await self._route(key, job, known_ids, avoid)
            if self._has_ended:
                raise stopping_error()
            on_placed(assign)
            try:
                async with self._attempt(key, job, known_ids, assign, on_joined) as mailbox:
                    while not mailbox.is_finished:
                        records = await mailbox.wait_tokens()
                        emitted += [record.token_id for record in records]
                        yield records
                return
            except AttemptFailed as failure:
                self._judge(failure, key)
                self._count_death(job, deaths, failure, len(emitted))
                last = failure
                avoid += [w for w in (assign.prefill_worker, assign.decode_worker) if w]
        if last is not None and isinstance(last.__cause__, CapacityError):
            raise last.__cause__
        raise WorkerError(f"the request failed on {1 + self._config.handoff.tries} tries")

    # ---- one attempt ----------------------------------------------------------------------------

    @asynccontextmanager
    async def _attempt(
        self,
        key: RequestKey,
        job: GenerationJob,
        known_ids: list[int],
        assign: Assign,
        on_joined: Callable[[], None],
    ) -> AsyncGenerator[Mailbox, None]:
        """Submits the job; its tokens come to the mailbox, and so does a refusal: nobody waits for
        the worker's answer alone. On leaving, cancels the job if it is unfinished.

        Raises AttemptFailed.
        """
        mailbox = Mailbox(
            prefill_worker=assign.prefill_worker,
            decode_worker=assign.decode_worker,
            next_index=len(known_ids) - len(job.prompt_ids),
            on_joined=on_joined,
        )
        self._mailboxes[key] = mailbox
        loop = asyncio.get_running_loop()
        deadline = loop.call_later(self._left_s(job), mailbox.expire)  # one timer, not one a token
        answer: asyncio.Future[object] | None = None
        try:
            # A lost or frozen worker never answers, but its loss ends the mailbox.
            answer = self._submit(key, job, known_ids, assign)
            answer.add_done_callback(mailbox.note_answer)
            yield mailbox
        finally:
            if answer is not None:
                answer.cancel()
            deadline.cancel()
            del self._mailboxes[key]
            if not mailbox.is_finished:
                self._abort(key, assign)

    def _submit(
        self, key: RequestKey, job: GenerationJob, known_ids: list[int], assign: Assign
    ) -> "asyncio.Future[object]":
        """Sends the job; returns what becomes the worker's answer. Raises AttemptFailed."""
        submit = Submit(
            key=key,
            ingress_id=self._ingress_id,
            token_ids=known_ids,
            num_prompt_tokens=len(job.prompt_ids),
            spec=job.spec,
            age_s=self._age_s(job),
            decode_worker=assign.decode_worker,
        )
        try:
            answer = self.links.get(assign.prefill_worker).submit(submit)
        except WorkerError as error:
            raise AttemptFailed(error.message, is_retryable=True, code="submit_failed") from error
        return asyncio.ensure_future(answer)

    def _age_s(self, job: GenerationJob) -> float:
        """Returns the seconds since the request arrived."""
        return self._clock.now_s() - job.arrived_s

    def _left_s(self, job: GenerationJob) -> float:
        """Returns the seconds until the job's deadline; negative once it has passed."""
        assert job.spec.deadline_s is not None, "every request of a client has a deadline"
        return job.spec.deadline_s - self._age_s(job)

    def _judge(self, failure: AttemptFailed, key: RequestKey) -> None:
        """Raises the client's error, or returns if another attempt may be made."""
        logger.warning("request %s attempt %d: %s", key.request_id, key.attempt, failure.reason)
        if failure.code == "non_finite_logits":
            raise NumericsError(failure.reason) from failure
        if failure.code == STOPPING:
            raise stopping_error() from failure
        if failure.code == "timeout":
            raise TimeoutError(failure.reason) from failure
        if not failure.is_retryable:
            raise WorkerError(failure.reason) from failure
        self.counters.num_retries += 1

    def _count_death(
        self, job: GenerationJob, deaths: Deaths, failure: AttemptFailed, num_tokens: int
    ) -> None:
        """Counts a worker's death. Raises PoisonedError for a request that kills its workers."""
        is_death = failure.code == HOLDER_LOST
        if deaths.is_suspect(is_death=is_death, num_tokens=num_tokens):
            logger.error("request %s ended workers again and again", job.request_id)
            self._quarantine.add(job.prompt_ids, job.spec.params, job.spec.salt)
            raise PoisonedError("Workers failed under this request; it is not tried again.")

    # ---- placement ------------------------------------------------------------------------------

    async def _route(
        self, key: RequestKey, job: GenerationJob, known_ids: list[int], avoid: list[str]
    ) -> Assign:
        """Asks until a worker can take the job. Raises CapacityError if refused or too late."""
        ttft_s = job.spec.ttft_deadline_s
        request = RouteRequest(
            num_prompt_tokens=len(known_ids),
            max_queued_tokens=None if key.attempt else self.queue_limit.num_tokens,
            avoid=avoid,
            # Tokens that an earlier attempt emitted are cached only where that attempt failed.
            block_hashes=job.block_hashes,
            ttft_deadline_s=None if ttft_s is None else ttft_s - self._age_s(job),
        )
        patience_s = min(self._left_s(job), self._config.edge.place_timeout_s)
        give_up_s = self._clock.now_s() + patience_s
        while True:
            placement = (
                self._route_here(request) if self._is_forced else await self._ask_allocator(request)
            )
            if isinstance(placement, Assign):
                if self._is_connected(placement):
                    return placement
                placement = Hold(reason="its worker is not connected yet", retry_after_s=0.1)
            has_time = self._clock.now_s() + placement.retry_after_s < give_up_s
            if not isinstance(placement, Hold) or not has_time:
                raise CapacityError(placement.reason, retry_after_s=placement.retry_after_s)
            await asyncio.sleep(min(placement.retry_after_s, 0.2))

    def _is_connected(self, assign: Assign) -> bool:
        """Whether the streams of both workers are read, so that no token can be missed."""
        up = {link.name for link in self.links.links() if link.is_up}
        return assign.prefill_worker in up and (assign.decode_worker or assign.prefill_worker) in up

    async def _ask_allocator(self, request: RouteRequest) -> Placement:
        """Returns the allocator's decision; while it is away, one by the same rule here."""
        if self._clock.now_s() >= self._no_allocator_until_s:
            try:
                async with asyncio.timeout(ALLOCATOR_TIMEOUT_S):
                    if self._allocator is None:
                        self._allocator = await self._find_allocator(self._allocator_name)
                    return await self._allocator.route(request)
            except WorkerError:
                self._allocator = None
            except TimeoutError:  # it hangs: later requests should not wait for it, too
                self._allocator = None  # or its host is gone, which a connection notices late
                self._no_allocator_until_s = self._clock.now_s() + ALLOCATOR_PAUSE_S
        return self._route_here(request)

    def _route_here(self, request: RouteRequest) -> Placement:
        """Returns a decision by loads alone, without pools and cached prefixes."""
        placement = route(request, self._view.snapshots(), self._clock.now_s(), self._rules)
        if isinstance(placement, Assign):
            self._view.note(placement, request.num_prompt_tokens)
        return placement

    # ---- messages and cancellation --------------------------------------------------------------

    async def _dispatch(self, message: StepMessage) -> None:
        """Hands a step's records to their requests, first tokens before all others.

        The others' turn is the next one of the event loop: what a turn writes leaves at its end,
        and a first token should not wait for the answers of every other stream.
        """
        for key in message.joined:
            mailbox = self._mailboxes.get(key)
            if mailbox is not None:
                mailbox.joined()
        first = [record for record in message.tokens if record.index == 0]
        self._put(message.worker, first)
        if first and len(first) < len(message.tokens):
            await asyncio.sleep(0)
        self._put(message.worker, (r for r in message.tokens if r.index != 0))
        for failure in message.failures:
            mailbox = self._mailboxes.get(failure.key)
            if mailbox is not None:
                mailbox.fail(failure)

    def _put(self, worker: str, records: Iterable[TokenRecord]) -> None:
        for record in records:
            mailbox = self._mailboxes.get(record.key)
            if mailbox is not None:
                mailbox.put(worker, record)

    def _lose_worker(self, worker: str) -> None:
        for mailbox in list(self._mailboxes.values()):
            mailbox.lose(worker)

    def _abort(self, key: RequestKey, assign: Assign) -> None:
        """Cancels an attempt on both workers, in the background; repeats until each answers."""
        for worker in (assign.prefill_worker, assign.decode_worker):
            if worker is not None:
                # In a context of its own: Ray cancels what a cancelled HTTP request has started.
                task = asyncio.get_running_loop().create_task(
                    self._abort_on(worker, key), context=self._context
                )
                self._aborts.add(task)
                task.add_done_callback(self._aborts.discard)

    async def _abort_on(self, worker: str, key: RequestKey) -> None:
        """Repeats an abort until the worker answers, or must have given this ingress up.

        A worker that cannot be reached hears nothing either, and forgets the requests of an ingress
        that is silent.
        """
        give_up_s = self._clock.now_s() + 2 * self._config.lifetimes.ingress_silence_s
        while self._clock.now_s() < give_up_s and self.links.follows(worker):
            try:
                async with asyncio.timeout(ABORT_TIMEOUT_S):
                    await self.links.get(worker).abort(key)
                    return
            except (WorkerError, TimeoutError):
                await asyncio.sleep(ABORT_RETRY_S)
