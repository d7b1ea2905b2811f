"""Tokens of one attempt at one request, in index order, as the ingress receives them.

Two workers answer for one attempt (the prefill worker its first token, the decode worker the
rest), on streams of their own: what is ahead waits, what is behind was seen and is dropped.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from engine.messages import FailureRecord, TokenRecord

# Codes of an attempt whose worker died, or fell silent
WORKER_LOST = "worker_lost"
HOLDER_LOST = "holder_lost"  # while it computed the request: who knows whether because of it
STOPPING = "stopping"  # the ingress ends, and its requests with it


class AttemptFailed(Exception):  # noqa: N818 - a signal inside the ingress, not one of our errors
    """This attempt brings no more tokens; `is_retryable` = another one may."""

    def __init__(self, reason: str, *, is_retryable: bool, code: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_retryable = is_retryable
        self.code = code


class Mailbox:
    """Receives records from the links' tasks, hands them to one reader in order."""

    def __init__(
        self,
        *,
        prefill_worker: str,
        decode_worker: str | None,
        next_index: int,
        on_joined: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_joined()` is called when the decode worker says that it has the request."""
        self._on_joined = on_joined
        self._prefill_worker = prefill_worker
        self._holder: str | None = None
        self.workers = {prefill_worker} | ({decode_worker} if decode_worker else set())
        self._decode_worker = decode_worker
        self._is_decoding = False
        self._next_index = next_index
        self._ahead: dict[int, TokenRecord] = {}
        self._ready: deque[TokenRecord] = deque()
        self._failure: AttemptFailed | None = None
        self._failed = asyncio.Event()
        self._has_news = asyncio.Event()

    def submitted(self) -> None:
        """The prefill worker has queued the request."""
        self._holder = self._holder or self._prefill_worker

    def joined(self) -> None:
        """The decode worker has it."""
        self._holder = self._decode_worker
        self._on_joined()

    def put(self, worker: str, record: TokenRecord) -> None:
        """A token arrived.

        Once the decode worker speaks, and nothing is missing before its words, the prefill worker
        is out of the game.
        """
        self._is_decoding |= worker == self._decode_worker
        if record.index >= self._next_index:
            self._ahead.setdefault(record.index, record)
        while self._next_index in self._ahead:
            self._ready.append(self._ahead.pop(self._next_index))
            self._next_index += 1
            self._has_news.set()
        if self._is_decoding and not self._ahead:
            self.workers = {name for name in self.workers if name == self._decode_worker}

    def fail(self, failure: FailureRecord) -> None:
        """A worker gave the attempt up."""
        self._end(AttemptFailed(failure.reason, is_retryable=failure.retryable, code=failure.code))

    def lose(self, worker: str) -> None:
        """A worker died, or its messages may be missing."""
        if worker in self.workers:
            code = HOLDER_LOST if worker == self._holder else WORKER_LOST
            self._end(AttemptFailed(f"{worker} was lost", is_retryable=True, code=code))

    def expire(self) -> None:
        """The request's deadline passed."""
        reason = "the request's deadline passed"
        self._end(AttemptFailed(reason, is_retryable=False, code="timeout"))

    def stop(self) -> None:
        """The ingress ends."""
        self._end(AttemptFailed("the server is stopping", is_retryable=False, code=STOPPING))

    async def get(self) -> TokenRecord:
        """The next token. Raises AttemptFailed after the last one that arrived."""
        while not self._ready:
            if self._failure is not None:
                raise self._failure
            self._has_news.clear()
            await self._has_news.wait()
        return self._ready.popleft()

    async def unless_failed(self, call: Awaitable[None]) -> None:
        """Await `call`; raises AttemptFailed, and cancels it, if the attempt fails meanwhile."""
        task = asyncio.ensure_future(call)
        failed = asyncio.ensure_future(self._failed.wait())
        try:
            await asyncio.wait((task, failed), return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and self._failure is not None:
                raise self._failure
            await task
        finally:
            task.cancel()
            failed.cancel()

    def _end(self, failure: AttemptFailed) -> None:
        if self._failure is None:
            self._failure = failure
            self._failed.set()
            self._has_news.set()
