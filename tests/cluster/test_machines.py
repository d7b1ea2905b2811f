"""Several machines, as namespaces of this one: what crosses a network that fails."""

import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from actors.ingress.closed_haproxy import BUNDLED, SILENT_S, closed_arguments
from load_tests.testbed.deployed import MODEL, ROOT, free_port, wait_until
from load_tests.testbed.listeners import Listener, listeners, unexpected
from load_tests.testbed.machines import Machine, Network, network, why_not
from load_tests.testbed.ray_machines import HOME, RayMachines, why_no_shifted_clocks
from tests.cluster.on_machines import (
    APPLICATION,
    HTTP_PORT,
    MachinesWithApplication,
    assert_answers_are_right,
    is_ready,
)

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(400),
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
PROXY = """global
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
        PROXY.format(
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
            waiting: Future[httpx.Response]
            while True:  # at first HAProxy knows of no replica that is up, and answers at once
                waiting = client.submit(httpx.get, url, timeout=6 * SILENT_S)
                wait_until(lambda w=waiting: asked.exists() or w.done(), "it is asked", 30)
                if not waiting.done():
                    break
            machines.cut(machine)
            assert waiting.result().status_code in (502, 503, 504)
    finally:
        machine.kill()
        server.wait()


# ---- a cluster of Ray ----------------------------------------------------------------------------


def test_a_machine_that_is_turned_off_changes_nothing_for_the_others(machines: Network) -> None:
    """Else what others send here is lost until they ask again who that is."""

    def address() -> str:
        return Path(f"/sys/class/net/{machines.bridge}/address").read_text()

    before = address()
    for name in ("alpha", "beta", "gamma"):
        machines.add(name)
    assert address() == before
    for machine in machines.machines.values():
        machine.kill()
        assert address() == before


def test_a_port_too_many_is_a_stranger() -> None:
    known = [Listener("raylet", 7, "*", 8076), Listener("raylet", 7, "*", 40001)]
    local = Listener("sshd", 9, "127.0.0.1", 22)
    assert unexpected([*known, local]) == []
    assert len(unexpected([*known, Listener("raylet", 7, "10.0.0.1", 40002)])) == 2
    assert unexpected([*known, Listener("sshd", 9, "0.0.0.0", 22)]) == [
        Listener("sshd", 9, "0.0.0.0", 22)
    ]


def test_a_weak_cable_delays_and_loses() -> None:
    with network(has_weak_cables=True) as found:
        machine = found.add("far")
        assert knock(machine) is not None, "the cable is as good as any"
        found.weaken(machine, delay_ms=100, loss=0)
        wait_until(lambda: (knock(machine) or 0) > 0.2, "delayed both ways", 30)
        found.weaken(machine, delay_ms=0, loss=1)
        wait_until(lambda: knock(machine) is None, "everything is lost", 30)
        found.weaken(machine, delay_ms=0, loss=0)
        wait_until(lambda: knock(machine) is not None, "it is mended", 30)


def knock(machine: Machine) -> float | None:
    """Seconds until a port where nobody listens has said so; None = nothing came in two."""
    began_s = time.monotonic()
    try:
        socket.create_connection((machine.address, PORT), timeout=2).close()
    except ConnectionRefusedError:
        return time.monotonic() - began_s
    except OSError:
        return None
    raise AssertionError("somebody listens")


def assert_nobody_comes_in_without_the_token(system: MachinesWithApplication) -> None:
    for machine in system.machines:
        answer = httpx.get(f"http://{machine.address}:52365/api/version", timeout=30)
        assert answer.status_code == 401, machine.name
    head = system.head.address
    client = f"python -c 'import ray; ray.init(\"ray://{head}:10001\"); print(ray.nodes())'"
    refusals = {
        f"ray status --address {head}:6379": r"(?i)authenticat|token",
        client: "ray client connection timeout",  # it is told no reason
    }
    for words, refusal in refusals.items():
        command = f"PATH=$HOME/laps-venv/bin:$PATH RAY_AUTH_MODE=%s {words}"
        with pytest.raises(RuntimeError, match=refusal):
            system.cluster.run(system.head, command % "disabled")
        system.cluster.run(system.head, command % "token")  # else the refusal would say nothing


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["token", "token and TLS"])
def test_an_application_over_three_machines(machines: Network, is_encrypted: bool) -> None:
    """KV goes over gloo; with TLS over Ray's object store, which is encrypted then."""
    changes = {"handoff": {"channel": "object_store"}} if is_encrypted else {}
    system = MachinesWithApplication(machines, changes=changes, is_encrypted=is_encrypted)
    assert_answers_are_right(system.wait_doors(60))
    strangers = {m.name: unexpected(listeners(m)) for m in system.machines}
    assert not any(strangers.values()), strangers
    if not is_encrypted:  # else there is no HTTP without a certificate
        assert_nobody_comes_in_without_the_token(system)


@pytest.mark.skipif(why_no_shifted_clocks() is not None, reason=str(why_no_shifted_clocks()))
@pytest.mark.parametrize("shifts_s", [{"alpha": 120, "beta": -120}, {"head": 120}], ids=str)
def test_an_application_over_machines_whose_clocks_differ(
    machines: Network, shifts_s: Mapping[str, int]
) -> None:
    """Prefill and decode are four minutes apart, or both two minutes from Ray's head."""
    system = MachinesWithApplication(machines, shifts_s=shifts_s)
    for machine in system.machines:
        seen_s = float(system.cluster.run(machine, "python3 -c 'import time; print(time.time())'"))
        assert abs(seen_s - time.time() - shifts_s.get(machine.name, 0)) < 30, machine.name
    doors = system.wait_doors(60)
    for _ in range(3):
        assert_answers_are_right(doors)


def test_a_driver_deploys_to_a_cluster_that_runs(machines: Network) -> None:
    """By the words of docs/operations.md, on the head; a SIGTERM ends the application, not Ray."""
    cluster = RayMachines(machines)
    head = cluster.start("head", num_cpus=0)
    for name in ("alpha", "beta"):
        cluster.start(name, num_cpus=1)
    (head.disk / "tmp" / "my.yaml").write_text(yaml.safe_dump(APPLICATION))
    url = f"http://{head.address}:{HTTP_PORT}"
    settings = cluster.user(head) | {
        "PATH": f"{HOME}/laps-venv/bin:/usr/bin:/bin",
        "RAY_AUTH_MODE": "token",
        "RAY_ADDRESS": f"{head.address}:6379",
    }
    words = f"serve run serve_app:build config=/tmp/my.yaml model={MODEL} host=0.0.0.0"
    driver = subprocess.Popen(head.command(["sh", "-c", f"cd {ROOT} && exec {words}"], settings))
    try:
        wait_until(lambda: is_ready(url) or driver.poll() is not None, "it can serve", 180)
        assert_answers_are_right([url])
        [pid] = head.run(["pgrep", "-f", "serve run serve_app:build"], {}).split()
        head.run(["kill", "-TERM", pid], {})
        assert driver.wait(60) == 0
        assert "ALIVE" in cluster.ray(head, "list nodes --address http://127.0.0.1:8265")
    finally:
        driver.kill()
        driver.wait()


def test_a_machine_that_is_drained_is_left_before_it_ends(machines: Network) -> None:
    """Without an error and without a machine that ends: it is only announced."""
    system = MachinesWithApplication(machines, names=("alpha", "beta", "gamma"))
    [drained] = system.machines_of("ray::DecodeWorker")
    why = "--reason DRAIN_NODE_REASON_PREEMPTION --reason-message maintenance"
    words = f"drain-node {why} --deadline-remaining-seconds 600"
    system.cluster.ray(drained, f"{words} --address {system.head.address}:6379")
    until_s = time.monotonic() + 120
    url = system.url(system.head)
    while drained in system.machines_of("Worker"):
        assert time.monotonic() < until_s, system.places()
        assert_answers_are_right([url])
    assert len(system.machines_of("ray::DecodeWorker")) == 1, system.places()
    assert_answers_are_right([url])
