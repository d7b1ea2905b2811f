"""Bounded waits: until a deadline, or until something else happens first."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol, TypeVar

from engine.errors import HandoffError, WorkerError
from engine.messages import PieceReply

logger = logging.getLogger(__name__)

T = TypeVar("T")

IsOver = Callable[[], bool]  # polled, because the operation runs by itself


class Closable(Protocol):
    async def close(self) -> None: ...


End = TypeVar("End", bound=Closable)


class EndedError(Exception):
    """A wait was cancelled because its result is not needed; control flow, never shown."""


async def bounded(call: Awaitable[T], seconds: float) -> T:
    """Await a call to a peer for at most `seconds`; then HandoffError."""
    try:
        async with asyncio.timeout(seconds):
            return await call
    except TimeoutError as error:
        raise HandoffError(f"no answer within {seconds:.1f} s") from error


async def acknowledged(reply: "asyncio.Future[PieceReply]", deadline_s: float) -> PieceReply:
    """Wait for a piece's acknowledgement; HandoffError at the deadline, which ends the wait."""
    try:
        async with asyncio.timeout(deadline_s):
            return await reply
    except TimeoutError as error:
        raise HandoffError(f"no acknowledgement within {deadline_s} s") from error


async def unless_ended(
    call: Awaitable[T], ended: asyncio.Future[None], *watched: asyncio.Future[None]
) -> T:
    """Returns the result of `call`. Raises EndedError if `ended` is done first, or a watched error.

    `call` is then cancelled, unless it is a future that the caller made and keeps.
    """
    waited = asyncio.ensure_future(call)
    everything: set[asyncio.Future[T] | asyncio.Future[None]] = {waited, ended, *watched}
    try:
        await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            raise EndedError
        for task in watched:
            if task.done():
                await task
        return await waited
    finally:
        if waited is not call:
            waited.cancel()
            await asyncio.gather(waited, return_exceptions=True)


async def to_the_end(running: asyncio.Future[T]) -> T:
    """Awaits something that cannot be stopped; raises a cancellation only after its end."""
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            with suppress(asyncio.CancelledError):  # another one; the first is raised
                await asyncio.wait([running])
        raise


async def close_when_open(opening: "asyncio.Future[End]") -> None:
    """Closes an end of a channel, which is not needed, once it has opened or failed to."""
    await asyncio.wait([opening])
    if opening.cancelled():
        return  # it did not open and has closed its connection
    try:
        channel = opening.result()
    except WorkerError as error:
        logger.debug("the unused end did not open: %s", error)
    else:
        await channel.close()


def settle(future: asyncio.Future[T], value: T) -> None:
    """Set a future's result unless it has one."""
    if not future.done():
        future.set_result(value)


async def end_thread(thread: ThreadPoolExecutor, last_job: Callable[[], None]) -> None:
    """Let a one-thread pool finish what is queued and `last_job`, and end it; idempotent."""
    try:
        done = asyncio.get_running_loop().run_in_executor(thread, last_job)
    except RuntimeError:
        return  # it was ended before
    thread.shutdown(wait=False)
    await done
    thread.shutdown(wait=True)  # it has nothing left to do: this does not hold up the loop
