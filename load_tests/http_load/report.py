"""A sweep as one HTML page that needs nothing else: what it came to, pictures, tables, terms"""

from collections.abc import Iterable, Sequence
from html import escape

from load_tests.http_load.metrics import GOOD_SHARE, MAX_LAG_MS, Number, Point, Summary
from load_tests.http_load.plots import (
    plot_goodput,
    plot_throughput,
    plot_timelines,
    plot_times,
)
from load_tests.http_load.results import Sweep
from load_tests.http_load.scenario import LENGTH_CLASSES, Limits

MAX_ERRORS = 12

CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #24242c; background: #fff; margin: 0 auto;
       padding: 2rem; max-width: 1120px; }
h1 { font-size: 1.7rem; margin: 0 0 .2rem; } h2 { font-size: 1.15rem; margin: 2.4rem 0 .6rem; }
.about { color: #5b5b66; margin: 0; } .tiles { display: flex; gap: 1rem; flex-wrap: wrap;
         margin: 1.4rem 0; }
.tile { flex: 1 1 11rem; border: 1px solid #e0e0e8; border-radius: 8px; padding: .8rem 1rem; }
.tile b { display: block; font-size: 1.5rem; font-weight: 650; }
.tile span { color: #5b5b66; font-size: .87rem; }
.warning { background: #fdf0e3; border-left: 4px solid #c8590b; padding: .6rem 1rem;
           margin: .6rem 0; }
svg { width: 100%; height: auto; display: block; } table { border-collapse: collapse; width: 100%;
      font-variant-numeric: tabular-nums; font-size: .87rem; }
th, td { text-align: right; padding: .3rem .5rem; border-bottom: 1px solid #ececf1; }
th { color: #5b5b66; font-weight: 600; }
th:first-child, td:first-child, .errors th, .errors td { text-align: left; }
tr.first td { border-top: 2px solid #d0d0da; } .scroll { overflow-x: auto; }
code { font: .87rem/1.5 ui-monospace, monospace; background: #f5f5f8; padding: .1rem .3rem; }
pre { background: #f5f5f8; padding: .8rem 1rem; overflow-x: auto; font-size: .85rem;
      white-space: pre-wrap; }
"""

COLUMNS = (
    ("completed", "completed"),
    ("failed", "failed"),
    ("cancelled", "cancelled"),
    ("TTFT p50", "median_ttft_ms"),
    ("p90", "p90_ttft_ms"),
    ("p99", "p99_ttft_ms"),
    ("TPOT p50", "median_tpot_ms"),
    ("p99", "p99_tpot_ms"),
    ("ITL p99", "p99_itl_ms"),
    ("E2E p50", "median_e2el_ms"),
    ("p99", "p99_e2el_ms"),
    ("output tokens/s", "output_throughput"),
    ("all tokens/s", "total_token_throughput"),
    ("goodput req/s", "request_goodput"),
)

NOTES = """<ul>
<li>Arrivals are open loop: each request is sent when it is due, whether or not others were
answered. The next turn of a conversation follows its own last answer.</li>
<li>TTFT: from sending to the first token. TPOT: a token after the first, on average over a
request. ITL: between two events that bring tokens. E2E: from sending to the last token. All of
completed requests.</li>
<li>Goodput: completed within every limit of its class. Failed and refused requests have missed
theirs; those that their own client cancelled are not judged.</li>
<li>Client lag: how late the client itself sent a request; it is in no other figure.</li>
<li>Seeds are pooled: quantiles over all requests of a rate, throughput over the sum of the
runs.</li></ul>"""


def to_html(sweep: Sweep) -> str:
    """The whole page. Raises AssertionError for a sweep without points."""
    assert sweep.points, "nothing was measured"
    points = sweep.points
    scenario = sweep.scenario
    parts = [
        f"<h1>{escape(scenario.name)} on {escape(sweep.model)}</h1>",
        f'<p class="about">{escape(scenario.about)}<br>{escape(sweep.url)}, {_date(sweep.date)},'
        f" {scenario.duration_s:g} s of arrivals at each rate, seeds {_seeds(points)}"
        f"{_shrunk(scenario.shrink)}.</p>",
        _tiles(sweep),
        *(f'<p class="warning">{escape(text)}</p>' for text in warnings(sweep)),
        "<h2>Time to the first token</h2>",
        plot_times(points, "ttft", "TTFT"),
        "<h2>Goodput</h2>",
        f"<p>Limits: {_limits(sweep)}. The dashed line is {100 * GOOD_SHARE:g} % of requests.</p>",
        plot_goodput(points),
        "<h2>Throughput</h2>",
        plot_throughput(points),
        "<h2>Time per output token</h2>",
        plot_times(points, "tpot", "TPOT"),
        "<h2>Over time</h2>",
        "<p>Above, each request's first token by when it was sent; below, how many were under way,"
        " a line a seed.</p>",
        plot_timelines(points),
        "<h2>Figures</h2><p>Rate in requests/s, times in ms.</p>",
        _table(points),
        _errors(points),
        "<h2>How it was measured</h2>",
        NOTES,
        f"<pre>{escape(sweep.command)}</pre>",
    ]
    body = "\n".join(parts)
    title = f"{escape(scenario.name)} on {escape(sweep.model)}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{CSS}</style></head>'
        f"<body>\n{body}\n</body></html>\n"
    )


def warnings(sweep: Sweep) -> list[str]:
    """What a reader has to know before believing the figures."""
    summaries = [(f"at {point.rate:.4g}/s", point.summary) for point in sweep.points]
    failed = [
        f"{s['failed']} of {s['num_prompts']} {where}" for where, s in summaries if s["failed"]
    ]
    late = [
        f"{lag_ms:.0f} ms {where}"
        for where, s in summaries
        if (lag_ms := s["p99_client_lag_ms"]) is not None and lag_ms > MAX_LAG_MS
    ]
    found = []
    if failed:
        found.append(f"Requests failed: {', '.join(failed)}.")
    if late:
        found.append(
            f"The client itself was late by up to (p99) {', '.join(late)}: it was short of"
            " processor time, and figures there are worse than the server's."
        )
    return found


def _tiles(sweep: Sweep) -> str:
    best = sweep.highest_good_rate
    summaries = [point.summary for point in sweep.points]
    tokens = max(float(s["output_throughput"] or 0) for s in summaries)
    good = max(float(s["request_goodput"] or 0) for s in summaries)
    first = sweep.points[0]
    short = first.by_class["short"]["median_ttft_ms"]
    tiles = [
        (
            "none" if best is None else f"{best:.4g} req/s",
            f"highest rate with {100 * GOOD_SHARE:g} % within limits",
        ),
        (f"{good:.3g} req/s", "best goodput"),
        (f"{tokens:,.0f} tokens/s", "best output throughput"),
        (f"{_number(short)} ms", f"short TTFT p50 at {first.rate:.4g} req/s"),
    ]
    cells = "".join(
        f'<div class="tile"><b>{escape(a)}</b><span>{escape(b)}</span></div>' for a, b in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def _table(points: Sequence[Point]) -> str:
    header = _row("th", ["rate", "prompts", *(title for title, _ in COLUMNS)])
    rows = []
    for point in points:
        named = {"all": point.summary, **point.by_class}
        for name, summary in named.items():
            rate = f"{point.rate:.4g}" if name == "all" else ""
            css = "first" if name == "all" else ""
            rows.append(_row("td", [rate, name, *_cells(summary)], css))
    return f'<div class="scroll"><table>{header}{"".join(rows)}</table></div>'


def _cells(summary: Summary) -> list[str]:
    return [_number(summary[key]) for _, key in COLUMNS]


def _row(tag: str, cells: Iterable[str], css: str = "") -> str:
    inner = "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)
    return f'<tr class="{css}">{inner}</tr>'


def _errors(points: Sequence[Point]) -> str:
    """The commonest errors of each rate."""
    rows = []
    for point in points:
        counts: dict[str, int] = {}
        for record in point.records:
            if record.error is not None:
                counts[record.error] = counts.get(record.error, 0) + 1
        ranked = sorted(counts.items(), key=lambda item: -item[1])[:MAX_ERRORS]
        rows += [_row("td", [f"{point.rate:.4g}", str(num), text]) for text, num in ranked]
    if not rows:
        return ""
    header = _row("th", ["requests/s", "failed", "error"])
    return f'<h2>Errors</h2><table class="errors">{header}{"".join(rows)}</table>'


def _limits(sweep: Sweep) -> str:
    words = [f"{name} prompts {_limit(sweep.scenario.slo.of(name))}" for name in LENGTH_CLASSES]
    tokens = max(1, sweep.scenario.short_tokens // sweep.scenario.shrink)
    return escape("; ".join(words) + f" (short: at most {tokens} tokens)")


def _limit(limits: Limits) -> str:
    named = (("TTFT", limits.ttft_ms), ("TPOT", limits.tpot_ms), ("E2E", limits.e2e_ms))
    words = [f"{name} {limit_ms:.4g} ms" for name, limit_ms in named if limit_ms is not None]
    return ", ".join(words) or "none"


def _seeds(points: Sequence[Point]) -> str:
    return ", ".join(str(seed) for seed in sorted({r.header.seed for p in points for r in p.runs}))


def _shrunk(shrink: int) -> str:
    return f", all lengths divided by {shrink}" if shrink > 1 else ""


def _date(date: str) -> str:
    return escape(date.replace("T", " ").replace("+00:00", " UTC"))


def _number(value: Number) -> str:
    """Three digits are enough, but counts are whole."""
    if value is None:
        return ""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
