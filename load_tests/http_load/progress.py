"""A sweep while it runs, on a terminal: a line a run, read from the files that runs write."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import JustifyMethod
from rich.table import Table

from load_tests.http_load.metrics import Run, Summary, quantile_ms, summarize
from load_tests.http_load.records import Outcome, RunReader
from load_tests.http_load.scenario import LENGTH_CLASSES, Slo

BAR_CELLS = 6
COLUMNS = (  # with what they are told in; 80 characters hold them
    ("rate", "1/s"),
    ("seed", ""),
    ("ended", "of arrivals"),
    ("fail", ""),
    ("cancel", ""),
    ("short TTFT", "p50 p99 ms"),
    ("long TTFT", "p50 p99 ms"),
    ("kept", "SLO"),
    ("lag", "ms"),
)


@dataclass(slots=True, kw_only=True)
class RunView:
    """One run of a sweep: waiting, under way or over."""

    rate: float | None  # None = as recorded
    seed: int
    reader: RunReader
    slo: Slo

    @property
    def cells(self) -> list[str]:
        """A row of the table."""
        header = self.reader.header
        rate = "recorded" if self.rate is None else f"{self.rate:.4g}"
        if header is None:
            return [rate, str(self.seed), "waiting", *[""] * 6]
        records = self.reader.records
        share = len(records) / header.num_arrivals
        summary = summarize([Run(header=header, records=records)], self.slo)
        bar = "━" * round(BAR_CELLS * share)
        return [
            rate,
            str(self.seed),
            f"[green]{bar.ljust(BAR_CELLS, '·')}[/green] {len(records)}/{header.num_arrivals}",
            _failed(summary),
            f"{summary['cancelled']}",
            *(self._first_tokens(name) for name in LENGTH_CLASSES),
            "" if summary["slo_share"] is None else f"{100 * summary['slo_share']:.0f}%",
            _ms(summary["p99_client_lag_ms"]),
        ]

    def _first_tokens(self, name: str) -> str:
        values_s = [
            ttft_s
            for record in self.reader.records
            if record.length_class == name
            and record.outcome is Outcome.COMPLETED
            and (ttft_s := record.ttft_s) is not None
        ]
        return f"{_ms(quantile_ms(values_s, 0.5))} {_ms(quantile_ms(values_s, 0.99)):>5}"


def render_progress(title: str, views: Sequence[RunView]) -> Table:
    """All runs, those that are still to come included."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1), pad_edge=False)
    for name, unit in COLUMNS:
        justify: JustifyMethod = "left" if name == "ended" else "right"
        table.add_column(f"{name}\n[dim]{unit}[/dim]", justify=justify, no_wrap=True)
    for view in views:
        table.add_row(*view.cells)
    return table


def _failed(summary: Summary) -> str:
    return f"[red]{summary['failed']}[/red]" if summary["failed"] else "0"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
