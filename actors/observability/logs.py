"""Logging of an actor process: a line an event on stderr, where Ray adds the actor's name."""

import logging
from dataclasses import dataclass
from typing import Literal

LogLevel = Literal["debug", "info"]
FORMAT = "%(levelname)s %(asctime)s %(message)s"
ROOMS = ("actors", "engine", "kernels")


def set_up_logging(level: LogLevel) -> None:
    """Send our own modules' lines of that level to stderr, whatever the host process logs."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(FORMAT, "%H:%M:%S"))
    for room in ROOMS:
        logger = logging.getLogger(room)
        logger.handlers = [handler]
        logger.setLevel(level.upper())
        logger.propagate = False


def leave_out(logger: str, beginning: str) -> None:
    """Keep those lines of a library's logger that begin so out of the log of this process.

    For what is untrue here, or asks for what is done already: the caller says why.
    """
    logging.getLogger(logger).addFilter(_LeftOut(beginning))


@dataclass(frozen=True)
class _LeftOut:
    """A filter of `logging`. Equal ones are added once."""

    beginning: str

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self.beginning)
