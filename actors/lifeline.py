"""Who lives for whom: a detached actor that hears no supervisor for long enough ends itself.

Detached actors survive their creator, and Serve ends a deployment's actors without a hook; this is
what keeps any of ours from outliving the application.
"""

import logging
import threading
import time
from collections.abc import Callable

import ray

from actors.placement_groups import leave_group

logger = logging.getLogger(__name__)

CHECK_EVERY_S = 0.5


def exit_for_good() -> None:
    """End this actor without a restart, whatever its max_restarts says. Any thread may call it.

    The devices that were held for it are free again.
    """
    try:
        leave_group()
    finally:
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


class Lifeline:
    """A daemon thread that ends the actor after `silence_s` without a `beat`.

    A thread, not a task: a stuck event loop must not keep the process alive. It counts its looks: a
    machine that stood still as a whole (a snapshot, a frozen container) was silent to nobody.
    `last_act` is called before the end, for what the actor has to clear away besides itself.
    """

    def __init__(self, silence_s: float, last_act: Callable[[], None] | None = None) -> None:
        self._last_act = last_act
        self._silence_s = silence_s
        # Each is written by one thread alone, so that no beat is lost.
        self._num_looks = 0
        self._look_of_last_beat = 0

    def start(self) -> "Lifeline":
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()
        return self

    def beat(self) -> None:
        """A supervisor or an ingress was heard."""
        self._look_of_last_beat = self._num_looks

    def look(self) -> bool:
        """One look of the thread; True = the silence has lasted for `silence_s`."""
        self._num_looks += 1
        num_silent = self._num_looks - self._look_of_last_beat
        return num_silent * CHECK_EVERY_S > self._silence_s

    def _watch(self) -> None:
        while not self.look():
            time.sleep(CHECK_EVERY_S)
        logger.warning("nobody was heard for %.0f s: exiting", self._silence_s)
        try:
            if self._last_act is not None:
                self._last_act()
        finally:
            exit_for_good()
