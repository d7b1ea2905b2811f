"""The loading bench on a model of a few kilobytes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.models.registry import build_model
from load_tests.lab import bench_load
from load_tests.lab.shapes import SHAPES

CPU = torch.device("cpu")
TINY = SHAPES["qwen3-8b"] | {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "intermediate_size": 96,
    "vocab_size": 300,
}


def test_a_written_model_can_be_loaded_and_is_cut_into_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setattr(bench_load, "FILE_BYTES", 50_000)
    model = bench_load.write_model("tiny", tmp_path, CPU)
    files = sorted(model.glob("*.safetensors"))
    assert len(files) > 2
    assert bench_load.read_once(model) == sum(file.stat().st_size for file in files)
    loaded = build_model(model, dtype=torch.bfloat16, device=CPU)
    files_of = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    head = load_file(str(model / files_of["lm_head.weight"]))["lm_head.weight"]
    assert len(head.unique()) > 100
    hidden = torch.randn(3, 64).bfloat16()
    exact = hidden.double() @ head.double().T
    assert (loaded.logits(hidden).double() - exact).norm() < 1e-2 * exact.norm()
    rounds_s = bench_load.load_rounds_s(model, CPU)
    assert len(rounds_s) == 3
    assert min(rounds_s) > 0
