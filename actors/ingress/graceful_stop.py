"""Handles SIGTERM and SIGINT of `serve run`: drains requests, then shuts Serve down.

Ray's own answer to SIGTERM ends the process and with it the local cluster, and Serve's to SIGINT
ends its proxies first: either cuts every stream. Here the first signal asks every ingress replica
to stop (`Ingress.stop`), waits for that, and continues as Ctrl-C does, which shuts Serve down and
exits with 0. A second signal does not wait.

A terminal, `make` or `kill -- -GROUP` signals a whole process group. So Ray's own processes get
groups of their own: they have to live for as long as the stop takes.

Ray and Serve wait without an end, or for half a minute, for a process of theirs that hangs. So the
stop of a cluster that `serve run` has started has a limit of its own, within the 30 s after which
Kubernetes kills: then this process ends, and by that the cluster. A program that calls `serve.run`
itself may have more to do after a signal, so it has no limit.

Only a process that builds the application itself and then starts Ray can handle its signals:
`serve run serve_app:app`. With a YAML file Serve builds it in a process of the cluster.
"""

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray import serve

# Ray has no public hook behind its own handlers, and no public way to start its processes apart.
from ray._private import services as ray_services
from ray._private import worker as ray_worker
from ray.serve.schema import ApplicationStatusOverview

from actors.ingress.failed_start import is_serve_run
from actors.ingress.stopping import LAST_WORDS_S

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
CALL_S = 5.0  # to reach the replicas, on top of their own time
END_S = 15.0  # of Serve and Ray, once no request is left; 6 to 11 s on a machine that is busy
SAME_SIGNAL_S = 0.5  # `make`, signalled with its group, passes on a SIGTERM that has come already


def stop_gracefully_on_signals(
    drain_s: float, clean_up: Callable[[], None], folder: Path | None
) -> None:
    """Installs the handlers once Ray has started in this process; call it in the main thread.

    drain_s: how long a replica may wait for its requests. clean_up: removes what would outlive
    workers that are killed, which is how Ray ends them; called before, never raises. folder: goes
    with this process by `atexit`, and has to where the end does not come so far.
    """
    if threading.current_thread() is not threading.main_thread() or ray.is_initialized():
        return
    if sys.platform == "linux":  # elsewhere Ray itself needs the group, to end what is in it
        in_own_group = partial(subprocess.Popen, process_group=0)
        ray_services.ConsolePopen = in_own_group  # type: ignore[misc, assignment] # a class there

    def install() -> None:
        stop = _Stop(drain_s, clean_up, folder)
        for number in SIGNALS:
            signal.signal(number, stop.first)

    # Ray has installed its own, whose C++ part aborts the process, and other hooks take seconds.
    ray_worker._post_init_hooks.insert(0, install)


class _Stop:
    """The handlers of the first and the second signal."""

    def __init__(self, drain_s: float, clean_up: Callable[[], None], folder: Path | None) -> None:
        self._drain_s = drain_s
        self._clean_up = clean_up
        self._folder = folder
        self._first_at_s = 0.0

    def first(self, number: int, frame: FrameType | None) -> None:
        """Drains, then continues as Ctrl-C does."""
        self._first_at_s = time.monotonic()
        for each in SIGNALS:
            signal.signal(each, self.second)
        logger.warning(
            "%s: no new requests; those under way have %g s. Once more ends them at once.",
            signal.Signals(number).name,
            self._drain_s,
        )
        self._end_within(self._drain_s + LAST_WORDS_S + END_S)
        try:
            if ray.is_initialized():
                _stop_ingresses(self._drain_s + LAST_WORDS_S + CALL_S)
        except Exception:  # Serve is shut down in any case
            logger.exception("the requests under way could not be waited for")
        self._end_within(END_S)
        self._clean_up()
        raise KeyboardInterrupt

    def second(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() - self._first_at_s < SAME_SIGNAL_S:
            return
        self._end_within(END_S)
        self._clean_up()
        raise KeyboardInterrupt

    def _end_within(self, seconds: float) -> None:
        """Ends this process then, if it lives, is `serve run`, and its end is the cluster's."""
        if not is_serve_run():
            return
        node: Any = ray_worker._global_node
        if node is None or not node.is_head():  # Serve's shutdown goes on in a cluster of others
            return
        timer = threading.Timer(seconds, self._end)
        timer.daemon = True
        timer.start()

    def _end(self) -> None:
        """The kernel then kills the processes that Ray has started from here, and they theirs."""
        logger.warning("Ray and Serve have not ended in time: they are killed. No request is left.")
        self._clean_up()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(0)


def _stop_ingresses(timeout_s: float) -> None:
    """Stops every replica of every application of this Serve instance, all at once.

    Replicas that do not answer in time are left to Serve's shutdown.
    """
    threads = []
    for name, application in serve.status().applications.items():
        if _has_started(application):
            threads.append(
                threading.Thread(target=_stop_application, args=(name, timeout_s), daemon=True)
            )
        else:  # a call would wait for a replica that answers
            logger.warning("%s: it had not started", name)
    for thread in threads:
        thread.start()
    for thread in threads:  # a second signal ends this, and does not wait for them
        thread.join()


def _has_started(application: ApplicationStatusOverview) -> bool:
    """Whether a replica may have requests. Ours start for as long as the system cannot serve."""
    states = {state for one in application.deployments.values() for state in one.replica_states}
    return not states <= {"STARTING"}


def _stop_application(name: str, timeout_s: float) -> None:
    """Stops one application and prints the result; never raises, because others follow."""
    try:
        answer = serve.get_app_handle(name).broadcast("stop")
        found = answer.results(timeout_s=timeout_s, return_exceptions=True)
    except Exception:  # it has no replica that answers, or is none of ours
        logger.exception("%s could not be stopped within %g s", name, timeout_s)
        return
    num_left = sum(number for number in found if isinstance(number, int))
    left = (
        f"{num_left} requests were left and ended with an error"
        if num_left
        else "no request was left"
    )
    logger.warning("%s: %s", name, left)
    for error in (number for number in found if not isinstance(number, int)):
        logger.error("%s: a replica could not stop: %r", name, error)
