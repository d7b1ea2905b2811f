"""Loads a worker's engine in a thread, so that the actor answers heartbeats meanwhile."""

import gc
import logging
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import ray

from actors.worker.stall_watch import EXIT_FAILED
from engine.clock import Clock
from engine.errors import ConfigError

if TYPE_CHECKING:
    from engine.engine import Engine

logger = logging.getLogger(__name__)


class EngineLoader:
    """Builds one engine, once."""

    def __init__(
        self,
        name: str,
        *,
        build: Callable[[], "Engine"],
        clock: Clock,
        on_loaded: Callable[["Engine"], object],
        on_failed: Callable[[Exception], object],
    ) -> None:
        """`build`, `on_loaded` and `on_failed` are called on the loader's thread."""
        self._name = name
        self._build = build
        self._clock = clock
        self._on_loaded = on_loaded
        self._on_failed = on_failed

    def start(self) -> None:
        threading.Thread(target=self._load, name="model loader", daemon=True).start()

    def _load(self) -> None:
        started_s = self._clock.now_s()
        try:
            engine = self._build()
        except Exception as error:  # noqa: BLE001 - reported to the supervisor, which says so
            self._on_failed(error)
            return
        # Objects made so far live on; frozen, a full collection skips them and saves 50 ms.
        gc.collect()
        gc.freeze()
        took_s = self._clock.now_s() - started_s
        logger.info("%s loaded in %.1f s: %s", self._name, took_s, engine.describe())
        self._on_loaded(engine)


def why_not_started(name: str, error: Exception, *, may_restart: bool) -> str:
    """Returns what the supervisor is told of a worker that cannot start.

    A configuration that cannot be used stays so. After any other error, a process that Ray
    restarted exits to be restarted again: what it tries has worked before.
    """
    if isinstance(error, ConfigError):
        logger.error("%s cannot start: %s", name, error.message)
        return error.message
    logger.error("%s cannot start", name, exc_info=error)
    is_restart = ray.get_runtime_context().was_current_actor_reconstructed
    if is_restart and may_restart:
        logging.shutdown()
        os._exit(EXIT_FAILED)
    return f"{type(error).__name__}: {error}"
