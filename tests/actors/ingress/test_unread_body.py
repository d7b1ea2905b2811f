"""What becomes of a body that is still coming when its request is answered, over real sockets."""

import asyncio
import hashlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import uvicorn

from actors.ingress.unread_body import READ_TIMES, WAITING_SHARE
from tests.actors.ingress.edge_app import edge_app

LIMIT = 2**21  # bytes of a body
KEYS = {"api.keys": {"someone": hashlib.sha256(b"a key").hexdigest()}}
PATIENCE_S = 30.0  # of a test, with a server that never closes
PIECE = b" " * 2**16
ENDLESS = b"Content-Length: %d" % 2**60

REFUSED = {
    "of a length that nobody may send": (b"POST /v1/completions", b"Bearer a key", 413),
    "without a key": (b"POST /v1/completions", b"Bearer another", 401),
    "to no route": (b"POST /v2/nothing", b"Bearer a key", 404),
    "to a route that reads none": (b"GET /health", b"Bearer a key", 200),
}

Client = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(upload_timeout_s: float, **more: int) -> AsyncIterator[int]:
    """Yields the port of an ingress; more: settings of its edge."""
    edge = {"upload_timeout_s": upload_timeout_s, "max_body_bytes": LIMIT} | more
    overrides = {f"edge.{name}": value for name, value in edge.items()}
    config = uvicorn.Config(edge_app(KEYS | overrides).app, log_config=None, lifespan="off")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.create_task(server.serve([listener]))
        yield listener.getsockname()[1]
        server.should_exit = server.force_exit = True
        await task


def run(client: Client, upload_timeout_s: float) -> None:
    async def main() -> None:
        async with serving(upload_timeout_s) as port, asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                await client(reader, writer)
            finally:
                writer.close()

    asyncio.run(main())


def headers(target: bytes, key: bytes, *more: bytes) -> bytes:
    lines = [target + b" HTTP/1.1", b"Host: here", b"Authorization: " + key]
    return b"\r\n".join([*lines, b"Content-Type: application/json", *more, b"", b""])


async def send_for_ever(writer: asyncio.StreamWriter) -> None:
    """Sends pieces until the connection is closed."""
    while True:
        writer.write(PIECE)
        await writer.drain()


@pytest.mark.parametrize(("target", "key", "status"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("is_slow", [True, False])
def test_a_body_that_never_ends_ends_with_its_connection(
    target: bytes, key: bytes, status: int, is_slow: bool
) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(headers(target, key, ENDLESS))
        sending = None if is_slow else asyncio.create_task(send_for_ever(writer))
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert b"connection: close" in answer
        if sending is None:
            await reader.read()  # to the end: the connection is closed
            return
        with pytest.raises(ConnectionError):
            await sending

    run(client, upload_timeout_s=0.05 if is_slow else PATIENCE_S)


@pytest.mark.parametrize("claims_length", [True, False])
@pytest.mark.parametrize(("target", "key", "status"), REFUSED.values(), ids=REFUSED)
def test_who_reads_only_when_everything_is_sent_finds_the_answer(
    target: bytes, key: bytes, status: int, claims_length: bool
) -> None:
    num_bytes = (READ_TIMES - 1) * LIMIT  # more than the buffers between the two hold

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if claims_length:
            writer.write(headers(target, key, b"Content-Length: %d" % num_bytes))
            writer.write(b" " * num_bytes)
        else:
            writer.write(headers(target, key, b"Transfer-Encoding: chunked"))
            writer.write(b"%x\r\n" % num_bytes + b" " * num_bytes + b"\r\n0\r\n\r\n")
        await writer.drain()
        answer = await reader.read()  # to the end: the connection is closed
        assert answer.startswith(b"HTTP/1.1 %d " % status)

    run(client, upload_timeout_s=PATIENCE_S)


def test_a_body_that_came_whole_leaves_the_connection_open() -> None:
    body = b'{"model": "tiny", "prompt": "hi", "max_tokens": 1}'

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            length = b"Content-Length: %d" % len(body)
            writer.write(headers(b"POST /v1/completions", b"Bearer a key", length) + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert b"connection: close" not in answer
            num_bytes = answer.partition(b"content-length: ")[2].partition(b"\r")[0]
            await reader.readexactly(int(num_bytes))

    run(client, upload_timeout_s=PATIENCE_S)


def test_who_has_no_key_cannot_take_all_places_by_bodies_that_never_come() -> None:
    async def main() -> None:
        refused = headers(b"POST /v1/completions", b"Bearer another", ENDLESS)
        async with (
            serving(PATIENCE_S, max_ongoing_requests=2 * WAITING_SHARE) as port,
            asyncio.timeout(PATIENCE_S / 2),
        ):
            clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
            for reader, writer in clients:
                writer.write(refused)
                answer = await reader.readuntil(b"\r\n\r\n")
                assert answer.startswith(b"HTTP/1.1 401 ")
            for reader, _ in clients[2:]:
                await reader.read()  # to the end: the connection is closed
            assert not any(reader.at_eof() for reader, _ in clients[:2])
            for _, writer in clients:
                writer.close()

    asyncio.run(main())
