"""What a script sees of `serve run` whose application cannot be started."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from click.testing import CliRunner
from ray import serve
from ray.serve import scripts

from actors.ingress.failed_start import fail_where_start_fails

APPLICATION = serve.deployment(lambda: None, name="nothing").bind()
ERROR = RuntimeError("Deploying application default failed")


class Calls:
    """As much of Ray and Serve as `serve run` calls; counts, and raises in `run` what is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: BaseException | None) -> None:
        self.error = error
        self.num_runs = 0
        self.num_shutdowns = 0
        self.is_serve_gone = False
        monkeypatch.setattr(ray, "is_initialized", lambda: False)
        monkeypatch.setattr(ray, "init", lambda **_: None)
        monkeypatch.setattr(scripts._private_api, "serve_start", lambda **_: None)
        monkeypatch.setattr(serve, "run", self._run)
        monkeypatch.setattr(serve, "shutdown", self._shutdown)
        monkeypatch.setattr(serve, "status", self._status)

    def _run(self, *args: Any, **options: Any) -> None:
        self.num_runs += 1
        if self.error is not None:
            raise self.error

    def _shutdown(self) -> None:
        self.num_shutdowns += 1

    def _status(self) -> SimpleNamespace:
        if self.is_serve_gone or self.num_shutdowns:
            raise RuntimeError("Serve is gone")
        status = SimpleNamespace(value="DEPLOY_FAILED")
        failed = SimpleNamespace(status=status, message="Error: no such device")
        unasked = SimpleNamespace(status=status, message="")
        deployments = {"ingress": failed, "other": unasked}
        return SimpleNamespace(applications={"default": SimpleNamespace(deployments=deployments)})


def build(args: dict[str, str]) -> serve.Application:
    """An application as `serve_app.build` is called by `serve run`."""
    fail_where_start_fails()
    return APPLICATION


@pytest.mark.parametrize(
    ("error", "status", "num_shutdowns"), [(ERROR, 1, 1), (None, 0, 0), (KeyboardInterrupt(), 0, 1)]
)
def test_serve_run_ends_with_1_if_the_start_fails_and_only_then(
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException | None,
    status: int,
    num_shutdowns: int,
) -> None:
    calls = Calls(monkeypatch, error)
    result = CliRunner().invoke(scripts.run, [f"{__name__}:build"])
    assert (result.exit_code, calls.num_runs) == (status, 1), result.output
    assert calls.num_shutdowns == num_shutdowns


def test_the_reason_is_told_before_serve_forgets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    Calls(monkeypatch, ERROR)
    result = CliRunner().invoke(scripts.run, [f"{__name__}:build"])
    assert result.stderr.endswith("ingress is DEPLOY_FAILED: Error: no such device\n")


def test_a_serve_that_cannot_say_why_keeps_nothing_from_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = Calls(monkeypatch, ERROR)
    calls.is_serve_gone = True
    result = CliRunner().invoke(scripts.run, [f"{__name__}:build"])
    assert (result.exit_code, calls.num_shutdowns) == (1, 1)


def test_a_reload_that_fails_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, None)
    fail_where_start_fails()
    options = {"blocking": False, "name": "default", "route_prefix": "/"}  # as `serve run` does
    serve.run(APPLICATION, **options)
    calls.error = ERROR
    with pytest.raises(RuntimeError, match="Deploying"):
        serve.run(APPLICATION, **options)


def test_a_program_that_runs_the_application_itself_gets_the_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = Calls(monkeypatch, ERROR)
    monkeypatch.delitem(sys.modules, scripts.__name__)
    application = build({})
    with pytest.raises(RuntimeError, match="Deploying"):
        serve.run(application)
    assert calls.num_shutdowns == 0


def test_in_a_cluster_that_builds_the_application_nothing_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Calls(monkeypatch, ERROR)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    before = serve.run
    fail_where_start_fails()
    assert serve.run == before
