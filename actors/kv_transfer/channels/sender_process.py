"""The process of a sender on this host, whose end is noticed though it tells nobody.

A GPU keeps the memory of a dead process for as long as another one maps it. So a worker that is
started anew there would have no room for its KV store, and would never open the channel that
replaces the older one.
"""

import asyncio
import logging
import os
from collections.abc import Callable

logger = logging.getLogger(__name__)


class SenderProcess:
    """Belongs to the event loop. Make it before its memory is mapped, and `close` it."""

    def __init__(self, name: str, pid: int) -> None:
        self._name = f"{name} (pid {pid})"
        self._pidfd: int | None = None  # None = it is not watched
        self._problem: OSError | None = None
        try:
            self._pidfd = os.pidfd_open(pid)  # numbers are given again
        except OSError as error:  # it has ended, or its numbers are not this process's
            self._problem = error

    def at_end(self, call: Callable[[], object]) -> None:
        """Calls `call` once when the process ends, or soon if it has ended; not after `close`."""

        def end() -> None:
            logger.info("%s has ended: its KV store is not mapped any more", self._name)
            self.close()
            call()

        if self._pidfd is not None:
            asyncio.get_running_loop().add_reader(self._pidfd, end)
        if self._problem is not None:
            logger.warning("the end of %s would not be noticed: %s", self._name, self._problem)

    def close(self) -> None:
        """Idempotent."""
        pidfd, self._pidfd = self._pidfd, None
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)
