"""Many connections that ask for nothing: silent, with half a header, or after an answer.

For tests and benchmarks of what idle clients cost a server. Their number is bound by the open
files a process may have, here and in the server.
"""

import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

SPARE_FILES = 1000  # for everything else that a process has open
HALF_HEADER = b"POST /v1/completions HTTP/1.1\r\nHost: idle\r\nX-Half: "
QUICK_REQUEST = b"GET /-/healthz HTTP/1.1\r\nHost: idle\r\n\r\n"
TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleConnections:
    """How many of each kind are open."""

    num_silent: int
    num_half: int  # the first half of a request's header was sent
    num_kept: int  # one request was answered, the next has not come

    @property
    def num_all(self) -> int:
        return self.num_silent + self.num_half + self.num_kept


def raise_file_limit(num_files: int) -> None:
    """Let this process have so many open files. Raises OSError if it may not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < num_files <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, hard))
    elif soft < num_files:
        raise OSError(f"{num_files} open files are needed, and {hard} allowed (ulimit -Hn)")


@contextmanager
def idle_connections(host: str, port: int, wanted: IdleConnections) -> Iterator[None]:
    """Open until the block is left. Raises OSError if the server does not take them all."""
    raise_file_limit(wanted.num_all + SPARE_FILES)
    says = [b""] * wanted.num_silent + [HALF_HEADER] * wanted.num_half
    says += [QUICK_REQUEST] * wanted.num_kept
    connections: list[socket.socket] = []
    try:
        for said in says:
            connection = socket.create_connection((host, port), TIMEOUT_S)
            connections.append(connection)
            connection.sendall(said)
        for connection in connections[wanted.num_silent + wanted.num_half :]:
            if not connection.recv(4096).startswith(b"HTTP/1.1 200"):
                raise OSError("the server did not answer /-/healthz")
        yield
    finally:
        for connection in connections:
            connection.close()
