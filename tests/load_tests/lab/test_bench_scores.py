"""Requests for scores come when due, in three ways, and take until their last item is answered."""

from pathlib import Path

import pytest

from load_tests.lab.bench_scores import (
    WAYS,
    ScoreLoad,
    bench_config,
    build_parser,
    main,
    measure,
    serve,
)
from load_tests.lab.in_process import EngineInProcess
from tests.harness.seeds import seed_of
from tests.harness.tiny_models import save_model

SEED = seed_of(__name__)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> EngineInProcess:
    folder = tmp_path_factory.mktemp("tiny")
    save_model(folder, "Qwen3ForCausalLM", seed=SEED)
    args = build_parser().parse_args(["--model", str(folder)])
    return EngineInProcess(bench_config(folder, args))


class Clock:
    """Moves by a step's cost at each look, and by what is slept."""

    def __init__(self, look_s: float) -> None:
        self.now_s = 50.0
        self._look_s = look_s

    def now(self) -> float:
        self.now_s += self._look_s
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def load(**given: float) -> ScoreLoad:
    fields = {"rate": 40.0, "num_items": 4, "num_tokens": 9, "duration_s": 1.0, "seed": SEED}
    return ScoreLoad(**{**fields, **given})  # type: ignore[arg-type]


def test_arrivals_are_those_of_the_seed_and_as_many_as_the_rate_says() -> None:
    times_s = load(duration_s=300.0).arrivals_s()
    assert times_s == load(duration_s=300.0).arrivals_s() == sorted(times_s)
    assert times_s[0] == 0.0
    assert times_s[-1] <= 300.0
    # Poisson with mean 3,000: nine deviations.
    assert abs(len(times_s) - 3001) < 9 * 3000**0.5
    assert len(load(duration_s=0.0).arrivals_s()) == 1


@pytest.mark.parametrize("way", WAYS)
def test_a_request_takes_until_its_last_item_is_answered(ours: EngineInProcess, way: str) -> None:
    clock = Clock(look_s=1e-3)
    before = ours.engine.core.scheduler.statistics()
    took_s = serve(ours, load(), WAYS[way], clock.now, clock.sleep)
    after = ours.engine.core.scheduler.statistics()
    assert len(took_s) == len(load().arrivals_s())
    assert min(took_s) > 0
    num_outputs = 0 if way == "score" else 4 * len(took_s)
    assert after.num_output_tokens - before.num_output_tokens == num_outputs
    assert not ours.engine.core.has_work


def test_a_request_that_waited_for_its_turn_took_that_long_too(ours: EngineInProcess) -> None:
    """Each look at the clock takes longer than the gaps between arrivals."""
    clock = Clock(look_s=0.5)
    took_s = serve(ours, load(rate=400.0), WAYS["score"], clock.now, clock.sleep)
    assert max(took_s) > 2.0


def test_the_table_has_a_row_for_each_rate_and_the_highest_good_one(ours: EngineInProcess) -> None:
    switches = ["--rates", "2000,4000", "--seconds", "0.01", "--items", "2", "--tokens", "5"]
    said: list[str] = []
    header, first, second, last = measure(ours, build_parser().parse_args(switches), said.append)
    assert [line.partition(":")[0] for line in said] == [
        f"{rate} items/s, {way}" for rate in (2000, 4000) for way in WAYS
    ]
    assert header[:3] == ["items/s", "score p50 ms", "score p99 ms"]
    assert (first[0], second[0]) == ("2000", "4000")
    assert {len(row) for row in (header, first, second, last)} == {7}
    assert float(first[1]) <= float(first[2])


def test_the_command_prints_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path, "Qwen3ForCausalLM", seed=SEED)
    switches = ["--rates", "900", "--seconds", "0.01", "--items", "2", "--tokens", "5"]
    monkeypatch.setattr("sys.argv", ["bench_scores", "--model", str(tmp_path), *switches])
    main()
    printed = capsys.readouterr().out
    assert "| 900 " in printed
    assert "p99 < 500 ms" in printed
    assert "device: cpu" in printed
