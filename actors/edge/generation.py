"""The life of a request at the ingress, which owns it: place, submit, read, retry, cancel.

    place -> submit -> tokens in index order -> finish
      ^                     |
      '-- attempt + 1, with the tokens emitted so far, when a worker fails under it

The client sees each token once whatever happens below. Knows no HTTP and no text.
"""

import asyncio
import contextvars
import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

from actors.edge.mailbox import HOLDER_LOST, STOPPING, AttemptFailed, Mailbox
from actors.edge.placement_view import PlacementView
from actors.edge.quarantine import Deaths, Quarantine
from actors.edge.stopping import stopping_error
from actors.edge.system_view import block_hasher
from actors.edge.worker_links import WorkerLinks
from actors.handles import AllocatorHandle, WorkerHandle
from configs.schema import AppConfig
from engine.clock import Clock
from engine.errors import CapacityError, NumericsError, PoisonedError, WorkerError
from engine.kv.request_hasher import RequestHasher
from engine.messages import (
    Assign,
    Hold,
    Placement,
    PlaceRequest,
    StepMessage,
    Submit,
    TokenRecord,
    Topology,
)
from engine.request import RequestKey, SamplingParams
from engine.scheduling.placement import place

logger = logging.getLogger(__name__)

ALLOCATOR_TIMEOUT_S = 2.0  # then the ingress decides by itself
ALLOCATOR_PAUSE_S = 5.0  # and does not ask again for so long
ABORT_TIMEOUT_S = 5.0
ABORT_RETRY_S = 0.5


def new_request_id() -> str:
    """128 random bits, as 32 hex digits."""
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One choice of one prompt, ready to be generated."""

    request_id: str
    child: int
    prompt_ids: list[int]
    block_hashes: list[bytes]  # of the prompt's full blocks; empty = not known
    params: SamplingParams
    deadline_s: float  # on this process's clock
    priority: int = 0
    salt: str = ""
    first_token_due_s: float | None = None  # likewise, and a wish; None = its class's default


@dataclass(slots=True)
class GenerationCounters:
    """Since start; read by the metrics."""

    num_retries: int = 0


class Generations:
    """All requests of one ingress that are under way."""

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
        self._find_allocator = find_allocator
        self._allocator: AllocatorHandle | None = None
        self._allocator_name = ""
        self._no_allocator_until_s = 0.0
        self._hasher: RequestHasher | None = None  # None before a worker has said who it is
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

    @property
    def hasher(self) -> RequestHasher | None:
        """Names blocks as the workers do; None before one of them has said who it is."""
        return self._hasher

    @property
    def num_open(self) -> int:
        """Attempts that wait for tokens now."""
        return len(self._mailboxes)

    def update(self, topology: Topology) -> None:
        """Follow the system as the supervisor sees it."""
        self.links.update(topology.roles)
        self._hasher = self._hasher or block_hasher(topology)
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
        choice: Choice,
        on_placed: Callable[[Assign], None],
        on_joined: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[TokenRecord, None]:
        """The choice's tokens in order, each once; the last carries `finish`.

        `on_placed` is told where the first attempt goes, before its first token; `on_joined` is
        called when its KV has arrived at a decode worker, of every attempt.
        Closing the iterator early cancels the request on every worker. Raises CapacityError
        (nothing can take it now), NumericsError, PoisonedError (workers died under it, or lately
        under one like it), WorkerError (tries are used up), and TimeoutError when the deadline
        passes.
        """
        self._quarantine.check(choice.prompt_ids, choice.params, choice.salt)
        deaths = Deaths()
        emitted: list[int] = []
        avoid: list[str] = []
        last: AttemptFailed | None = None
        for attempt in range(1 + self._config.handoff.tries):
            key = RequestKey(choice.request_id, choice.child, attempt)
            known_ids = choice.prompt_ids + emitted
            assign = await self._place(key, choice, known_ids, avoid)
            if self._has_ended:
                raise stopping_error()
            if attempt == 0:
                on_placed(assign)
            attempt_tokens = self._attempt(key, choice, known_ids, assign, on_joined)
            try:
                async for record in attempt_tokens:
                    emitted.append(record.token_id)
                    yield record
                return
            except AttemptFailed as failure:
                self._judge(failure, key)
                self._count_death(choice, deaths, failure, len(emitted))
                last = failure
                avoid += [w for w in (assign.prefill_worker, assign.decode_worker) if w]
            finally:
                await attempt_tokens.aclose()
        if last is not None and isinstance(last.__cause__, CapacityError):
            raise last.__cause__
        raise WorkerError(f"the request failed on {1 + self._config.handoff.tries} tries")

    # ---- one attempt ----------------------------------------------------------------------------

    async def _attempt(
        self,
        key: RequestKey,
        choice: Choice,
        known_ids: list[int],
        assign: Assign,
        on_joined: Callable[[], None],
    ) -> AsyncGenerator[TokenRecord, None]:
        """Submit, then yield what comes; whatever ends it early cancels it on the workers."""
        mailbox = Mailbox(
            prefill_worker=assign.prefill_worker,
            decode_worker=assign.decode_worker,
            next_index=len(known_ids) - len(choice.prompt_ids),
            on_joined=on_joined,
        )
        self._mailboxes[key] = mailbox
        loop = asyncio.get_running_loop()
        remaining_s = choice.deadline_s - self._clock.now_s()
        deadline = loop.call_later(remaining_s, mailbox.expire)  # one timer, not one per token
        is_finished = False
        try:
            # A worker that is lost or frozen answers nothing: the mailbox hears of it.
            await mailbox.unless_failed(self._submit(key, choice, known_ids, assign))
            mailbox.submitted()
            while not is_finished:
                record = await mailbox.get()
                is_finished = record.finish is not None
                yield record
        finally:
            deadline.cancel()
            del self._mailboxes[key]
            if not is_finished:
                self._abort(key, assign)

    async def _submit(
        self, key: RequestKey, choice: Choice, known_ids: list[int], assign: Assign
    ) -> None:
        submit = Submit(
            key=key,
            ingress_id=self._ingress_id,
            token_ids=known_ids,
            num_prompt_tokens=len(choice.prompt_ids),
            params=choice.params,
            decode_worker=assign.decode_worker,
            remaining_s=choice.deadline_s - self._clock.now_s(),
            priority=choice.priority,
            salt=choice.salt,
            ttft_deadline_s=self._due_in_s(choice),
        )
        try:
            await self.links.get(assign.prefill_worker).submit(submit)
        except (WorkerError, CapacityError) as error:
            raise AttemptFailed(error.message, is_retryable=True, code="submit_failed") from error

    def _due_in_s(self, choice: Choice) -> float | None:
        """Until its first token is due, negative when it is late; None = nothing was asked for."""
        due_s = choice.first_token_due_s
        return None if due_s is None else due_s - self._clock.now_s()

    def _judge(self, failure: AttemptFailed, key: RequestKey) -> None:
        """Raise what the client must see, or return to try again."""
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
        self, choice: Choice, deaths: Deaths, failure: AttemptFailed, num_tokens: int
    ) -> None:
        """Raise PoisonedError, now and for a while, for a request that ends its workers."""
        is_death = failure.code == HOLDER_LOST
        if deaths.is_suspect(is_death=is_death, num_tokens=num_tokens):
            logger.error("request %s ended workers again and again", choice.request_id)
            self._quarantine.add(choice.prompt_ids, choice.params, choice.salt)
            raise PoisonedError("Workers failed under this request; it is not tried again.")

    # ---- placement ------------------------------------------------------------------------------

    async def _place(
        self, key: RequestKey, choice: Choice, known_ids: list[int], avoid: list[str]
    ) -> Assign:
        """Ask until a worker can take it. Raises CapacityError when refused or held too long."""
        request = PlaceRequest(
            num_prompt_tokens=len(known_ids),
            max_queued_tokens=None if key.attempt else self._config.edge.max_queued_tokens,
            avoid=avoid,
            # What an earlier attempt emitted is cached nowhere but where that attempt failed.
            block_hashes=choice.block_hashes,
            ttft_deadline_s=self._due_in_s(choice),
        )
        give_up_s = min(choice.deadline_s, self._clock.now_s() + self._config.edge.place_timeout_s)
        while True:
            placement = await self._ask_allocator(request)
            if isinstance(placement, Assign):
                if self._is_connected(placement):
                    return placement
                placement = Hold(reason="its worker is not connected yet", retry_after_s=0.1)
            has_time = self._clock.now_s() + placement.retry_after_s < give_up_s
            if not isinstance(placement, Hold) or not has_time:
                raise CapacityError(placement.reason, retry_after_s=placement.retry_after_s)
            await asyncio.sleep(min(placement.retry_after_s, 0.2))

    def _is_connected(self, assign: Assign) -> bool:
        """Both workers' streams are read: no token of theirs can be missed."""
        up = {link.name for link in self.links.links() if link.is_up}
        return assign.prefill_worker in up and (assign.decode_worker or assign.prefill_worker) in up

    async def _ask_allocator(self, request: PlaceRequest) -> Placement:
        """The allocator's decision; ours, by the same rule, while it is away."""
        if self._clock.now_s() >= self._no_allocator_until_s:
            try:
                async with asyncio.timeout(ALLOCATOR_TIMEOUT_S):
                    if self._allocator is None:
                        self._allocator = await self._find_allocator(self._allocator_name)
                    return await self._allocator.place(request)
            except WorkerError:
                self._allocator = None
            except TimeoutError:  # it hangs: not every request should find that out
                self._allocator = None  # or its host is gone, which a connection learns late
                self._no_allocator_until_s = self._clock.now_s() + ALLOCATOR_PAUSE_S
        placement = place(request, self._view.snapshots(), self._clock.now_s())
        if isinstance(placement, Assign):
            self._view.note(placement, request.num_prompt_tokens)
        return placement

    # ---- messages and cancellation --------------------------------------------------------------

    def _dispatch(self, message: StepMessage) -> None:
        for key in message.joined:
            mailbox = self._mailboxes.get(key)
            if mailbox is not None:
                mailbox.joined()
        for record in message.tokens:
            mailbox = self._mailboxes.get(record.key)
            if mailbox is not None:
                mailbox.put(message.worker, record)
        for failure in message.failures:
            mailbox = self._mailboxes.get(failure.key)
            if mailbox is not None:
                mailbox.fail(failure)

    def _lose_worker(self, worker: str) -> None:
        for mailbox in list(self._mailboxes.values()):
            mailbox.lose(worker)

    def _abort(self, key: RequestKey, assign: Assign) -> None:
        """Cancel an attempt on both workers, in the background; each is told until it answers."""
        for worker in (assign.prefill_worker, assign.decode_worker):
            if worker is not None:
                # In our own context: Ray cancels what a cancelled HTTP request has started.
                task = asyncio.get_running_loop().create_task(
                    self._abort_on(worker, key), context=self._context
                )
                self._aborts.add(task)
                task.add_done_callback(self._aborts.discard)

    async def _abort_on(self, worker: str, key: RequestKey) -> None:
        """Tell a worker until it answers.

        Or until it must have given us up: one that we cannot reach does not hear us either, and
        forgets the requests of an ingress that is silent.
        """
        give_up_s = self._clock.now_s() + 2 * self._config.lifetimes.ingress_silence_s
        while self._clock.now_s() < give_up_s and self.links.follows(worker):
            try:
                async with asyncio.timeout(ABORT_TIMEOUT_S):
                    await self.links.get(worker).abort(key)
                    return
            except (WorkerError, TimeoutError):
                await asyncio.sleep(ABORT_RETRY_S)
