"""A Ray cluster on machines of its own, started and deployed to by the files of configs/cluster.

What differs from `ray up`: the commands run in namespaces instead of over ssh, nobody scales the
cluster, each machine says how many processors it has, and HAProxy has fewer connections.
"""

import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from load_tests.testbed.certificates import Authority
from load_tests.testbed.machines import Machine, Network

ROOT = Path(__file__).resolve().parents[2]
CLUSTER_FILE = ROOT / "configs" / "cluster" / "ray_cluster.yaml"
SERVE_FILE = ROOT / "configs" / "cluster" / "serve.yaml"
HOME = "/tmp/home"
MAX_CONNECTIONS = 1000
START_S = 120.0
STORE_PORT = 6380
SHIFTED_CLOCK = Path(__file__).with_name("shifted_clock.c")
# How long Ray's nodes wait for a head that comes back: its default is a minute.
HEAD_AWAY_S = 600
TLS = {
    "RAY_USE_TLS": "1",
    "RAY_TLS_SERVER_CERT": f"{HOME}/tls/certificate",
    "RAY_TLS_SERVER_KEY": f"{HOME}/tls/key",
    "RAY_TLS_CA_CERT": f"{HOME}/tls/authority",
}


@dataclass
class RayMachines:
    """A Ray cluster; the first machine that is started is its head."""

    network: Network
    environment: Mapping[str, str] = field(default_factory=dict)  # of every node, besides
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    authority: Authority | None = None  # of everybody's certificates; None = nothing is encrypted
    store: Machine | None = None  # has a Redis with what Ray's head must not forget; None = no such
    head: Machine | None = None
    # By name, seconds by which a machine's time of day is wrong for Ray and all that it starts.
    shifts_s: Mapping[str, int] = field(default_factory=dict)

    def start_store(self) -> None:
        """Starts a machine with Redis; Ray's control store keeps its state there."""
        self.store = self.network.add("store")
        options = f"--bind {self.store.address} --port {STORE_PORT} --requirepass {self.token}"
        words = f"redis-server {options} --daemonize yes --dir /tmp"
        self.store.run(["sh", "-c", words], {})

    def start(self, name: str, *, num_cpus: int) -> Machine:
        """Starts a machine and Ray on it; the first is the head."""
        machine = self.network.add(name)
        self._furnish(machine)
        if self.head is None:
            self.head = machine
        self.join(machine, num_cpus=num_cpus)
        return machine

    def join(self, machine: Machine, *, num_cpus: int) -> None:
        """Starts Ray on a machine that is on and runs none."""
        is_head = machine is self.head
        commands = yaml.safe_load(CLUSTER_FILE.read_text())
        role = "head" if is_head else "worker"
        for command in commands[f"{role}_start_ray_commands"]:
            if command.endswith("ray stop"):
                continue  # nothing of Ray runs there
            adapted = _adapted(command, machine, num_cpus)
            if is_head and self.store is not None:
                adapted += f" --redis-password={self.token}"
            self.run(machine, adapted, START_S)

    def ray(self, machine: Machine, words: str) -> str:
        """Runs a command of Ray's on a machine; returns what it printed."""
        return self.run(machine, f"RAY_AUTH_MODE=token {HOME}/laps-venv/bin/ray {words}")

    def run(self, machine: Machine, command: str, timeout_s: float = START_S) -> str:
        """Runs a command of a shell on a machine, as its user would."""
        return machine.run(["sh", "-c", f"cd {ROOT} && {command}"], self.user(machine), timeout_s)

    def user(self, machine: Machine) -> dict[str, str]:
        """The environment of a machine's user."""
        assert self.head is not None, "no machine was started"
        return {
            "HOME": HOME,
            "RAY_HEAD_IP": self.head.address,
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            **(TLS if self.authority is not None else {}),
            **self._address_of_store(machine),
            **self._shifted_clock(machine),
            **self.environment,
        }

    def deploy(self, config: Mapping[str, object], model: Path, route_prefix: str = "/") -> None:
        """Deploys as the operations page says, from the head; returns when Serve has taken it."""
        assert self.head is not None, "no machine was started"
        deploy = yaml.safe_load(SERVE_FILE.read_text())
        [application] = deploy["applications"]
        application["args"] = {"config": "/tmp/config.yaml", "model": str(model)}
        application["route_prefix"] = route_prefix
        for machine in self.network.machines.values():
            (machine.disk / "tmp" / "config.yaml").write_text(yaml.safe_dump(dict(config)))
        (self.head.disk / "tmp" / "serve.yaml").write_text(yaml.safe_dump(deploy))
        serve = f"{HOME}/laps-venv/bin/serve"
        self.run(
            self.head,
            f"RAY_AUTH_MODE=token {serve} deploy /tmp/serve.yaml -a http://127.0.0.1:8265",
        )

    def _address_of_store(self, machine: Machine) -> dict[str, str]:
        """What the head must know of Redis, and the others of its head's absence."""
        if self.store is None:
            return {}
        if machine is not self.head:
            return {"RAY_gcs_rpc_server_reconnect_timeout_s": str(HEAD_AWAY_S)}
        return {"RAY_REDIS_ADDRESS": f"{self.store.address}:{STORE_PORT}"}

    def _shifted_clock(self, machine: Machine) -> dict[str, str]:
        shift_s = self.shifts_s.get(machine.name)
        if shift_s is None:
            return {}
        return {"LD_PRELOAD": f"{HOME}/shifted_clock.so", "SHIFTED_CLOCK_S": str(shift_s)}

    def _furnish(self, machine: Machine) -> None:
        """Puts the token and the installed environment where the commands look for them."""
        home = machine.disk / "tmp" / "home"
        (home / ".ray").mkdir(parents=True)
        token = home / ".ray" / "auth_token"
        token.write_text(self.token)
        token.chmod(0o600)
        if self.authority is not None:
            self.authority.issue(home / "tls", machine.address)
        (home / "laps-venv").symlink_to(Path(sys.prefix))
        if machine.name in self.shifts_s:
            library = str(home / "shifted_clock.so")
            options = ["-O2", "-shared", "-fPIC", "-pthread", "-o", library]
            subprocess.run(["gcc", *options, str(SHIFTED_CLOCK), "-ldl"], check=True)


def why_no_shifted_clocks() -> str | None:
    """Why a machine's clock cannot be wrong here; None = it can."""
    return None if shutil.which("gcc") else "gcc is not installed"


def _adapted(command: str, machine: Machine, num_cpus: int) -> str:
    """Returns a command of the cluster file for a machine of this kind."""
    command = with_fewer_connections(re.sub(r"--autoscaling-config=\S+", "", command))
    assert " start " in command, f"{CLUSTER_FILE}: what does this start? {command}"
    return f"{command} --num-cpus={num_cpus} --node-ip-address={shlex.quote(machine.address)}"


def with_fewer_connections(command: str) -> str:
    """Returns a command of the cluster file that lets HAProxy open fewer files."""
    return re.sub(r"MAXCONN=\d+", f"MAXCONN={MAX_CONNECTIONS}", command)
