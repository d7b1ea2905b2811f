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
_QWEN3_30B_A3B: dict[str, object] = {
    **_QWEN3_8B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_MIXTRAL_8X7B: dict[str, object] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32768,
    "hidden_act": "silu",
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES = {
    "qwen3-8b": _QWEN3_8B,
    "qwen3-30b-a3b": _QWEN3_30B_A3B,
    "mixtral-8x7b": _MIXTRAL_8X7B,
}


def write_shapes(name: str, folder: Path) -> Path:
    """Write the config.json of `name`, one of SHAPES, to a new folder below `folder`."""
    model = folder / name
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(SHAPES[name], indent=2))
    return model
