"""A few short prompts at once, prefill only: what a client waits, and what the device computes.

    wall      from adding the prompts until every one has its first token, on the host
    device    the same step between two events of the device, which the host is kept ahead of

The second is what a bare chain's replayed graph is compared with; it has sampling and the copies
of the step's inputs and tokens in it besides.
"""

import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from load_tests.lab.comparison import read_chain
from load_tests.lab.in_process import EngineInProcess
from load_tests.prompts import RandomPrompts
from load_tests.tables import render_rows

NUM_ROUNDS = 9
NUM_WARM_UP_ROUNDS = 2
# The device is kept busy so long before a timed step that the host has queued all of it by then.
_HEAD_START_CYCLES = 40_000_000

_CHAIN_HISTORY = re.compile(r"^re-prefill: (\d+) new tokens on (\d+) cached, (\d+) rows\n"
                            r"\s*graph ([\d.]+) ms", re.MULTILINE)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """`num_rows` prompts of `num_tokens` new tokens behind `num_cached` ones each."""

    num_rows: int
    num_tokens: int
    num_cached: int = 0

    @property
    def key(self) -> str:
        """As others name it in their results."""
        return f"short_prefill_{self.num_rows}x{self.num_tokens}_ms"

    @property
    def label(self) -> str:
        behind = f" on {self.num_cached:,} cached" if self.num_cached else ""
        return f"{self.num_rows}x{self.num_tokens}{behind}"


WALL_BATCHES = tuple(Batch(num_rows=n, num_tokens=t) for n, t in ((1, 64), (8, 64), (1, 256)))
DEVICE_BATCHES = (
    *WALL_BATCHES,
    Batch(num_rows=8, num_tokens=16),
    Batch(num_rows=4, num_tokens=32, num_cached=2000),
)
# Ours / the peer's wall; ours on the device / the chain's graph.
WALL_TARGETS = dict(zip(WALL_BATCHES, (0.75, 0.9, 0.75), strict=True))
DEVICE_TARGET = 0.97


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFigure:
    """A batch's median and range in ms beside another's figure; a ratio is ours / theirs."""

    what: str  # wall, device
    batch: Batch
    rounds_ms: Sequence[float]
    theirs_ms: float | None
    target: float | None  # of the ratio, at most

    @property
    def value_ms(self) -> float:
        return statistics.median(self.rounds_ms)

    @property
    def ratio(self) -> float | None:
        return None if self.theirs_ms is None else self.value_ms / self.theirs_ms

    def to_builtins(self) -> dict[str, object]:
        """Everything, for a program to read."""
        return {
            "what": self.what,
            "batch": self.batch.label,
            "ms": self.value_ms,
            "range_ms": [min(self.rounds_ms), max(self.rounds_ms)],
            "theirs_ms": self.theirs_ms,
            "ratio": self.ratio,
            "target": self.target,
        }


class OneBatch:
    """Times batches on an idle engine. History needs its prefix cache."""

    def __init__(self, ours: EngineInProcess, *, seed: int = 0) -> None:
        self._ours = ours
        self._prompts = RandomPrompts(ours.engine.spec.vocab_size, seed=seed)

    def wall_rounds_ms(self, batch: Batch) -> list[float]:
        """From adding the prompts until each has its first token."""
        return self._rounds(batch, self._wall_ms)

    def device_rounds_ms(self, batch: Batch) -> list[float]:
        """The step alone, by events of the device. Needs a GPU and overlapped steps."""
        return self._rounds(batch, self._device_ms)

    def _rounds(
        self, batch: Batch, measure: Callable[[Sequence[Sequence[int]]], float]
    ) -> list[float]:
        """Prompts are new in every round, except for what is cached."""
        histories = self._prompts.draw(batch.num_rows, batch.num_cached)
        if batch.num_cached:
            self._ours.generate(histories, 1)
        rounds = []
        for _ in range(NUM_WARM_UP_ROUNDS + NUM_ROUNDS):
            rests = self._prompts.draw(batch.num_rows, batch.num_tokens)
            num_cached = self._num_cached_tokens
            rounds.append(measure([a + b for a, b in zip(histories, rests, strict=True)]))
            num_cached = self._num_cached_tokens - num_cached
            assert num_cached == batch.num_rows * batch.num_cached, f"{num_cached} cached tokens"
        return rounds[NUM_WARM_UP_ROUNDS:]

    def _wall_ms(self, prompts: Sequence[Sequence[int]]) -> float:
        started_s = time.perf_counter()
        self._ours.generate(prompts, 1)
        return 1e3 * (time.perf_counter() - started_s)

    def _device_ms(self, prompts: Sequence[Sequence[int]]) -> float:
        for prompt in prompts:
            self._ours.add(prompt, 1)
        cuda: Any = torch.cuda  # events have no types, and what keeps a device busy no public name
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        cuda._sleep(_HEAD_START_CYCLES)
        start.record()
        launched = self._ours.step()
        end.record()
        assert not start.query(), "the host was not ahead of the device"
        assert launched.has_progressed, "nothing was launched"
        assert not launched.tokens, "the step was waited for: steps do not overlap"
        committed = self._ours.step()
        assert len(committed.tokens) == len(prompts), "the prompts did not share one step"
        end.synchronize()
        return float(start.elapsed_time(end))

    @property
    def _num_cached_tokens(self) -> int:
        return self._ours.engine.core.scheduler.statistics().num_cached_tokens


def measure_batches(
    ours: EngineInProcess, peer: Mapping[str, float], chain: Mapping[str, float]
) -> list[BatchFigure]:
    """Both columns; on a CPU, the wall alone. `peer`, `chain`: ms by key or label, maybe none."""
    bench = OneBatch(ours)
    figures = [
        BatchFigure(
            what="wall",
            batch=batch,
            rounds_ms=bench.wall_rounds_ms(batch),
            theirs_ms=peer.get(batch.key),
            target=WALL_TARGETS[batch],
        )
        for batch in WALL_BATCHES
    ]
    if ours.engine.kv_store.tensor.is_cuda:
        figures += [
            BatchFigure(
                what="device",
                batch=batch,
                rounds_ms=bench.device_rounds_ms(batch),
                theirs_ms=chain.get(batch.label),
                target=DEVICE_TARGET,
            )
            for batch in DEVICE_BATCHES
        ]
    return figures


def read_chain_batches(path: Path) -> dict[str, float]:
    """The chain's graphs in ms, by label. Raises ValueError if the file has no figures."""
    numbers = read_chain(path)
    by_label = {b.label: numbers[b.key] for b in DEVICE_BATCHES if b.key in numbers}
    for num_tokens, num_cached, num_rows, ms in _CHAIN_HISTORY.findall(path.read_text("utf-8")):
        batch = Batch(
            num_rows=int(num_rows), num_tokens=int(num_tokens), num_cached=int(num_cached)
        )
        by_label[batch.label] = float(ms)
    return by_label


def render_batches(figures: Sequence[BatchFigure]) -> str:
    """A table in Markdown; wall is held against the peer's, device against the chain's."""
    header = ("one batch", "what", "ours", "range", "theirs", "ratio", "target", "met")
    return render_rows([header, *map(_cells, figures)])


def _cells(one: BatchFigure) -> tuple[str, ...]:
    is_met = None if one.ratio is None or one.target is None else one.ratio <= one.target
    return (
        one.batch.label,
        one.what,
        f"{one.value_ms:.2f} ms",
        f"{min(one.rounds_ms):.2f} - {max(one.rounds_ms):.2f}",
        "" if one.theirs_ms is None else f"{one.theirs_ms:.2f}",
        "" if one.ratio is None else f"{one.ratio:.3f}",
        "" if one.target is None else f"<= {one.target:.2f}",
        {None: "", True: "yes", False: "NO"}[is_met],
    )
