"""The wire format of calls: messages, frames, and errors that keep their class.

    caller -> actor    a secret [32 bytes], then frames of Call
    actor -> caller    HELLO, then frames of Answer in any order; of a stream, one for each item

A frame is its length, 4 bytes, and msgpack.
"""

import asyncio
import logging
import socket
from contextlib import suppress
from inspect import signature
from typing import Any, TypeVar

import msgspec

from engine import errors
from engine.errors import EngineError, WorkerError
from engine.messages import decode, encode

logger = logging.getLogger(__name__)
M = TypeVar("M", bound=msgspec.Struct)

SECRET_BYTES = 32
LENGTH_BYTES = 4
MAX_FRAME_BYTES = 64 * 2**20  # a prompt of millions of tokens
# A connection to a host that vanished ends after this long without an answer to a probe, or to
# data.
PROBE_AFTER_S, PROBE_EVERY_S, MAX_PROBES = 30, 10, 3
UNHEARD_MS = 30_000

HELLO = -1  # in place of a call's number: the secret was right
STOP = ""  # in place of a method: stop the stream of that number


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where an actor listens for calls, and the secret that a caller sends first."""

    host: str
    port: int
    secret: bytes


class Call(msgspec.Struct, frozen=True, kw_only=True):
    number: int  # unique on its connection
    method: str
    data: bytes = b""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The error that a call raised."""

    kind: str  # a class of engine.errors; "" = something else, which `message` names
    message: str
    details: dict[str, Any] = {}  # its other attributes


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Answers the call of that number; without data and failure it ends the stream."""

    number: int
    data: bytes | None = None
    failure: Failure | None = None


# ---- frames -------------------------------------------------------------------------------------


def frame_of(message: msgspec.Struct) -> bytes:
    """Encodes a message behind its length. Raises WorkerError if the other end would refuse it."""
    data = encode(message)
    _check(len(data))
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def take_frame(heard: bytearray) -> bytes | None:
    """Removes the first frame and returns its content; None = it is not complete yet.

    Raises WorkerError as `num_bytes_of` does.
    """
    if len(heard) < LENGTH_BYTES:
        return None
    end = LENGTH_BYTES + num_bytes_of(heard[:LENGTH_BYTES])
    if len(heard) < end:
        return None
    frame = bytes(heard[LENGTH_BYTES:end])
    del heard[:end]
    return frame


def num_bytes_of(length: bytes | bytearray) -> int:
    """Reads how many bytes follow. Raises WorkerError for more than a frame may have."""
    num_bytes = int.from_bytes(length, "big")
    _check(num_bytes)
    return num_bytes


def _check(num_bytes: int) -> None:
    if num_bytes > MAX_FRAME_BYTES:
        raise WorkerError(f"a message of {num_bytes} bytes, more than {MAX_FRAME_BYTES}")


def decoded(frame: bytes, kind: type[M]) -> M:
    """Raises WorkerError for what is no message."""
    try:
        return decode(frame, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WorkerError(f"no message of this version: {error}") from error


def probe(transport: asyncio.BaseTransport) -> None:
    """Makes the operating system probe whether the other host is gone."""
    connected = transport.get_extra_info("socket")
    with suppress(OSError):  # the connection is gone already; the next read will fail
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_AFTER_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, MAX_PROBES)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNHEARD_MS)


# ---- errors -------------------------------------------------------------------------------------

_KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, EngineError)
}


def failure_of(method: str, error: BaseException) -> Failure:
    """Returns the failure for the caller; logs what is neither EngineError nor cancellation."""
    for kind in type(error).__mro__:
        if isinstance(error, EngineError) and kind in _KINDS.values():
            names = [name for name in signature(kind).parameters if name != "message"]
            details = {name: getattr(error, name) for name in names}
            return Failure(kind=kind.__name__, message=error.message, details=details)
    if isinstance(error, Exception):
        logger.error("%s raised what it should not have", method, exc_info=error)
    return Failure(kind="", message=type(error).__name__)


def error_of(name: str, failure: Failure) -> EngineError:
    """Returns the error that a call of the actor `name` raised."""
    kind = _KINDS.get(failure.kind)
    if kind is None:
        return WorkerError(f"{name} failed: {failure.message}")
    try:
        return kind(failure.message, **failure.details)
    except TypeError as error:
        return WorkerError(f"{name} runs another version: {error}")
