"""Quantised forms of the shipped model predict nearly what it predicts; FP8 nearer than 4 bits."""

from pathlib import Path

import torch

from load_tests.lab.quant_accuracy import (
    ONLINE,
    held_out_windows,
    measure,
    measure_kv,
    render,
)


def test_what_formats_change_is_bounded(tmp_path: Path) -> None:
    windows = held_out_windows(2)
    names = ["fp8-block", ONLINE, "awq"]
    published, *found = measure(names, windows, torch.device("cpu"), tmp_path)
    assert published.kl < 1e-6
    assert published.top_1 == 1.0
    for accuracy in found:
        is_fp8 = accuracy.name != "awq"
        assert 1e-5 < accuracy.kl < (0.01 if is_fp8 else 0.08), accuracy
        assert accuracy.top_1 > (0.95 if is_fp8 else 0.85), accuracy
        assert abs(accuracy.perplexity / published.perplexity - 1) < (0.02 if is_fp8 else 0.08)
    assert "| awq " in render([published, *found])


def test_k_and_v_in_fp8_change_little_of_what_the_model_predicts() -> None:
    """Bounds are some three times of what 32,768 tokens show, for a few windows vary."""
    windows = held_out_windows(5)
    plain, *rounded = measure_kv(windows[:2], windows[2:], torch.device("cpu"))
    assert plain.kl < 1e-6
    for found in rounded:
        assert 1e-5 < found.kl < 0.01
        assert found.top_1 > 0.93
        assert abs(found.perplexity / plain.perplexity - 1) < 0.02
