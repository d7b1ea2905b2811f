"""Who listens where on the machines of a cluster: what `ss` shows, and what is expected."""

import re
from dataclasses import dataclass

from load_tests.testbed.machines import Machine

_LINE = re.compile(r'LISTEN\s+\d+\s+\d+\s+(\S+):(\d+)\s+\S+\s+users:\(\("([^"]+)"')
_LOOPBACK = ("127.", "::1", "::ffff:127.")
RAY_PORTS = range(10002, 11000)  # --min-worker-port and --max-worker-port of configs/cluster
REPLICA_PORTS = range(30000, 31001)


@dataclass(frozen=True, slots=True)
class Listener:
    """One listening socket."""

    process: str  # its name, which Linux cuts to 15 letters
    host: str  # "*" or "0.0.0.0" = every interface
    port: int

    @property
    def is_local(self) -> bool:
        return self.host.strip("[]").startswith(_LOOPBACK)


@dataclass(frozen=True, slots=True)
class Expected:
    """Listeners that docs/operations.md names; `ports` None = chosen by the kernel."""

    process: str  # beginning of the name
    ports: range | None


# Reached from other machines. Loopback is not looked at: who is on a machine may talk to it.
EXPECTED = (
    Expected("gcs_server", range(6379, 6380)),
    Expected("raylet", range(8076, 8077)),
    Expected("raylet", None),
    Expected("python", range(10001, 10002)),  # Ray Client's server, on the head
    Expected("python", range(44217, 44218)),  # metrics of Ray's autoscaler, on the head
    Expected("python", range(44227, 44228)),  # metrics of Ray's dashboard, on the head
    Expected("ray::DashboardA", None),  # a node's agent: calls, its jobs (52365) and metrics
    Expected("ray::RuntimeEnv", None),
    Expected("ray::", RAY_PORTS),  # Ray's calls to an actor
    Expected("ray-dashboard", RAY_PORTS),
    Expected("haproxy", range(8000, 8001)),
    Expected("ray::ProxyActor", range(8500, 8501)),  # what HAProxy asks where no replica is up
    Expected("ray::ServeRepli", REPLICA_PORTS),
    Expected("ray::ServeRepli", None),  # closed_replica.py leaves it without a service
    # Calls between actors, and gloo's or NCCL's connections.
    *(Expected(f"ray::{actor}", None) for actor in ("PrefillWor", "DecodeWork", "UnifiedWor")),
    *(Expected(f"ray::{actor}", None) for actor in ("LapsAlloca", "TokenizerB")),
)


def listeners(machine: Machine) -> list[Listener]:
    """All listening TCP sockets of a machine."""
    shown = machine.run(["ss", "-ltnpH"], {})
    found = [Listener(process, host, int(port)) for host, port, process in _LINE.findall(shown)]
    assert len(found) == len(shown.strip().splitlines()), f"not read: {shown}"
    return found


def unexpected(found: list[Listener]) -> list[Listener]:
    """Those that other machines reach and that nobody expects."""
    return [one for one in found if not one.is_local and not any(_fits(one, e) for e in EXPECTED)]


def _fits(one: Listener, expected: Expected) -> bool:
    is_port = expected.ports is None or one.port in expected.ports
    return is_port and one.process.startswith(expected.process)
