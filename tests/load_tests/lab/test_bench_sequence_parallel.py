"""The bench of sequence-parallel steps runs each form and reads what a sum saves."""

from pathlib import Path

from engine.layers.context import SINGLE_RANK
from engine.ranks.rank import WHOLE_MODEL
from load_tests.lab.bench_sequence_parallel import (
    Form,
    Trial,
    bench_config,
    build_parser,
    render,
    time_forms,
)
from tests.engine.ranks.exact_models import build_exact
from tests.engine.runner.step_driver import StepDriver
from tests.harness.tiny_models import save_model


def test_a_size_is_run_in_each_form(tmp_path: Path) -> None:
    save_model(tmp_path)
    model, attention = build_exact(tmp_path, WHOLE_MODEL)
    executor = StepDriver(model, seed=1, phased=attention).executor
    trial = time_forms(executor, SINGLE_RANK, 50, num_rounds=1, row_tokens=40)
    assert list(trial.seconds) == [Form.SUMMED, Form.SHARED], "one rank has no peer memory"
    assert executor.min_exchanged_tokens == 1
    assert min(trial.seconds.values()) > 0


def test_a_sum_saves_its_part_of_what_the_faster_form_saves() -> None:
    seconds = {Form.SUMMED: 0.5, Form.SHARED: 0.45, Form.STREAM: 0.4, Form.STREAMS: 0.41}
    trial = Trial(num_tokens=1000, seconds=seconds)
    cells = render([trial], num_layers=50).splitlines()[2].strip("|").split("|")
    assert [cell.strip() for cell in cells] == [
        *("1,000", "500.00", "450.00", "400.00", "410.00", "0.800", "1000.0", "2,500")
    ]


def test_the_bench_asks_for_a_valid_configuration(tmp_path: Path) -> None:
    config = bench_config(tmp_path, build_parser().parse_args(["--ranks", "2"]))
    assert config.workers.sequence_parallel_min_tokens == 1
    assert config.scheduler.max_num_batched_tokens == 16384
