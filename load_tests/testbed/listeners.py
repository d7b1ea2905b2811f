"""Who listens where on the machines of a cluster: what `ss` shows, and what is expected."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from load_tests.testbed.machines import Machine

_LINE = re.compile(r'LISTEN\s+\d+\s+\d+\s+(\S+):(\d+)\s+\S+\s+users:\(\("([^"]+)",pid=(\d+)')
_LOOPBACK = ("127.", "::1", "::ffff:127.")
RAY_PORTS = range(10002, 11000)  # --min-worker-port and --max-worker-port of configs/cluster
REPLICA_PORTS = range(30000, 31001)


@dataclass(frozen=True, slots=True)
class Listener:
    """One listening socket."""

    process: str  # its name, which Linux cuts to 15 letters
    pid: int
    host: str  # "*" or "0.0.0.0" = every interface
    port: int

    @property
    def is_local(self) -> bool:
        return self.host.strip("[]").startswith(_LOOPBACK)


@dataclass(frozen=True, slots=True)
class Expected:
    """What docs/operations.md says of a kind of processes."""

    process: str  # beginning of the name
    ports: tuple[int, ...] = ()
    ranges: tuple[range, ...] = ()
    num_others: int = 0  # ports that the kernel chooses, at most


# Reached from other machines; the longest name that fits counts. Loopback is not looked at: who is
# on a machine may talk to it.
EXPECTED = (
    Expected("gcs_server", (6379,)),
    Expected("raylet", (8076,), num_others=1),
    # On the head: Ray Client's server, and metrics of Ray's autoscaler and dashboard.
    Expected("python", (10001, 44217, 44227)),
    Expected("haproxy", (8000,)),
    Expected("ray-dashboard", ranges=(RAY_PORTS,)),
    # A node's agents: jobs; calls and metrics.
    Expected("ray::DashboardA", (52365,), num_others=2),
    Expected("ray::RuntimeEnv", num_others=1),
    Expected("ray::", ranges=(RAY_PORTS,)),  # Ray's calls to an actor
    Expected("ray::ProxyActor", (8500,), (RAY_PORTS,)),  # asked where no replica is up
    # One has no service (closed_replica.py); by the other, several replicas ask each other.
    Expected("ray::ServeRepli", (), (RAY_PORTS, REPLICA_PORTS), num_others=2),
    # Calls between actors; of workers, gloo's or NCCL's connections too.
    *(Expected(f"ray::{w}", (), (RAY_PORTS,), 2) for w in ("PrefillWor", "DecodeWork")),
    *(Expected(f"ray::{a}", (), (RAY_PORTS,), 1) for a in ("LapsAlloca", "TokenizerB")),
)


def listeners(machine: Machine) -> list[Listener]:
    """All listening TCP sockets of a machine."""
    shown = machine.run(["ss", "-ltnpH"], {})
    found = [
        Listener(process, int(pid), host, int(port))
        for host, port, process, pid in _LINE.findall(shown)
    ]
    assert len(found) == len(shown.strip().splitlines()), f"not read: {shown}"
    return found


def unexpected(found: Sequence[Listener]) -> list[Listener]:
    """Those that other machines reach and that nobody expects, process by process."""
    processes: defaultdict[int, list[Listener]] = defaultdict(list)
    for one in found:
        if not one.is_local:
            processes[one.pid].append(one)
    return [one for sockets in processes.values() for one in _strangers(sockets)]


def _strangers(sockets: Sequence[Listener]) -> list[Listener]:
    """Of one process: all that are not named, if they are more than the kernel may choose."""
    name = sockets[0].process
    fitting = [expected for expected in EXPECTED if name.startswith(expected.process)]
    if not fitting:
        return list(sockets)
    expected = max(fitting, key=lambda one: len(one.process))
    named = {*expected.ports, *(port for ports in expected.ranges for port in ports)}
    others = [one for one in sockets if one.port not in named]
    return others if len(others) > expected.num_others else []
