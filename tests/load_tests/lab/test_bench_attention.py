"""The bench of attention backends, on a CPU: what it counts, and what it says of who cannot run."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.attention.masks import LayerMask
from load_tests.lab import bench_attention as bench

pytestmark = pytest.mark.lab


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small steps, and a clock that says a millisecond."""

    def run_all(calls: Sequence[Callable[[], object]]) -> float:
        for call in calls:
            call()
        return 1000.0

    monkeypatch.setattr(bench, "DEVICE", "cpu")
    monkeypatch.setattr(bench, "graph_us", run_all)
    monkeypatch.setattr(bench, "CASES", {"2 x 5 on 3": (2, 3, 5)})
    monkeypatch.setattr(bench, "DECODE_CASES", {"2 x 1 on 3": (2, 3, 1)})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "no GPU")


@pytest.mark.usefixtures("on_cpu")
def test_a_backend_that_cannot_run_has_a_dash_and_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["--json", str(tmp_path / "found.json")]) == 0
    out = capsys.readouterr().out
    assert "triton: the Triton kernels need a GPU" in out
    assert "flash_attn_4: FlashAttention-4 needs a GPU" in out
    record = json.loads((tmp_path / "found.json").read_text())
    timed = [result for result in record["results"] if result["tflops"] is not None]
    assert [(result["contender"], result["has_sinks"]) for result in timed] == [
        ("flex", False),
        ("flex", True),
        ("flex, a call a row", False),
        ("flex, a call a row", True),
    ]
    pairs = 2 * (4 + 5 + 6 + 7 + 8)
    assert timed[0]["tflops"] == pytest.approx(4 * 32 * 128 * pairs / 1000.0 / 1e6)
    assert len(record["results"]) == 2 * len(bench.CONTENDERS)
    assert out.count("1.000") == 2  # what sinks cost


@pytest.mark.usefixtures("on_cpu")
def test_single_tokens_have_microseconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "DECODING", ("flex",))
    assert bench.main(["--decode", "--shape", "gpt-oss-20b", "--only", "flex"]) == 0
    assert "1000.0 us | 1000.0 us" in capsys.readouterr().out


@pytest.mark.parametrize("window", [None, 1, 4, 7, 50])
@pytest.mark.parametrize(("num_computed", "num_new"), [(0, 9), (3, 5), (20, 1), (6, 2)])
def test_pairs_are_those_of_the_mask(num_computed: int, num_new: int, window: int | None) -> None:
    positions = np.arange(num_computed, num_computed + num_new)
    seen = LayerMask(window=window).seen(positions, np.arange(num_computed + num_new))
    assert bench.num_pairs(num_computed, num_new, window) == seen.sum()


def test_a_wrong_output_is_marked() -> None:
    result = bench.Result(
        contender="flex", case="c", has_sinks=True, us_a_layer=1.0, tflops=2.0, error=float("nan")
    )
    assert not result.is_right
    assert "WRONG" in result.cell


def test_a_stopped_run_shows_what_it_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object) -> Iterator[bench.Result]:
        yield bench.Result(
            contender="flex", case="8 x 1024", has_sinks=False, us_a_layer=1.0, tflops=321.0
        )
        raise SystemExit("stopped")

    monkeypatch.setattr(bench, "results", stopped)
    with pytest.raises(SystemExit):
        bench.main([])
    assert "321" in capsys.readouterr().out
