"""Runs an application on this machine for a measurement: start, wait until it is ready, end it.

On a Ray cluster of its own, which goes with it; several may run side by side. What comes out of it
is in a file. Knows no Ray: the process is `serve run`, as a person starts it.
"""

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import yaml

from configs.load import load_config
from load_tests.lab.server_process import HOST, ROOT, ServerCommand, ServerProcess

# Where the ingress replicas behind HAProxy listen: so many ports, above all that Linux chooses
# itself, at a distance from the port that clients use. Applications that start side by side would
# otherwise take the same ones.
NUM_REPLICA_PORTS = 50
FIRST_REPLICA_PORT = 61_000


@contextmanager
def running(
    config: Path,
    model: Path,
    *,
    overrides: Mapping[str, object],
    port: int,
    ready_s: float,
) -> Iterator[str]:
    """The URL of a ready application of `config` and `model`, until the block is left.

    overrides: dotted keys of the configuration. Raises ConfigFileError for a configuration that
    cannot be, and LoadError for one that is not ready within `ready_s`, with the end of its log.
    """
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = application_command(Path(folder), config, model, overrides, port)
        process = ServerProcess(command, Path(folder) / "log")
        try:
            process.wait_ready(time.monotonic() + ready_s)
            yield command.url
        finally:
            process.end()


def application_command(
    folder: Path,
    config: Path,
    model: Path,
    overrides: Mapping[str, object],
    port: int,
    *,
    gpus: Sequence[int] | None = None,
    replica_ports: range | None = None,
) -> ServerCommand:
    """How to start an application of `config` and `model`; what it needs is written to `folder`.

    folder: also for Ray's files; its path must be short (Unix sockets lie deep below it). gpus:
    those that it sees; None = all. replica_ports: for the ingress replicas behind HAProxy; None =
    free ones. Raises ConfigFileError for a configuration that cannot be.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    environment = {
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Where Ray notes a cluster's address: that of another application would be found there.
        "RAY_TMPDIR": str(folder),
        "PYTHONPATH": path,
    }
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    if replica_ports is not None:
        environment["RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT"] = str(replica_ports[0])
        environment["RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT"] = str(replica_ports[-1])
    settings = folder / config.name
    settings.write_text(yaml.safe_dump(msgspec.to_builtins(load_config(config, overrides))))
    # Not a deploy file: that one is imported when Ray runs already, too late to choose HAProxy.
    words = [sys.executable, "-m", "ray.serve.scripts", "run", "--address", "local"]
    words += ["--app-dir", str(ROOT), "serve_app:build", f"config={settings}"]
    words += [f"model={model.resolve()}", f"host={HOST}", f"port={port}"]
    return ServerCommand(
        name=f"the application of {config.name}",
        words=words,
        port=port,
        ready_path="/ready",
        environment=environment,
    )


def replica_ports_of(index: int, first_port: int) -> range:
    """Ports for the ingress replicas of application number `index`, the first at `first_port`."""
    first = first_port + index * NUM_REPLICA_PORTS
    return range(first, first + NUM_REPLICA_PORTS)
