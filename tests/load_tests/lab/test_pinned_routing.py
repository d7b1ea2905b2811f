"""Pinned routing: uniform, other experts in every layer, the router's own weights."""

from pathlib import Path

import pytest
import torch

from engine.layers.moe import Mixture
from engine.models.registry import build_model
from load_tests.lab import bench_engine
from load_tests.lab.bench_engine import build_parser, run
from load_tests.lab.pinned_routing import count_distinct, pin_routing, uniform_experts
from tests.harness.tiny_models import save_model

CPU = torch.device("cpu")


def test_every_expert_is_as_likely_and_none_is_chosen_twice() -> None:
    experts = uniform_experts(4000, 16, 4, seed=3, device=CPU)
    assert all(len(set(row)) == 4 for row in experts[:100].tolist())
    counts = experts.flatten().bincount(minlength=16)
    assert counts.min() > 850
    assert counts.max() < 1150
    assert torch.equal(experts, uniform_experts(4000, 16, 4, seed=3, device=CPU))
    assert not torch.equal(experts, uniform_experts(4000, 16, 4, seed=4, device=CPU))


def test_a_pinned_model_uses_the_tables_experts(tmp_path: Path) -> None:
    save_model(tmp_path, "Qwen3MoeForCausalLM", num_hidden_layers=3, mlp_only_layers=[1])
    model = build_model(tmp_path, dtype=torch.float32, device=CPU)
    assert count_distinct(model, [4]) == []
    assert pin_routing(model, max_tokens=50, seed=1) == 2
    mlp = model.layers[0].mlp
    assert isinstance(mlp, Mixture)
    x = torch.randn(5, 64)
    first, again = (mlp.router(part, None) for part in (x, x[:3]))
    assert torch.equal(first.ids[:3], again.ids)
    assert torch.allclose(first.weights.sum(dim=1), torch.ones(5))
    (few, many) = count_distinct(model, [1, 40])
    assert (few.least, few.most) == (3, 3)
    assert many.mean == 7
    assert few.describe() == "1 tokens: 3.0 (3 to 3)"


@pytest.mark.lab
@pytest.mark.slow
def test_the_engine_bench_prints_distinct_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_engine, "WARM_UPS", ((2, 8, 2),))
    save_model(tmp_path, "Qwen3MoeForCausalLM")
    args = build_parser().parse_args(
        ["--model", str(tmp_path), "--weights", "safetensors", "--device", "cpu", "--max-rows", "4",
         "--max-model-len", "256", "--max-num-batched-tokens", "48", "--num-blocks", "256",
         "--works", "none", "--no-host", "--pin-routing", "3"]
    )  # fmt: skip
    shown: list[str] = []
    run(args, tmp_path, shown.append)
    [printed] = shown
    assert "1 tokens: 3.0 (3 to 3)" in printed
