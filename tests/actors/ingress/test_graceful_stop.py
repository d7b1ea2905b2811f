"""Signals of `serve run`: the order of things, and that nothing keeps Serve from its shutdown."""

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import ray
from ray._private import services as ray_services
from ray._private import worker as ray_worker

from actors.ingress import graceful_stop
from actors.ingress.failed_start import COMMAND_LINE
from actors.ingress.graceful_stop import END_S, SIGNALS, stop_gracefully_on_signals
from actors.ingress.stopping import LAST_WORDS_S
from configs.schema import EdgeConfig


class Applications:
    """As much of `serve` as is asked: names, each with what its replicas answer or raise."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[str] = []
        self.replica_states: dict[str, int] = {"RUNNING": 1}  # of all

    def status(self) -> SimpleNamespace:
        ingress = SimpleNamespace(replica_states=self.replica_states)
        application = SimpleNamespace(deployments={"ingress": ingress})
        return SimpleNamespace(applications=dict.fromkeys(self.answers, application))

    def get_app_handle(self, name: str) -> "Applications":
        answer = self.answers[name]
        if isinstance(answer, BaseException):
            raise answer
        self.asked.append(name)
        return Applications(**{"": answer})

    def broadcast(self, method: str) -> SimpleNamespace:
        assert method == "stop"
        return SimpleNamespace(results=lambda **_: self.answers[""])


CLEANED_UP: list[int] = []  # calls of `clean_up`
FOLDER = Path("/folder/of/haproxy")


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], None]]]:
    """Those that Ray runs once it has started; handlers are put back as they were."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    made: list[Callable[[], None]] = []
    CLEANED_UP.clear()
    monkeypatch.setattr(ray_worker, "_post_init_hooks", made)
    monkeypatch.setattr(ray_services, "ConsolePopen", ray_services.ConsolePopen)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    yield made
    for number, handler in before.items():
        signal.signal(number, handler)


def start(monkeypatch: pytest.MonkeyPatch, hooks: list[Callable[[], None]], serve: Any) -> None:
    """As `serve run` does: the application is built, then Ray starts."""
    stop_gracefully_on_signals(drain_s=1.0, clean_up=lambda: CLEANED_UP.append(1), folder=FOLDER)
    (hook,) = hooks
    monkeypatch.setattr(graceful_stop, "serve", serve)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    hook()


@pytest.mark.parametrize("number", SIGNALS)
def test_every_application_is_stopped_and_then_all_is_shut_down_as_by_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, hooks: list[Callable[[], None]], number: int
) -> None:
    serve = Applications(one=[0, 2], two=RuntimeError("no replica"), three=[ValueError("what?")])
    start(monkeypatch, hooks, serve)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)
    assert sorted(serve.asked) == ["one", "three"]
    assert CLEANED_UP


@pytest.mark.parametrize(
    ("states", "is_asked"),
    [
        ({}, False),
        ({"STARTING": 2}, False),
        ({"STARTING": 1, "RUNNING": 1}, True),
        ({"STOPPING": 1}, True),
        ({"RECOVERING": 1}, True),
    ],
)
def test_an_application_that_has_not_started_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
    hooks: list[Callable[[], None]],
    states: dict[str, int],
    is_asked: bool,
) -> None:
    serve = Applications(default=[0])
    serve.replica_states = states
    start(monkeypatch, hooks, serve)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
    assert serve.asked == (["default"] if is_asked else [])
    assert CLEANED_UP == [1]


def test_nothing_that_goes_wrong_keeps_serve_from_being_shut_down(
    monkeypatch: pytest.MonkeyPatch, hooks: list[Callable[[], None]]
) -> None:
    start(monkeypatch, hooks, SimpleNamespace())  # a Serve that does not even tell its status
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_second_signal_does_not_wait(
    monkeypatch: pytest.MonkeyPatch, hooks: list[Callable[[], None]]
) -> None:
    monkeypatch.setattr(graceful_stop, "SAME_SIGNAL_S", 0.0)

    def status() -> SimpleNamespace:
        os.kill(os.getpid(), signal.SIGTERM)  # while the first one is being answered
        pytest.fail("it was waited for")

    start(monkeypatch, hooks, SimpleNamespace(status=status))
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
    assert CLEANED_UP


def test_a_signal_that_make_passes_on_at_once_is_the_first_one(
    monkeypatch: pytest.MonkeyPatch, hooks: list[Callable[[], None]]
) -> None:
    class SignalledTwice(Applications):
        def status(self) -> SimpleNamespace:
            os.kill(os.getpid(), signal.SIGTERM)
            return super().status()

    monkeypatch.setattr(graceful_stop, "SAME_SIGNAL_S", 60.0)
    serve = SignalledTwice(one=[0])
    start(monkeypatch, hooks, serve)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
    assert serve.asked == ["one"]


def test_signals_are_handled_before_anything_else_is_started(
    monkeypatch: pytest.MonkeyPatch, hooks: list[Callable[[], None]]
) -> None:
    """Serve is started by such a hook, for seconds, and a signal meanwhile left files."""
    before = signal.getsignal(signal.SIGTERM)

    def start_serve() -> None:
        assert signal.getsignal(signal.SIGTERM) != before

    hooks.append(start_serve)
    stop_gracefully_on_signals(drain_s=1.0, clean_up=lambda: None, folder=None)
    for hook in hooks:
        hook()


@pytest.mark.skipif(sys.platform != "linux", reason="Ray needs its own group elsewhere")
def test_processes_of_ray_have_groups_of_their_own(
    monkeypatch: pytest.MonkeyPatch, hooks: list[Callable[[], None]]
) -> None:
    start(monkeypatch, hooks, Applications())
    with ray_services.ConsolePopen(["sleep", "60"]) as process:
        group = os.getpgid(process.pid)
        process.kill()
    assert group == process.pid != os.getpgrp()


def test_where_ray_runs_already_nobody_answers_signals(
    monkeypatch: pytest.MonkeyPatch, hooks: list[Callable[[], None]]
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    stop_gracefully_on_signals(drain_s=1.0, clean_up=lambda: None, folder=None)
    assert hooks == []


class Ends:
    """Stands in for the clock, and for the end of this process: an `Ended` raised."""

    class Ended(BaseException):
        pass

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, is_head: bool, is_serve_run: bool = True
    ) -> None:
        monkeypatch.delitem(sys.modules, COMMAND_LINE, raising=False)
        if is_serve_run:
            monkeypatch.setitem(sys.modules, COMMAND_LINE, ModuleType(COMMAND_LINE))
        self.due: list[tuple[float, Callable[[], None]]] = []  # seconds, and what is called then
        self.removed: list[Path] = []
        monkeypatch.setattr(ray_worker, "_global_node", SimpleNamespace(is_head=lambda: is_head))
        monkeypatch.setattr(graceful_stop.threading, "Timer", self._timer)
        monkeypatch.setattr(graceful_stop.os, "_exit", self._exit)
        monkeypatch.setattr(shutil, "rmtree", lambda folder, **_: self.removed.append(folder))

    def _timer(self, seconds: float, call: Callable[[], None]) -> SimpleNamespace:
        return SimpleNamespace(start=lambda: self.due.append((seconds, call)))

    def _exit(self, status: int) -> None:
        assert status == 0
        raise self.Ended


def test_a_stop_that_hangs_ends_in_time_and_leaves_no_file(
    monkeypatch: pytest.MonkeyPatch, hooks: list[Callable[[], None]]
) -> None:
    """Before Kubernetes kills, and whether Serve hangs when it is asked or when it shuts down."""
    ends = Ends(monkeypatch, is_head=True)

    def status() -> SimpleNamespace:
        ((seconds, _),) = ends.due  # begun before Serve is asked anything
        assert seconds == 1.0 + LAST_WORDS_S + END_S
        return SimpleNamespace(applications={})

    start(monkeypatch, hooks, SimpleNamespace(status=status))
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
    seconds, end = ends.due[1]
    assert seconds == END_S
    assert EdgeConfig().drain_s + LAST_WORDS_S + END_S < 30.0
    CLEANED_UP.clear()
    with pytest.raises(Ends.Ended):
        end()
    assert CLEANED_UP
    assert ends.removed == [FOLDER]


def test_a_cluster_of_others_is_left_to_serves_own_shutdown(
    monkeypatch: pytest.MonkeyPatch, hooks: list[Callable[[], None]]
) -> None:
    ends = Ends(monkeypatch, is_head=False)
    start(monkeypatch, hooks, Applications(one=[0]))
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
    assert ends.due == []


def test_a_program_that_runs_the_application_itself_may_go_on_after_a_signal(
    monkeypatch: pytest.MonkeyPatch, hooks: list[Callable[[], None]]
) -> None:
    """It may have results to write; it was killed then, with status 0."""
    ends = Ends(monkeypatch, is_head=True, is_serve_run=False)
    start(monkeypatch, hooks, Applications(one=[0]))
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert ends.due == []
