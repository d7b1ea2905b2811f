"""What a cluster's clients see when a machine or its cable fails: answers, seconds, leaks.

    RAY_AUTH_MODE=disabled OMP_NUM_THREADS=1 python -m load_tests.lab.machine_failures

Four machines in namespaces (load_tests/testbed/machines.py): a head without workers, and three with
room for one worker each, of which one prefills, one decodes and one is spare. Started and deployed
by the commands of configs/cluster. Clients ask HAProxy without a pause, on the head unless the row
is about it, while a row does its deed and mends it; every answer is compared token for token with
what an engine in this process brought beforehand. Rows of another setting (weak cables, Ray's store
in Redis, which needs redis-server, workers of two ranks) get a cluster of their own. Exits with 1
if a token was wrong or something is held at rest.
"""

import argparse
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

import httpx

from load_tests.http_load.client import Server
from load_tests.lab.child_processes import exit_on_sigterm
from load_tests.lab.soak_cases import Case, build_cases
from load_tests.lab.soak_clients import Clients, Outcomes
from load_tests.tables import describe_machine, render_rows
from load_tests.testbed.deployed import MODEL, metric_sum, wait_until
from load_tests.testbed.machines import Machine, network
from load_tests.testbed.ray_machines import RayMachines

WORKERS = ("alpha", "beta", "gamma")
PORT = 8000
NUM_CLIENTS = 4
TIMEOUT_S = 400.0  # of a request: longer than any deed
READY_S = 180.0
REST_S = 180.0
LOOK_S = 0.1
DRAIN_S = 30
DEED_EVERY_S = 30.0
NUM_WARM = 12  # answers, after which everybody has met everybody
PREFILL, DECODE, INGRESS = "ray::PrefillWorker", "ray::DecodeWorker", "ray::ServeReplica"
HELD = (
    "laps_open_attempts",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "laps_queued_tokens",
    "vllm:kv_cache_usage_perc",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What of the cluster is unusual."""

    has_weak_cables: bool = False
    has_store: bool = False  # Ray's control store keeps its state in Redis
    num_ingresses: int = 1
    num_ranks: int = 1  # of each worker
    # By name, seconds by which a machine's time of day is wrong.
    shifts_s: Mapping[str, int] = field(default_factory=dict)

    def config(self) -> dict[str, object]:
        """A machine has room for one worker, whatever its ranks."""
        size = {"tensor_parallel_size": self.num_ranks, "num_cpus": 1 / self.num_ranks}
        workers = {"unified": 0, "prefill": 1, "decode": 1} | size
        edge = {"num_replicas": self.num_ingresses}
        return {"workers": workers, "cache": {"num_blocks": 1024}, "edge": edge}


USUAL = Setting()
WEAK = Setting(has_weak_cables=True)
STORE = Setting(has_store=True, num_ingresses=3)  # of which one at least is not on the head
GANGS = Setting(num_ranks=2)
CLOCKS = Setting(shifts_s={"alpha": 120, "beta": -120})


class Stage:
    """A cluster with the application, and what is done to it."""

    def __init__(self, cluster: RayMachines, setting: Setting) -> None:
        """Starts all machines and deploys; returns when the application can serve."""
        self.cluster = cluster
        self.network = cluster.network
        if setting.has_store:
            cluster.start_store()
        self.head = self.door = cluster.start("head", num_cpus=0)
        for name in WORKERS:
            cluster.start(name, num_cpus=1)
        cluster.deploy(setting.config(), MODEL)
        self.wait_ready()

    @property
    def url(self) -> str:
        """Where clients ask."""
        return f"http://{self.door.address}:{PORT}"

    def is_ready(self, door: Machine | None = None) -> bool:
        url = f"http://{(door or self.door).address}:{PORT}"
        try:
            return httpx.get(f"{url}/ready", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def leave_head(self) -> None:
        """Lets clients ask another machine, which has a replica of the ingress."""

        def find() -> bool:
            workers = (self.network.machines[name] for name in WORKERS)
            self.door = next((one for one in workers if self.is_ready(one)), self.head)
            return self.door is not self.head

        wait_until(find, "a machine other than the head answers", READY_S)

    def wait_ready(self) -> None:
        wait_until(self.is_ready, "the application can serve", READY_S)

    def runs(self, machine: Machine, title: str) -> bool:
        """Whether a process with this in its title is on the machine."""
        return machine.is_on and title in machine.run(["ps", "axww", "-o", "args"], {})

    def machine_of(self, title: str) -> Machine:
        """The one machine on which it runs."""
        found = [m for m in self.network.machines.values() if self.runs(m, title)]
        assert len(found) == 1, f"{title} runs on {[m.name for m in found]}"
        return found[0]

    def others(self, machine: Machine) -> list[Machine]:
        """All machines that are on, but this one."""
        machines = self.network.machines.values()
        return [other for other in machines if other is not machine and other.is_on]

    def places(self) -> dict[str, list[str]]:
        """What of the application and of Serve runs on each machine that is on."""
        found = {}
        for machine in self.network.machines.values():
            shown = machine.run(["ps", "axww", "-o", "args"], {}) if machine.is_on else ""
            titles = [line.split(".")[0] for line in shown.splitlines() if line.startswith("ray::")]
            found[machine.name] = sorted(t.removeprefix("ray::") for t in titles if "IDLE" not in t)
        return found

    def restore(self) -> None:
        """Brings back every machine that is off, and Ray where it has ended, until Ray has all.

        Ray may have given up a machine that is heard again; it ends itself there a little later.
        """
        wait_until(self._is_whole, "every machine is in the cluster", READY_S)

    def _is_whole(self) -> bool:
        for name in WORKERS:
            machine = self.network.machines[name]
            if not machine.is_on:
                self.cluster.start(name, num_cpus=1)
            elif not self.runs(machine, "raylet/raylet"):
                self.cluster.join(machine, num_cpus=1)
        words = "list nodes --filter state=ALIVE --address http://127.0.0.1:8265"
        shown = self.cluster.ray(self.head, words)
        return shown.count(" ALIVE ") == 1 + len(WORKERS)

    def held(self) -> dict[str, float]:
        """What the application holds for requests; {} when it is at rest."""
        try:
            text = httpx.get(f"{self.url}/metrics", timeout=10).raise_for_status().text
        except httpx.HTTPError as error:
            return {f"no metrics: {error!r}": 1.0}
        return {name: value for name in HELD if (value := metric_sum(text, name))}


def kill(title: str) -> Callable[[Stage], None]:
    """Pulls the plug of the machine on which it runs; the machine comes back empty later."""

    def deed(stage: Stage) -> None:
        stage.machine_of(title).kill()

    return deed


def cut(title: str, seconds: float) -> Callable[[Stage], None]:
    """Pulls the cable of the machine on which it runs, for so long."""

    def deed(stage: Stage) -> None:
        machine = stage.machine_of(title)
        stage.network.cut(machine)
        time.sleep(seconds)
        stage.network.mend(machine)

    return deed


def mute(title: str, seconds: float) -> Callable[[Stage], None]:
    """Lets the machine on which it runs hear everybody, and nobody hear it, for so long."""

    def deed(stage: Stage) -> None:
        machine = stage.machine_of(title)
        lose_one_way([(machine, other) for other in stage.others(machine)], seconds)

    return deed


def deafen(title: str, seconds: float) -> Callable[[Stage], None]:
    """Lets everybody hear the machine on which it runs, and it hear nobody, for so long."""

    def deed(stage: Stage) -> None:
        machine = stage.machine_of(title)
        lose_one_way([(other, machine) for other in stage.others(machine)], seconds)

    return deed


def lose_one_way(ways: Sequence[tuple[Machine, Machine]], seconds: float) -> None:
    """Loses what the first machine of a pair sends to the second, for so long."""
    nobody = ["lladdr", "02:00:00:00:00:01", "dev", "eth0", "nud", "permanent"]
    for sender, receiver in ways:
        sender.run(["ip", "neigh", "replace", receiver.address, *nobody], {})
    time.sleep(seconds)
    for sender, receiver in ways:
        sender.run(["ip", "neigh", "del", receiver.address, "dev", "eth0"], {})


def drain(title: str) -> Callable[[Stage], None]:
    """Asks Ray to drain the node on which it runs, and turns its machine off at the deadline."""

    def deed(stage: Stage) -> None:
        machine = stage.machine_of(title)
        assert machine is not stage.head, "the ingress is on the head, which stays: try again"
        say(f"{machine.name} is drained, of {stage.places()}")
        why = "--reason DRAIN_NODE_REASON_PREEMPTION --reason-message maintenance"
        words = f"drain-node {why} --deadline-remaining-seconds {DRAIN_S}"
        stage.cluster.ray(machine, f"{words} --address {stage.head.address}:6379")
        time.sleep(DRAIN_S)
        say(f"{machine.name} is turned off, of {stage.places()}")
        machine.kill()

    return deed


def weaken(*, delay_ms: float, loss: float, seconds: float) -> Callable[[Stage], None]:
    """Delays frames of all machines but the head, each way, and loses some, for so long."""

    def deed(stage: Stage) -> None:
        machines = [stage.network.machines[name] for name in WORKERS]
        for machine in machines:
            stage.network.weaken(machine, delay_ms=delay_ms, loss=loss)
        time.sleep(seconds)
        for machine in machines:
            stage.network.weaken(machine, delay_ms=0, loss=0)

    return deed


def restart_head(seconds: float) -> Callable[[Stage], None]:
    """Pulls the plug of the head for so long; Ray finds its state in Redis then."""

    def deed(stage: Stage) -> None:
        stage.head.kill()
        time.sleep(seconds)
        stage.cluster.head = None
        stage.head = stage.cluster.start("head", num_cpus=0)

    return deed


def replace_head(stage: Stage) -> None:
    """Pulls the plug of the head, and starts and deploys everything anew when workers have left.

    Ray's control store is on the head and keeps nothing: what the cluster was goes with it.
    """
    began_s = time.monotonic()
    stage.head.kill()
    workers = [stage.network.machines[name] for name in WORKERS]

    def are_gone() -> bool:
        return not any(stage.runs(machine, "raylet/raylet") for machine in workers)

    wait_until(are_gone, "the workers' machines notice", READY_S)
    print(f"Ray has left the other machines after {time.monotonic() - began_s:.0f} s", flush=True)
    stage.cluster.head = None
    stage.head = stage.door = stage.cluster.start("head", num_cpus=0)
    stage.restore()
    stage.cluster.deploy(USUAL.config(), MODEL)
    stage.wait_ready()


def random_deeds(minutes: float, rng: random.Random) -> Callable[[Stage], None]:
    """One short deed after the other, each when the one before is mended, at least 30 s apart."""
    deeds = [
        (f"{title} {what}", title, do)
        for title in (PREFILL, DECODE)
        for what, do in (
            ("turned off", kill(title)),
            ("cut off for 5 s", cut(title, 5)),
            ("not heard for 5 s", mute(title, 5)),
        )
    ]

    def deed(stage: Stage) -> None:
        until_s = time.monotonic() + 60 * minutes
        num_deeds = 0
        while time.monotonic() < until_s:
            next_s = time.monotonic() + DEED_EVERY_S
            name, title, deed_of_it = rng.choice(deeds)
            machine = stage.machine_of(title)
            is_door = stage.runs(machine, INGRESS)
            say(f"{name}: {machine.name}, {'with' if is_door else 'without'} an ingress replica")
            deed_of_it(stage)
            stage.restore()
            stage.wait_ready()
            say("mended")
            num_deeds += 1
            time.sleep(max(0.0, next_s - time.monotonic()))
        print(f"{num_deeds} deeds in {minutes:g} minutes", flush=True)

    return deed


@contextmanager
def stage_of(setting: Setting) -> Iterator[Stage]:
    """A cluster that serves; it is gone when the block is left."""
    with network(has_weak_cables=setting.has_weak_cables) as machines:
        yield Stage(RayMachines(machines, shifts_s=setting.shifts_s), setting)


@dataclass(frozen=True, slots=True)
class Row:
    """One failure."""

    name: str
    deed: Callable[[Stage], None]
    setting: Setting = USUAL
    is_door_on_head: bool = True


ROWS = (
    Row("prefill machine turned off", kill(PREFILL)),
    Row("decode machine turned off", kill(DECODE)),
    Row("prefill machine cut off for 5 s", cut(PREFILL, 5)),
    Row("decode machine cut off for 5 s", cut(DECODE, 5)),
    Row("prefill machine cut off for 30 s", cut(PREFILL, 30)),
    Row("decode machine cut off for 30 s", cut(DECODE, 30)),
    Row("decode machine not heard for 30 s", mute(DECODE, 30)),
    Row("decode machine drained, then turned off", drain(DECODE)),
    Row("prefill machine drained, then turned off", drain(PREFILL)),
    Row("ingress machine drained, then turned off", drain(INGRESS)),
    Row("decode machine cut off for 300 s", cut(DECODE, 300)),
    Row("head turned off, all deployed anew", replace_head),
    Row("random deeds for 10 minutes", random_deeds(10, random.Random(7))),
    Row("delay of 50 ms each way for 60 s", weaken(delay_ms=50, loss=0, seconds=60), WEAK),
    Row("1 % of frames lost for 60 s", weaken(delay_ms=0, loss=0.01, seconds=60), WEAK),
    Row("both", weaken(delay_ms=50, loss=0.01, seconds=60), WEAK),
    Row("head off for 30 s, store in Redis", restart_head(30), STORE, is_door_on_head=False),
    Row("decode machine not heard for 300 s", mute(DECODE, 300)),
    Row("prefill machine hears nobody for 30 s", deafen(PREFILL, 30)),
    Row("decode machine hears nobody for 30 s", deafen(DECODE, 30)),
    Row("clocks 4 min apart, prefill machine turned off", kill(PREFILL), CLOCKS),
    Row("clocks 4 min apart, decode machine turned off", kill(DECODE), CLOCKS),
    Row("clocks 4 min apart, decode machine cut off for 30 s", cut(DECODE, 30), CLOCKS),
    Row("clocks 4 min apart, decode machine drained", drain(DECODE), CLOCKS),
    Row("machine of a prefill gang turned off", kill(PREFILL), GANGS),
    Row("machine of a decode gang turned off", kill(DECODE), GANGS),
    Row("machine of a decode gang cut off for 30 s", cut(DECODE, 30), GANGS),
)


def say(text: str) -> None:
    print(f"[{time.monotonic():.1f} s] {text}", flush=True)


class _Gaps:
    """Looks, in a thread of its own, for the longest time without a right answer, and for failures.

    A failure is printed when it comes, so that it can be laid beside what was done then.
    """

    def __init__(self, seen: Outcomes) -> None:
        self._seen = seen
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._longest_s = 0.0
        self._last = (0, time.monotonic())
        self._told: Counter[str] = Counter()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ending.set()
        self._thread.join()

    def reset(self) -> None:
        self._longest_s, self._last = 0.0, (self._seen.num_right, time.monotonic())

    @property
    def longest_s(self) -> float:
        return max(self._longest_s, time.monotonic() - self._last[1])

    def _look(self) -> None:
        while not self._is_ending.wait(LOOK_S):
            failed = Counter(self._seen.errors) + Counter(self._seen.broken)
            for text, number in (failed - self._told).items():
                say(f"failed, {number} times: {text}")
            self._told = failed
            num_right, at_s = self._last
            if self._seen.num_right > num_right:
                self._longest_s = max(self._longest_s, time.monotonic() - at_s)
                self._last = (self._seen.num_right, time.monotonic())


@dataclass(slots=True, kw_only=True)
class Seen:
    """What the clients saw of one row."""

    num_right: int
    errors: Counter[str]
    broken: Counter[str]
    wrong: list[str]
    longest_gap_s: float  # between two right answers
    restored_s: float  # from the deed's begin until /ready, with every machine back
    held: dict[str, float] = field(default_factory=dict)


def observe(stage: Stage, row: Row, cases: Sequence[Case], seed: int) -> Seen:
    """Does a row under load; returns when everything is at rest, or patience has ended."""
    if not row.is_door_on_head:
        stage.leave_head()
    clients = Clients(
        Server(url=stage.url),
        MODEL.name,
        cases,
        num_clients=NUM_CLIENTS,
        leave_share=0.0,
        timeout_s=TIMEOUT_S,
        seed=seed,
    )
    seen = clients.outcomes
    with clients, _Gaps(seen) as gaps:
        wait_until(lambda: seen.num_right >= NUM_WARM, "clients have answers", READY_S)
        gaps.reset()
        began_s = time.monotonic()
        row.deed(stage)
        num_before = seen.num_right
        wait_until(lambda: seen.num_right >= num_before + 2 * NUM_CLIENTS, "it goes on", TIMEOUT_S)
        stage.restore()
        stage.wait_ready()
        restored_s = time.monotonic() - began_s
        longest_s = gaps.longest_s
    until_s = time.monotonic() + REST_S
    while (held := stage.held()) and time.monotonic() < until_s:
        time.sleep(1.0)
    return Seen(
        num_right=seen.num_right,
        errors=seen.errors,
        broken=seen.broken,
        wrong=seen.wrong,
        longest_gap_s=longest_s,
        restored_s=restored_s,
        held=held,
    )


def rows_of(seen: dict[str, Seen]) -> list[tuple[str, ...]]:
    """What clients saw, a row for each failure."""
    names = (
        "right",
        "error said",
        "broken off",
        "wrong",
        "longest gap, s",
        "whole again, s",
        "held",
    )
    rows: list[tuple[str, ...]] = [("failure", *names)]
    for name, one in seen.items():
        counts = (one.num_right, one.errors.total(), one.broken.total(), len(one.wrong))
        times = (f"{one.longest_gap_s:.1f}", f"{one.restored_s:.0f}")
        held = ", ".join(f"{what} {num:g}" for what, num in one.held.items()) or "nothing"
        rows.append((name, *map(str, counts), *times, held))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=[""], help="rows with one of these in names")
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    exit_on_sigterm()
    cases = build_cases(MODEL, 30, seed=args.seed)
    found: dict[str, Seen] = {}
    for setting in (USUAL, WEAK, STORE, CLOCKS, GANGS):
        ours = [row for row in ROWS if row.setting is setting]
        rows = [row for row in ours if any(word in row.name for word in args.only)]
        if not rows:
            continue
        with stage_of(setting) as stage:
            for row in rows:
                seen = found[row.name] = observe(stage, row, cases, args.seed)
                print(f"{row.name}: {seen}", flush=True)
    print(render_rows(rows_of(found)))
    print(*(f"{name}: {value}" for name, value in describe_machine().items()), sep="\n")
    sys.exit(any(one.wrong or one.held for one in found.values()))


if __name__ == "__main__":
    main()
