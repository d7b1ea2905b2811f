"""The report and the results file of a sweep: all names, all rates, nothing unescaped."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from load_tests.http_load.client import AskOptions
from load_tests.http_load.dialogue import PromptStyle
from load_tests.http_load.metrics import Point, Run
from load_tests.http_load.options import LoadOptions
from load_tests.http_load.records import Header, Outcome, Record
from load_tests.http_load.report import to_html, warnings
from load_tests.http_load.results import Sweep, to_json
from load_tests.http_load.scenario import LENGTH_CLASSES, Changes, read_scenario
from tests.harness.seeds import fresh_random

ROOT = Path(__file__).resolve().parents[3]
SCENARIO = read_scenario("mixed")
VLLM_FIELDS = (
    "date endpoint_type backend label model_id tokenizer_id num_prompts request_rate burstiness"
    " max_concurrency duration completed failed total_input_tokens total_output_tokens"
    " request_throughput request_goodput output_throughput total_token_throughput"
    " max_output_tokens_per_s max_concurrent_requests"
)


def record(rng: random.Random, index: int, outcome: Outcome = Outcome.COMPLETED) -> Record:
    sent_s = rng.uniform(0, 10)
    num_tokens = 0 if outcome is Outcome.FAILED else rng.randint(1, 9)
    chunk_s = sorted(sent_s + rng.uniform(0.01, 2) for _ in range(num_tokens))
    return Record(
        index=index,
        session=index,
        length_class=rng.choice(LENGTH_CLASSES),
        num_prompt_tokens=rng.randint(1, 999),
        num_output_tokens=num_tokens,
        due_s=sent_s,
        sent_s=sent_s,
        ended_s=sent_s + 2,
        outcome=outcome,
        error="a <b>bad</b> thing" if outcome is Outcome.FAILED else None,
        chunk_s=chunk_s,
        chunk_tokens=[1] * num_tokens,
    )


def run(rate: float, seed: int, records: list[Record]) -> Run:
    header = Header(
        scenario="mixed",
        url="http://here",
        model="a<model>",
        rate=rate,
        seed=seed,
        salt=3,
        duration_s=10.0,
        num_arrivals=len(records),
        started_at="2026-01-01T00:00:00+00:00",
    )
    return Run(header=header, records=records)


def sweep_of(points: list[Point]) -> Sweep:
    return Sweep(
        scenario=SCENARIO,
        options=LoadOptions(
            scenario="mixed",
            changes=Changes(),
            style=PromptStyle.CHAT,
            takes_extensions=True,
            tokens_per_word=1.0,
            vocab_size=1000,
            model=None,
            api_key_file=None,
            salt=1,
        ),
        url="http://here",
        model="a<model>",
        date="2026-01-01T00:00:00+00:00",
        command="python -m load_tests.sweep",
        points=points,
    )


def points(rates: list[float], outcome: Outcome = Outcome.COMPLETED) -> list[Point]:
    rng = fresh_random()
    return [
        Point(
            rate=rate,
            slo=SCENARIO.slo,
            runs=[
                run(rate, seed, [record(rng, i, outcome) for i in range(rng.randint(1, 30))])
                for seed in (7, 8)
            ],
        )
        for rate in rates
    ]


def loaded(sweep: Sweep) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(to_json(sweep))
    return fields


def test_results_have_the_names_of_vllms_benchmark_and_their_own_by_class() -> None:
    rates = sorted(random.sample(range(1, 99), 3))
    results = loaded(sweep_of(points([float(rate) for rate in rates])))
    assert [point["request_rate"] for point in results["points"]] == rates
    for point in results["points"]:
        times = [f"{q}_{m}_ms" for q in ("mean", "median", "std", "p99")
                 for m in ("ttft", "tpot", "itl", "e2el")]  # fmt: skip
        assert set(point) >= {*VLLM_FIELDS.split(), *times, "cancelled", "slo_share"}
        assert set(point["by_class"]) == {"short", "long"}
        assert set(point["by_seed"]) == {"7", "8"}
        for key in ("num_prompts", "completed", "total_output_tokens"):
            assert sum(point["by_class"][name][key] for name in LENGTH_CLASSES) == point[key]
        assert point["burstiness"] == 1.0
        assert point["endpoint_type"] == "openai-chat"


def check_page(page: str, sweep: Sweep, outcome: Outcome) -> None:
    assert page.count("<svg") == page.count("</svg>") == 5
    assert "a&lt;model&gt;" in page
    assert "<model>" not in page
    assert "<b>bad" not in page
    assert ("a &lt;b&gt;bad&lt;/b&gt; thing" in page) == (outcome is Outcome.FAILED)
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#)""", page)  # needs nothing else
    assert any("failed" in text for text in warnings(sweep)) == (outcome is Outcome.FAILED)


# Drawing a rate takes most of a second.
def test_a_report_is_whole_and_no_legend_covers_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Figure] = []
    begin = Figure.__init__

    def keep(figure: Figure, *args: Any, **kwargs: Any) -> None:
        begin(figure, *args, **kwargs)
        made.append(figure)

    monkeypatch.setattr(Figure, "__init__", keep)
    sweep = sweep_of(points([4.0, 16.0]))
    check_page(to_html(sweep), sweep, Outcome.COMPLETED)
    num_legends = 0
    for figure in made:
        figure.draw_without_rendering()
        own = [legend for axes in figure.axes if (legend := axes.get_legend()) is not None]
        for legend in [*own, *figure.legends]:
            num_legends += 1
            box = legend.get_window_extent()
            assert not any(box.overlaps(axes.patch.get_window_extent()) for axes in figure.axes)
            assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1, "it is cut off"
    assert num_legends == 8


@pytest.mark.parametrize("outcome", [Outcome.CANCELLED, Outcome.FAILED])
def test_a_report_of_a_rate_of_which_nothing_is_known_is_whole(outcome: Outcome) -> None:
    sweep = sweep_of(points([1.0], outcome))
    check_page(to_html(sweep), sweep, outcome)


def test_a_client_that_was_late_is_told() -> None:
    late = record(fresh_random(), 0)
    fields = {name: getattr(late, name) for name in Record.__struct_fields__}
    one = Record(**(fields | {"due_s": (late.sent_s or 0.0) - 0.5}))
    point = Point(rate=3.0, runs=[run(3.0, 7, [one])], slo=SCENARIO.slo)
    assert any("500 ms at 3/s" in text for text in warnings(sweep_of([point])))


def test_the_load_side_imports_no_engine() -> None:
    code = (
        "import sys, load_tests.locustfile, load_tests.sweep, load_tests.chat\n"
        "ours = {'actors', 'configs', 'engine', 'kernels', 'serve_app', 'torch', 'ray'}\n"
        "print(sorted(ours & {name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_body_has_the_style_of_its_prompts() -> None:
    for style in PromptStyle:
        body = json.loads(AskOptions(model="m", style=style).body("x", 3))
        assert ("messages" in body) == (style is PromptStyle.CHAT)
