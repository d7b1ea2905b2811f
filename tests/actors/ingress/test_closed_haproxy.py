"""What stands between Serve and HAProxy closes what Serve leaves open, or starts nothing."""

import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

from actors.ingress.closed_haproxy import BUNDLED, close, closed_arguments

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
