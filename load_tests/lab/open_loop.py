"""Serves a mixed load with the engine in this process: requests come when due, served or not.

This thread adds what is due between two steps, as a worker's engine thread does. Tokens go to a
reader in another thread as one encoded message a step, as a worker's do, and count when it has
decoded them.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import Self

from engine.core import EngineCore
from engine.messages import LoadReport, StepMessage, TokenRecord, decode, encode
from engine.request import RequestKey
from load_tests.lab.host_work import collecting_as_a_worker, sharing_as_a_worker
from load_tests.lab.in_process import EngineInProcess
from load_tests.mixed_load import MixedLoad, Served, Stamps

POLL_S = 2e-4  # requests are here, and the next step is not due yet


class TokenReader:
    """Decodes each step's tokens in a thread of its own; a context manager."""

    def __init__(self, load: LoadReport, on_token: Callable[[TokenRecord, float], None]) -> None:
        """`on_token(record, now_s)` is called in that thread; `load` travels with each message."""
        self._load = load
        self._on_token = on_token
        self._queue: SimpleQueue[list[TokenRecord] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="reader", daemon=True)
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._queue.put(None)
        self._thread.join()
        if error is None and self._error is not None:
            raise self._error

    def publish(self, tokens: Sequence[tuple[str, TokenRecord]]) -> None:
        """Hand over one step's tokens; returns at once."""
        if tokens:
            self._queue.put([record for _, record in tokens])

    def _run(self) -> None:
        step_seq = 0
        try:
            while (tokens := self._queue.get()) is not None:
                self._read(step_seq, tokens)
                step_seq += 1
        except BaseException as error:  # noqa: BLE001 - raised to whoever leaves the context
            self._error = error

    def _read(self, step_seq: int, tokens: list[TokenRecord]) -> None:
        message = StepMessage(
            worker="", incarnation="", step_seq=step_seq, load=self._load, tokens=tokens
        )
        data = encode(message)
        records = decode(data, StepMessage).tokens
        now_s = time.perf_counter()
        for record in records:
            self._on_token(record, now_s)


def serve_load(ours: EngineInProcess, load: MixedLoad) -> list[Served]:
    """Run `load` until every request has its last token.

    Threads share the interpreter, and garbage is collected, as in a worker.
    """
    arrivals = load.arrivals()
    assert arrivals, f"nobody arrives in {load.duration_s} s at {load.rate}/s"
    due = deque(zip(arrivals, load.prompts(arrivals, ours.engine.spec.vocab_size), strict=True))
    stamps = Stamps(arrivals)
    indices: dict[RequestKey, int] = {}  # the reader finds a key here: it was added before its step
    core = ours.engine.core
    start_s = math.nan

    def stamp(record: TokenRecord, now_s: float) -> None:
        stamps.add(indices[record.key], now_s - start_s)

    with (
        sharing_as_a_worker(),
        collecting_as_a_worker(),
        TokenReader(ours.engine.load(), stamp) as reader,
    ):
        start_s = time.perf_counter()
        while due or core.has_work:
            while due and due[0][0].at_s <= time.perf_counter() - start_s:
                _, prompt = due.popleft()
                indices[ours.add(prompt, load.num_output_tokens)] = len(indices)
            next_s = start_s + due[0][0].at_s if due else math.inf
            if not core.has_work or core.defer_s() > 0.0:
                _wait(next_s, core)
                continue
            output = ours.step()
            reader.publish(output.tokens)
            if not output.has_progressed:
                _wait(next_s, core)
    return stamps.served(load.num_output_tokens)


def _wait(until_s: float, core: EngineCore) -> None:
    """Until the next arrival; less where a step may be due sooner, which only asking tells."""
    pause_s = until_s - time.perf_counter()
    if core.has_work:
        pause_s = min(pause_s, POLL_S)
    time.sleep(max(0.0, pause_s))
