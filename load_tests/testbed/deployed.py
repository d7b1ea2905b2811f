"""A deployed application: what it answers, its processes, and what each of them holds."""

import asyncio
import contextlib
import gc
import json
import os
import random
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.util import list_named_actors

from actors.lifecycle.deployment import describe_deployment
from configs.load import load_config
from configs.resolved import resolve_scheduler
from configs.schema import AppConfig
from load_tests.testbed.holdings import worker_holdings
from serve_app import bind

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "demo_model" / "laps-demo"
PATIENCE_S = 60.0
START_S = 180.0  # of all processes of an application, on a machine that is busy with other things
CHECK_EVERY_S = 0.05
ANSWER_S = 10.0  # an actor that exists
NUM_LOOKS = 5
# Below Linux's own, above those of Ray's workers; without those that were given.
_PORTS = random.sample(range(20_000, 30_000), 10_000)
# Short enough for tests, long enough for a machine that is busy with other tests.
LIFETIMES = {
    "lifetimes.supervisor_silence_s": 8.0,
    "lifetimes.supervisor_heartbeat_s": 0.5,
    "lifetimes.ingress_silence_s": 5.0,
    "edge.drain_s": 3.0,
    "edge.place_timeout_s": 120.0,
}


def wait_until(
    holds: Callable[[], bool], what: str | Callable[[], str], patience_s: float = PATIENCE_S
) -> None:
    """Look until it is so; fails, saying what was awaited, when patience ends.

    what: a function is called then, and so can say what there is instead.
    """
    deadline_s = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < deadline_s, f"not within {patience_s} s: {_text_of(what)}"
        time.sleep(CHECK_EVERY_S)


def _text_of(what: str | Callable[[], str]) -> str:
    if isinstance(what, str):
        return what
    try:
        return what()
    except Exception as error:  # noqa: BLE001 - what was awaited must be told in any case
        return f"{error!r} when asked what there is"


def free_port() -> int:
    """A TCP port on which nothing listens, at each call another one.

    It is one of those that the kernel gives to nobody else: one that the kernel chooses may be a
    connection's of another test before it is listened on.
    """
    while True:
        port = _PORTS.pop()
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def make_config(name: str, overrides: Mapping[str, object]) -> AppConfig:
    roles = {"workers.unified": 0, "workers.prefill": 0, "workers.decode": 0}
    model = {"name": name, "model.path": str(MODEL)}
    return load_config(None, roles | LIFETIMES | model | dict(overrides))


@dataclass
class Application:
    """A deployed application and how to reach it."""

    config: AppConfig
    url: str
    hash: str
    api_key: str = "none"  # what clients send; nobody reads it where no keys are configured

    @property
    def name(self) -> str:
        assert self.config.name is not None, "make_config sets it"
        return self.config.name

    @property
    def model(self) -> str:
        return Path(self.config.model.path).name

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=self.api_key, max_retries=0, **options
        )

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=self.api_key, max_retries=0, **options
        )

    def complete(self, prompt: str | list[int], **params: object) -> list[int]:
        """Token ids of one greedy completion."""
        body: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24} | params
        extra = {"return_token_ids": True} | body.pop("extra_body", {})
        with self.client() as client:
            answer = client.completions.create(
                model=self.model, prompt=prompt, extra_body=extra, **body
            )
        return list(answer.choices[0].model_extra["token_ids"])

    def workers(self, role: str = "") -> list[str]:
        """Names of this deployment's worker actors."""
        roles = (role,) if role else ("prefill", "decode", "unified")
        return [n for n in self.actors() if n.startswith(roles) and n.endswith(self.hash)]

    def actors(self) -> list[str]:
        """Names of all detached actors of the application, of any deployment."""
        return named_actors(self.name)

    def actor(self, name: str) -> Any:
        return ray.get_actor(name, self.name)

    def statistics(self) -> dict[str, dict[str, Any]]:
        """What every worker holds; each checks its blocks' books first."""
        return {
            name: ray.get(self.actor(name).statistics.remote(), timeout=PATIENCE_S)
            for name in self.workers()
        }

    def call_in_workers(self, function: Callable[[Any], T], role: str = "") -> dict[str, T]:
        """Calls a function in the process of each worker, with its actor; returns the results."""
        calls = {n: self.actor(n).__ray_call__.remote(function) for n in self.workers(role)}
        return dict(zip(calls, ray.get(list(calls.values()), timeout=PATIENCE_S), strict=True))

    def call_in_replicas(self, function: Callable[[object], T]) -> list[T]:
        """Calls a function in the process of each ingress replica; returns the results."""
        replicas: list[Any] = [ray.get_actor(name, "serve") for name in self.replicas()]
        calls = [replica.__ray_call__.remote(function) for replica in replicas]
        return list(ray.get(calls, timeout=PATIENCE_S))

    def is_quiet(self) -> bool:
        """No request, block, row, lease or reservation is held by any worker."""
        return all(
            not seen["held_blocks"]
            and seen["num_requests"] == 0
            and seen["free_rows"] == self._num_rows(worker)
            and seen["streams"]["num_unacknowledged_tokens"] == 0
            for worker, seen in self.statistics().items()
        )

    def _num_rows(self, worker: str) -> int | str:
        workers, num_rows = self.config.workers, self.config.scheduler.max_num_seqs
        if not workers.enable_dp_attention or num_rows == "auto":
            return num_rows
        [num_ranks] = [n for role, n in workers.num_ranks.items() if worker.startswith(role)]
        return num_ranks * num_rows  # each rank has as many

    def wait_quiet(self) -> None:
        wait_until(self.is_quiet, lambda: f"{self.name} holds nothing: {self.statistics()}")

    def wait_ready(self) -> None:
        wait_until(
            lambda: self.get("/ready")[0] == 200,
            lambda: f"{self.name} is ready; it says {self.get('/ready')}",
        )

    def wait_loaded(self) -> None:
        """Until every worker has loaded its model: with one of each role it is ready."""

        def have_loaded() -> bool:
            try:
                self.statistics()
            except (ValueError, ray.exceptions.RayError):
                return False
            return True

        what = f"all workers of {self.name} have loaded their models"
        wait_until(have_loaded, what, START_S)

    def get(self, path: str) -> tuple[int, str]:
        """Status and text of a GET."""
        headers = {"Authorization": f"Bearer {self.api_key}"}
        answer = httpx.get(f"{self.url}{path}", headers=headers, timeout=PATIENCE_S)
        return answer.status_code, answer.text

    def laps_status(self) -> dict[str, Any]:
        """What the allocator knows. Waits for it: the page is a 503 while it does not answer."""
        said: list[tuple[int, str]] = []

        def has_answered() -> bool:
            said[:] = [self.get("/laps_status")]
            return said[0][0] == 200

        wait_until(has_answered, lambda: f"the allocator of {self.name} answers; last {said}")
        status: dict[str, Any] = json.loads(said[0][1])
        return status

    @contextmanager
    def stream(self, prompt: str | list[int], **params: Any) -> Iterator[Iterator[int]]:
        """Token ids of one completion as they come; leaving the block hangs up."""
        extra = {"return_token_ids": True, "ignore_eos": True}
        with (
            self.client() as client,
            client.completions.create(
                model=self.model, prompt=prompt, stream=True, extra_body=extra, **params
            ) as chunks,
        ):
            yield (
                token_id
                for chunk in chunks
                for choice in chunk.choices
                for token_id in choice.model_extra["token_ids"]
            )

    def metric(self, name: str) -> float:
        """Sum of the samples of that name in /metrics; 0 while nothing was counted."""
        _, text = self.get("/metrics")
        assert f"# TYPE {name} " in text, f"/metrics has no {name}"
        return metric_sum(text, name)

    def pid(self, name: str) -> int:
        """Of one of its detached actors; asking does not count as a heartbeat."""
        return actor_pid(name, self.name)

    def replica(self) -> str:
        """Serve's name of the one ingress actor."""
        [name] = self.replicas()
        return name

    def replicas(self) -> list[str]:
        """Serve's names of the ingress actors."""
        prefix = f"SERVE_REPLICA::{self.name}#"
        return [name for name in named_actors("serve") if name.startswith(prefix)]

    def supervisor(self) -> str:
        """Serve's name of the supervisor actor."""
        [name] = [n for n in named_actors("serve") if f"::{self.name}::" in n]
        return name

    def holdings(self) -> dict[str, dict[str, int]]:
        """How much of everything each worker and the ingress hold now; all but tasks 0 at rest."""
        num_tasks = sum(self.call_in_replicas(count_tasks))
        ingress = {"open attempts": int(self.metric("laps_open_attempts")), "tasks": num_tasks}
        max_rows = resolve_scheduler(self.config.scheduler, {}).max_num_seqs
        workers = {n: worker_holdings(seen, max_rows) for n, seen in self.statistics().items()}
        return {"ingress": ingress} | workers

    def baseline(self) -> dict[str, dict[str, int]]:
        """Holdings at rest: calls come and go, so the smallest of several looks."""
        self.wait_quiet()
        looks = [self.holdings() for _ in range(NUM_LOOKS)]
        return {
            who: {what: min(look[who][what] for look in looks) for what in looks[0][who]}
            for who in looks[0]
        }

    def wait_restored(self, baseline: Mapping[str, Mapping[str, int]]) -> None:
        """Until nobody holds more of anything than at the baseline."""
        deadline_s = time.monotonic() + PATIENCE_S
        while more := _beyond(self.holdings(), baseline):
            assert time.monotonic() < deadline_s, f"{self.name} still holds {more}"
            time.sleep(CHECK_EVERY_S)

    def stop(self, *, waits: bool = True) -> None:
        """Delete it; `waits`: until Serve has stopped its replicas."""
        serve.delete(self.name, _blocking=waits)


def _beyond(
    now: Mapping[str, Mapping[str, int]], baseline: Mapping[str, Mapping[str, int]]
) -> dict[str, str]:
    """Who holds more of what than at the baseline, now and then."""
    return {
        f"{who}: {what}": f"{num}, before {baseline[who][what]}"
        for who, held in now.items()
        for what, num in held.items()
        if num > baseline[who][what]
    }


def metric_sum(text: str, name: str) -> float:
    """Sum of a metric's samples in Prometheus' text; 0 if there are none."""
    families = text_string_to_metric_families(text)
    return sum(s.value for family in families for s in family.samples if s.name == name)


def arena_name(worker: Any) -> str | None:
    """Of its host tier, for `call_in_workers`; None = it has none."""
    tier = worker._host.engine.host_tier
    return None if tier is None else str(tier._arena.name)


def num_cached_blocks(worker: Any) -> int:
    """Of a worker that runs nothing, for `call_in_workers`."""
    return int(worker._host.engine.cache.num_cached_idle)


def count_tasks(_: object) -> int:
    """Unfinished tasks on all event loops of the ingress, but for those of its links to workers.

    Tasks from before its first request are out of sight, because Serve freezes them for the
    garbage collector; a link's are made anew when its worker is.
    """
    tasks = [o for o in gc.get_objects() if isinstance(o, asyncio.Task) and not o.done()]
    names = [str(getattr(task.get_coro(), "__qualname__", None)) for task in tasks]
    return sum(not name.startswith("WorkerLinks.") for name in names)


def actor_pid(name: str, namespace: str) -> int:
    """The process of a named actor. Raises ValueError or RayError while there is none."""
    actor: Any = ray.get_actor(name, namespace)
    return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=ANSWER_S))


def wait_replaced(name: str, namespace: str, old_pid: int) -> None:
    """Until the actor of that name answers from another process."""

    def is_replaced() -> bool:
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            return actor_pid(name, namespace) != old_pid
        return False

    wait_until(is_replaced, f"{name} lives again")


def named_actors(namespace: str) -> list[str]:
    entries = list_named_actors(all_namespaces=True)
    return sorted(e["name"] for e in entries if e["namespace"] == namespace)


@dataclass
class Cluster:
    """A local Ray cluster with Serve on a free port."""

    port: int

    @classmethod
    def start(cls) -> "Cluster":
        """On a Ray cluster of its own, which `stop` ends."""
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        return cls.serve()

    @classmethod
    def serve(cls) -> "Cluster":
        """On the Ray cluster that this process has joined."""
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        return cls(port=port)

    def run(
        self, name: str, overrides: Mapping[str, object], *, api_key: str = "none"
    ) -> Application:
        """Deploy and wait until it can serve."""
        config = make_config(name, overrides)
        spec = describe_deployment(config)
        serve.run(bind(spec), name=name, route_prefix=f"/{name}", blocking=False)
        url = f"http://127.0.0.1:{self.port}/{name}"
        return Application(config=config, url=url, hash=spec.hash, api_key=api_key)

    def stop(self) -> None:
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()
