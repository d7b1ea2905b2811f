"""Models by their shapes alone: a config.json without weights, for random ones."""

import json
from pathlib import Path

_QWEN3_8B: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES = {"qwen3-8b": _QWEN3_8B}


def write_shapes(name: str, folder: Path) -> Path:
    """Write the config.json of `name`, one of SHAPES, to a new folder below `folder`."""
    model = folder / name
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(SHAPES[name], indent=2))
    return model
