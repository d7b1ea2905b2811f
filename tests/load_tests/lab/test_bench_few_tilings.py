"""The bench of FP8 products' tilings as far as it needs no GPU."""

from pathlib import Path

import pytest
import torch

from engine.models.registry import build_model
from kernels.quant import fp8_few
from load_tests.lab.bench_few_tilings import (
    CHOSEN,
    KINDS,
    TILINGS,
    Race,
    kind_of,
    race,
    render,
    tiled_by,
    tiling_of,
)
from tests.engine.runner.graph_story import RerunRecorder, row_tensor_attention
from tests.engine.runner.step_driver import StepDriver
from tests.harness.tiny_models import save_model

NUM_SMS = 132
# Gate and up, down, query with key and value, output of Qwen3-8B and of Llama-3.1-8B.
QWEN = ((24576, 4096), (4096, 12288), (6144, 4096), (4096, 4096))
LLAMA = ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096))


@pytest.mark.parametrize("shapes", [QWEN, LLAMA])
def test_a_tiling_changes_the_weights_of_its_kind_alone(
    shapes: tuple[tuple[int, int], ...],
) -> None:
    assert tuple(kind_of(*shape) for shape in shapes) == KINDS
    tiling = tiling_of("deep:split_k=3,prefetch_bytes=256;square:num_stages=5")
    for kind, shape in zip(KINDS, shapes, strict=True):
        chosen = fp8_few.choose_config(16, 2, *shape, NUM_SMS)
        with tiled_by(tiling):
            changed = fp8_few.choose_config(16, 2, *shape, NUM_SMS)
        assert changed == tiling.of(chosen, *shape)
        assert (changed != chosen) == (kind in ("deep", "square"))
        with tiled_by(CHOSEN):
            assert fp8_few.choose_config(16, 2, *shape, NUM_SMS) == chosen
    with tiled_by(tiling_of("all:prefetch_bytes=256")):
        assert fp8_few.choose_config(16, 2, *shapes[0], NUM_SMS).prefetch_bytes == 256


def test_every_tiling_of_the_race_is_one_and_differs_from_the_chosen() -> None:
    assert len(set(TILINGS)) == len(TILINGS)
    for text in TILINGS:
        tiling = tiling_of(text)
        chosen = [fp8_few.choose_config(16, 2, *shape, NUM_SMS) for shape in QWEN]
        changed = [tiling.of(cut, *shape) for cut, shape in zip(chosen, QWEN, strict=True)]
        assert changed != chosen, f"{text} would be measured twice"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("deepest:split_k=2", "'deepest' is none of all"),
        ("deep:parts=2", "parts: a tiling has block_m"),
        ("deep:split_k=two", "invalid literal"),
        ("", "is none of all"),
    ],
)
def test_what_is_no_tiling_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        tiling_of(text)


def test_the_fastest_is_first_beside_the_chosen() -> None:
    table = render({"chosen": [3.04, 3.03, 3.05], "deep:split_k=3": [2.968, 2.9, 3.1]}, 36)
    lines = table.splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["deep:split_k=3", "chosen"]
    assert "-2.00" in lines[2]


def test_a_race_captures_steps_of_one_size_and_times_each_tiling_in_turn(tmp_path: Path) -> None:
    save_model(tmp_path)
    model = build_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    driver = StepDriver(model, seed=1, phased=row_tensor_attention(model))
    timed = Race(driver.executor, num_rows=3, num_keys=9, num_steps=2, recorder=RerunRecorder())
    found = race(timed, [CHOSEN, tiling_of("all:prefetch_bytes=256")], 2)
    assert all(len(rounds) == 2 and min(rounds) > 0.0 for rounds in found.values())
    captured = driver.executor.statistics().decode_graphs
    assert captured is not None
    assert captured.num_graphs == 1
