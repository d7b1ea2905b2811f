"""What stands between Serve and HAProxy closes what Serve leaves open, or starts nothing."""

import re
import socket
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

from actors.ingress.closed_haproxy import BUNDLED, close, closed_arguments
from load_tests.testbed.deployed import free_port, wait_until

ROOT = Path(__file__).resolve().parents[3]
# As Serve fills its template in, in short.
OPEN = """global
    stats socket {folder}/admin.sock mode 666 level admin expose-fd listeners
defaults
    mode http
    timeout connect 5s
    timeout client 3600s
    timeout server 60s
frontend prometheus
    bind :19101
    http-request use-service prometheus-exporter if {{ path /metrics }}
frontend http_frontend
    bind 127.0.0.1:18000
listen stats
  bind *:18404
  stats enable
"""


def test_serves_own_template_has_all_that_is_replaced_and_nothing_else_open() -> None:
    closed = close(HAPROXY_CONFIG_TEMPLATE)
    binds = re.findall(r"^\s+bind (\S+)", closed, flags=re.MULTILINE)
    assert binds.count("127.0.0.1:{{") == 2
    assert not [bind for bind in binds if bind.startswith((":", "*"))]
    assert "mode 666" not in closed
    assert "timeout http-request 10s" in closed


@pytest.mark.parametrize(
    "line",
    ["frontend prometheus\n    bind :19101\n", "  bind *:18404\n", " mode 666 ", "defaults\n"],
)
def test_a_configuration_that_lacks_a_line_or_has_it_twice_is_refused(line: str) -> None:
    for changed in (OPEN.replace(line, "\n"), OPEN.replace(line, line + line) + OPEN):
        with pytest.raises(ValueError, match="places, not one"):
            close(changed)


def test_haproxy_finds_nothing_wrong_with_the_closed_configuration(tmp_path: Path) -> None:
    source = tmp_path / "haproxy.cfg"
    source.write_text(OPEN.format(folder=tmp_path))
    arguments = closed_arguments(["-db", "-f", str(source), "-dR"])
    assert arguments[0::3] == ["-db", "-dR"]
    assert arguments[1] == "-f"
    assert arguments[2] != str(source)
    checked = subprocess.run([str(BUNDLED), "-c", *arguments], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert stat.S_IMODE(Path(arguments[2]).stat().st_mode) & stat.S_IWOTH == 0


def test_what_needs_no_configuration_is_passed_on() -> None:
    command = [sys.executable, "-m", "actors.ingress.closed_haproxy", "-v"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert said.stdout.startswith("HAProxy version")


def test_an_unknown_configuration_ends_the_start_and_says_what_to_do(tmp_path: Path) -> None:
    source = tmp_path / "haproxy.cfg"
    source.write_text("global\n")
    command = [sys.executable, "-m", "actors.ingress.closed_haproxy", "-f", str(source)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert said.returncode == 1
    assert "its ports would be open" in said.stderr


def test_haproxy_leaves_with_the_process_that_started_it(tmp_path: Path) -> None:
    """A request under way is finished, and nothing new is taken."""
    front, replica = free_port(), socket.create_server(("127.0.0.1", 0))
    source = tmp_path / "haproxy.cfg"
    source.write_text(
        f"global\n    stats socket {tmp_path}/admin.sock mode 666 level admin\n"
        "defaults\n    mode http\n    timeout connect 5s\n    timeout client 60s\n"
        f"    timeout server 60s\nfrontend prometheus\n    bind :{free_port()}\n"
        f"frontend http_frontend\n    bind 127.0.0.1:{front}\n    default_backend replicas\n"
        f"listen stats\n  bind *:{free_port()}\n  stats enable\n"
        f"backend replicas\n    server one 127.0.0.1:{replica.getsockname()[1]}\n"
    )
    start = (
        "import subprocess, sys; child = subprocess.Popen("
        f"[sys.executable, '-m', 'actors.ingress.closed_haproxy', '-db', '-f', '{source}']);"
        "print(child.pid, flush=True); child.wait()"
    )
    manager = subprocess.Popen([sys.executable, "-c", start], cwd=ROOT, stdout=subprocess.PIPE)
    assert manager.stdout is not None
    with manager.stdout as told:
        haproxy = psutil.Process(int(told.readline()))
    try:
        with replica, ThreadPoolExecutor(1) as client:
            wait_until(lambda: is_open(front), "HAProxy listens", 30)
            waiting = client.submit(httpx.get, f"http://127.0.0.1:{front}", timeout=30)
            with replica.accept()[0] as asked:
                manager.kill()
                manager.wait()
                wait_until(lambda: not is_open(front), "nothing new is taken", 30)
                asked.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
                assert waiting.result().text == "hi"
        wait_until(lambda: not haproxy.is_running(), "HAProxy has left", 30)
    finally:
        manager.kill()
        manager.wait()
        if haproxy.is_running():
            haproxy.kill()


def is_open(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except (ConnectionRefusedError, ConnectionResetError):  # reset: it was closed with us queued
        return False
    return True
