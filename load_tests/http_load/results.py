"""A sweep as one JSON file: a point a rate, by the names of vLLM's `bench serve`, and by class."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from load_tests.http_load.metrics import GOOD_SHARE, Point, highest_good_rate
from load_tests.http_load.options import LoadOptions
from load_tests.http_load.scenario import LENGTH_CLASSES, Scenario, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What was measured, and how."""

    scenario: Scenario  # as it was run, but for rate and seed
    options: LoadOptions
    url: str
    model: str
    date: str  # UTC, ISO 8601
    command: str
    points: Sequence[Point]

    @property
    def highest_good_rate(self) -> float | None:
        return highest_good_rate(self.points)


def to_json(sweep: Sweep) -> bytes:
    """Indented, for programs and for readers."""
    fields = {
        "scenario": sweep.scenario,
        "url": sweep.url,
        "date": sweep.date,
        "command": sweep.command,
        "good_share": GOOD_SHARE,
        "highest_good_rate": sweep.highest_good_rate,
        "points": [_point(sweep, point) for point in sweep.points],
    }
    return msgspec.json.format(msgspec.json.encode(fields), indent=2)


def _point(sweep: Sweep, point: Point) -> dict[str, object]:
    cv = sweep.scenario.cv_of_gaps
    is_drawn = not isinstance(sweep.scenario.load, Trace)
    limits = {name: sweep.scenario.slo.of(name) for name in LENGTH_CLASSES}
    return {
        "date": sweep.date,
        "endpoint_type": "openai-chat" if sweep.options.style.value == "chat" else "openai",
        "backend": "openai",
        "label": sweep.scenario.name,
        "model_id": sweep.model,
        "tokenizer_id": sweep.model,
        "request_rate": point.rate,
        "burstiness": 1 / cv**2 if is_drawn and cv else None,
        "max_concurrency": None,
        **point.summary,
        "slo": limits,
        "by_class": point.by_class,
        "by_seed": {
            str(run.header.seed): Point(rate=point.rate, runs=[run], slo=point.slo).summary
            for run in point.runs
        },
    }
