"""The benches of two batches and of two streams run their steps both ways and read them right."""

from pathlib import Path

from engine.layers.context import SINGLE_RANK
from engine.ranks.rank import WHOLE_MODEL
from engine.runner.overlap.rule import H200, OverlapCosts, OverlapRule, layer_costs
from load_tests.lab import bench_shared_beside, bench_two_batches
from load_tests.lab.bench_shared_beside import Size
from load_tests.lab.bench_two_batches import SameSteps, Trial, render_decodes, render_prompts
from tests.engine.ranks.exact_models import build_exact
from tests.engine.runner.step_driver import StepDriver
from tests.harness.tiny_models import save_model


def test_a_size_is_run_whole_in_turn_and_at_once(tmp_path: Path) -> None:
    save_model(tmp_path)
    model, attention = build_exact(tmp_path, WHOLE_MODEL)
    executor = StepDriver(model, seed=1, phased=attention).executor
    rule = OverlapRule(min_prompt_tokens=3, min_decode_rows=None)
    executor.overlap_two_batches(rule, threshold=0.48)
    steps = SameSteps(executor, SINGLE_RANK, num_rounds=2)
    prompt, decode = steps.prompts(50, row_tokens=40), steps.decodes(5, num_keys=9)
    assert (prompt.halves, decode.halves) == ((25, 25), (2, 3))
    assert executor.two_batches.rule == rule
    counts = executor.two_batches.statistics()
    # A warm-up and two rounds each: in turn, at once, what is sent, on the host; and of decodes.
    assert (counts.num_split_prompts, counts.num_split_decodes) == (4 * 3, 3)
    assert counts.num_steps == 6 * 3 + 2 * 3
    costs = OverlapCosts(layer=layer_costs(model.spec, 2, 2), rates=H200)
    assert render_prompts([prompt], costs).splitlines()[2].startswith("| 50     | 25 + 25")
    assert len(render_decodes({2: [decode], 0: [decode]}).splitlines()) == 3


def test_what_is_hidden_is_what_two_at_once_save() -> None:
    trial = Trial(size=8, halves=(4, 4), whole_s=9.0, in_turn_s=12.0, at_once_s=9.0, sent_s=4.0)
    assert (trial.hidden, trial.speed_up) == (0.75, 1.0)
    assert Trial(size=8, halves=(4, 4), whole_s=9.0, at_once_s=9.0).hidden is None


def test_both_benches_ask_for_a_valid_configuration(tmp_path: Path) -> None:
    args = bench_two_batches.build_parser().parse_args(["--device", "cpu", "--expert-parallel"])
    config = bench_two_batches.bench_config(tmp_path, args)
    assert config.execution.enable_two_batch_overlap
    assert config.scheduler.max_num_batched_tokens == 32768
    beside = bench_shared_beside.build_parser().parse_args(["--rows", "4", "--tokens", "64"])
    assert bench_shared_beside.beside_config(tmp_path, beside, 64).model.device == "cuda"
    sizes = bench_shared_beside.sizes_of(beside)
    assert [size.label for size in sizes] == ["4 rows", "prompt of 64"]


def test_the_ratio_of_streams_is_that_of_medians() -> None:
    size = Size(num_rows=1, num_tokens=1, num_keys=3)
    table = bench_shared_beside.render([size], [[[2.0, 4.0, 3.0]]], [[[1.5]]])
    cells = [cell.strip() for cell in table.splitlines()[2].strip("|").split("|")]
    assert cells == ["1 rows", "3000.000", "2000.000 - 4000.000", "1500.000",
                     "1500.000 - 1500.000", "2.000"]  # fmt: skip
    assert size.rows()[0].num_tokens == 4
