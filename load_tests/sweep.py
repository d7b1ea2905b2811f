"""One load at several rates on a running server, and a page that shows what came of it.

    python -m load_tests.sweep --url http://127.0.0.1:8000 --scenario mixed --rates 1 2 4 8 \\
        --seeds 7 8 --out report/

Each rate and seed is a locust process of its own. The folder then holds `report.html`, which needs
nothing else, `results.json` with the names of vLLM's `bench serve`, and for each run its requests
(.jsonl) and its log. The server may be any that speaks OpenAI's protocol; what this needs besides
comes with the extra `load`.
"""

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.live import Live

from load_tests.http_load.client import LoadError
from load_tests.http_load.metrics import Point, Run
from load_tests.http_load.options import (
    LoadOptions,
    add_load_arguments,
    read_load_arguments,
    to_arguments,
)
from load_tests.http_load.preflight import check_lengths, prepare
from load_tests.http_load.progress import RunView, render_progress
from load_tests.http_load.records import RunReader
from load_tests.http_load.report import to_html, warnings
from load_tests.http_load.results import Sweep, to_json
from load_tests.http_load.scenario import Scenario, ScenarioError
from load_tests.http_load.schedule import draw_sessions

ROOT = Path(__file__).resolve().parents[1]
LOCUSTFILE = ROOT / "load_tests" / "locustfile.py"
LOOK_EVERY_S = 0.25
STOP_TIMEOUT_S = 20.0
LOG_TAIL_LINES = 15


class RunError(Exception):
    """A run that did not do what it should; the message has the end of its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run to do."""

    arguments: Sequence[str]  # of the load, for locust
    url: str
    rate: float | None  # None = as recorded
    seed: int
    path: Path  # of its records

    @property
    def command(self) -> list[str]:
        words = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless"]
        words += ["--only-summary", "--exit-code-on-error=0", f"--host={self.url}"]
        words += [*self.arguments, f"--seed={self.seed}", f"--records={self.path}"]
        return words if self.rate is None else [*words, f"--rate={self.rate}"]


def run_one(plan: Plan, reader: RunReader, live: Live) -> None:
    """Until its process has ended. Raises RunError; whatever ends it, the process is gone."""
    log_path = plan.path.with_suffix(".log")
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            plan.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            start_new_session=True,  # Ctrl-C reaches this process, which ends that one in order
        )
        try:
            while process.poll() is None:
                time.sleep(LOOK_EVERY_S)
                reader.refresh()
                live.refresh()
        finally:
            _stop(process)
    reader.refresh()
    num_arrivals = None if reader.header is None else reader.header.num_arrivals
    if process.returncode or num_arrivals != len(reader.records):
        tail = log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        raise RunError(
            f"{plan.path.stem}: {len(reader.records)} of {num_arrivals} requests ended, exit code"
            f" {process.returncode}; the end of {log_path}:\n" + "\n".join(tail)
        )


def _stop(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def run_all(plans: Sequence[Plan], views: Sequence[RunView], console: Console, title: str) -> int:
    """One after the other; how many were finished when all were, or when the user stopped it.

    Raises RunError.
    """
    with Live(
        get_renderable=lambda: render_progress(title, views), console=console, auto_refresh=False
    ) as live:
        for num_finished, (plan, view) in enumerate(zip(plans, views, strict=True)):
            try:
                run_one(plan, view.reader, live)
            except KeyboardInterrupt:
                return num_finished
            live.refresh()
    return len(plans)


def build_points(views: Sequence[RunView], scenario: Scenario) -> list[Point]:
    """Finished runs by rate, in order."""
    by_rate: dict[float | None, list[Run]] = {}
    for view in views:
        header = view.reader.header
        assert header is not None, f"no run at {view.rate}"
        run = Run(header=header, records=view.reader.records)
        by_rate.setdefault(view.rate, []).append(run)
    points = [
        Point(rate=sum(run.header.rate for run in runs) / len(runs), runs=runs, slo=scenario.slo)
        for runs in by_rate.values()
    ]
    return sorted(points, key=lambda point: point.rate)


def build_plans(args: argparse.Namespace, scenario: Scenario) -> list[Plan]:
    """Every rate with every seed, each once."""
    rates = dict.fromkeys(args.rates or [scenario.rate])
    seeds = dict.fromkeys(args.seeds or [scenario.seed])
    folder = args.out.resolve()
    return [
        Plan(
            arguments=to_arguments(args),
            url=args.url,
            rate=rate,
            seed=seed,
            path=folder / f"rate_{'recorded' if rate is None else f'{rate:g}'}_seed_{seed}.jsonl",
        )
        for rate in rates
        for seed in seeds
    ]


def check(args: argparse.Namespace, options: LoadOptions, plans: Sequence[Plan]) -> str:
    """The model that will answer. Raises LoadError or ScenarioError for what cannot be run."""
    server = options.server(args.url)
    _, served = prepare(server, options.model, options.ask_options())
    for plan in plans:
        one = read_load_arguments(args, rate=plan.rate, seed=plan.seed)
        check_lengths(draw_sessions(one.read_scenario()), served)
    return served.model


def sweep(args: argparse.Namespace, console: Console) -> int:
    """The exit code. Raises LoadError, ScenarioError or RunError."""
    options = read_load_arguments(args, rate=None, seed=None)
    scenario = options.read_scenario()
    plans = build_plans(args, scenario)
    model = check(args, options, plans)
    args.out.mkdir(parents=True, exist_ok=True)
    for plan in plans:
        plan.path.unlink(missing_ok=True)  # or an older run's would be shown as this one's
    views = [
        RunView(rate=p.rate, seed=p.seed, reader=RunReader(p.path), slo=scenario.slo) for p in plans
    ]
    date = datetime.now(UTC).isoformat(timespec="seconds")
    title = f"{scenario.name} on {model} at {args.url}, {scenario.duration_s:g} s a run"
    num_finished = run_all(plans, views, console, title)
    console.print()
    points = build_points(views[:num_finished], scenario)
    if not points:
        console.print("stopped before the first run ended: there is nothing to report")
        return 1
    result = Sweep(
        scenario=scenario,
        options=options,
        url=args.url,
        model=model,
        date=date,
        command=shlex.join(["python", "-m", "load_tests.sweep", *sys.argv[1:]]),
        points=points,
    )
    (args.out / "results.json").write_bytes(to_json(result))
    page = args.out / "report.html"
    page.write_text(to_html(result), encoding="utf-8")
    for warning in warnings(result):
        console.print(f"[yellow]{warning}[/yellow]")
    console.print(f"{num_finished} of {len(plans)} runs: {page}", soft_wrap=True)
    return 0 if num_finished == len(plans) else 1


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    add_load_arguments(parser)
    parser.add_argument("--rates", type=float, nargs="+", help="requests/s [the scenario's]")
    parser.add_argument("--seeds", type=int, nargs="+", help="of the arrivals [the scenario's]")
    parser.add_argument("--out", type=Path, default=Path("report"), help="a folder [report]")
    return parser.parse_args()


def main() -> None:
    console = Console()
    try:
        sys.exit(sweep(parse_args(), console))
    except (LoadError, ScenarioError, RunError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
