"""Pictures of a sweep as SVG text: first tokens, goodput, throughput, and each rate over time."""

import io
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import ticker
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from load_tests.http_load.metrics import GOOD_SHARE, Point, in_flight
from load_tests.http_load.records import Outcome
from load_tests.http_load.scenario import LENGTH_CLASSES, Limits

COLORS = {"short": "#1f6fb4", "long": "#c8590b", "all": "#3b3b46", "bad": "#c22f3d"}
QUANTILES = (("median", "p50", "-"), ("p90", "p90", "--"), ("p99", "p99", ":"))
STYLE: dict[Any, Any] = {  # matplotlib types its keys one by one
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a8a94",
    "axes.labelcolor": "#3b3b46",
    "axes.grid": True,
    "grid.color": "#e4e4ea",
    "xtick.color": "#3b3b46",
    "ytick.color": "#3b3b46",
    "legend.facecolor": "white",
    "legend.edgecolor": "none",
    "axes.axisbelow": True,
    "svg.hashsalt": "laps",  # the same picture, the same bytes
}
PANELS_IN_ROW = 4
SIZE = (5.2, 3.4)  # inches, of one panel


def plot_times(points: Sequence[Point], metric: str, title: str) -> str:
    """A panel a class: quantiles of a metric of the summary (`ttft`, `tpot`) against the rate."""

    def draw(axes: Sequence[Axes]) -> None:
        for panel, name in zip(axes, LENGTH_CLASSES, strict=True):
            for quantile, label, line in QUANTILES:
                values = [point.by_class[name][f"{quantile}_{metric}_ms"] for point in points]
                _line(panel, points, values, color=COLORS[name], linestyle=line, label=label)
            _limit(panel, points[0].slo.of(name), metric)
            panel.set(title=f"{title}, {name} prompts", ylabel="ms", xlabel="requests/s")
            _log_scale(panel)
            _legend(panel)

    return _picture(2, draw)


def plot_goodput(points: Sequence[Point]) -> str:
    """Requests/s that kept their limits beside all that were completed; and the share by class."""

    def draw(axes: Sequence[Axes]) -> None:
        rates, share = axes
        asked = [point.rate for point in points]
        rates.plot(asked, asked, color="#b9b9c3", linewidth=1, label="asked for")
        for key, label, color in (
            ("request_throughput", "completed", COLORS["all"]),
            ("request_goodput", "within limits (goodput)", "#26834a"),
        ):
            _line(rates, points, [p.summary[key] for p in points], color=color, label=label)
        rates.set(title="Goodput", xlabel="requests/s asked for", ylabel="requests/s")
        _from_zero(rates)
        _legend(rates)
        for name in LENGTH_CLASSES:
            values = [_percent(point.by_class[name]["slo_share"]) for point in points]
            _line(share, points, values, color=COLORS[name], label=f"{name} prompts")
        share.axhline(100 * GOOD_SHARE, color=COLORS["bad"], linewidth=1, linestyle="--")
        share.set(title="Within their limits", xlabel="requests/s", ylabel="% of requests")
        share.set_ylim(-3, 103)
        _legend(share)

    return _picture(2, draw)


def plot_throughput(points: Sequence[Point]) -> str:
    """Output tokens/s, and what became of the requests."""

    def draw(axes: Sequence[Axes]) -> None:
        tokens, ends = axes
        values = [point.summary["output_throughput"] for point in points]
        _line(tokens, points, values, color=COLORS["all"], label="output")
        tokens.set(title="Output throughput", xlabel="requests/s", ylabel="tokens/s")
        _from_zero(tokens)
        labels = [f"{point.rate:.4g}" for point in points]
        below = [0.0] * len(points)
        for key, color in (
            ("completed", "#26834a"),
            ("cancelled", "#b9b9c3"),
            ("failed", COLORS["bad"]),
        ):
            counts = [float(point.summary[key] or 0) for point in points]
            ends.bar(labels, counts, bottom=below, color=color, label=key, width=0.6)
            below = [a + b for a, b in zip(below, counts, strict=True)]
        ends.set(title="What became of the requests", xlabel="requests/s", ylabel="requests")
        _legend(ends)

    return _picture(2, draw)


def plot_timelines(points: Sequence[Point]) -> str:
    """A column a rate: first tokens by the time of sending, and requests under way below."""
    num_columns = min(PANELS_IN_ROW, len(points))
    num_rows = -(-len(points) // num_columns)
    size = (2 * SIZE[0] / num_columns, 2.4)  # as wide as the other pictures

    def draw(axes: Sequence[Axes]) -> None:
        starts = [2 * row * num_columns for row in range(num_rows)]
        tops = [axes[start + column] for start in starts for column in range(num_columns)]
        belows = [axes[start + num_columns + c] for start in starts for c in range(num_columns)]
        for point, top, below in zip(points, tops, belows, strict=False):
            _timeline(point, top, below)
        for top, below in zip(tops[len(points) :], belows[len(points) :], strict=True):
            top.set_visible(False)
            below.set_visible(False)
        _log_scale(*tops)
        highest = max(axis.dataLim.ymax for axis in belows[: len(points)])
        for below in belows:
            below.set_ylim(0, 1.05 * max(1.0, highest))
        for row in range(num_rows):
            tops[row * num_columns].set_ylabel("TTFT [ms]")
            belows[row * num_columns].set_ylabel("requests under way")
        _shared_legend(tops)

    return _picture(2 * num_rows * num_columns, draw, num_columns=num_columns, size=size)


def _timeline(point: Point, top: Axes, below: Axes) -> None:
    for name in LENGTH_CLASSES:
        shown = [
            (record.sent_s, 1e3 * record.ttft_s)
            for record in point.records
            if record.length_class == name and record.sent_s is not None and record.ttft_s
        ]
        if shown:
            at_s, ttft_ms = zip(*shown, strict=True)
            top.scatter(at_s, ttft_ms, s=12, color=COLORS[name], alpha=0.7, lw=0, label=name)
    failed_s = [
        r.sent_s for r in point.records if r.outcome is Outcome.FAILED and r.sent_s is not None
    ]
    if failed_s:  # along the lower edge, whatever the scale
        edge = [0.03] * len(failed_s)
        top.plot(failed_s, edge, "x", ms=4, color=COLORS["bad"], label="failed",
                 transform=top.get_xaxis_transform())  # fmt: skip
    top.set(title=f"{point.rate:.4g} requests/s")
    for run in point.runs:
        below.step(*in_flight(run), where="post", color=COLORS["all"], lw=1, alpha=0.8)
    below.set(xlabel="s")
    below.sharex(top)


def _line(
    axes: Axes,
    points: Sequence[Point],
    values: Sequence[float | None],
    *,
    color: str,
    label: str,
    linestyle: str = "-",
) -> None:
    known = [(p.rate, v) for p, v in zip(points, values, strict=True) if v is not None]
    if known:
        rates, numbers = zip(*known, strict=True)
        axes.plot(rates, numbers, color=color, linestyle=linestyle, marker="o", ms=4, label=label)


def _limit(axes: Axes, limits: Limits, metric: str) -> None:
    limit_ms = {"ttft": limits.ttft_ms, "tpot": limits.tpot_ms}[metric]
    if limit_ms is not None:
        # Two points instead of `axhline`: the range of the axis is to know of it.
        axes.plot(axes.get_xlim(), [limit_ms] * 2, color=COLORS["bad"], linewidth=1,
                  label=f"limit {limit_ms:.4g} ms")  # fmt: skip


def _from_zero(axes: Axes) -> None:
    """From 0 to above the highest value, also where one rate alone was asked for."""
    highest = axes.dataLim.ymax
    axes.set_ylim(0, 1.08 * highest if np.isfinite(highest) and highest > 0 else 1.0)


def _log_scale(*all_axes: Axes) -> None:
    """One range for all of them, in plain numbers: 20 ms, not 2 x 10^1."""
    drawn = [axes for axes in all_axes if np.isfinite(axes.dataLim.minposy)]
    if not drawn:
        return
    lowest = min(axes.dataLim.minposy for axes in drawn)
    highest = max(axes.dataLim.ymax for axes in drawn)
    for axes in drawn:
        axes.set_yscale("log")
        axes.set_ylim(lowest / 1.5, highest * 1.5)
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())


def _legend(axes: Axes) -> None:
    """Between the title and the picture, where it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.set_title(axes.get_title(), pad=24)
        axes.legend(
            handles,
            labels,
            loc="lower center",
            bbox_to_anchor=(0.5, 1.0),
            ncols=len(handles),
            fontsize=9,
            columnspacing=1.2,
            handlelength=1.8,
        )


def _shared_legend(all_axes: Sequence[Axes]) -> None:
    """One above all panels, with whatever any of them shows."""
    named: dict[str, Artist] = {}
    for axes in all_axes:
        named |= {
            label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
    figure = all_axes[0].get_figure(root=True)
    if named and figure is not None:
        figure.legend(
            [*named.values()], [*named], loc="outside upper center", ncols=len(named), fontsize=9
        )


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _picture(
    num_panels: int,
    draw: Callable[[Sequence[Axes]], None],
    *,
    num_columns: int = 2,
    size: tuple[float, float] = SIZE,
) -> str:
    """An `<svg>` element of the panels, in rows."""
    num_rows = -(-num_panels // num_columns)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(size[0] * num_columns, size[1] * num_rows), layout="constrained")
        draw(list(figure.subplots(num_rows, num_columns, squeeze=False).flat))
        file = io.StringIO()
        figure.savefig(
            file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    text = file.getvalue()
    return text[text.index("<svg") :]
