"""Machines on one machine: namespaces of Linux.

Each has its network, processes, /tmp and /dev/shm, and an address of its own on a bridge, to which
this process has a foot too. A machine's first process ends with this process, and takes all others
of the machine along, as pulling the plug would. What it shares with the real machine are the
processors, the clock and the file system but /tmp and /dev/shm. Needs root, util-linux (`unshare`,
`nsenter`, `setpriv`) and iproute2 (`ip`); cables that can be weak need /dev/net/tun too.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

PROGRAMS = ("ip", "unshare", "nsenter", "setpriv", "mount")
PATIENCE_S = 10.0
# Buries what its own processes leave behind, as the first process of a machine must.
INIT = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\nwhile True: signal.pause()"
ALL_NAMESPACES = ("--mount", "--uts", "--ipc", "--net", "--pid")


def why_not() -> str | None:
    """Returns why there can be no machines here; None = there can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if os.geteuid() != 0:
        return "namespaces of networks take root"
    probe = subprocess.run(
        ["unshare", "--net", "--mount", "true"], capture_output=True, check=False
    )
    return probe.stderr.decode().strip() or None if probe.returncode else None


@dataclass
class Machine:
    """One machine, from its start until it is killed."""

    name: str
    address: str
    disk: Path  # its /tmp and /dev/shm are folders of it
    link: str  # its network's end of its cable, on the bridge
    init: "subprocess.Popen[bytes]"
    cable: "subprocess.Popen[str] | None" = None  # passes its frames on, if its cable can be weak

    def command(self, words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
        """Returns the command that runs another on this machine."""
        enter = ["nsenter", "--target", str(self.pid), *ALL_NAMESPACES, "--wd=/"]
        settings = [f"{name}={value}" for name, value in environment.items()]
        return [*enter, "env", *settings, *words]

    @property
    def pid(self) -> int:
        """The first process of the machine, as seen from here."""
        children = Path(f"/proc/{self.init.pid}/task/{self.init.pid}/children").read_text().split()
        assert children, f"{self.name} has no first process: it is off"
        return int(children[0])

    @property
    def is_on(self) -> bool:
        return self.init.poll() is None

    def run(
        self, words: Sequence[str], environment: Mapping[str, str], timeout_s: float = 120.0
    ) -> str:
        """Runs a command to its end; returns what it printed.

        Raises RuntimeError, with that, if it fails, and subprocess.TimeoutExpired.
        """
        done = subprocess.run(
            self.command(words, environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{self.name}: {' '.join(words)}\n{done.stdout}")
        return done.stdout

    def kill(self) -> None:
        """Ends every process of the machine at once; idempotent."""
        self.init.send_signal(signal.SIGKILL)  # --kill-child: the first process of the machine, too
        self.init.wait(PATIENCE_S)
        if self.cable is not None:
            self.cable.kill()
            self.cable.communicate()


class Network:
    """A bridge, and the machines on it."""

    def __init__(self, disk: Path, subnet: int, *, has_weak_cables: bool = False) -> None:
        """subnet: of 10.77, so that networks of several runs do not meet.

        has_weak_cables: frames pass through processes, so that `weaken` can delay and lose them.
        """
        self._disk = disk
        self._subnet = subnet
        self._has_weak_cables = has_weak_cables
        self.bridge = f"laps{subnet}"
        self._num_machines = 0
        self.machines: dict[str, Machine] = {}
        # A bridge without an address of its own takes that of one of its cables, and another when
        # that is pulled: connections of all machines to this process would stand still then.
        address = f"02:77:00:00:00:{subnet:02x}"
        _ip("link", "add", self.bridge, "address", address, "type", "bridge")
        _ip("addr", "add", f"10.77.{subnet}.254/24", "dev", self.bridge)
        _ip("link", "set", self.bridge, "up")

    def add(self, name: str) -> Machine:
        """Starts a machine, with an empty disk; one of this name must be off."""
        before = self.machines.get(name)
        assert before is None or not before.is_on, f"{name} is on"
        self._num_machines += before is None
        number = self._num_machines if before is None else int(before.address.rpartition(".")[2])
        disk = self._disk / f"{name}-{time.monotonic_ns()}"
        for folder in ("tmp", "shm"):
            (disk / folder).mkdir(parents=True)
        link = f"{self.bridge}-{number}"
        machine = Machine(
            name=name,
            address=f"10.77.{self._subnet}.{number}",
            disk=disk,
            link=link,
            init=_start_init(disk, name),
        )
        self.machines[name] = machine
        self._plug_in(machine)
        return machine

    def cut(self, machine: Machine) -> None:
        """Pulls its cable: nothing comes, nothing goes, and nobody is told."""
        _ip("link", "set", machine.link, "nomaster")

    def mend(self, machine: Machine) -> None:
        _ip("link", "set", machine.link, "master", self.bridge)

    def weaken(self, machine: Machine, *, delay_ms: float, loss: float) -> None:
        """Delays frames of the machine, each way, and loses a share of them. Both 0 = as before."""
        assert machine.cable is not None, "this network's cables cannot be weak"
        assert machine.cable.stdin is not None
        print(delay_ms, loss, file=machine.cable.stdin, flush=True)

    def close(self) -> None:
        """Ends all machines, and takes cables and bridge away."""
        for machine in self.machines.values():
            machine.kill()
            _remove_link(machine.link)
        _remove_link(self.bridge)

    def _plug_in(self, machine: Machine) -> None:
        here, there = machine.link, f"{machine.link}p"
        _remove_link(here)  # of the one that was killed
        if self._has_weak_cables:
            machine.cable = _start_cable(here, there)
        else:
            _ip("link", "add", here, "type", "veth", "peer", "name", there)
        _ip("link", "set", there, "netns", str(machine.pid))
        _ip("link", "set", here, "master", self.bridge, "up")
        commands = [
            ["ip", "link", "set", "lo", "up"],
            ["ip", "link", "set", there, "name", "eth0", "up"],
            ["ip", "addr", "add", f"{machine.address}/24", "dev", "eth0"],
            ["ip", "route", "add", "default", "via", f"10.77.{self._subnet}.254"],
        ]
        for command in commands:
            machine.run(command, {})


@contextmanager
def network(*, has_weak_cables: bool = False) -> Iterator[Network]:
    """A network without machines; they and it are gone when the block is left, however it is."""
    subnet = next(i for i in range(1, 250) if not Path(f"/sys/class/net/laps{i}").exists())
    with ExitStack() as stack:
        disk = Path(stack.enter_context(TemporaryDirectory(prefix="laps-machines-")))
        found = Network(disk, subnet, has_weak_cables=has_weak_cables)
        stack.callback(found.close)
        yield found


def _start_init(disk: Path, name: str) -> "subprocess.Popen[bytes]":
    """Starts a machine's first process; returns when it runs."""
    script = (
        f"mount --make-rprivate / && mount --bind {disk}/shm /dev/shm"
        f" && mount --bind {disk}/tmp /tmp && hostname {name}"
        f" && touch /tmp/.is-on && exec {sys.executable} -c '{INIT}'"
    )
    flags = ["--fork", "--kill-child", "--mount-proc", *ALL_NAMESPACES]
    command = ["setpriv", "--pdeathsig", "KILL", "unshare", *flags, "sh", "-c", script]
    process = subprocess.Popen(command, start_new_session=True)
    until_s = time.monotonic() + PATIENCE_S
    while not (disk / "tmp" / ".is-on").exists():
        if process.poll() is not None or time.monotonic() > until_s:
            process.kill()
            raise RuntimeError(f"machine {name} did not start: {process.poll()}")
        time.sleep(0.01)
    return process


def _start_cable(here: str, there: str) -> "subprocess.Popen[str]":
    """Starts the process of a cable; returns when both its ends exist."""
    program = [sys.executable, "-m", "load_tests.testbed.weak_cable", here, there]
    command = ["setpriv", "--pdeathsig", "KILL", *program]
    pipe = subprocess.PIPE
    cable = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
    assert cable.stdout is not None
    if cable.stdout.readline() != "ready\n":
        cable.kill()
        raise RuntimeError(f"the cable {here} was not made: {cable.wait(PATIENCE_S)}")
    return cable


def _remove_link(name: str) -> None:
    """Removes a link and its other end; they may be gone already, with their machine."""
    subprocess.run(["ip", "link", "delete", name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    """Runs `ip`. Raises RuntimeError with what it says."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
