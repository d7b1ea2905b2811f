"""A call between two actors of one machine: by Ray, and by a connection (actors/rpc).

    python -m load_tests.lab.bench_calls

There and back, one after the other, of so many bytes each way; starts a Ray cluster of its own.
"""

import argparse
import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

import ray

from actors.rpc.connection import connect
from actors.rpc.server import CallServer
from load_tests.tables import render_rows

LOOPBACK = "127.0.0.1"
CONNECT_S = 10.0
WARM_ROUNDS = 100
HEADER = ("bytes", "by Ray, p50", "p99", "by a connection, p50", "p99")

Echo = Callable[[bytes], Awaitable[bytes]]


class Callee:
    """Says what it is told."""

    def __init__(self) -> None:
        self._server = CallServer(LOOPBACK, {"echo": self.echo})

    async def address(self) -> bytes:
        return await self._server.address()

    async def echo(self, data: bytes) -> bytes:
        return data


class Caller:
    async def times_ms(self, callee: Any, num_bytes: int, rounds: int) -> list[list[float]]:  # noqa: ANN401
        """[2, rounds] ascending: by Ray, by a connection."""
        data = os.urandom(num_bytes)
        calls = await connect("the callee", await callee.address.remote(), CONNECT_S)
        by_ray = await _times_ms(callee.echo.remote, data, rounds)
        by_connection = await _times_ms(lambda data: calls.call("echo", data), data, rounds)
        await calls.close()
        return [by_ray, by_connection]


async def _times_ms(echo: Echo, data: bytes, rounds: int) -> list[float]:
    times_ms = []
    for _ in range(WARM_ROUNDS + rounds):
        started_s = time.perf_counter()
        assert await echo(data) == data, "another answer came"
        times_ms.append(1e3 * (time.perf_counter() - started_s))
        await asyncio.sleep(0)
    return sorted(times_ms[WARM_ROUNDS:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=int, nargs="+", default=[300, 10_000, 100_000])
    parser.add_argument("--rounds", type=int, default=1000)
    args = parser.parse_args()
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    actors: list[Any] = [ray.remote(kind).options(num_cpus=0).remote() for kind in (Caller, Callee)]
    caller, callee = actors
    rows: list[tuple[str, ...]] = [HEADER]
    for num_bytes in args.bytes:
        series = ray.get(caller.times_ms.remote(callee, num_bytes, args.rounds))
        cells = [f"{ms[int(q * len(ms))]:.3f} ms" for ms in series for q in (0.5, 0.99)]
        rows.append((str(num_bytes), *cells))
    print(render_rows(rows))
    ray.shutdown()


if __name__ == "__main__":
    main()
