"""How long a supervisor lives; what it does on a real cluster is tested in tests/cluster."""

import asyncio
from contextlib import suppress
from types import SimpleNamespace

import pytest
import ray
from ray import serve

from actors import supervisor
from actors.lifecycle.deployment import describe_deployment
from actors.lifecycle.liveness import CHECK_EVERY_S, Lifeline
from actors.supervisor import INGRESS_SILENCE_S, Supervisor
from engine.errors import WorkerError
from engine.messages import WorkerStatus
from load_tests.testbed.deployed import make_config


async def watch_nothing(_: Supervisor) -> None:
    await asyncio.Event().wait()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor without Ray, whose lifeline the test looks at by itself."""
    context = SimpleNamespace(get_actor_name=lambda: "supervisor")
    monkeypatch.setattr(supervisor, "set_up_logging", lambda level: None)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(
        serve, "get_deployment_actor_context", lambda: SimpleNamespace(app_name="app")
    )
    monkeypatch.setattr(Supervisor, "_watch", watch_nothing)
    monkeypatch.setattr(supervisor, "_exit_without_watcher", lambda _: None)
    monkeypatch.setattr(Lifeline, "start", lambda lifeline: lifeline)


@pytest.mark.usefixtures("alone")
def test_a_supervisor_ends_when_no_ingress_asks_it_any_more() -> None:
    """As one that Serve has forgotten: nobody else ends it."""
    num_looks = int(INGRESS_SILENCE_S / CHECK_EVERY_S)

    async def run() -> None:
        asked = Supervisor(
            describe_deployment(make_config("app", {"workers.unified": 1})).to_text()
        )
        for _ in range(2 * num_looks):
            assert not asked._lifeline.look()
            with suppress(WorkerError):  # it has not looked yet
                await asked.topology()
        assert [asked._lifeline.look() for _ in range(num_looks + 1)] == [False] * num_looks + [
            True
        ]

    asyncio.run(run())


@pytest.mark.usefixtures("alone")
def test_a_worker_that_changes_its_state_is_a_line_of_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ready = WorkerStatus(identity=None, state="ready")
    answers = [ready, ready, WorkerStatus(identity=None, state="failed", detail="no such file")]

    async def answer(*_: object) -> WorkerStatus:
        return answers.pop(0)

    monkeypatch.setattr(Supervisor, "_ask", answer)

    async def run() -> str:
        config = make_config("app", {"workers.unified": 1})
        watching = Supervisor(describe_deployment(config).to_text())
        [name] = watching._statuses
        for _ in range(3):
            await watching._check_worker(name)
        return name

    with caplog.at_level("INFO", "actors.supervisor"):
        name = asyncio.run(run())
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"{name} is ready", f"{name} is failed: no such file"]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("num_cpus", [0.0, 0.1])
def test_only_workers_that_answer_nothing_and_should_have_a_place_are_looked_for(
    num_cpus: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_for: list[str] = []
    monkeypatch.setattr(supervisor, "end_lost", lambda workers, _: looked_for.extend(workers))
    config = make_config("app", {"workers.unified": 3, "workers.num_cpus": num_cpus})

    async def run() -> list[str]:
        watching = Supervisor(describe_deployment(config).to_text())
        answers, silent, _ = watching._statuses
        watching._statuses[answers] = WorkerStatus(identity=None, state="starting")
        watching._end_lost([answers, silent])
        return [silent] if num_cpus else []

    assert asyncio.run(run()) == looked_for
