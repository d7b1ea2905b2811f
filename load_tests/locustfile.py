"""An open-loop load on any server of OpenAI's protocol, with and without locust's web page.

    locust -f load_tests/locustfile.py --host http://127.0.0.1:8000 --scenario mixed --rate 4
    locust -f load_tests/locustfile.py --host http://127.0.0.1:8000 --headless --records run.jsonl

Requests are drawn ahead and sent when they are due, so the number of locust's users is of no
matter: one user holds the schedule. Besides locust's entry of a request (POST, its time to the
last token) there are entries of TTFT, TPOT, ITL and of how late the client was (LAG), in ms by
prompt class; the requests/s of `SLO ... kept` are the goodput. Requests that the server refused
with 429 or 503 and a Retry-After are REFUSED, those under way when the run was stopped are
STOPPED. None of these is in locust's totals, charts and failures, which stay those of whole
requests. For many rates and a report there is `python -m load_tests.sweep`.
"""

import argparse
import logging
from datetime import UTC, datetime
from pathlib import Path

import gevent
from locust import User, events, task
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import LocalRunner

from load_tests.http_load.client import LoadError, ask
from load_tests.http_load.dialogue import dialogue_maker
from load_tests.http_load.metrics import is_within
from load_tests.http_load.open_loop import OpenLoop
from load_tests.http_load.options import LoadOptions, add_load_arguments, read_load_arguments
from load_tests.http_load.preflight import check_lengths, prepare
from load_tests.http_load.records import Header, Outcome, Record, RunFile
from load_tests.http_load.scenario import Scenario, ScenarioError
from load_tests.http_load.schedule import draw_sessions, num_requests

EXIT_NOT_STARTED = 2


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_load_arguments(parser)
    parser.add_argument("--rate", type=float, help="requests/s on average [the scenario's]")
    parser.add_argument("--seed", type=int, help="of the arrivals [the scenario's]")
    parser.add_argument("--records", default="", help="write a line for each request to this file")


@events.init.add_listener  # type: ignore[untyped-decorator]
def check_runner(environment: Environment, **_: object) -> None:
    if not isinstance(environment.runner, LocalRunner):
        raise SystemExit("one schedule runs in one process: leave out --processes and --master")


class OpenLoopUser(User):
    """The one user that sends every request of the schedule."""

    fixed_count = 1

    @task
    def run_load(self) -> None:
        """Once; then the run is over."""
        try:
            run_once(self.environment)
        except (LoadError, ScenarioError) as error:
            logging.getLogger(__name__).error("the load did not start: %s", error)
            self.environment.process_exit_code = EXIT_NOT_STARTED
        # Not from here: ending the run waits for its users, of which this is one.
        gevent.spawn(end_run, self.environment)
        raise StopUser


def end_run(environment: Environment) -> None:
    runner, options = environment.runner, environment.parsed_options
    assert runner is not None
    assert options is not None
    if options.headless:
        runner.quit()
    else:
        runner.stop()


def run_once(environment: Environment) -> None:
    """Raises LoadError or ScenarioError before anything is sent."""
    args = environment.parsed_options
    assert args is not None
    options = read_load_arguments(args, rate=args.rate, seed=args.seed)
    scenario = options.read_scenario()
    sessions = draw_sessions(scenario)
    server = options.server(environment.host or "")
    ask_options, served = prepare(server, options.model, options.ask_options())
    check_lengths(sessions, served)
    header = _header(options, scenario, server.url, served.model, num_requests(sessions))
    file = RunFile(Path(args.records), header) if args.records else None

    def on_record(record: Record) -> None:
        if file is not None:
            file.add(record)
        report(environment, scenario, record)

    try:
        OpenLoop(
            scenario,
            sessions,
            lambda prompt, num: ask(server, ask_options, prompt, num, scenario.answer_timeout_s),
            dialogue_maker(options.style, options.content()),
            on_record,
        ).run()
    finally:
        if file is not None:
            file.close()


def report(environment: Environment, scenario: Scenario, record: Record) -> None:
    """One request to locust: its own event, and an entry for each of its token times."""
    if record.sent_s is None:  # the run was stopped before it was due
        return
    took_s = record.ended_s - record.sent_s
    if record.is_shed:
        _log(environment, "REFUSED", f"{record.length_class} {record.status}", took_s)
    elif record.outcome is Outcome.STOPPED:
        _log(environment, "STOPPED", record.length_class, took_s)
    else:
        _fire(environment, record, took_s)
    times_s = {"TTFT": record.ttft_s, "TPOT": record.tpot_s, "LAG": record.lag_s}
    for metric, value_s in times_s.items():
        if value_s is not None:
            _log(environment, metric, record.length_class, value_s)
    for gap_s in record.gaps_s:
        _log(environment, "ITL", record.length_class, gap_s)
    if record.outcome in (Outcome.COMPLETED, Outcome.FAILED):
        verdict = "kept" if is_within(record, scenario.slo) else "missed"
        _log(environment, "SLO", f"{record.length_class} {verdict}", record.e2e_s or 0.0)


def _fire(environment: Environment, record: Record, took_s: float) -> None:
    """The event that locust's own totals, charts and failures are made of."""
    is_cancelled = record.outcome is Outcome.CANCELLED
    environment.events.request.fire(  # type: ignore[no-untyped-call]
        request_type="POST",
        name=record.length_class + (" cancelled" if is_cancelled else ""),
        response_time=1e3 * took_s,
        response_length=record.num_output_tokens,
        exception=LoadError(record.error) if record.outcome is Outcome.FAILED else None,
        context={},
    )


def _log(environment: Environment, metric: str, name: str, value_s: float) -> None:
    """An entry of its own, which locust's totals do not count; locust keeps fractions of a ms."""
    environment.stats.get(name, metric).log(1e3 * value_s, 0)  # type: ignore[arg-type]


def _header(
    options: LoadOptions, scenario: Scenario, url: str, model: str, num_arrivals: int
) -> Header:
    return Header(
        scenario=scenario.name,
        url=url,
        model=model,
        rate=scenario.rate or num_arrivals / scenario.duration_s,
        seed=scenario.seed,
        salt=options.salt,
        duration_s=scenario.duration_s,
        num_arrivals=num_arrivals,
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
