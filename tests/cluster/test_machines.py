"""Several machines, as namespaces of this one: what crosses a network that fails."""

import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from actors.ingress.closed_haproxy import BUNDLED, SILENT_S, closed_arguments
from load_tests.testbed.deployed import free_port, wait_until
from load_tests.testbed.machines import Machine, Network, network, why_not

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(300),
    pytest.mark.skipif(why_not() is not None, reason=f"no machines here: {why_not()}"),
]

PORT = 9000
# Takes requests, notes that it has one, and never answers.
MUTE_SERVER = f"""
import pathlib, socket
server = socket.create_server(("", {PORT}))
taken = []
while True:
    taken.append(server.accept()[0])
    if taken[-1].recv(1):
        pathlib.Path("/tmp/asked").touch()
"""
CONFIG = """global
    stats socket {folder}/admin.sock mode 666 level admin expose-fd listeners
defaults
    mode http
    timeout connect 5s
frontend prometheus
    bind :{metrics}
    http-request use-service prometheus-exporter if {{ path /metrics }}
frontend http_frontend
    bind 127.0.0.1:{front}
    default_backend replicas
listen stats
  bind *:{statistics}
  stats enable
backend replicas
    server replica {address}:{port} check
"""


@contextmanager
def haproxy_before(machine: Machine, folder: Path) -> Iterator[str]:
    """Runs HAProxy, as Serve configures it, on this side of the machine's cable; yields its URL."""
    front = free_port()
    source = folder / "haproxy.cfg"
    source.write_text(
        CONFIG.format(
            folder=folder,
            front=front,
            metrics=free_port(),
            statistics=free_port(),
            address=machine.address,
            port=PORT,
        )
    )
    arguments = closed_arguments(["-db", "-f", str(source)])
    process = subprocess.Popen([str(BUNDLED), *arguments])
    try:
        yield f"http://127.0.0.1:{front}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def machines() -> Iterator[Network]:
    with network() as found:
        yield found


def test_a_request_to_a_machine_that_vanishes_ends_with_an_error(
    machines: Network, tmp_path: Path
) -> None:
    """The request waits for its answer, and nobody has anything to send, when the cable is cut."""
    machine = machines.add("alpha")
    server = subprocess.Popen(machine.command(["python3", "-c", MUTE_SERVER], {}))
    asked = machine.disk / "tmp" / "asked"
    try:
        with haproxy_before(machine, tmp_path) as url, ThreadPoolExecutor(1) as client:
            answer: Future[httpx.Response]
            while True:
                answer = client.submit(httpx.get, url, timeout=6 * SILENT_S)
                wait_until(lambda a=answer: asked.exists() or a.done(), "it is asked", 30)
                if not answer.done():
                    break
            machines.cut(machine)
            assert answer.result().status_code in (502, 503, 504)
    finally:
        machine.kill()
        server.wait()
