"""The bench of quantised products keeps the fastest tiling, and says what failed."""

import pytest

from load_tests.lab.bench_quant import BLOCK_TILINGS, Timing, best, render, tilings
from tests.harness.gpus import gpu


def _timing(way: str, median_us: float | None, problem: str = "") -> Timing:
    return Timing(
        kind="deep", num_tokens=16, format="int4", way=way, median_us=median_us, floor_us=5.0,
        problem=problem,
    )  # fmt: skip


def test_of_many_tilings_the_fastest_is_shown() -> None:
    timings = [_timing("weights", 12.0), _timing("weights 16,64", 11.0)]
    timings += [_timing("weights 16,128", 10.0), _timing("weights 32,64", None, "RuntimeError: no")]
    kept = best(timings)
    assert [timing.way for timing in kept] == ["weights", "weights 16,128"]
    assert "50%" in render(kept)


def test_a_failure_is_a_row_that_says_why() -> None:
    assert "RuntimeError: no" in render(best([_timing("many", None, "RuntimeError: no")]))


@pytest.mark.parametrize("num_tokens", [1, 17, 64, 65, 1024])
def test_tilings_are_for_the_number_of_tokens(num_tokens: int) -> None:
    cuts = tilings(num_tokens)
    assert len(set(cuts)) == len(cuts) > 5
    for cut in cuts:
        assert cut.block_m >= min(num_tokens, 64)
        assert cut.split_k == 1 or num_tokens <= cut.block_m


def test_tiles_of_fp8_have_room_for_two_stages() -> None:
    limit = gpu("H200").shared_memory_per_block_bytes
    for cut in BLOCK_TILINGS:
        held = cut.programs_per_sm * cut.num_stages * 128 * (cut.block_m + cut.block_n)
        assert held < limit
