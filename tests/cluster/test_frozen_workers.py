"""A process that is stopped and never goes on: it cannot end itself, so its supervisor does."""

import os
import signal
import time
from collections.abc import Iterator

import pytest

from load_tests.testbed.deployed import Application, Cluster, actor_pid, wait_replaced, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.nightly]

PROMPT = "import os\nimport "
TOKENS = 600


@pytest.fixture(scope="module")
def application(cluster: Cluster) -> Iterator[Application]:
    application = cluster.run("frozen", {"workers.prefill": 1, "workers.decode": 1})
    yield application
    application.stop()


@pytest.mark.parametrize("roles", [("decode",), ("prefill", "tokenizer")])
def test_actors_that_freeze_for_good_are_replaced_and_cost_no_token(
    application: Application, roles: tuple[str, ...]
) -> None:
    undisturbed = application.complete(PROMPT, max_tokens=TOKENS, extra_body={"ignore_eos": True})
    victims = {
        name: application.pid(name) for name in application.actors() if name.startswith(roles)
    }
    assert len(victims) == len(roles), f"one of each role: {victims}"
    with application.stream(PROMPT, max_tokens=TOKENS, temperature=0.0) as tokens:
        seen = [next(tokens) for _ in range(3)]
        for victim_pid in victims.values():
            os.kill(victim_pid, signal.SIGSTOP)
        for victim, victim_pid in victims.items():
            wait_replaced(victim, application.name, victim_pid)
        seen += tokens
    assert seen == undisturbed
    wait_until(lambda: application.get("/ready")[0] == 200, "it is ready again")
    assert application.complete(PROMPT, max_tokens=3) == undisturbed[:3]
    application.wait_quiet()


def test_a_supervisor_that_freezes_takes_nobody_along(application: Application) -> None:
    """For longer than anybody lives without a heartbeat, and less than Serve takes to notice."""
    expected = application.complete(PROMPT)
    before = {name: application.pid(name) for name in application.actors()}
    supervisor_pid = actor_pid(application.supervisor(), "serve")
    until_s = time.monotonic() + 1.5 * application.config.lifetimes.supervisor_silence_s
    os.kill(supervisor_pid, signal.SIGSTOP)
    try:
        while time.monotonic() < until_s:
            assert application.complete(PROMPT) == expected
    finally:
        os.kill(supervisor_pid, signal.SIGCONT)
    assert {name: application.pid(name) for name in application.actors()} == before
    application.wait_ready()
