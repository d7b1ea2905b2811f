"""Engine figures beside those of another engine, of a bare chain of kernels, and of the floor.

Reads what those two print; runs neither.
"""

import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from load_tests.lab.works import DECODES, LONG_PREFILLS, Work
from load_tests.tables import render_rows

# Ours / vLLM's, in the work's own unit: at most that of a duration, at least that of a rate.
TARGETS: dict[str, float] = dict(
    zip(
        [work.key for work in (*DECODES, *LONG_PREFILLS)],
        (0.89, 0.91, 0.91, 0.83, 0.90, 1.04, 1.04, 1.06),
        strict=True,
    )
)
CHAIN_DECODED_TOKENS = 64  # the chain times one step in the middle of a decode work's 128

_RESULT = "RESULT "
_CHAIN_DECODE = re.compile(r"^\s*bs=(\d+) ctx=(\d+): ([\d.]+) ms", re.MULTILINE)
_CHAIN_BATCH = re.compile(r"^\s*(\d+x\d+) in T=\d+: graph ([\d.]+) ms, eager ([\d.]+) ms", re.M)
_CHAIN_PREFILL = re.compile(r"^\s*\d+x(\d+): [\d.]+ ms, (\d+) tok/s", re.MULTILINE)

Numbers = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One work's figure and what it is held against, all in the work's unit."""

    work: Work
    value: float
    spread: tuple[float, float]
    floor: float
    peer: float | None
    chain: float | None

    @property
    def ratio(self) -> float | None:
        """Ours / the peer's."""
        return None if self.peer is None else self.value / self.peer

    @property
    def target(self) -> float | None:
        return TARGETS.get(self.work.key)

    @property
    def is_met(self) -> bool | None:
        """None where nothing is asked or there is nothing to compare with."""
        if self.ratio is None or self.target is None:
            return None
        return self.ratio >= self.target if self.work.is_rate else self.ratio <= self.target

    @property
    def share_of_floor(self) -> float:
        """1 = as fast as the machine allows."""
        return self.value / self.floor if self.work.is_rate else self.floor / self.value

    def to_builtins(self) -> dict[str, object]:
        """Everything, for a program to read."""
        return {
            "value": self.value,
            "unit": self.work.kind.value,
            "range": self.spread,
            "vllm": self.peer,
            "ratio": self.ratio,
            "target": self.target,
            "is_met": self.is_met,
            "plain_chain": self.chain,
            "floor": self.floor,
            "share_of_floor": self.share_of_floor,
        }


def render_comparisons(comparisons: Sequence[Comparison]) -> str:
    """A table in Markdown; what was not measured is empty."""
    header = ("work", "ours", "range", "vLLM", "ratio", "target", "met", "plain chain")
    rows = [(*header, "floor", "share of floor"), *map(_cells, comparisons)]
    return render_rows(rows)


def read_peer(path: Path) -> Numbers:
    """The peer's figures by work key. Raises ValueError unless the file has one table of works."""
    lines = path.read_text(encoding="utf-8").splitlines()
    tables = [json.loads(line.removeprefix(_RESULT)) for line in lines if line.startswith(_RESULT)]
    tables = [table for table in tables if set(table) & set(TARGETS)]
    if len(tables) != 1:
        raise ValueError(f"{path}: {len(tables)} lines of '{_RESULT}' with engine figures, not one")
    return {key: float(value) for key, value in tables[0].items()}


def read_chain(path: Path) -> Numbers:
    """The chain's figures by work key. Raises ValueError if the file has none.

    A chain's prefill has fewer prompts than the work of the same length; a rate is a rate.
    """
    text = path.read_text(encoding="utf-8")
    rates = {int(length): float(rate) for length, rate in _CHAIN_PREFILL.findall(text)}
    numbers = {w.key: rates[w.num_tokens] for w in LONG_PREFILLS if w.num_tokens in rates}
    for shape, graph_ms, eager_ms in _CHAIN_BATCH.findall(text):
        numbers[f"short_prefill_{shape}_ms"] = min(float(graph_ms), float(eager_ms))
    decodes = {(int(b), int(c)): float(ms) for b, c, ms in _CHAIN_DECODE.findall(text)}
    for work in DECODES:
        shape = (work.num_rows, work.num_tokens + CHAIN_DECODED_TOKENS)
        if shape in decodes:
            numbers[work.key] = decodes[shape]
    if not numbers:
        raise ValueError(f"{path}: no figures of a plain chain")
    return numbers


def compare(
    work: Work, rounds_s: Sequence[float], floor_s: float, *, peer: Numbers, chain: Numbers
) -> Comparison:
    """`rounds_s`: a duration of each round; `peer`, `chain`: numbers by work key, maybe none."""
    values = [work.in_unit(round_s) for round_s in rounds_s]
    return Comparison(
        work=work,
        value=statistics.median(values),
        spread=(min(values), max(values)),
        floor=work.in_unit(floor_s),
        peer=peer.get(work.key),
        chain=chain.get(work.key),
    )


def _cells(one: Comparison) -> tuple[str, ...]:
    sign = ">=" if one.work.is_rate else "<="
    return (
        one.work.label,
        f"{_number(one.value)} {one.work.kind.value}",
        f"{_number(one.spread[0])} - {_number(one.spread[1])}",
        _number(one.peer),
        "" if one.ratio is None else f"{one.ratio:.3f}",
        "" if one.target is None else f"{sign} {one.target:.2f}",
        {None: "", True: "yes", False: "NO"}[one.is_met],
        _number(one.chain),
        _number(one.floor),
        f"{one.share_of_floor:.0%}",
    )


def _number(value: float | None) -> str:
    """Four digits, or all before the point."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
