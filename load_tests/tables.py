"""Figures as a small aligned table, or as JSON."""

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of a result: the median of several rounds, and what it is held against."""

    name: str
    value: float
    unit: str
    spread: tuple[float, float] | None = None  # smallest and largest round
    target: str = ""  # "" = nothing is asked of it
    is_met: bool | None = None


def median_figure(name: str, rounds: Sequence[float], unit: str) -> Figure:
    """The median of `rounds` with their range."""
    return Figure(
        name=name,
        value=statistics.median(rounds),
        unit=unit,
        spread=(min(rounds), max(rounds)),
    )


def at_least(name: str, rounds: Sequence[float], unit: str, target: float) -> Figure:
    """A median that should not be below `target`."""
    value = statistics.median(rounds)
    return Figure(
        name=name,
        value=value,
        unit=unit,
        spread=(min(rounds), max(rounds)),
        target=f">= {target:g}",
        is_met=value >= target,
    )


def at_most(name: str, value: float, unit: str, target: float) -> Figure:
    """A value that should not be above `target`."""
    return Figure(
        name=name, value=value, unit=unit, target=f"<= {target:g}", is_met=value <= target
    )


def describe_machine() -> dict[str, object]:
    """What a reader must know to judge a figure: processors, load, versions."""
    return {
        "cpus": os.cpu_count(),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }


def render(figures: Sequence[Figure]) -> str:
    """A table in Markdown, aligned for a terminal too."""
    header = ("figure", "median", "range", "target", "met")
    return render_rows([header, *(_cells(figure) for figure in figures)])


def render_rows(rows: Sequence[Sequence[str]]) -> str:
    """The same of any cells; the first row is the header."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) + " |" for r in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def to_json(figures: Sequence[Figure], about: Mapping[str, object]) -> str:
    """Everything, for a program to read."""
    rows = [{name: getattr(figure, name) for name in Figure.__slots__} for figure in figures]
    return json.dumps({"about": dict(about), "figures": rows}, indent=2)


def _cells(figure: Figure) -> tuple[str, ...]:
    spread = "" if figure.spread is None else f"{figure.spread[0]:.4g} - {figure.spread[1]:.4g}"
    met = {None: "", True: "yes", False: "NO"}[figure.is_met]
    return (figure.name, f"{figure.value:.4g} {figure.unit}", spread, figure.target, met)
