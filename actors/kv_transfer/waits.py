"""Waiting with an end: for at most so long, or unless something else happens first."""

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

IsOver = Callable[[], bool]  # of something that goes on by itself: looked at, not waited for


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
    """The result of `call`; EndedError if `ended` is done first, or the error of a watched task.

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
    """Await what cannot be stopped: cancellations are raised only when it is over."""
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            with suppress(asyncio.CancelledError):  # another one; the first is raised
                await asyncio.wait([running])
        raise


async def close_when_open(opening: "asyncio.Future[End]") -> None:
    """See an end of a channel out that nobody wants any more; its deadline bounds the wait."""
    await asyncio.wait([opening])
    if opening.cancelled():
        return  # it has closed what it had of a connection
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
