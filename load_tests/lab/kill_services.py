"""What 200 streaming clients see when a process beside the workers is killed: counts, and leaks.

    RAY_AUTH_MODE=disabled python -m load_tests.lab.kill_services

Starts the application as its users do (`serve run`, so behind HAProxy where that can run) with two
ingress replicas and the shipped model on a CPU. For each victim 200 streams begin together; once a
quarter of them has ended, one process gets SIGKILL. Every answer is compared token for token with
what an engine in this process brought beforehand. Afterwards nothing may be held, and the victim
has been replaced. Exits with 1 if that is not so, or if a stream had wrong tokens.
"""

import argparse
import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import psutil
import yaml

from load_tests.lab.soak_cases import Case, build_cases
from load_tests.tables import describe_machine, render_rows
from load_tests.testbed.deployed import MODEL, ROOT, free_port, metric_sum, wait_until
from load_tests.testbed.ingress_client import Client

HOST = "127.0.0.1"
START_S = 180.0
REST_S = 120.0
# Part of a process's title, as Ray sets it.
VICTIMS = {
    "ingress replica": "ServeReplica:default:ingress",
    "allocator": "LapsAllocator",
    "tokenizer": "TokenizerBatcher",
}
HELD = (
    "laps_open_attempts",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "laps_queued_tokens",
    "vllm:kv_cache_usage_perc",
)
CONFIG = {
    "workers": {"unified": 2, "prefill": 0, "decode": 0},
    "edge": {"num_replicas": 2},
    "cache": {"num_blocks": 4096},
}


class Running:
    """The application that `serve run` started."""

    def __init__(self, process: "subprocess.Popen[bytes]", port: int) -> None:
        self._process = psutil.Process(process.pid)
        self.port = port
        self.url = f"http://{HOST}:{port}"

    def pids(self, title: str) -> list[int]:
        """Returns the processes of the actors with this in their titles."""
        found = []
        for child in self._process.children(recursive=True):
            try:
                line = " ".join(child.cmdline())
            except psutil.NoSuchProcess:
                continue
            if line.startswith("ray::") and title in line:
                found.append(child.pid)
        return sorted(found)

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def held(self) -> dict[str, float]:
        """Returns what the application holds for requests; {} when it is at rest."""
        try:
            text = httpx.get(f"{self.url}/metrics", timeout=10).raise_for_status().text
        except httpx.HTTPError as error:
            return {f"no metrics: {error!r}": 1.0}
        held = {name: metric_sum(text, name) for name in HELD}
        return {name: value for name, value in held.items() if value}


@contextmanager
def _running() -> Iterator[Running]:
    port = free_port()
    with TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(yaml.safe_dump(CONFIG))
        log = Path(folder) / "log"
        command = [sys.executable, "-m", "ray.serve.scripts", "run", "serve_app:build"]
        command += [f"config={config}", f"model={MODEL}", f"host={HOST}", f"port={port}"]
        with log.open("w") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            application = Running(process, port)
            wait_until(application.is_ready, lambda: f"ready: {log.read_text()[-2000:]}", START_S)
            found = re.search(r"HTTP connections are taken by [^\n]*", log.read_text())
            print(found[0] if found else log.read_text()[-2000:], flush=True)
            yield application
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(REST_S)


def _stop_one(application: Running, title: str) -> None:
    """Sends SIGKILL to one of the processes."""
    os.kill(application.pids(title)[0], signal.SIGKILL)


async def _stream_all(
    application: Running, cases: Sequence[Case], num_streams: int, kill: Callable[[], None]
) -> Counter[str]:
    """Returns what became of the streams; `kill` is called while they go on."""
    outcomes: Counter[str] = Counter()
    num_ended = 0
    is_busy = asyncio.Event()

    async def stream(number: int) -> None:
        nonlocal num_ended
        case = cases[number % len(cases)]
        client = Client(HOST, application.port)
        try:
            reply = await client.complete(case.fields(MODEL.name, is_stream=True))
        except OSError:
            outcomes["broken off"] += 1
            return
        finally:
            client.close()
            num_ended += 1
            if num_ended >= num_streams // 4:
                is_busy.set()
        if reply.is_complete:
            outcomes["whole" if reply.token_ids == case.expected else "wrong tokens"] += 1
        elif reply.status != 200:
            outcomes[f"HTTP {reply.status}"] += 1
        else:
            outcomes["error event"] += 1

    async def kill_when_busy() -> None:
        await is_busy.wait()
        await asyncio.to_thread(kill)

    await asyncio.gather(kill_when_busy(), *map(stream, range(num_streams)))
    return outcomes


def measure(
    application: Running, victim: str, cases: Sequence[Case], num_streams: int
) -> Counter[str]:
    """Kills one process under load. Raises AssertionError if something stays held, or away."""
    title = VICTIMS[victim]
    before = application.pids(title)
    assert before, f"no process is called {title}"
    started_s = time.monotonic()
    outcomes = asyncio.run(
        _stream_all(application, cases, num_streams, lambda: _stop_one(application, title))
    )
    outcomes["seconds"] = round(time.monotonic() - started_s)

    def is_at_rest() -> bool:
        now = application.pids(title)
        return len(now) == len(before) and now != before and not application.held()

    wait_until(is_at_rest, lambda: f"at rest: {application.held()}", REST_S)
    wait_until(application.is_ready, "ready again", REST_S)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=200, help="at once")
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    cases = build_cases(MODEL, 40, seed=args.seed)
    with _running() as application:
        seen = {victim: measure(application, victim, cases, args.streams) for victim in VICTIMS}
    columns = sorted({outcome for outcomes in seen.values() for outcome in outcomes})
    rows = [("killed", *columns)]
    rows += [(victim, *(str(outcomes[c]) for c in columns)) for victim, outcomes in seen.items()]
    print(render_rows(rows))
    print(*(f"{name}: {value}" for name, value in describe_machine().items()), sep="\n")
    sys.exit(any(outcomes["wrong tokens"] for outcomes in seen.values()))


if __name__ == "__main__":
    main()
