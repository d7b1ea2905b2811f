"""The tokens of one attempt, put in order for the one who reads them.

Two workers answer for one attempt, on separate streams: the prefill worker sends the first token,
the decode worker the rest. A `Mailbox` keeps tokens that are ahead, drops those that were seen, and
ends with the last token or with the reason why no more will come. Knows no workers' handles.
"""

import asyncio
from collections.abc import Callable

from engine.errors import CapacityError, WorkerError
from engine.messages import FailureRecord, TokenRecord

# Codes of an attempt whose worker died, or fell silent
WORKER_LOST = "worker_lost"
HOLDER_LOST = "holder_lost"  # it computed the request, which may be the cause
STOPPING = "stopping"  # the ingress ends, and its requests with it


class AttemptFailed(Exception):  # noqa: N818 - a signal inside the ingress, not one of our errors
    """An attempt brings no more tokens; `is_retryable`: another attempt may."""

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
        self._ready: list[TokenRecord] = []  # in order, for the reader
        self.is_finished = False  # the reader has the last token
        self._failure: Exception | None = None
        self._has_news = asyncio.Event()

    def submitted(self) -> None:
        """Notes that the prefill worker has queued the request."""
        self._holder = self._holder or self._prefill_worker

    def note_answer(self, answer: "asyncio.Future[object]") -> None:
        """Notes how the prefill worker answered the submission, once it has."""
        error = None if answer.cancelled() else answer.exception()
        if error is None:
            self.submitted()
        else:
            assert isinstance(error, Exception), f"{error!r} ends a process, not an attempt"
            self.refuse(error)

    def refuse(self, error: Exception) -> None:
        """Ends the attempt: the prefill worker did not take the request."""
        if isinstance(error, WorkerError | CapacityError):
            failure = AttemptFailed(error.message, is_retryable=True, code="submit_failed")
            failure.__cause__ = error
            self._end(failure)
        else:
            self._end(error)

    def joined(self) -> None:
        """Notes that the decode worker has the request."""
        self._holder = self._decode_worker
        self._on_joined()

    def put(self, worker: str, record: TokenRecord) -> None:
        """Takes a token that arrived.

        Once the decode worker has sent one, and none before it is missing, the attempt does not
        depend on the prefill worker any more.
        """
        if record.index == self._next_index and not self._ahead:  # as nearly always
            self._add(record)
        elif record.index >= self._next_index:
            self._ahead.setdefault(record.index, record)
            while self._next_index in self._ahead:
                self._add(self._ahead.pop(self._next_index))
        if worker == self._decode_worker:
            self._is_decoding = True
        if self._is_decoding and len(self.workers) > 1 and not self._ahead:
            self.workers = {worker for worker in self.workers if worker == self._decode_worker}

    def fail(self, failure: FailureRecord) -> None:
        """Ends the attempt: a worker gave it up."""
        self._end(AttemptFailed(failure.reason, is_retryable=failure.retryable, code=failure.code))

    def lose(self, worker: str) -> None:
        """Ends the attempt: a worker died, or its messages may be missing."""
        if worker in self.workers:
            code = HOLDER_LOST if worker == self._holder else WORKER_LOST
            self._end(AttemptFailed(f"{worker} was lost", is_retryable=True, code=code))

    def expire(self) -> None:
        """Ends the attempt: the request's deadline has passed."""
        reason = "the request's deadline passed"
        self._end(AttemptFailed(reason, is_retryable=False, code="timeout"))

    def stop(self) -> None:
        """Ends the attempt: the ingress stops."""
        self._end(AttemptFailed("the server is stopping", is_retryable=False, code=STOPPING))

    async def wait_tokens(self) -> list[TokenRecord]:
        """Returns all tokens that have come, at least one.

        After the last one that arrived, raises AttemptFailed, or the worker's error for a request
        that it can never take.
        """
        while not self._ready:
            if self._failure is not None:
                raise self._failure
            self._has_news.clear()
            await self._has_news.wait()
        records, self._ready = self._ready, []
        self.is_finished = records[-1].finish is not None
        return records

    def _add(self, record: TokenRecord) -> None:
        self._ready.append(record)
        self._next_index += 1
        self._has_news.set()

    def _end(self, failure: Exception) -> None:
        if self._failure is None:
            self._failure = failure
            self._has_news.set()
