"""Lines of Ray that mislead here are left out of the log, and no others."""

import inspect
import logging
from types import ModuleType

import pytest
import ray.actor
import ray.serve._private.api

from actors import supervisor
from actors.ingress import listening
from actors.observability.logs import leave_out


@pytest.fixture
def logger() -> logging.Logger:
    return logging.getLogger("one of a library")


def _passes(logger: logging.Logger, message: str, *args: object) -> bool:
    return bool(logger.filter(logging.LogRecord("x", logging.INFO, "x", 1, message, args, None)))


def test_lines_that_begin_so_are_left_out(logger: logging.Logger) -> None:
    for _ in range(2):
        leave_out(logger.name, "100 % of")
    assert len(logger.filters) == 1
    assert not _passes(logger, "%d %% of them", 100)
    assert _passes(logger, "not 100 % of them")


@pytest.mark.parametrize(
    ("said_by", "logger_name", "beginning"),
    [
        (ray.actor, "ray.actor", supervisor.WARNED_OF),
        (ray.serve._private.api, "ray.serve", listening.FOUND_SERVE),
    ],
)
def test_ray_says_what_is_left_out(said_by: ModuleType, logger_name: str, beginning: str) -> None:
    """If another version says it in other words or elsewhere, it is in the log again."""
    assert beginning in inspect.getsource(said_by)
    assert said_by.logger.name == logger_name
