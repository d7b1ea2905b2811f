"""The thread that drives one end of a pair, in one order, until something fails."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from actors.handoff.waits import end_thread
from engine.errors import HandoffError, WorkerError


class PairThread:
    """Operations of one connection, one after the other; the first failure ends it for good."""

    def __init__(self, epoch: int, hang_up: Callable[[], None]) -> None:
        """`hang_up` drops the connection; called in the thread, at least once, idempotent."""
        self.epoch = epoch
        self.is_open = True
        self._hang_up = hang_up
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"kv-pair-{epoch}")

    def start(self, operation: Callable[[], None]) -> "asyncio.Future[None]":
        """Queue `operation`, whose place is taken at once; its failure breaks the connection.

        Raises HandoffError, here or from the future, when the connection is closed or breaks.
        """
        if not self.is_open:
            raise HandoffError(f"the channel of epoch {self.epoch} is closed")
        return asyncio.get_running_loop().run_in_executor(self._thread, self._guard, operation)

    async def close(self) -> None:
        """Refuse new operations, wait for the queued ones (bounded by their deadlines), hang up."""
        self.is_open = False
        await end_thread(self._thread, self._hang_up)

    def _guard(self, operation: Callable[[], None]) -> None:
        try:
            operation()
            return
        except WorkerError as error:
            failure = error.with_traceback(None)
        except RuntimeError as error:  # what torch raises: a closed connection, a deadline
            failure = HandoffError(f"the channel of epoch {self.epoch} broke: {error}")
        # Raised out here and without the frames it came from: they hold the group, which must go
        # now, because dropping it is what hangs up.
        self.is_open = False
        self._hang_up()
        raise failure
