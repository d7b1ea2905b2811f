"""Where the time of handoffs goes: how long each part of them takes the host, in both processes.

Wraps methods of an end that is there already, so what is measured is what workers run. Stages lie
inside each other: the rest of an outer one is waiting for a thread, for the device or for the peer.
"""

import functools
import inspect
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from actors.kv_transfer import kv_pieces
from actors.kv_transfer.channels import nccl_pair
from load_tests.tables import render_rows
from load_tests.testbed.channel_ends import End, SendingProcess

# Of `KvPieces`: whole, from the event loop.
_PIECE_CALLS = ("read", "to_host", "write", "pull")
# Of the same, in a thread.
_THREAD_CALLS = ("queue_load", "queue_take", "pull_digests")
# Of the store, in a thread: queued on the device, not waited for.
_STORE_CALLS = ("index", "queue_digests", "queue_write")


# Milliseconds of a call and, of them, those its thread ran; the second is 0 for a coroutine.
Span = tuple[float, float]


class Stages:
    """Milliseconds of every call of what is watched, by name: in all, and on a core."""

    def __init__(self) -> None:
        self.spans_ms: dict[str, list[Span]] = {}

    def watch_end(self, end: End) -> None:
        """All parts of a handoff that this process takes, by any channel."""
        for name in _PIECE_CALLS:
            self.watch(end.pieces, name, f"pieces: {name}")
        for name in _THREAD_CALLS:
            self.watch(end.pieces, name, f"thread: {name}")
        for name in _STORE_CALLS:
            self.watch(end.store, name, f"queue: {name}")
        self.watch(kv_pieces, "copy_blocks", "queue: copies")
        for name in ("send", "receive"):
            self.watch(nccl_pair.NcclGroup, name, f"nccl: post a {name}")

    def watch(self, owner: object | ModuleType, name: str, label: str) -> None:
        """Replace `owner.name`, a function or a coroutine function, by one that is timed."""
        setattr(owner, name, self._timed(getattr(owner, name), label))

    async def take(self) -> dict[str, list[Span]]:
        """What was timed since the last time."""
        taken, self.spans_ms = self.spans_ms, {}
        return taken

    def _timed(self, call: Callable[..., Any], label: str) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(call):

            @functools.wraps(call)
            async def timed_later(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
                started_s = time.perf_counter()
                try:
                    return await call(*args, **kwargs)
                finally:
                    self._add(label, started_s, 0.0)

            return timed_later

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            started_s, running_s = time.perf_counter(), time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self._add(label, started_s, time.thread_time() - running_s)

        return timed

    def _add(self, label: str, started_s: float, ran_s: float) -> None:
        span = (1e3 * (time.perf_counter() - started_s), 1e3 * ran_s)
        self.spans_ms.setdefault(label, []).append(span)  # of threads, too: one at a time


async def stages_of(
    process: SendingProcess, mine: Stages, blocks: Sequence[list[int]], rounds: int
) -> str:
    """The table of `rounds` handoffs over the open channel; the receiver answers "stages"."""
    await mine.take()
    await process.call("stages")
    for _ in range(rounds):
        await process.hand_over(*blocks)
    spans_ms = {"receiver": await process.call("stages"), "sender": await mine.take()}
    return render_stages(process.channel.kind, spans_ms, rounds)


def render_stages(
    channel: str, spans_ms: Mapping[str, Mapping[str, Sequence[Span]]], num_handoffs: int
) -> str:
    """A table; spans_ms: process -> stage -> one span for each call."""
    header = (
        f"{channel}: process",
        "stage",
        "calls a handoff",
        "ms a call",
        "on a core",
        "ms a handoff",
    )
    rows = [
        (
            process,
            stage,
            f"{len(spans) / num_handoffs:.1f}",
            f"{statistics.median(span[0] for span in spans):.3f}",
            f"{statistics.median(span[1] for span in spans):.3f}",
            f"{sum(span[0] for span in spans) / num_handoffs:.3f}",
        )
        for process, stages in spans_ms.items()
        for stage, spans in stages.items()
    ]
    return render_rows([header, *rows])
