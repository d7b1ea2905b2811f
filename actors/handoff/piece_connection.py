"""Headers of pieces from a prefill to a decode worker, by a TCP connection of their own.

    P -> D    secret [32 bytes], then frames of PieceCall
    D -> P    frames of PieceAnswer, in any order

A call of an actor takes 1.3 ms there and back, this 0.1, and short prompts wait for nothing else. A
frame is its length, 4 bytes, and msgpack. D listens from its first channel on; its answer to the
opening of a channel, a call of an actor, says where and the secret. P connects once per channel,
and a connection that ends fails what is under way with the channel: the next one is opened by a
call, which knows whether D lives. Not encrypted, as Ray's calls are not unless told; not for
payloads that are objects of Ray. Knows no requests and no blocks.
"""

import asyncio
import hmac
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from itertools import count, starmap
from typing import Any, TypeVar

import msgspec

from actors.handoff.waits import bounded, settle
from engine.errors import HandoffError
from engine.messages import PieceHeader, PieceReply, decode, encode

logger = logging.getLogger(__name__)
T = TypeVar("T")

SECRET_BYTES = 32
LENGTH_BYTES = 4
MAX_FRAME_BYTES = 64 * 2**20  # about two million digests
GREETING_S = 5.0
# A host that vanished says nothing: after so long without an answer a connection ends.
PROBE_AFTER_S, PROBE_EVERY_S, MAX_PROBES = 30, 10, 3

Piece = tuple[PieceHeader, list[Any]]


class PieceCall(msgspec.Struct, frozen=True, kw_only=True):
    """Pieces that leave together, each with its payload."""

    number: int  # its own among those of a connection
    pieces: Sequence[Piece]


class PieceAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """To the call of that number: one reply for each piece."""

    number: int
    replies: Sequence[PieceReply]


class PieceAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a decode worker takes pieces, and what to say first."""

    host: str
    port: int
    secret: bytes


class PieceServer:
    """D's end: takes pieces from whoever knows the secret, all at the same time."""

    def __init__(
        self, host: str, take: Callable[[PieceHeader, list[Any]], Awaitable[PieceReply]]
    ) -> None:
        """host: the address to listen on; `take(header, payload)` answers one piece."""
        self._host = host
        self._take = take
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._starting = asyncio.Lock()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # one a connection, one a call

    async def address(self) -> bytes:
        """An encoded PieceAddress; listens from the first time on. Raises HandoffError."""
        async with self._starting:
            if self._server is None:
                try:
                    self._server = await asyncio.start_server(self._accept, self._host, 0)
                except OSError as error:
                    raise HandoffError(f"no port for pieces on {self._host}: {error}") from error
        host, port = self._server.sockets[0].getsockname()[:2]
        return encode(PieceAddress(host=host, port=port, secret=self._secret))

    async def close(self) -> None:
        """Listen no more and end all connections; answers under way are not sent."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._spawn(self._serve(reader, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until its other end is gone."""
        sender = writer.get_extra_info("peername")
        try:
            _probe(writer)
            async with asyncio.timeout(GREETING_S):
                secret = await reader.readexactly(SECRET_BYTES)
            if not hmac.compare_digest(secret, self._secret):
                raise HandoffError("it does not know the secret")
            while True:
                call = await _read(reader, PieceCall)
                self._spawn(self._answer(writer, call))
        except (asyncio.IncompleteReadError, ConnectionError):
            logger.debug("the connection from %s has ended", sender)
        except (TimeoutError, OSError, HandoffError) as error:
            logger.warning("the connection from %s is cut: %s", sender, error or "it is silent")
        finally:
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, call: PieceCall) -> None:
        try:
            replies = await asyncio.gather(*starmap(self._take, call.pieces))
        except Exception:
            logger.exception("unexpected in a piece: its connection is cut")
            writer.close()  # no answer would be taken for one that is still to come
        else:
            if not writer.is_closing():
                writer.write(_frame(PieceAnswer(number=call.number, replies=replies)))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class PieceConnection:
    """P's end: a `PieceTaker`. Open from the start."""

    def __init__(
        self, where: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """where: it leads to, for messages."""
        self._where = where
        self._writer = writer
        self._numbers = count()
        self._answers: dict[int, asyncio.Future[Sequence[PieceReply]]] = {}
        self._reading = asyncio.ensure_future(self._read_answers(reader))

    @property
    def is_open(self) -> bool:
        return not self._reading.done()

    async def receive_pieces(self, pieces: Sequence[Piece]) -> list[PieceReply]:
        """One reply each. Raises HandoffError when the connection has ended, or does meanwhile."""
        if not self.is_open:
            raise self._ended()
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(_frame(PieceCall(number=number, pieces=pieces)))
            replies = await answer
        finally:
            del self._answers[number]
        if len(replies) != len(pieces):
            raise HandoffError(f"{self._where} answered {len(replies)} of {len(pieces)} pieces")
        return list(replies)

    async def close(self) -> None:
        """End the connection; calls under way fail."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _read_answers(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                answered = await _read(reader, PieceAnswer)
                if answered.number in self._answers:  # else its caller gave up
                    settle(self._answers[answered.number], answered.replies)
        except (asyncio.IncompleteReadError, OSError, HandoffError) as error:
            logger.info("the connection to %s has ended: %s", self._where, error)
        finally:
            self._writer.close()
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(self._ended())

    def _ended(self) -> HandoffError:
        return HandoffError(f"the connection to {self._where} has ended")


async def connect(address: bytes, deadline_s: float) -> PieceConnection:
    """Connect to a `PieceServer` and see that it answers. Raises HandoffError."""
    try:
        at = decode(address, PieceAddress)
    except msgspec.DecodeError as error:
        raise HandoffError(f"no address to send pieces to: {error}") from error
    where = f"{at.host}:{at.port}"
    try:
        reader, writer = await bounded(asyncio.open_connection(at.host, at.port), deadline_s)
    except OSError as error:
        raise HandoffError(f"no connection to {where}: {error}") from error
    _probe(writer)
    writer.write(at.secret)
    connection = PieceConnection(where, reader, writer)
    try:
        await bounded(connection.receive_pieces([]), deadline_s)
    except BaseException:
        await connection.close()
        raise
    return connection


def _frame(message: msgspec.Struct) -> bytes:
    data = encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


async def _read(reader: asyncio.StreamReader, kind: type[T]) -> T:
    """Raises HandoffError for what is no message, asyncio.IncompleteReadError at the end."""
    num_bytes = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    if num_bytes > MAX_FRAME_BYTES:
        raise HandoffError(f"a message of {num_bytes} bytes")
    try:
        return decode(await reader.readexactly(num_bytes), kind)
    except msgspec.DecodeError as error:
        raise HandoffError(f"no message of this version: {error}") from error


def _probe(writer: asyncio.StreamWriter) -> None:
    """Let the system find out when the other host is gone."""
    connected = writer.get_extra_info("socket")
    with suppress(OSError):  # it is gone already, as the next read will tell
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_AFTER_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, MAX_PROBES)
