"""The arithmetic of a load over HTTP: times of a request, limits, goodput, pooled figures."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from load_tests.http_load.metrics import (
    Point,
    Run,
    highest_good_rate,
    in_flight,
    is_within,
    summarize,
)
from load_tests.http_load.records import Header, Outcome, Record, RunFile, RunReader
from load_tests.http_load.scenario import LengthClass, Limits, Slo

SLO = Slo(
    short=Limits(ttft_ms=100.0, tpot_ms=20.0),
    long=Limits(ttft_ms=1000.0, tpot_ms=20.0, e2e_ms=2000.0),
)
HEADER = Header(
    scenario="s",
    url="u",
    model="m",
    rate=2.0,
    seed=7,
    salt=1,
    duration_s=10.0,
    num_arrivals=4,
    started_at="2026-01-01T00:00:00+00:00",
)


def record(
    sent_s: float = 1.0,
    ttft_s: float = 0.05,
    tpot_s: float = 0.01,
    num_tokens: int = 5,
    outcome: Outcome = Outcome.COMPLETED,
    length_class: LengthClass = "short",
) -> Record:
    chunk_s = [sent_s + ttft_s + i * tpot_s for i in range(num_tokens)]
    return Record(
        index=0,
        session=0,
        length_class=length_class,
        num_prompt_tokens=30,
        num_output_tokens=num_tokens,
        due_s=sent_s - 0.002,
        sent_s=sent_s,
        ended_s=chunk_s[-1] if chunk_s else sent_s,
        outcome=outcome,
        error="no" if outcome is Outcome.FAILED else None,
        chunk_s=chunk_s,
        chunk_tokens=[1] * num_tokens,
    )


def run(*records: Record) -> Run:
    return Run(header=HEADER, records=records)


def test_the_times_of_a_request() -> None:
    one = record(sent_s=2.0, ttft_s=0.25, tpot_s=0.5, num_tokens=3)
    assert one.ttft_s == pytest.approx(0.25)
    assert one.tpot_s == pytest.approx(0.5)
    assert one.e2e_s == pytest.approx(1.25)
    assert one.gaps_s == pytest.approx([0.5, 0.5])
    assert one.lag_s == pytest.approx(0.002)


def test_tokens_that_came_in_one_event_share_the_time_after_the_first() -> None:
    fields = {name: getattr(record(), name) for name in Record.__struct_fields__}
    one = Record(
        **(fields | {"num_output_tokens": 9, "chunk_s": [1.5, 2.3], "chunk_tokens": [1, 8]})
    )
    assert one.tpot_s == pytest.approx(0.1)
    assert one.gaps_s == pytest.approx([0.8])


def test_what_has_no_token_has_no_times() -> None:
    one = record(num_tokens=0, outcome=Outcome.FAILED)
    assert (one.ttft_s, one.tpot_s, one.e2e_s, one.gaps_s) == (None, None, None, [])
    assert record(num_tokens=1).tpot_s is None


@pytest.mark.parametrize(
    ("one", "is_good"),
    [
        (record(sent_s=0.0, ttft_s=0.1), True),
        (record(ttft_s=0.11), False),
        (record(ttft_s=0.11, length_class="long"), True),
        (record(tpot_s=0.03), False),
        (record(tpot_s=0.03, num_tokens=1), True),
        (record(tpot_s=0.019, num_tokens=101, length_class="long"), True),
        (record(tpot_s=0.019, num_tokens=111, length_class="long"), False),
        (record(outcome=Outcome.FAILED), False),
        (record(outcome=Outcome.CANCELLED), False),
    ],
)
def test_a_request_is_served_well_if_it_completes_within_every_limit(
    one: Record, is_good: bool
) -> None:
    assert is_within(one, SLO) is is_good


def test_every_arrival_is_counted_once_and_goodput_is_what_kept_its_limits() -> None:
    runs = [
        run(record(), record(sent_s=8.0, ttft_s=1.8, num_tokens=1)),  # ends after 9.8 s
        run(
            record(sent_s=4.0),
            record(sent_s=4.05, outcome=Outcome.CANCELLED),
            record(num_tokens=0, outcome=Outcome.FAILED),
            record(sent_s=5.0, ttft_s=5.2, num_tokens=1, length_class="long"),  # after 10.2 s
        ),
    ]
    summary = summarize(runs, SLO)
    assert (summary["completed"], summary["failed"], summary["cancelled"]) == (4, 1, 1)
    assert summary["num_prompts"] == 6
    assert summary["duration"] == pytest.approx(20.0)
    assert summary["request_throughput"] == pytest.approx(4 / 20)
    assert summary["request_goodput"] == pytest.approx(2 / 20)
    assert summary["slo_share"] == pytest.approx(2 / 5)
    assert summary["total_input_tokens"] == 4 * 30
    assert summary["total_output_tokens"] == 5 + 1 + 5 + 1
    assert summary["output_throughput"] == pytest.approx(12 / 20)
    assert summary["max_concurrent_requests"] == 2
    by_class = Point(rate=2.0, runs=runs, slo=SLO).by_class
    assert by_class["long"]["request_throughput"] == pytest.approx(1 / 20)
    assert by_class["short"]["num_prompts"] == 5


def test_quantiles_are_those_of_numpy() -> None:
    ttft_s = [random.uniform(0.01, 3.0) for _ in range(31)]
    summary = summarize([run(*(record(ttft_s=t) for t in ttft_s))], SLO)
    assert summary["p99_ttft_ms"] == pytest.approx(1e3 * np.percentile(ttft_s, 99))
    assert summary["median_ttft_ms"] == pytest.approx(1e3 * np.median(ttft_s))
    assert summary["mean_ttft_ms"] == pytest.approx(1e3 * np.mean(ttft_s))
    assert summary["std_ttft_ms"] == pytest.approx(1e3 * np.std(ttft_s))


def test_nothing_gives_no_figures_instead_of_wrong_ones() -> None:
    summary = summarize([run()], SLO)
    assert summary["completed"] == 0
    assert summary["p99_ttft_ms"] is None
    assert summary["slo_share"] is None
    assert summary["request_throughput"] == 0.0


def test_requests_under_way_are_counted_from_sending_to_the_end() -> None:
    at_s, counts = in_flight(
        run(
            record(sent_s=0.0, ttft_s=3.0, num_tokens=1),
            record(sent_s=1.0, ttft_s=1.0, num_tokens=1),
        )
    )
    assert list(zip(at_s, counts, strict=True)) == [(0.0, 1), (1.0, 2), (2.0, 1), (3.0, 0)]


def test_the_highest_good_rate_has_no_bad_rate_below_it() -> None:
    def point(rate: float, num_good: int) -> Point:
        good = [record()] * num_good
        return Point(rate=rate, runs=[run(*good, *[record(ttft_s=0.5)] * (20 - num_good))], slo=SLO)

    assert highest_good_rate([point(4, 18), point(1, 20), point(2, 19)]) == 4
    assert highest_good_rate([point(1, 20), point(2, 17), point(4, 20)]) == 1
    assert highest_good_rate([point(1, 17)]) is None


def test_a_run_file_is_read_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    reader = RunReader(path)
    reader.refresh()
    assert reader.header is None
    file = RunFile(path, HEADER)
    written = [record(sent_s=random.uniform(0, 9)) for _ in range(3)]
    file.add(written[0])
    reader.refresh()
    assert (reader.header, reader.records) == (HEADER, [written[0]])
    file.add(written[1])
    file.close()
    line = json.dumps({"index": 1})
    with path.open("a") as half:
        half.write(line)  # without its end: not there yet
    reader.refresh()
    assert reader.records == written[:2]
