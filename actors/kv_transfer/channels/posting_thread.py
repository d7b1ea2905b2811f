"""The thread that posts one end's operations, each while earlier ones still run.

A posted operation runs by itself on a device, and operations end in the order of posting. So the
thread posts the next operation at once, and polls in between whether the oldest has ended:

    posts       a  b  c .     d     e
    is over             a     b  c     d

The first failure ends all running and later operations for good: an operation that cannot be
posted, an abort from outside, or one that is the oldest for longer than the deadline. That one is
judged on the event loop, because posting may itself wait for a device. Knows no NCCL.
"""

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from actors.kv_transfer.waits import IsOver
from engine.errors import HandoffError, WorkerError

logger = logging.getLogger(__name__)

POLL_S = 50e-6  # between two looks at the oldest operation; 256 MiB take about 700 us
ABORT_S = 10.0  # an abort takes half a second; no caller waits longer than this


@dataclass(slots=True, kw_only=True, eq=False)
class _Operation:
    verb: str
    post: Callable[[], IsOver]
    drain: Callable[[], None]
    is_over: IsOver | None = None  # None = not posted yet
    ended: Future[None] = field(default_factory=Future)


class PostingThread:
    """Operations of one connection. Created, started and closed on the event loop."""

    def __init__(
        self,
        epoch: int,
        deadline_s: float,
        cut: Callable[[], None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`cut` aborts transfers between the two ends; called once, in a thread of its own."""
        self._epoch = epoch
        self._deadline_s = deadline_s
        self._cut = cut
        self._now_s = now_s
        self._aborting = threading.Lock()
        self._is_aborted = threading.Event()  # or about to be aborted
        self._abort_done = threading.Event()  # or given up
        self._has_cut = False
        self._is_open = True
        # None = the thread shall end
        self._asked: queue.SimpleQueue[_Operation | None] = queue.SimpleQueue()
        self._watching = asyncio.get_running_loop().call_later(deadline_s, self._watch)
        # Touched by the thread only, and the time read by the loop:
        self._under_way: deque[_Operation] = deque()  # in the order of posting
        self._oldest_since_s: float | None = None  # None = nothing runs
        self._thread = threading.Thread(target=self._run, name=f"kv-pair-{epoch}", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        return self._is_open

    @property
    def is_aborted(self) -> bool:
        """Whether `abort` was called; what ended since may be incomplete. From any thread."""
        return self._is_aborted.is_set()

    @property
    def has_cut(self) -> bool:
        """Whether an abort has ended, so that nothing that was posted touches memory any more."""
        return self._has_cut

    def start(
        self, verb: str, post: Callable[[], IsOver], drain: Callable[[], None] = lambda: None
    ) -> "asyncio.Future[None]":
        """Posts an operation after all earlier ones are posted; done when it has ended.

        `post` may itself wait; nothing else is polled meanwhile. `drain()` is called in the thread
        after an abort, or once that was waited for too long (`has_cut` tells which). It returns
        when no part of the operation that an abort does not cut touches memory any more. Raises
        HandoffError, here or from the future, when the connection is closed or breaks.
        """
        if not self._is_open:
            raise self._failure(verb)
        operation = _Operation(verb=verb, post=post, drain=drain)
        operation.ended.set_running_or_notify_cancel()  # it cannot be taken back
        self._asked.put(operation)
        return asyncio.wrap_future(operation.ended)

    def wait(self, verb: str, post: Callable[[], IsOver]) -> None:
        """Within a `post`: post another operation and wait for its end, a deadline for each."""
        self._check(verb)
        self._oldest_since_s = self._now_s()
        try:
            is_over = post()  # may itself wait for the peer, the first time
            while not self.is_aborted and not is_over():
                time.sleep(POLL_S)
        except BaseException:
            self.abort()  # the caller may free memory that is still written to
            raise
        self._check(verb)

    def abort(self) -> None:
        """Aborts all calls; returns when they have ended, or after ABORT_S.

        May be called from any thread, and more than once.
        """
        self._begin_abort()
        if not self._abort_done.wait(ABORT_S):
            logger.error("the channel of epoch %d does not end in %g s", self._epoch, ABORT_S)
            self._abort_done.set()  # nobody else waits for it either

    async def close(self) -> None:
        """Aborts all operations and ends the thread. Idempotent.

        Waits without a bound for what an abort does not cut, copies on this GPU, because blocks
        that are still written to must not be freed.
        """
        self._is_open = False
        self._watching.cancel()
        self._begin_abort()
        self._asked.put(None)
        await asyncio.to_thread(self._thread.join)

    # ---- on the event loop ----------------------------------------------------------------------

    def _watch(self) -> None:
        """Aborts at the oldest operation's deadline; checks again when that may have come."""
        if self._is_aborted.is_set():
            return
        now_s, since_s = self._now_s(), self._oldest_since_s
        left_s = self._deadline_s - (now_s - since_s if since_s is not None else 0.0)
        if left_s <= 0:
            self._begin_abort()
            return
        self._watching = asyncio.get_running_loop().call_later(left_s, self._watch)

    # ---- in any thread --------------------------------------------------------------------------

    def _begin_abort(self) -> None:
        with self._aborting:
            if self._is_aborted.is_set():
                return
            self._is_aborted.set()
        self._is_open = False
        threading.Thread(target=self._abort, name=f"kv-abort-{self._epoch}", daemon=True).start()

    def _abort(self) -> None:
        try:
            self._cut()
            self._has_cut = True
        except Exception:
            logger.exception("the channel of epoch %d was not cut", self._epoch)
        finally:
            self._abort_done.set()

    def _check(self, verb: str) -> None:
        """Raises HandoffError if it was aborted, once the abort has ended."""
        if self._is_aborted.is_set():
            self.abort()
            raise self._failure(verb)

    def _failure(self, verb: str) -> HandoffError:
        return HandoffError(
            f"the channel of epoch {self._epoch} did not {verb}: it is closed, or not in"
            f" {self._deadline_s} s"
        )

    # ---- in the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        is_ended = False
        while not is_ended:
            is_ended = self._turn()
        self._fail(self._failure("end"))

    def _turn(self) -> bool:
        """Posts the next operation or polls; returns whether the thread shall end."""
        asked: _Operation | None = None
        try:
            asked = self._asked.get(timeout=POLL_S if self._under_way else None)
            is_ended = asked is None
        except queue.Empty:
            is_ended = False
        if asked is not None:
            self._under_way.append(asked)
        if not is_ended:
            self._guard(asked)
        return is_ended

    def _guard(self, newest: _Operation | None) -> None:
        try:
            if newest is not None:
                self._post(newest)
            self._look()
            return
        except WorkerError as error:
            failure = error.with_traceback(None)
        except Exception as error:
            if not isinstance(error, RuntimeError):  # torch's, of a closed connection
                logger.exception("unexpected on the channel of epoch %d", self._epoch)
            failure = HandoffError(f"the channel of epoch {self._epoch} broke: {error}")
        # Raised here and without its frames, which hold what `cut` releases.
        self._fail(failure)

    def _post(self, operation: _Operation) -> None:
        self._check(operation.verb)
        if self._oldest_since_s is None:
            self._oldest_since_s = self._now_s()
        operation.is_over = operation.post()

    def _look(self) -> None:
        """Settles operations that have ended."""
        while self._under_way:
            oldest = self._under_way[0]
            assert oldest.is_over is not None, "everything under way was posted"
            is_over = oldest.is_over()
            self._check(oldest.verb)  # afterwards, because aborted operations have ended, too
            if not is_over:
                return
            self._under_way.popleft()
            self._oldest_since_s = self._now_s() if self._under_way else None
            oldest.ended.set_result(None)

    def _fail(self, failure: WorkerError) -> None:
        self.abort()
        while self._under_way:
            operation = self._under_way.popleft()
            try:
                operation.drain()
            except Exception:
                logger.exception("the device failed under the channel of epoch %d", self._epoch)
            operation.ended.set_exception(failure)
        self._oldest_since_s = None
