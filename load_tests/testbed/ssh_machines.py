"""Machines that are reached by ssh, and a desk from which an operator starts Ray on them.

The desk has the project, a token and the key to the others; what runs there is what
docs/operations.md says, with the cluster file's addresses filled in (`fill_in`). In place of the
two commands that install the project, a link to the environment of this process is made: the
machines have no way out. Each machine's user is `laps`, with a home of its own.
"""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import yaml

from load_tests.testbed.machines import Machine, Network
from load_tests.testbed.ray_machines import CLUSTER_FILE, HOME, ROOT, with_fewer_connections

USER = "laps"
PROGRAMS = ("sshd", "ssh", "ssh-keygen", "rsync")
KEY = f"{HOME}/.ssh/laps_cluster"
LINK = f"mkdir -p {HOME} && ln -sfn {sys.prefix} {HOME}/laps-venv"
START_S = 240.0
SSHD = f"""
Port 22
HostKey {HOME}/host_key
AuthorizedKeysFile {HOME}/.ssh/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
StrictModes no
PidFile none
MaxSessions 100
MaxStartups 100
SetEnv PYTHONPATH={HOME}/laps-engine OMP_NUM_THREADS=1 RAY_USAGE_STATS_ENABLED=0
"""


def why_no_ssh() -> str | None:
    """Why machines cannot be reached by ssh here; None = they can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


class Desk:
    """Where the operator sits."""

    def __init__(self, network: Network) -> None:
        self._machine = network.add("desk")
        home = _move_in(self._machine)
        (home / "laps-venv").symlink_to(Path(sys.prefix))
        (home / ".ssh").mkdir()
        self.run(f"ssh-keygen -q -t ed25519 -N '' -f {KEY}")
        self._public_key = (home / ".ssh" / "laps_cluster.pub").read_text()

    def command(self, words: str) -> list[str]:
        """Returns the command that runs a line of a shell at the desk, in the project's folder."""
        variables = {
            "HOME": HOME,
            "PATH": f"{HOME}/laps-venv/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONPATH": str(ROOT),
        }
        return self._machine.command(["sh", "-c", f"cd {ROOT} && {words}"], variables)

    def run(self, words: str, timeout_s: float = START_S) -> str:
        """Runs a line to its end; returns what it printed. Raises RuntimeError if it fails."""
        done = subprocess.run(
            self.command(words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{words}\n{done.stdout}")
        return done.stdout

    def write(self, name: str, content: Mapping[str, object]) -> str:
        """Writes a YAML file; returns its path at the desk."""
        (self._machine.disk / "tmp" / name).write_text(yaml.safe_dump(dict(content)))
        return f"/tmp/{name}"

    def open_door(self, machine: Machine) -> None:
        """Lets the desk's key, and who has a copy of it, into a machine."""
        home = _move_in(machine)
        (home / ".ssh").mkdir()
        (home / ".ssh" / "authorized_keys").write_text(self._public_key)
        (machine.disk / "tmp" / "sshd_config").write_text(SSHD)
        machine.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{HOME}/host_key"], {})
        machine.run(["/usr/sbin/sshd", "-f", "/tmp/sshd_config"], {})


def fill_in(head: Machine, *workers: Machine) -> dict[str, object]:
    """Returns the cluster file as an operator of these machines would have it."""
    cluster = yaml.safe_load(CLUSTER_FILE.read_text())
    cluster["provider"]["head_ip"] = head.address
    cluster["provider"]["worker_ips"] = [worker.address for worker in workers]
    cluster["min_workers"] = cluster["max_workers"] = len(workers)
    cluster["auth"] = {"ssh_user": USER, "ssh_private_key": KEY}
    words = ("-m venv", "pip install")
    installs = [c for c in cluster["setup_commands"] if any(word in c for word in words)]
    assert len(installs) == 2, f"{CLUSTER_FILE}: what installs the project? {installs}"
    kept = [command for command in cluster["setup_commands"] if command not in installs]
    cluster["setup_commands"] = [LINK, *kept]
    for role, num_cpus in (("head", 0), ("worker", 1)):
        commands = cluster[f"{role}_start_ray_commands"]
        cluster[f"{role}_start_ray_commands"] = [
            f"{with_fewer_connections(command)} --num-cpus={num_cpus}"
            if " start " in command
            else command
            for command in commands
        ]
    return dict(cluster)


def _move_in(machine: Machine) -> Path:
    """Makes the user's home on a machine's own disk, and returns where it lies."""
    home = machine.disk / "tmp" / "home"
    home.mkdir()
    users = Path("/etc/passwd").read_text()
    (machine.disk / "tmp" / "passwd").write_text(f"{USER}:*:0:0::{HOME}:/bin/bash\n{users}")
    machine.run(["mount", "--bind", "/tmp/passwd", "/etc/passwd"], {})
    machine.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], {})
    machine.run(["mkdir", "-p", "/run/sshd"], {})
    return home
