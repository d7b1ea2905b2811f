"""Logging of an actor process: a line an event on stderr, where Ray adds the actor's name."""

import logging
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
