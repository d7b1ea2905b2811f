"""A client that keeps connections, beside servers that keep them, or do not."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from load_tests.http_load.client import Server
from load_tests.testbed.stream_client import StreamClient

PATIENCE_S = 30.0
NUM_REQUESTS = 3
OK = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n%s\r\n2\r\nok\r\n0\r\n\r\n"

Between = Callable[[StreamClient], Awaitable[None]]


class Answers:
    """A server that counts its connections and has so many requests on each."""

    def __init__(self, num_each: int, header: bytes = b"") -> None:
        self.num_connections = 0
        self._num_each = num_each
        self._header = header

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        for _ in range(self._num_each):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(OK % self._header)
        writer.close()


async def _nothing(client: StreamClient) -> None:
    """The next request comes at once."""


async def _wait_closed(client: StreamClient) -> None:
    [idle] = client._idle
    assert idle.transport is not None
    while not idle.transport.is_closing():  # noqa: ASYNC110 - a transport has no event
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("answers", "between", "num_connections"),
    [
        (Answers(NUM_REQUESTS), _nothing, 1),
        (Answers(1, b"Connection: close\r\n"), _nothing, NUM_REQUESTS),
        (Answers(1), _wait_closed, NUM_REQUESTS),
    ],
    ids=["kept", "not kept, as it says", "closed once idle"],
)
def test_a_connection_is_used_again_where_the_server_keeps_it(
    answers: Answers, between: Between, num_connections: int
) -> None:
    async def run() -> None:
        async with await asyncio.start_server(answers.serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            client = StreamClient(Server(url=f"http://127.0.0.1:{port}"))
            request = client.request("/answers", b"")
            for number in range(NUM_REQUESTS):
                async with asyncio.timeout(PATIENCE_S):
                    pieces = await client.post(request)
                assert b"".join(piece for _, piece in pieces) == b"ok"
                if number < NUM_REQUESTS - 1:
                    await between(client)
            client.close()

    asyncio.run(run())
    assert answers.num_connections == num_connections
