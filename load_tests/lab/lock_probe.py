"""What a worker's threads wait for the interpreter's lock, measured inside the worker's process.

A thread sleeps for a millisecond, again and again; how much later it goes on is the time that the
system and the lock took. It also looks how many rows run. `fill` gives the engine rows of its own
whose tokens go nowhere: what its steps take without an event loop beside them. The functions are
called in an actor's process, with the actor.
"""

import math
import random
import statistics
import sys
import threading
import time
from typing import Any

import msgspec

from engine.request import Request, RequestKey, RequestSpec, SamplingParams
from engine.scheduling.contracts import StepOutput

PERIOD_S = 1e-3


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """By a thread that wants to go on."""

    late_s: float  # on average
    late_p99_s: float
    rows: float  # that ran, on average
    step_s: float  # from one step to the next, on average; infinite without any
    tokens_s: float  # sampled a second


class LockProbe:
    """One measurement."""

    def __init__(self, worker: Any) -> None:
        self._core = worker._host.engine.core
        self._began_s, self._counts = time.perf_counter(), self._core.scheduler.statistics()
        self._late_s: list[float] = []
        self._rows: list[int] = []
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def end(self) -> Seen:
        """Returns what was seen since the start."""
        self._is_ending.set()
        self._thread.join()
        late_s = sorted(self._late_s)
        took_s, now = time.perf_counter() - self._began_s, self._core.scheduler.statistics()
        num_steps = now.num_steps - self._counts.num_steps
        return Seen(
            step_s=took_s / num_steps if num_steps else math.inf,
            tokens_s=(now.num_output_tokens - self._counts.num_output_tokens) / took_s,
            late_s=statistics.fmean(late_s),
            late_p99_s=late_s[int(0.99 * (len(late_s) - 1))],
            rows=statistics.fmean(self._rows),
        )

    def _look(self) -> None:
        while not self._is_ending.is_set():
            began_s = time.perf_counter()
            time.sleep(PERIOD_S)  # gives the lock away, and needs it back
            self._late_s.append(time.perf_counter() - began_s - PERIOD_S)
            self._rows.append(self._core.scheduler.num_running)


_probes: dict[str, LockProbe] = {}


def start_probe(worker: Any, name: str = "probe") -> None:
    """Starts a probe in the process of a worker."""
    _probes[name] = LockProbe(worker)


def end_probe(_: object, name: str = "probe") -> Seen:
    """Ends it."""
    return _probes.pop(name).end()


def set_switch_interval(_: object, seconds: float) -> None:
    """Sets how long a thread may keep the lock that another one waits for."""
    sys.setswitchinterval(seconds)


def fill(worker: Any, num_rows: int, num_prompt_tokens: int, num_tokens: int) -> None:
    """Gives the engine requests, and takes its outputs away from the event loop."""
    thread, rng = worker._host.running.thread, random.Random(num_rows)
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    requests = [
        Request(
            spec=RequestSpec(params=params),
            key=RequestKey(f"{index:032x}"),
            ingress_id="nobody",
            tokens=[rng.randrange(300, 1500) for _ in range(num_prompt_tokens)],
            num_prompt_tokens=num_prompt_tokens,
            arrival_s=time.monotonic(),
        )
        for index in range(num_rows)
    ]
    _outputs[worker] = thread._on_step
    thread._on_step = _drop
    for request in requests:
        thread.post(lambda request=request: worker._host.engine.core.scheduler.add(request))


def empty(worker: Any) -> None:
    """Takes those requests away, and gives the event loop the engine's outputs again."""
    thread = worker._host.running.thread
    thread.post(lambda: worker._host.running.requests._abort_all("nobody"))
    thread.post(lambda: setattr(thread, "_on_step", _outputs.pop(worker)))


_outputs: dict[Any, Any] = {}


def _drop(output: StepOutput) -> None:
    assert not output.failures, f"failed: {output.failures}"
