"""Writes where a device's time went: a page with bars that loads nothing, or all kernels as CSV."""

import csv
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_STYLE = """
body { font: 15px sans-serif; margin: 2em; }
.bar { display: flex; height: 2em; margin: 0 0 1em; }
.key { display: inline-block; width: 1em; height: 1em; margin: 0 .3em 0 1em; }
td, th { padding: .2em .8em; text-align: left; }
td.number { text-align: right; }
"""
_MAX_KERNELS = 40  # of each work, on the page


class KernelLine(NamedTuple):
    """One kernel of one work: its runs together."""

    work: str
    group: str
    name: str
    num_runs: int
    time_us: float  # that it owns


def write_csv(lines: Sequence[KernelLine], path: Path) -> None:
    """A line for each kernel of each work, in the order of `lines`."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("work", "group", "kernel", "runs", "ms"))
        for line in lines:
            writer.writerow((*line[:4], f"{line.time_us / 1e3:.6f}"))


def write_page(
    profiles: Mapping[str, Mapping[str, float]], lines: Sequence[KernelLine], path: Path
) -> None:
    """Profiles: work -> group -> microseconds, the same groups of all. Bars show shares of time."""
    groups = list(next(iter(profiles.values())))
    colours = {g: f"hsl({360 * i / len(groups):.0f} 60% 65%)" for i, g in enumerate(groups)}
    keys = [
        f'<span class="key" style="background:{colours[g]}"></span>{html.escape(g)}' for g in groups
    ]
    parts = [f"<p>{''.join(keys)}</p>"]
    for work, times_us in profiles.items():
        mine = [line for line in lines if line.work == work]
        parts += [_bar(work, times_us, colours), _table(mine[:_MAX_KERNELS])]
    title = "Where the device's time goes"
    path.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style><h1>{title}</h1>{''.join(parts)}</html>\n",
        encoding="utf-8",
    )


def _bar(work: str, times_us: Mapping[str, float], colours: Mapping[str, str]) -> str:
    wall_us = sum(times_us.values())
    pieces = [
        f'<div title="{html.escape(group)}: {us / 1e3:.3f} ms, {us / wall_us:.1%}"'
        f' style="width:{us / wall_us:.3%};background:{colours[group]}"></div>'
        for group, us in times_us.items()
    ]
    heading = f"<h2>{html.escape(work)}: {wall_us / 1e3:.3f} ms</h2>"
    return f'{heading}<div class="bar">{"".join(pieces)}</div>'


def _table(lines: Sequence[KernelLine]) -> str:
    rows = [
        f"<tr><td>{html.escape(line.name)}</td><td>{html.escape(line.group)}</td>"
        f'<td class="number">{line.num_runs}</td>'
        f'<td class="number">{line.time_us / 1e3:.3f}</td></tr>'
        for line in lines
    ]
    head = "<tr><th>kernel</th><th>group</th><th>runs</th><th>ms</th></tr>"
    return f"<table>{head}{''.join(rows)}</table>"
