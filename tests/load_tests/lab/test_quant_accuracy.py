"""Quantised forms of the shipped model predict nearly what it predicts; FP8 nearer than 4 bits."""

from pathlib import Path

import torch

from load_tests.lab.quant_accuracy import ONLINE, held_out_windows, measure, render


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
