"""Starting what the ingress benchmark measures, and what each of its processes uses.

A server is a process with everything it started below it; it ends when its input is closed.
"""

import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import psutil

from load_tests.lab.ingress_apps import SERVING

Kind = Literal["plain", "python-proxy", "haproxy"]
KINDS: tuple[Kind, ...] = ("plain", "python-proxy", "haproxy")
HAPROXY_ENVIRONMENT = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # Nobody is to be drained at the end of a measurement.
    "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
}
OWN_CLUSTER = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
END_S = 60.0

# What the title of a process says it is; the first that is found counts.
ROLES = (
    (r"ray::ServeReplica:.*:ingress", "ingress"),
    (r"ray::ProxyActor", "Serve's Python proxy"),
    (r"ray::HAProxyManager", "HAProxy's manager"),
    (r"haproxy .*-f ", "HAProxy"),
    (r"ray::NullWorker|null", "null worker"),
    (r"ray::UnifiedWorker|unified-", "unified worker"),
    (r"ray::TokenizerBatcher|tokenizer-", "tokenizer"),
    (r"ray::LapsAllocator|allocator", "allocator"),
    (r"raylet|gcs_server|ray::|ray/|IDLE", "Ray, the rest"),
    (r"ingress_apps plain", "uvicorn"),
    (r"ingress_apps", "Ray, the rest"),
)


def role_of(title: str) -> str:
    """Which part of the system a process with this title is."""
    return next((role for pattern, role in ROLES if re.search(pattern, title)), "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One that answers."""

    process: subprocess.Popen[str]
    host: str
    port: int

    def processes(self) -> list[psutil.Process]:
        top = psutil.Process(self.process.pid)
        return [top, *top.children(recursive=True)]

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far, by part of the system."""
        seconds: dict[str, float] = {}
        for process in self.processes():
            try:
                times, role = process.cpu_times(), role_of(_title(process))
            except psutil.NoSuchProcess:
                continue
            seconds[role] = seconds.get(role, 0.0) + times.user + times.system
        return seconds

    def find(self, role: str) -> psutil.Process:
        """The one process that is this part. Raises LookupError if there is none."""
        for process in self.processes():
            if role_of(_title(process)) == role:
                return process
        raise LookupError(f"no process of the server is the {role}")


def _title(process: psutil.Process) -> str:
    return " ".join(process.cmdline())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(
    kind: Kind,
    *,
    step_ms: float,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    host: str = "127.0.0.1",
    cores: str | None = None,
) -> Iterator[Server]:
    """A server of this kind until the block is left. Raises RuntimeError if it does not start.

    cores: as taskset reads them, which the server may use; None = all.
    """
    port = free_port()
    variables = OWN_CLUSTER | (HAPROXY_ENVIRONMENT if kind == "haproxy" else {})
    settings = [f"{name}={value}" for name, value in (variables | dict(environment or {})).items()]
    what = "plain" if kind == "plain" else "application"
    module = [sys.executable, "-m", "load_tests.lab.ingress_apps", what]
    options = ["--host", host, "--port", str(port), "--step-ms", str(step_ms)]
    options += [word for item in overrides for word in ("--set", item)]
    process = subprocess.Popen(
        [*(["taskset", "-c", cores] if cores else []), "env", *settings, *module, *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None, "it is a pipe"
    assert process.stdout is not None, "likewise"
    try:
        if not any(line.strip() == SERVING for line in process.stdout):
            raise RuntimeError(f"the {kind} server did not start; its output says why")
        yield Server(process=process, host=host, port=port)
    finally:
        process.stdin.close()
        process.wait(END_S)
