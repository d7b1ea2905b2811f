"""A soak of the real application on a CPU: clients that leave, killed workers, a redeploy

    RAY_AUTH_MODE=disabled OMP_NUM_THREADS=1 python -m load_tests.lab.soak --seconds 1800

Starts the application on a Ray cluster of its own, or asks one that runs (`--url`), which it
neither kills nor looks into. Every answer is compared token for token with what an engine in this
process brought beforehand. Exits with 1, and says why, when a token was wrong, an answer broke off
without a word, too many failed, something is held when all is quiet, or a process grew.
"""

import argparse
import concurrent.futures
import json
import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from load_tests.http_load.client import Server
from load_tests.lab.soak_cases import Case, build_cases
from load_tests.lab.soak_clients import Clients, Outcomes
from load_tests.lab.soak_record import Record, Track
from load_tests.testbed.deployed import MODEL, Cluster
from load_tests.testbed.system import System

WORKERS = ("prefill", "decode")
VICTIMS = (*WORKERS, "tokenizer", "allocator")
# A pool that is all in use within seconds: its memory has been touched before it is judged, and
# blocks are evicted all the time.
DEPLOYED: Mapping[str, object] = {
    "workers.prefill": 2,
    "workers.decode": 1,
    "cache.num_blocks": 320,
    "scheduler.max_num_seqs": 8,
}
REDEPLOYED: Mapping[str, object] = {"cache.num_blocks": 319}
TIMEOUT_S = 240.0  # of a request: a redeploy and a kill may come together, on a slow machine
REST_S = 120.0
LOOK_AGAIN_S = 0.5
NUM_WARM = 20  # answers, after which everybody has met everybody


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakOptions:
    seconds: float
    seed: int
    num_clients: int = 6
    num_cases: int = 40
    leave_share: float = 0.2
    kill_every_s: float = 60.0
    look_every_s: float = 5.0
    max_failed_share: float = 0.01  # of the requests, with a clear error


@dataclass(slots=True, kw_only=True)
class SoakReport:
    """What happened; `violations` is empty if all was well."""

    options: SoakOptions
    outcomes: Outcomes
    events: list[str] = field(default_factory=list)
    progress: list[tuple[float, int]] = field(default_factory=list)  # seconds, right answers
    tracks: list[Track] = field(default_factory=list)
    tasks_at_rest: dict[str, list[int]] = field(default_factory=dict)  # role: before, after
    num_in_redeploy: int | None = None  # right answers while another deployment started
    violations: list[str] = field(default_factory=list)

    def judge(self) -> None:
        """Add to the violations what answers and processes say."""
        seen, options = self.outcomes, self.options
        self.violations += [f"wrong tokens: {text}" for text in seen.wrong]
        self.violations += [f"{num} x without a word: {why}" for why, num in seen.broken.items()]
        if self.num_in_redeploy is not None and self.num_in_redeploy <= options.num_clients:
            self.violations.append("nobody new was answered while another deployment started")
        num_failed = seen.errors.total()
        if num_failed > options.max_failed_share * seen.num_ended:
            self.violations.append(f"{num_failed} of {seen.num_ended} failed: {dict(seen.errors)}")
        if not seen.num_right or (options.leave_share and not seen.num_left):
            self.violations.append(f"too little happened to say anything: {seen}")
        for track in self.tracks:
            self.violations += track.offences()


def soak(cluster: Cluster, options: SoakOptions) -> SoakReport:
    """Deploy, load, kill, redeploy, wait until it is quiet, judge."""
    cases = build_cases(MODEL, options.num_cases, seed=options.seed)
    system = System(cluster, "soak", DEPLOYED)
    try:
        with _clients(system.url, cases, options) as warm:
            _wait_until(lambda: warm.outcomes.num_right >= NUM_WARM, TIMEOUT_S)
        clients = _clients(system.url, cases, options)
        report = SoakReport(options=options, outcomes=clients.outcomes)
        record = Record(system)
        _check_rest(system, report)
        report.tasks_at_rest = {role: [num] for role, num in record.tasks_at_rest().items()}
        with clients:
            _Course(system, record, report).run()
        _check_rest(system, report)
        _check_tasks(record, report)
        report.tracks = record.tracks()
    finally:
        system.stop()
    report.judge()
    return report


def ask_only(url: str, options: SoakOptions) -> SoakReport:
    """The same clients at an application that runs elsewhere; its answers alone are judged."""
    clients = _clients(url, build_cases(MODEL, options.num_cases, seed=options.seed), options)
    with clients:
        time.sleep(options.seconds)
    report = SoakReport(options=options, outcomes=clients.outcomes)
    report.judge()
    return report


def _clients(url: str, cases: list[Case], options: SoakOptions) -> Clients:
    return Clients(
        Server(url=url),
        MODEL.name,
        cases,
        num_clients=options.num_clients,
        leave_share=options.leave_share,
        timeout_s=TIMEOUT_S,
        seed=options.seed,
    )


class _Course:
    """What is done to the system while the clients ask."""

    def __init__(self, system: System, record: Record, report: SoakReport) -> None:
        self._system = system
        self._record = record
        self._report = report
        self._options = report.options
        self._rng = random.Random(f"course {report.options.seed}")
        self._started_s = time.monotonic()
        self._num_right_at_kill = 0

    def run(self) -> None:
        """For as long as was asked, and until the redeploy has come to its end."""
        options = self._options
        kill_at_s = options.kill_every_s
        redeploy: concurrent.futures.Future[None] | None = None
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            while self._now_s < options.seconds or redeploy is None or not redeploy.done():
                look_again_s = self._now_s + options.look_every_s
                self._record.look()
                self._report.progress.append((self._now_s, self._report.outcomes.num_right))
                if redeploy is None and self._now_s >= options.seconds / 2:
                    redeploy = thread.submit(self._redeploy)
                    kill_at_s = self._now_s  # while new workers load
                elif self._now_s >= kill_at_s and self._kill(redeploy):
                    kill_at_s = self._now_s + options.kill_every_s
                time.sleep(max(0.0, look_again_s - self._now_s))
            redeploy.result()

    @property
    def _now_s(self) -> float:
        return time.monotonic() - self._started_s

    def _redeploy(self) -> None:
        num_before = self._report.outcomes.num_right
        self._say("redeploy begins")
        self._system.redeploy(REDEPLOYED)
        self._say("redeploy is done")
        self._report.num_in_redeploy = self._report.outcomes.num_right - num_before

    def _kill(self, redeploy: concurrent.futures.Future[None] | None) -> bool:
        """One after the other; in a redeploy a worker of the old deployment, while that answers.

        A request that meets two deaths without getting on is taken for their cause: everybody gets
        an answer between two.
        """
        num_right = self._report.outcomes.num_right
        if num_right < self._num_right_at_kill + self._options.num_clients:
            return False
        is_deploying = redeploy is not None and not redeploy.done()
        if not (self._system.is_ready() if is_deploying else self._system.is_whole()):
            return False
        role = self._rng.choice(WORKERS if is_deploying else VICTIMS)
        names = [n for n in self._system.names(role) if n.endswith(self._system.application.hash)]
        name = self._rng.choice(names)
        pid = self._system.send(name)
        self._num_right_at_kill = num_right
        self._say(f"killed {name} ({pid})" if pid else f"{name} is away already")
        return True

    def _say(self, event: str) -> None:
        seen = self._report.outcomes
        counts = f"{seen.num_right} right, {seen.num_left} left, {seen.errors.total()} failed"
        self._report.events.append(f"{self._now_s:.0f} s: {event} ({counts})")
        print(self._report.events[-1], flush=True)


# ---- at rest -------------------------------------------------------------------------------------


def _check_rest(system: System, report: SoakReport) -> None:
    """Until nothing is held, every role can serve and no earlier deployment is left."""

    def is_at_rest() -> bool:
        is_alone = all(name.endswith(system.application.hash) for name in system.names())
        return is_alone and system.is_whole() and not system.held()

    if not _wait_until(is_at_rest, REST_S):
        held = [f"held at rest by {who}: {num}" for who, num in system.held().items()]
        away = [f"away at rest: {name}" for name in system.missing()]
        report.violations += held + away or [f"not at rest after {REST_S} s: {system.names()}"]


def _check_tasks(record: Record, report: SoakReport) -> None:
    """No role has more asyncio tasks at rest than it had at first."""

    def beyond() -> dict[str, int]:
        now = record.tasks_at_rest()
        return {role: num for role, num in now.items() if num > report.tasks_at_rest[role][0]}

    _wait_until(lambda: not beyond(), REST_S)
    for role, num in record.tasks_at_rest().items():
        report.tasks_at_rest[role].append(num)
    for role, num in beyond().items():
        before = report.tasks_at_rest[role][0]
        report.violations.append(f"{role}: {num} asyncio tasks at rest, {before} at first")


def _wait_until(holds: Callable[[], bool], patience_s: float) -> bool:
    """Whether it came to hold in time."""
    until_s = time.monotonic() + patience_s
    while not holds():
        if time.monotonic() > until_s:
            return False
        time.sleep(LOOK_AGAIN_S)
    return True


# ---- saying it -----------------------------------------------------------------------------------


def render(report: SoakReport) -> str:
    """A summary as text: answers, processes, what was wrong."""
    seen = report.outcomes
    lines = [
        f"{seen.num_right} answers right token for token, {seen.num_left} given up by the client,"
        f" {seen.errors.total()} failed with an error, {seen.broken.total()} without a word,"
        f" {len(seen.wrong)} wrong (seed {report.options.seed})",
        *(f"  {num} x {why}" for why, num in (seen.errors + seen.broken).items()),
        "",
        "| process | seen, s | memory, MiB | MiB/min | open files | tasks |",
        "|---|---|---|---|---|---|",
        *(track.row() for track in report.tracks),
        "",
        *(f"asyncio tasks at rest, {role}: {n}" for role, n in report.tasks_at_rest.items()),
        *(f"VIOLATION: {text}" for text in report.violations),
        "" if report.violations else "no violation",
    ]
    return "\n".join(lines)


def to_json(report: SoakReport) -> str:
    return json.dumps(asdict(report), indent=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--url", help="of an application that runs; only its answers are judged")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--kill-every", type=float, default=60.0, help="seconds")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--json", type=Path, help="write everything that was seen there")
    args = parser.parse_args()
    options = SoakOptions(
        seconds=args.seconds,
        seed=args.seed,
        num_clients=args.clients,
        kill_every_s=args.kill_every,
    )
    if args.url:
        report = ask_only(args.url, options)
    else:
        cluster = Cluster.start()
        try:
            report = soak(cluster, options)
        finally:
            cluster.stop()
    if args.json:
        args.json.write_text(to_json(report))
    print(render(report))
    sys.exit(1 if report.violations else 0)


if __name__ == "__main__":
    main()
