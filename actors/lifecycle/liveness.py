"""Which actors are alive: an actor without a supervisor ends itself, a silent one is reported.

Detached actors survive their creator, and Serve ends a deployment's actors without a hook: a
`Lifeline` that hears no supervisor for long enough ends its actor, so that none outlives the
application. It waits for one that Ray takes to be alive: of a machine that is gone Ray knows after
half a minute only.

`LivenessTracker` finds actors that exist and do not answer: a stopped process, or an event loop
that hangs. Such an actor cannot end itself, and Ray regards it as alive. Time is counted in calls,
not read from a clock, because a supervisor that was stopped itself must not blame the others.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection
from functools import partial

import ray

from actors.lifecycle.deployment import DeploymentSpec

logger = logging.getLogger(__name__)

CHECK_EVERY_S = 0.5
MAX_UNANSWERED = 4  # calls in a row
# Of the actors of Serve, which has no public name for it. Not imported from it: every actor has a
# lifeline, and half of the time in which its process starts went into importing Serve.
SERVE_NAMESPACE = "serve"


def exit_for_good() -> None:
    """End this actor without a restart, whatever its max_restarts says. Any thread may call it.

    The supervisor or, without one, the rendezvous gives its place back. It must not do so itself:
    Ray kills the processes in a group that is removed, and an actor killed before Ray knows that it
    is to end for good is started anew, in a group that is gone, where it waits for ever.
    """
    ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


class Lifeline:
    """A daemon thread that ends the actor after `silence_s` without a `beat`.

    A thread, not a task: a stuck event loop must not keep the process alive. It counts its looks: a
    machine that stood still as a whole (a snapshot, a frozen container) has not been silent.
    """

    def __init__(
        self,
        silence_s: float,
        is_expected: Callable[[], bool] = lambda: False,
        *,
        last_act: Callable[[], bool] = lambda: True,
    ) -> None:
        """is_expected: whether Ray takes the supervisor to be alive; asked after half the silence.

        last_act: clears away what the actor has besides itself; returns whether all is done. It is
        called at every look, until then or until somebody is heard.
        """
        self._is_expected = is_expected
        self._last_act = last_act
        self._silence_s = silence_s
        self._num_looks = 0
        self._look_of_last_beat = 0

    @classmethod
    def of(cls, spec: DeploymentSpec, last_act: Callable[[], bool] = lambda: True) -> "Lifeline":
        """Returns the started lifeline of an actor of a deployment."""
        silence_s = spec.config.lifetimes.supervisor_silence_s
        return cls(silence_s, partial(has_supervisor, spec), last_act=last_act).start()

    def start(self) -> "Lifeline":
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()
        return self

    def beat(self) -> None:
        """Heartbeat of a supervisor or an ingress."""
        self._look_of_last_beat = self._num_looks

    def look(self) -> bool:
        """Checks once; returns True if nobody was heard or expected for `silence_s`."""
        self._num_looks += 1
        silent_s = (self._num_looks - self._look_of_last_beat) * CHECK_EVERY_S
        if silent_s > self._silence_s / 2 and self._expects_somebody():
            self.beat()
            return False
        return silent_s > self._silence_s

    def _expects_somebody(self) -> bool:
        """False, too, where that cannot be asked: the thread must live on to end the actor."""
        try:
            return self._is_expected()
        except Exception:
            logger.exception("whether a supervisor is alive cannot be asked")
            return False

    def _watch(self) -> None:
        try:
            while not (self.look() and self._last_act()):
                time.sleep(CHECK_EVERY_S)
        finally:
            logger.warning("nobody was heard for %.0f s: exiting", self._silence_s)
            exit_for_good()


def has_supervisor(spec: DeploymentSpec) -> bool:
    """Whether Ray takes the deployment's supervisor to be alive, or to be starting.

    Waits for Ray's control store. Raises RayError if that cannot be asked.
    """
    try:
        ray.get_actor(spec.supervisor, SERVE_NAMESPACE)
    except ValueError:
        return False
    return True


class LivenessTracker:
    """Counts calls without an answer in time, by actor; the caller chooses the time limit.

    An actor that has never answered is not counted, as it may wait for a device, or load; unless
    it is expected to answer.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def answered(self, name: str) -> None:
        """Notes an answer: from now on this actor is expected to answer."""
        self._counts[name] = 0

    def expect(self, name: str) -> None:
        """Expects answers of an actor though it may never have given one."""
        self._counts.setdefault(name, 0)

    def forget(self, name: str) -> None:
        """Stops expecting answers of an actor that died or starts, until it answers again."""
        self._counts.pop(name, None)

    def forget_others(self, names: Collection[str]) -> None:
        """Stops expecting answers of all actors but these: who is created anew starts first."""
        self._counts = {name: count for name, count in self._counts.items() if name in names}

    def timed_out(self, name: str) -> bool:
        """Counts an unanswered call; returns True, once, when there were too many."""
        if name not in self._counts:
            return False
        self._counts[name] += 1
        if self._counts[name] < MAX_UNANSWERED:
            return False
        del self._counts[name]
        return True
