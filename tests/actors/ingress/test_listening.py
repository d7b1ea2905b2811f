"""Where Serve is told to listen, and what is said of an address that nobody can have."""

import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from ray import serve
from ray._private import worker as ray_worker
from ray.serve.schema import ServeStatus

from actors.ingress.listening import listen_on
from configs.errors import ConfigFileError
from configs.load import PROJECT_ROOT, ListenAddress, listen_address
from load_tests.testbed.deployed import free_port


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What Ray calls when it has started."""
    hooks: list[Any] = []
    monkeypatch.setattr(ray_worker, "_post_init_hooks", hooks)
    return hooks


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options with which Serve was started."""
    started: list[Any] = []
    monkeypatch.setattr(serve, "start", lambda *, http_options: started.append(http_options))
    return started


def test_serve_starts_at_the_address_as_soon_as_ray_has_started(
    hooks: list[Any], started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "status", ServeStatus)
    port = free_port()
    listen_on(ListenAddress(host=None, port=port))
    assert started == []
    hooks[0]()
    assert (started[0].host, started[0].port) == ("127.0.0.1", port)


def test_a_serve_that_runs_already_is_not_said_to_have_moved(
    hooks: list[Any], started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = ServeStatus(proxies={"node": "HEALTHY"})
    monkeypatch.setattr(serve, "status", lambda: running)
    listen_on(ListenAddress(host="127.0.0.1", port=free_port()))
    with pytest.raises(ConfigFileError, match="stays where it listens"):
        hooks[0]()
    assert started == []


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_a_taken_port_is_an_error_before_anything_starts(host: str, hooks: list[Any]) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as Serve's proxies do
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigFileError, match=rf"^{host}:{port}: .*in use.* PORT="):
            listen_on(ListenAddress(host=host, port=port))
    assert hooks == []


def test_an_address_of_another_machine_is_an_error(hooks: list[Any]) -> None:
    with pytest.raises(ConfigFileError, match=r"192\.0\.2\.77"):  # for documentation (RFC 5737)
        listen_on(ListenAddress(host="192.0.2.77", port=free_port()))
    assert hooks == []


def test_a_build_within_a_cluster_is_told_where_the_address_belongs(hooks: list[Any]) -> None:
    with (
        ThreadPoolExecutor(1) as elsewhere,
        pytest.raises(ConfigFileError, match="http_options"),
    ):
        elsewhere.submit(listen_on, ListenAddress(host=None, port=free_port())).result()
    assert hooks == []


# ---- what names the address ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "environ", "expected"),
    [
        ({}, {}, None),
        ({"port": "8123"}, {}, (None, 8123)),
        ({"host": "::1"}, {"LAPS_PORT": "81"}, ("::1", 81)),
        ({"port": "8123"}, {"LAPS_PORT": "81", "LAPS_HOST": "0.0.0.0"}, ("0.0.0.0", 8123)),
    ],
)
def test_arguments_win_over_the_environment(
    args: dict[str, str], environ: dict[str, str], expected: tuple[str | None, int] | None
) -> None:
    found = listen_address(args, environ)
    assert (found and (found.host, found.port)) == expected


@pytest.mark.parametrize("port", ["0", "65536", "-1", "http", "80 ", "8000.0"])
def test_what_is_no_port_is_an_error(port: str) -> None:
    with pytest.raises(ConfigFileError, match="LAPS_PORT") as error:
        listen_address({}, {"LAPS_PORT": port})
    assert repr(port) in str(error.value)


def commands_of(*arguments: str, **environ: str) -> str:
    """What `make` would run."""
    makefile = Path(PROJECT_ROOT, "Makefile")
    return subprocess.run(
        ["make", "--dry-run", "--file", makefile, *arguments],
        env={"PATH": "/usr/bin:/bin"} | environ,
        cwd=PROJECT_ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_make_serve_passes_host_and_port_on() -> None:
    assert "host=127.0.0.1 port=8000\n" in commands_of("serve", HOST="a-shell-s-own")
    assert "host=0.0.0.0 port=81\n" in commands_of("serve", "HOST=0.0.0.0", "PORT=81")
    assert "host=127.0.0.1 port=82\n" in commands_of("serve", LAPS_PORT="82")


def test_make_serve_installs_no_test_tools_and_make_test_adds_them(tmp_path: Path) -> None:
    serving = commands_of("serve", f"VENV={tmp_path}")
    assert " -e .\n" in serving
    assert "[dev]" not in serving
    for target in ("test", "check"):
        both = commands_of(target, f"VENV={tmp_path}")
        assert both.index(" -e .\n") < both.index("-e '.[dev]'")
