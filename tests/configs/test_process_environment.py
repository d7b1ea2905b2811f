"""What Serve's processes are told by their environment, unless the operator says something else."""

import inspect
import os

import pytest
from ray.serve._private import constants

from configs.process_environment import (
    GCS_AWAY,
    HTTP_CALLBACK,
    MIDDLEWARES,
    MIN_DRAINING,
    PROXY_READY,
    set_serve_environment,
)


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (HTTP_CALLBACK, MIN_DRAINING, PROXY_READY, GCS_AWAY, "RAY_ADDRESS"):
        monkeypatch.setenv(name, "")  # so that it is put back as it was
        monkeypatch.delenv(name)


def test_what_the_operator_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HTTP_CALLBACK, "their.own:callback")
    set_serve_environment()
    assert os.environ[HTTP_CALLBACK] == "their.own:callback"


def test_a_stop_leaves_time_to_be_killed_in() -> None:
    set_serve_environment()
    assert os.environ[HTTP_CALLBACK] == MIDDLEWARES
    assert float(os.environ[MIN_DRAINING]) < 5.0
    assert float(os.environ[GCS_AWAY]) < 10.0


def test_how_long_a_cluster_outlives_its_gcs_is_its_operators_to_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    set_serve_environment()
    assert GCS_AWAY not in os.environ


def test_the_first_proxy_may_take_as_long_to_start_as_serve_run_waits_for_it() -> None:
    set_serve_environment()
    assert f'"{PROXY_READY}"' in inspect.getsource(constants)
    num_tries = constants.PROXY_HEALTH_CHECK_UNHEALTHY_THRESHOLD
    assert num_tries * float(os.environ[PROXY_READY]) >= constants.HTTP_PROXY_TIMEOUT
