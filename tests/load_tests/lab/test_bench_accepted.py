"""The bench of synthetic acceptance accepts as many drafts as it says, on the shipped model."""

from pathlib import Path

import pytest

from load_tests.lab.bench_accepted import Drafts, build_parser, measure
from tests.harness.seeds import seed_of

MODEL = Path(__file__).resolve().parents[3] / "demo_model" / "laps-demo"
TINY = ["--model", str(MODEL), "--weights", "safetensors", "--device", "cpu", "--works", "3x20",
        "--attention-backend", "prefill", "--graph-tokens", "0", "--num-blocks", "64",
        "--max-model-len", "256", "--max-num-batched-tokens", "64", "--rounds", "1"]  # fmt: skip
SEED = seed_of(__name__)


@pytest.mark.parametrize(("num_drafts", "length"), [(3, 2.5), (1, 1.75), (8, 1.0), (4, 5.0)])
def test_a_probability_gives_the_accepted_length(num_drafts: int, length: float) -> None:
    drafts = Drafts(num_drafts=num_drafts, accepted_length=length)
    assert sum(drafts.probability**i for i in range(num_drafts + 1)) == pytest.approx(length)


def test_a_length_that_no_drafts_give_is_refused() -> None:
    with pytest.raises(ValueError, match=r"3:4\.5: a row gets 1 to 4 tokens of a step"):
        Drafts.parse("3:4.5")


def test_rows_get_what_was_asked_for() -> None:
    args = build_parser().parse_args([*TINY, "--drafts", "3:2.5", "--seed", str(SEED)])
    plain, drafted = measure(MODEL, args)
    assert plain[3] == ""
    assert float(drafted[3]) == pytest.approx(2.5, abs=0.4)  # of some 150 rows with drafts
    wall_ms, processor_ms = map(float, drafted[10:])
    assert 0 < processor_ms <= wall_ms
    args = build_parser().parse_args([*TINY, "--sweep", "0", "--max-drafts", "2"])
    assert len(measure(MODEL, args)) == 2


def test_drafts_of_a_model_count_as_was_asked_for() -> None:
    args = build_parser().parse_args([*TINY, "--drafts", "3:2.5", "--seed", str(SEED)])
    args.draft_model = str(MODEL.with_name("laps-demo-draft"))
    _, drafted = measure(MODEL, args)
    assert float(drafted[3]) == pytest.approx(2.5, abs=0.4)


def test_drafts_that_the_device_looks_up_count_as_was_asked_for() -> None:
    args = build_parser().parse_args(
        [*TINY, "--drafts", "3:2.5", "--sweep", "1", "--ngrams", "device", "--repeat"]
    )
    _, drafted, swept = measure(MODEL, args)
    assert [drafted[2], swept[2]] == ["always 3, device", "controller, device, p 1"]
    assert float(drafted[3]) == pytest.approx(2.5, abs=0.4)
    assert float(drafted[8]) > 2.5  # of three rows, but where they come and go
