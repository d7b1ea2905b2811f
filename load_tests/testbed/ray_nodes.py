"""Ray nodes on this host, with a GPU or some processors each.

Three kinds. `one`: one node has everything. `addresses`: two nodes of one network, 127.0.0.2 and
127.0.0.3, whose processes see each other. `namespaces`: two machines as in machines.py, which only
share the processors, the GPUs and the file system but /tmp and /dev/shm.
"""

import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, get_args

import psutil
from ray._common.utils import reset_ray_address
from ray._private.utils import read_ray_address

from load_tests.testbed.deployed import ROOT, free_port, wait_until
from load_tests.testbed.machines import Machine, network

NodeKind = Literal["one", "addresses", "namespaces"]
KINDS: tuple[NodeKind, ...] = get_args(NodeKind)
# Every namespace has it, which is not so of /tmp.
SHARED = "/var/tmp"
NUM_CPUS = 4  # of each of two nodes, by Ray's count
STORE_BYTES = 500_000_000
START_S = 60.0
END_S = 3.0  # nothing of a node is needed any more
RAY = (sys.executable, "-m", "ray.scripts.scripts")


@dataclass(frozen=True, slots=True)
class Node:
    """Where a Ray node runs."""

    address: str
    machine: Machine | None  # None = this one
    environment: Mapping[str, str]

    def command(self, words: Sequence[str]) -> list[str]:
        """Returns the command that runs another beside the node's processes."""
        if self.machine is not None:
            return self.machine.command(words, self.environment)
        return ["env", *(f"{name}={value}" for name, value in self.environment.items()), *words]


@dataclass(frozen=True, slots=True)
class RayNodes:
    """A Ray cluster; its first node is its head."""

    nodes: Sequence[Node]
    folder: Path  # all nodes read and write it
    gcs_port: int

    @property
    def gcs_address(self) -> str:
        return f"{self.nodes[0].address}:{self.gcs_port}"


@contextmanager
def ray_nodes(
    kind: NodeKind, *, has_gpus: bool, environment: Mapping[str, str]
) -> Iterator[RayNodes]:
    """A cluster of this kind; it is gone when the block is left, however it is.

    environment: of every process of Ray, besides; `{folder}` in a value is the shared folder.
    Raises RuntimeError, with what Ray or the system says, if this host cannot have it.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="laps-nodes-", dir=SHARED)))
        every = {
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # else a node is drained before it ends
            "PYTHONPATH": ":".join([str(ROOT), *filter(None, sys.path)]),
            **{name: value.format(folder=folder) for name, value in environment.items()},
        }
        nodes = _places(kind, every, stack)
        cluster = RayNodes(nodes, folder, free_port())
        stack.callback(forget_address, cluster)
        share = 2 // len(nodes)
        for node in nodes:
            stack.callback(_stop, node, _start(cluster, node, share, has_gpus=has_gpus))
            if node is nodes[0]:
                wait_until(lambda: _answers(cluster), "Ray's head listens", START_S)
        yield cluster


def _places(kind: NodeKind, every: Mapping[str, str], stack: ExitStack) -> list[Node]:
    match kind:
        case "one":
            return [Node("127.0.0.1", None, every)]
        case "addresses":
            gpus = [{"CUDA_VISIBLE_DEVICES": str(gpu)} for gpu in range(2)]
            return [Node(f"127.0.0.{2 + i}", None, {**every, **gpu}) for i, gpu in enumerate(gpus)]
        case "namespaces":
            found = stack.enter_context(network())
            machines = [found.add(name) for name in ("alpha", "beta")]
            gpus = [
                {"CUDA_VISIBLE_DEVICES": str(gpu), "NCCL_SOCKET_IFNAME": "eth0"} for gpu in range(2)
            ]
            return [
                Node(machine.address, machine, {**every, **gpu})
                for machine, gpu in zip(machines, gpus, strict=True)
            ]


def _start(
    cluster: RayNodes, node: Node, share: int, *, has_gpus: bool
) -> "subprocess.Popen[bytes]":
    """Starts the processes of Ray; the one returned ends the others when it is ended.

    share: how many times the resources of one of two nodes it has.
    """
    words = [*RAY, "start", "--block", "--disable-usage-stats"]
    words += [f"--node-ip-address={node.address}", f"--num-cpus={share * NUM_CPUS}"]
    words += [f"--num-gpus={share if has_gpus else 0}", f"--object-store-memory={STORE_BYTES}"]
    words += ["--min-worker-port=0", "--max-worker-port=0"]
    if node is cluster.nodes[0]:
        words += ["--head", f"--port={cluster.gcs_port}", "--include-dashboard=false"]
    else:
        words += [f"--address={cluster.gcs_address}", "--dashboard-agent-listen-port=0"]
    log = (cluster.folder / f"ray-{node.address}.log").open("w")
    with log:
        return subprocess.Popen(
            node.command(words), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


def forget_address(cluster: RayNodes) -> None:
    """Removes what a head that was killed leaves: whoever starts Ray next would look for it."""
    if read_ray_address() == cluster.gcs_address:
        reset_ray_address()


def _answers(cluster: RayNodes) -> bool:
    address = (cluster.nodes[0].address, cluster.gcs_port)
    with suppress(OSError), socket.create_connection(address, timeout=1):
        return True
    return False


def _stop(node: Node, process: "subprocess.Popen[bytes]") -> None:
    """Ends the node, and then everything that it started and that is still there."""
    if node.machine is not None:
        node.machine.kill()
    with suppress(psutil.NoSuchProcess):
        started = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        _, alive = psutil.wait_procs(started, END_S)
        for one in alive:
            with suppress(psutil.NoSuchProcess):
                one.kill()
    process.kill()
    process.wait()
