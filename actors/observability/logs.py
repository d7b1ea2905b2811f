"""Logging of an actor process: a line an event on stderr, where Ray adds the actor's name."""

import logging

FORMAT = "%(levelname)s %(asctime)s %(message)s"
ROOMS = ("actors", "engine", "kernels")


def set_up_logging() -> None:
    """Send our own modules' INFO to stderr, whatever the host process logs otherwise."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(FORMAT, "%H:%M:%S"))
    for room in ROOMS:
        logger = logging.getLogger(room)
        logger.handlers = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False
