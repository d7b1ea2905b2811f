"""Frequencies and angles equal transformers' bit by bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.layers.rope_spec import RopeSpec
from engine.layers.rotary import RotaryTable, inverse_frequencies
from engine.models.config_file import ConfigFile
from engine.models.rope_config import parse_rope
from kernels.reference import TorchOps

LENGTHS = {"original_max_position_embeddings": 8192}
CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 10000.0},
    "default_large_theta": {"rope_theta": 1000000},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "llama3.1": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        **LENGTHS,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, **LENGTHS},
    "yarn_narrow_ramp": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "beta_fast": 1.01,
        "beta_slow": 1.0,
        **LENGTHS,
    },
}


def _spec(rope: dict[str, Any], tmp_path: Path) -> RopeSpec:
    values: dict[str, object] = {"max_position_embeddings": 32768, "rope_parameters": dict(rope)}
    return parse_rope(ConfigFile(tmp_path, values))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("head_dim", [6, 64, 128])
def test_angles_equal_transformers_bit_by_bit(case: str, head_dim: int, tmp_path: Path) -> None:
    rope = {"rope_type": "default", **CASES[case]}
    config = LlamaConfig(
        head_dim=head_dim, max_position_embeddings=32768, rope_parameters=dict(rope)
    )
    theirs = LlamaRotaryEmbedding(config)
    spec = _spec(rope, tmp_path)
    if rope["rope_type"] != "default":
        frequencies, _ = ROPE_INIT_FUNCTIONS[str(rope["rope_type"])](config)
        assert torch.equal(inverse_frequencies(spec, head_dim), frequencies)
    positions = torch.tensor([0, 1, 2, 77, 4095, 20011, 32767])
    cos, sin = theirs(torch.zeros(1), positions[None])
    cpu = torch.device("cpu")
    table = RotaryTable(spec, head_dim=head_dim, max_tokens=32768, device=cpu, ops=TorchOps())
    angles = table.angles(positions.int())
    assert torch.equal(angles.cos[:, 0], cos[0])
    half = head_dim // 2
    assert torch.equal(angles.sin[:, 0, half:], sin[0, :, half:])
    assert torch.equal(-angles.sin[:, 0, :half], sin[0, :, :half])
