"""Scales that were found on prompts: what K and V reach there, by transformers' own cache."""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from engine.errors import ConfigError
from engine.kv_calibration import largest_numbers, scales_for
from tests.harness.seeds import fresh_seed
from tests.harness.tiny_models import save_model


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "DeepseekV3ForCausalLM"])
def test_the_largest_numbers_are_those_of_transformers_cache(
    architecture: str, tmp_path: Path
) -> None:
    """Which has latents as keys and rotated keys as values."""
    save_model(tmp_path, architecture)
    seed = fresh_seed()
    draw = random.Random(seed)
    prompts = [[draw.randrange(3, 130) for _ in range(n)] for n in (1, 40, 17)]
    found = largest_numbers(tmp_path, prompts, "cpu")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    expected = torch.zeros_like(found)
    for prompt in prompts:
        cache = DynamicCache()
        with torch.inference_mode():
            model(torch.tensor([prompt]), past_key_values=cache)
        planes = [plane for layer in cache.layers for plane in (layer.keys[0], layer.values[0])]
        largest = torch.stack([plane.abs().amax(dim=(1, 2)) for plane in planes])
        expected = torch.maximum(expected, largest.view_as(expected))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(scales_for(found, 2.0), found * 2 / 448)


def test_heads_without_numbers_have_no_scale() -> None:
    for number in (0.0, torch.inf, torch.nan):
        with pytest.raises(ConfigError, match="zero or not finite"):
            scales_for(torch.tensor([[[1.0, number]]]), 2.0)
