"""How long a supervisor lives; what it does on a real cluster is tested in tests/cluster."""

import asyncio
from contextlib import suppress
from types import SimpleNamespace

import pytest

from actors import supervisor
from actors.lifecycle.deployment import describe_deployment
from actors.lifecycle.liveness import CHECK_EVERY_S, Lifeline
from actors.supervisor import INGRESS_SILENCE_S, Supervisor
from engine.errors import WorkerError
from load_tests.testbed.deployed import make_config


async def watch_nothing(_: Supervisor) -> None:
    await asyncio.Event().wait()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor without Ray, whose lifeline the test looks at by itself."""
    context = SimpleNamespace(get_actor_name=lambda: "supervisor")
    monkeypatch.setattr(supervisor, "set_up_logging", lambda: None)
    monkeypatch.setattr(supervisor.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(
        supervisor.serve, "get_deployment_actor_context", lambda: SimpleNamespace(app_name="app")
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
