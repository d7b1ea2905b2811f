"""The loading bench on a model of a few kilobytes."""

from pathlib import Path

import pytest
import torch

from engine.models.registry import build_model
from load_tests import bench_load
from load_tests.shapes import SHAPES

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
    tensors = [loaded.logits(torch.ones(1, 64, dtype=torch.bfloat16))]
    assert all(tensor.isfinite().all() for tensor in tensors)
    rounds_s = bench_load.load_rounds_s(model, CPU)
    assert len(rounds_s) == 3
    assert min(rounds_s) > 0
