"""Keeps the logging of the tests' process, which an actor sets up as if it were its own."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from actors.observability.logs import ROOMS


@contextmanager
def kept_logging() -> Iterator[None]:
    loggers = [logging.getLogger(room) for room in ROOMS]
    before = [(lg.handlers, lg.level, lg.propagate) for lg in loggers]
    yield
    for lg, (handlers, level, propagate) in zip(loggers, before, strict=True):
        lg.handlers, lg.level, lg.propagate = handlers, level, propagate
