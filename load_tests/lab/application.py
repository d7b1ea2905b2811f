"""Runs an application on this machine for a measurement: start, wait until it is ready, end it.

On a Ray cluster of its own, which goes with it. What comes out of it is in a file. Knows no Ray:
the process is `serve run`, as a person starts it.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import yaml

from configs.load import load_config
from load_tests.http_load.client import LoadError, Server, UnreachableError, get

ROOT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"
END_S = 60.0  # to shut down on request
LOOK_EVERY_S = 0.5
LOG_LINES = 30  # shown of an application that did not start


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
    url = f"http://{HOST}:{port}"
    if _answers(Server(url=url)):
        raise LoadError(f"something answers at {url} already: stop it, or take another --port")
    with TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        deploy = _write_deploy(Path(folder), config, model, overrides, port)
        with log.open("w") as output:
            process = _start(deploy, output.fileno())
        try:
            _wait_ready(process, Server(url=url), ready_s, log)
            yield url
        finally:
            _end(process)


def _write_deploy(
    folder: Path, config: Path, model: Path, overrides: Mapping[str, object], port: int
) -> Path:
    """What `serve run` is given: the application with its settings written out, and the port."""
    settings = folder / config.name
    built = msgspec.to_builtins(load_config(config, overrides))
    settings.write_text(yaml.safe_dump(built))
    application = {
        "name": "default",
        "route_prefix": "/",
        "import_path": "serve_app:build",
        "args": {"config": str(settings), "model": str(model.resolve())},
    }
    deploy = folder / "deploy.yaml"
    http = {"host": HOST, "port": port}
    deploy.write_text(yaml.safe_dump({"http_options": http, "applications": [application]}))
    return deploy


def _start(deploy: Path, output: int) -> "subprocess.Popen[bytes]":
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    command = ["env", "RAY_AUTH_MODE=disabled", "RAY_USAGE_STATS_ENABLED=0", f"PYTHONPATH={path}"]
    command += [sys.executable, "-m", "ray.serve.scripts", "run", "--address", "local"]
    command += ["--app-dir", str(ROOT), str(deploy)]
    # A session of its own, so that an interrupt of the bench does not reach it twice.
    return subprocess.Popen(
        command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )


def _wait_ready(
    process: "subprocess.Popen[bytes]", server: Server, ready_s: float, log: Path
) -> None:
    until_s = time.monotonic() + ready_s
    while not _is_ready(server):
        ended = process.poll()
        if ended is not None or time.monotonic() > until_s:
            what = f"not ready within {ready_s:g} s" if ended is None else f"ended with {ended}"
            lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            raise LoadError("\n".join([f"the application {what}; the end of its log:", *lines]))
        time.sleep(LOOK_EVERY_S)


def _is_ready(server: Server) -> bool:
    try:
        get(server, "/ready")
    except LoadError:
        return False
    return True


def _answers(server: Server) -> bool:
    try:
        get(server, "/health")
    except UnreachableError:
        return False
    except LoadError:
        return True
    return True


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ask it to shut down as a person would; if it does not, it is killed, and its cluster ends."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
