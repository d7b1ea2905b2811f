"""What the host does between two launches, and how steady steps are while streams are encoded.

A worker's event loop shares the interpreter with the thread that steps the engine. Here that loop
is stood in for by one in another thread: it encodes each step's tokens as one message per stream,
as a worker does, and decodes them too, which there is the ingresses' work.

    plan n+1   launch n+1   catch up   wait n   commit n        a turn, from return to return

Every turn of either run may be written to a file, to see which of its parts was late.
"""

import asyncio
import gc
import json
import math
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from actors.lifecycle.threads import share_interpreter
from engine.core import EngineCore, Executor, PendingStep
from engine.messages import LoadReport, StepMessage, TokenRecord, decode, encode
from engine.plan import StepPlan, StepResult
from engine.scheduling.contracts import StepOutput
from engine.step_times import NUM_KEPT_STEPS, StepTimesStatistics
from load_tests.lab.in_process import EngineInProcess
from load_tests.tables import Figure, at_most, median_figure

NUM_STREAMS = 8
# More than the engine remembers, so that what it reports is of steps without prompts.
NUM_TOKENS = NUM_KEPT_STEPS + 32
NUM_ENCODE_ROUNDS = 51
MAX_ABOVE_MS = 1.0  # a step, beside streams or not, beyond a median
NUM_NEIGHBOURS = 32

Tokens = Sequence[tuple[str, TokenRecord]]


@contextmanager
def collecting_as_a_worker() -> Iterator[None]:
    """Garbage is collected as in a worker that has loaded: objects made before are left out.

    One collection of all of them takes 50 ms, as much as a step of a long prompt.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def sharing_as_a_worker() -> Iterator[None]:
    """Threads share the interpreter as in a worker.

    With Python's own interval one that reads tokens waits up to 5 ms for the one that steps.
    """
    interval_s = sys.getswitchinterval()
    share_interpreter()
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)


def no_figures() -> list[Figure]:
    """Of ranks that are not there."""
    return []


def measure_host_work(
    ours: EngineInProcess,
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: int = NUM_TOKENS,
    of_ranks: Callable[[], list[Figure]] = no_figures,
    turns: Path | None = None,
) -> Iterator[Figure]:
    """Decode all prompts together: alone, then with NUM_STREAMS streams encoded beside.

    Yields each figure as soon as it is measured. of_ranks: what other ranks had to do with the
    steps so far; asked before there are streams. turns: a file for every turn, a line of JSON each.
    """
    watch = _TurnWatch(ours.engine.core)
    try:
        with sharing_as_a_worker():
            alone = _decode(ours, watch, prompts, num_tokens, None)
            yield from _host_figures(ours.engine.core.statistics())
            yield from of_ranks()
            yield from _step_figures("step", alone)
            with StreamReaders(NUM_STREAMS, ours.engine.load()) as readers:
                beside = _decode(ours, watch, prompts, num_tokens, readers)
            yield from _step_figures(f"step beside {NUM_STREAMS} streams", beside)
            if turns is not None:
                _write_turns(turns, {"alone": alone, "beside": beside})
    finally:
        watch.take_off()
    encode_us = _encode_rounds_us(alone.tokens, ours.engine.load())
    yield median_figure(f"host: encode {NUM_STREAMS} messages", encode_us, "us/step")


class StreamReaders:
    """A loop in another thread with one reader a stream; a context manager."""

    def __init__(self, num_streams: int, load: LoadReport) -> None:
        self._names = [f"stream-{i}" for i in range(num_streams)]
        self._load = load
        self._queues: dict[str, asyncio.Queue[list[TokenRecord] | None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="readers", daemon=True)
        self._num_published = 0
        self.num_read = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._end)
        self._thread.join()
        if error is None:
            lost = self._num_published - self.num_read
            assert lost == 0, f"{lost} of {self._num_published} records were not read"

    def publish(self, tokens: Tokens) -> None:
        """Hand one step's tokens to the loop; returns at once."""
        self._num_published += len(tokens)
        self._loop.call_soon_threadsafe(self._deliver, tokens)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._read_all())

    async def _read_all(self) -> None:
        readers = [self._read(name, self._queue(name)) for name in self._names]
        await asyncio.gather(*readers)

    async def _read(self, name: str, queue: "asyncio.Queue[list[TokenRecord] | None]") -> None:
        step_seq = 0
        while (tokens := await queue.get()) is not None:
            data = encode(_message(name, step_seq, self._load, tokens))
            self.num_read += len(decode(data, StepMessage).tokens)
            step_seq += 1

    def _queue(self, name: str) -> "asyncio.Queue[list[TokenRecord] | None]":
        return self._queues.setdefault(name, asyncio.Queue())

    def _deliver(self, tokens: Tokens) -> None:
        for name, records in split_by_stream(tokens).items():
            self._queue(name).put_nowait(records)

    def _end(self) -> None:
        for name in self._names:
            self._queue(name).put_nowait(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A turn of the step loop, in ms. NaN: nothing was launched, or no time is known."""

    took: float  # from the return of the turn before
    plan: float  # from there until the launch; publishing the tokens before, too
    launch: float
    catch_up: float
    wait: float
    commit: float
    device: float  # of the step that was waited for


@dataclass(frozen=True, slots=True)
class _Decoding:
    """Turns in which every row had a token, and the tokens of the last one."""

    turns: list[Turn]
    tokens: Tokens


class _TurnWatch:
    """Notes when the parts of a turn began and ended, and how long the device took."""

    def __init__(self, core: EngineCore) -> None:
        """Wraps the executor of `core`, until `take_off`."""
        self._core = core
        self._executor: Executor
        self._returned_s = time.perf_counter()
        self._launched_s = self._waited_s = (math.nan, math.nan)  # began, ended
        self._device_s = math.nan
        core.wrap_executor(self._around)

    def end_turn(self) -> Turn:
        """The turn that has just returned; the next one begins."""
        began_s, now_s = self._returned_s, time.perf_counter()
        (launch_s, launched_s), (wait_s, waited_s) = self._launched_s, self._waited_s
        turn = Turn(
            took=1e3 * (now_s - began_s),
            plan=1e3 * (launch_s - began_s),
            launch=1e3 * (launched_s - launch_s),
            catch_up=1e3 * (wait_s - launched_s),
            wait=1e3 * (waited_s - wait_s),
            commit=1e3 * (now_s - waited_s),
            device=1e3 * self._device_s,
        )
        self._returned_s = now_s
        self._launched_s = self._waited_s = (math.nan, math.nan)
        self._device_s = math.nan
        return turn

    def launch(self, plan: StepPlan) -> PendingStep:
        began_s = time.perf_counter()
        step = self._executor.launch(plan)
        self._launched_s = began_s, time.perf_counter()
        return _WatchedStep(step, self)

    def wait(self, step: PendingStep) -> StepResult:
        began_s = time.perf_counter()
        result = step.wait()
        self._waited_s = began_s, time.perf_counter()
        if result.duration_s is not None:
            self._device_s = result.duration_s
        return result

    def take_off(self) -> None:
        self._core.wrap_executor(lambda _: self._executor)

    def _around(self, executor: Executor) -> Executor:
        self._executor = executor
        return self


class _WatchedStep:
    def __init__(self, step: PendingStep, watch: _TurnWatch) -> None:
        self._step = step
        self._watch = watch

    @property
    def is_done(self) -> bool:
        return self._step.is_done

    def wait(self) -> StepResult:
        return self._watch.wait(self._step)


def split_by_stream(tokens: Tokens) -> dict[str, list[TokenRecord]]:
    """One step's records by the stream they go to."""
    records: dict[str, list[TokenRecord]] = {}
    for name, record in tokens:
        records.setdefault(name, []).append(record)
    return records


def _decode(
    ours: EngineInProcess,
    watch: _TurnWatch,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    readers: StreamReaders | None,
) -> _Decoding:
    """Steps are timed from the return of one to the return of the next."""
    for i, prompt in enumerate(prompts):
        ours.add(prompt, num_tokens, ingress=f"stream-{i % NUM_STREAMS}")
    turns: list[Turn] = []
    full: list[Tokens] = []

    def note(output: StepOutput) -> None:
        turn = watch.end_turn()
        if len(output.tokens) == output.num_scheduled_tokens == len(prompts):
            if full:
                turns.append(turn)
            full[:] = [output.tokens]
        if readers is not None:
            readers.publish(output.tokens)

    ours.run_until_idle(note)
    assert turns, f"{len(prompts)} prompts never decoded together"
    return _Decoding(turns, full[0])


def _write_turns(path: Path, decodings: Mapping[str, _Decoding]) -> None:
    lines = [
        json.dumps({"run": run} | asdict(turn))
        for run, decoding in decodings.items()
        for turn in decoding.turns
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _message(name: str, step_seq: int, load: LoadReport, tokens: list[TokenRecord]) -> StepMessage:
    return StepMessage(worker=name, incarnation="0", step_seq=step_seq, load=load, tokens=tokens)


def _encode_rounds_us(tokens: Tokens, load: LoadReport) -> list[float]:
    """Splitting and encoding one step's tokens, with nothing else going on."""
    rounds_us = []
    for i in range(NUM_ENCODE_ROUNDS):
        started_s = time.perf_counter()
        for name, records in split_by_stream(tokens).items():
            encode(_message(name, i, load, records))
        rounds_us.append(1e6 * (time.perf_counter() - started_s))
    return rounds_us


def _host_figures(times: StepTimesStatistics) -> list[Figure]:
    parts = {"plan": times.plan, "launch": times.launch, "commit": times.commit}
    means_us = {name: 1e6 * part.mean_s for name, part in parts.items()}
    return [
        *(
            Figure(name=f"host: {name}", value=mean_us, unit="us/step")
            for name, mean_us in means_us.items()
        ),
        Figure(name="host: sum of these", value=sum(means_us.values()), unit="us/step"),
        Figure(name="host: waits for the device", value=1e6 * times.wait.mean_s, unit="us/step"),
    ]


def _step_figures(name: str, decoding: _Decoding) -> list[Figure]:
    """Above the median of all, though contexts grow; above its neighbours: of like contexts.

    The last one tells steps that the device made late from those that the host did.
    """
    durations_ms = [turn.took for turn in decoding.turns]
    device_ms = [turn.device for turn in decoding.turns]
    median_ms, p99_ms = statistics.median(durations_ms), _p99(durations_ms)
    return [
        Figure(name=f"{name}, p50", value=median_ms, unit="ms"),
        Figure(name=f"{name}, p99", value=p99_ms, unit="ms"),
        at_most(f"{name}, p99 above the median", p99_ms - median_ms, "ms", MAX_ABOVE_MS),
        at_most(
            f"{name}, p99 above its neighbours",
            _p99(above_neighbours(durations_ms)),
            "ms",
            MAX_ABOVE_MS,
        ),
        Figure(
            name=f"{name}, p99 of the device above its neighbours",
            value=_p99(above_neighbours(device_ms)),
            unit="ms",
        ),
    ]


def above_neighbours(durations: Sequence[float]) -> list[float]:
    """What each step took beyond the median of the 33 around it, whose contexts are like its own.

    Contexts grow by a token a step, so later steps take longer with nothing unsteady about them.
    """
    half = NUM_NEIGHBOURS // 2
    return [
        duration - statistics.median(durations[max(0, i - half) : i + half + 1])
        for i, duration in enumerate(durations)
    ]


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]
