"""An application as whoever breaks it sees it: processes that come and go, and what they hold."""

import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import ray

from configs.resolved import resolve_scheduler
from engine.errors import WorkerError
from load_tests.testbed.deployed import (
    Application,
    Cluster,
    count_tasks,
    named_actors,
)
from load_tests.testbed.holdings import worker_holdings

ANSWER_S = 4.0  # of an actor that is there
WORKER_PREFIXES = ("prefill-", "decode-", "unified-")
REPLICA_PREFIX = "SERVE_REPLICA::"
# A machine that is short of cores must not look like one that failed.
PATIENT: dict[str, object] = {
    "handoff.address": "127.0.0.1",
    "lifetimes.supervisor_silence_s": 25.0,
    "lifetimes.supervisor_heartbeat_s": 1.0,
    "lifetimes.ingress_silence_s": 15.0,
    "lifetimes.acknowledge_every_s": 0.2,
    "edge.drain_s": 120.0,
    "edge.place_timeout_s": 120.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """One process of the application: another one after every restart."""

    name: str  # of its actor; of an ingress replica and a supervisor, Serve's
    pid: int


class System:
    """A deployed application whose processes come and go."""

    def __init__(self, cluster: Cluster, name: str, overrides: Mapping[str, object]) -> None:
        """Returns when it can serve."""
        self._cluster = cluster
        self.name = name
        self._overrides = PATIENT | dict(overrides)
        self.application: Application = cluster.run(name, self._overrides)

    @property
    def url(self) -> str:
        return self.application.url

    @property
    def model(self) -> Path:
        return Path(self.application.config.model.path)

    def redeploy(self, changes: Mapping[str, object]) -> None:
        """With another configuration, and so another hash; returns when the new one can serve."""
        self._overrides |= changes
        self.application = self._cluster.run(self.name, self._overrides)

    def stop(self) -> None:
        self.application.stop()

    # ---- processes ------------------------------------------------------------------------------

    def names(self, prefix: str = "") -> list[str]:
        """Of its detached actors, those of an earlier deployment too while they live."""
        return [name for name in named_actors(self.name) if name.startswith(prefix)]

    def replicas(self) -> list[str]:
        """Serve's names of its ingress replicas."""
        prefix = f"{REPLICA_PREFIX}{self.name}#"
        return [name for name in named_actors("serve") if name.startswith(prefix)]

    def supervisors(self) -> list[str]:
        """Serve's names of its supervisors."""
        return [name for name in named_actors("serve") if f"::{self.name}::" in name]

    def pid(self, name: str) -> int | None:
        """None while it does not answer."""
        return self._pids([name]).get(name)

    def processes(self) -> list[ProcessId]:
        """Of all that answer."""
        pids = self._pids([*self.names(), *self.replicas(), *self.supervisors()])
        return [ProcessId(name=name, pid=pid) for name, pid in pids.items()]

    def is_whole(self) -> bool:
        """Every actor that has a name answers, and so do a supervisor and every role."""
        there = {process.name for process in self.processes()}
        is_watched = not there.isdisjoint(self.supervisors())
        return is_watched and there.issuperset(self.names()) and self.is_ready()

    def send(self, name: str, number: signal.Signals = signal.SIGKILL) -> int | None:
        """A signal to the process of an actor; its pid, or None if nobody was there to get it."""
        pid = self.pid(name)
        if pid is not None:
            signal_process(pid, number)
        return pid

    def is_ready(self) -> bool:
        """By the ingress's word, and every worker of this deployment answers."""
        try:
            return self.application.get("/ready")[0] == 200 and not self.missing()
        except httpx.HTTPError:
            return False

    def missing(self) -> list[str]:
        """Workers of this deployment that do not say what they hold."""
        seen, workers = self.statistics(), self.application.config.workers
        counts = {"prefill": workers.prefill, "decode": workers.decode, "unified": workers.unified}
        ours = [
            f"{role}-{i}.{self.application.hash}" for role in counts for i in range(counts[role])
        ]
        return [name for name in ours if name not in seen]

    # ---- holdings -------------------------------------------------------------------------------

    def statistics(self) -> dict[str, dict[str, Any]]:
        """Of every worker that answers; each has checked its blocks' books first.

        Raises RayTaskError, with every term, when books do not add up.
        """
        workers = [name for name in self.names() if name.startswith(WORKER_PREFIXES)]
        return _answers({name: a.statistics.remote() for name, a in self._actors(workers).items()})

    def held(self) -> dict[str, int]:
        """All that anybody holds for requests, by `worker: what`; {} when it is quiet.

        Blocks go by their owner; leases are handoffs that a prefill worker keeps blocks for.
        """
        held: dict[str, int] = {"ingress: open attempts": int(self.metric("laps_open_attempts"))}
        max_rows = resolve_scheduler(self.application.config.scheduler, {}).max_num_seqs
        for name, seen in self.statistics().items():
            holdings = worker_holdings(seen, max_rows)
            del holdings["tasks"], holdings["blocks"]  # never 0; and by owner in their place
            held |= {f"{name}: blocks of {owner}": n for owner, n in seen["held_blocks"].items()}
            held |= {f"{name}: {what}": n for what, n in holdings.items()}
        return {what: num for what, num in held.items() if num}

    def ingress_tasks(self) -> int | None:
        """Unfinished asyncio tasks of the ingress; None while there is not one that answers."""
        replicas = self._actors(self.replicas())
        calls = {name: actor.__ray_call__.remote(count_tasks) for name, actor in replicas.items()}
        counts = list(_answers(calls).values())
        return int(counts[0]) if len(counts) == 1 else None

    def metric(self, name: str) -> float:
        """Sum of its samples in /metrics."""
        return self.application.metric(name)

    def _actors(self, names: Sequence[str]) -> dict[str, Any]:
        """Those that exist, the application's own or Serve's."""
        ours, found = set(self.names()), {}
        for name in names:
            with contextlib.suppress(ValueError):
                found[name] = ray.get_actor(name, self.name if name in ours else "serve")
        return found

    def _pids(self, names: Sequence[str]) -> dict[str, int]:
        """Of those that answer; asking is no heartbeat."""
        actors = self._actors(names)
        return _answers(
            {n: a.__ray_call__.remote(lambda _: os.getpid()) for n, a in actors.items()}
        )


def signal_process(pid: int, number: signal.Signals) -> None:
    """Does nothing if the process has ended meanwhile."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _answers(calls: Mapping[str, Any]) -> dict[str, Any]:
    """Of those that answer in time; who is away or still loads its model does not."""
    if not calls:
        return {}
    done, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=ANSWER_S)
    answers = {}
    for name, call in calls.items():
        if call not in done:
            continue
        try:
            answers[name] = ray.get(call)
        except ray.exceptions.RayTaskError as error:
            if not isinstance(error.cause, WorkerError):
                raise
        except ray.exceptions.RayError:
            continue
    return answers
