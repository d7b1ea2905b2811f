"""What docs/operations.md says of machines of one's own, run as it stands there: `ray up` over ssh.

The words in its block of commands are those of the page, with paths, key and address filled in.
"""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from load_tests.testbed.deployed import MODEL, wait_until
from load_tests.testbed.machines import Machine, network, why_not
from load_tests.testbed.ray_machines import ROOT, SERVE_FILE
from load_tests.testbed.ssh_machines import KEY, USER, Desk, fill_in, why_no_ssh
from tests.cluster.on_machines import APPLICATION, HTTP_PORT, assert_answers_are_right, is_ready

WHY_NOT = why_not() or why_no_ssh()
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(500),
    pytest.mark.skipif(WHY_NOT is not None, reason=f"no machines to reach here: {WHY_NOT}"),
]

PAGE = ROOT / "docs" / "operations.md"
FROM, TO = "2. **Several machines of your own.**", "3. **Kubernetes.**"


def commands() -> list[str]:
    """The block of the page, a command a line, without remarks."""
    text = PAGE.read_text()
    section = text[text.index(FROM) : text.index(TO)]
    lines = [line.strip() for line in section.splitlines() if line.startswith(" " * 7)]
    return [re.sub(r"\s+#.*", "", line) for line in lines]


@contextmanager
def background(command: list[str]) -> Iterator[None]:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def write_files(desk: Desk, nodes: list[Machine]) -> dict[str, str]:
    """Writes what an operator fills in; returns what stands for what in the page's commands."""
    deploy = yaml.safe_load(SERVE_FILE.read_text())
    deploy["applications"][0]["args"] = {"config": "/tmp/config.yaml", "model": str(MODEL)}
    for node in nodes:
        Path(node.disk, "tmp", "config.yaml").write_text(yaml.safe_dump(APPLICATION))
    return {
        "configs/cluster/ray_cluster.yaml": desk.write("ray_cluster.yaml", fill_in(*nodes)),
        "configs/cluster/serve.yaml": desk.write("serve.yaml", deploy),
        "ssh -N": f"exec ssh -i {KEY} -o StrictHostKeyChecking=accept-new -N",
        "<head node>": f"{USER}@{nodes[0].address}",
    }


def runs_ray(machine: Machine) -> bool:
    return "raylet/raylet" in machine.run(["ps", "axww", "-o", "args"], {})


def test_the_commands_of_the_page_start_use_and_end_a_cluster() -> None:
    make_token, up, tunnel, *use, down = commands()
    with network() as machines:
        desk = Desk(machines)
        nodes = [machines.add(name) for name in ("head", "alpha", "beta")]
        for node in nodes:
            desk.open_door(node)
        filled = write_files(desk, nodes)

        def words(command: str) -> str:
            for placeholder, value in filled.items():
                command = command.replace(placeholder, value)
            return command

        desk.run(make_token)
        desk.run(words(up))
        with background(desk.command(words(tunnel))):
            wait_until(lambda: all(map(runs_ray, nodes)), "Ray runs on every node", 120)
            deploy, *look, shutdown = map(words, use)
            desk.run(deploy)
            url = f"http://{nodes[0].address}:{HTTP_PORT}"
            wait_until(lambda: is_ready(url), "the application can serve", 180)
            assert_answers_are_right([url])
            shown = "".join(map(desk.run, look))
            assert "RUNNING" in shown
            assert "laps/decode-0" in shown
            desk.run(shutdown)
        desk.run(words(down))
        assert not runs_ray(nodes[0])
        wait_until(lambda: not any(map(runs_ray, nodes)), "Ray has left the others, too", 120)
