"""Random-weight Hugging Face folders of every supported architecture, made with transformers."""

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers

# Names: transformers imports each when it is first used, which takes seconds that other ranks and
# the interpreter's process, which read this file and make no model, need not spend.
CONFIG_CLASSES = {
    "LlamaForCausalLM": "LlamaConfig",
    "MistralForCausalLM": "MistralConfig",
    "Qwen2ForCausalLM": "Qwen2Config",
    "Qwen3ForCausalLM": "Qwen3Config",
    "MixtralForCausalLM": "MixtralConfig",
    "Qwen2MoeForCausalLM": "Qwen2MoeConfig",
    "Qwen3MoeForCausalLM": "Qwen3MoeConfig",
    "DeepseekV2ForCausalLM": "DeepseekV2Config",
    "DeepseekV3ForCausalLM": "DeepseekV3Config",
    "Glm4MoeForCausalLM": "Glm4MoeConfig",
    "Glm4MoeLiteForCausalLM": "Glm4MoeLiteConfig",
    "GptOssForCausalLM": "GptOssConfig",
    "Gemma2ForCausalLM": "Gemma2Config",
    "Gemma3ForCausalLM": "Gemma3TextConfig",
}
# Sizes of small mixtures; odd, as all of these.
MIXTURES: dict[str, dict[str, object]] = {
    "MixtralForCausalLM": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "Qwen2MoeForCausalLM": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "Qwen3MoeForCausalLM": {
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
    },
    "Glm4MoeForCausalLM": {
        "first_k_dense_replace": 0,
        "n_routed_experts": 5,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.5,
        "attention_bias": True,
        "num_mtp_layers": 0,
    },
}
_LATENT: dict[str, object] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "head_dim": 8,  # of the rotated part, as transformers writes it
    "v_head_dim": 20,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
}
# Sizes of small models with latent attention; mixtures after a dense layer.
DEEPSEEKS: dict[str, dict[str, object]] = {
    "DeepseekV2ForCausalLM": {
        **_LATENT,
        "q_lora_rank": None,
        "n_routed_experts": 7,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.5,
    },
    "DeepseekV3ForCausalLM": {
        **_LATENT,
        "q_lora_rank": 28,
        "n_routed_experts": 12,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "num_nextn_predict_layers": 0,
    },
    "Glm4MoeLiteForCausalLM": {
        **_LATENT,
        "q_lora_rank": 28,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "num_nextn_predict_layers": 0,
    },
}
# Sizes that every kernel of latent attention covers, small enough for seconds.
_LATENT_SIZES: dict[str, object] = {
    "hidden_size": 512,
    "intermediate_size": 736,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 32,
    "head_dim": 32,
    "v_head_dim": 64,
    "moe_intermediate_size": 96,
    "dtype": torch.bfloat16,
}
LATENT_ON_GPU: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": {**_LATENT_SIZES, "n_routed_experts": 16},
    "DeepseekV3ForCausalLM": {**_LATENT_SIZES, "q_lora_rank": 192, "n_routed_experts": 16},
    "Glm4MoeLiteForCausalLM": {
        **_LATENT_SIZES,
        "qk_nope_head_dim": 192,  # heads as wide as the published ones
        "qk_rope_head_dim": 64,
        "head_dim": 64,
        "v_head_dim": 256,
        "q_lora_rank": 192,
        "n_routed_experts": 16,
    },
}
# What small models of families with keys of their own have besides.
FAMILIES: dict[str, dict[str, object]] = {
    "GptOssForCausalLM": {
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "intermediate_size": 96,
        "sliding_window": 6,
        "swiglu_limit": 0.9,  # so low that it is reached
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "truncate": False,
        },
    },
    "Gemma2ForCausalLM": {
        "num_hidden_layers": 3,
        "sliding_window": 6,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "tie_word_embeddings": True,
    },
    "Gemma3ForCausalLM": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 6,
        "query_pre_attn_scalar": 24,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
}
VOCAB_SIZE = 131  # odd, so that nothing is a multiple of anything by accident
MAX_SAVED = 4  # models kept

_saved: dict[bytes, "transformers.PreTrainedModel"] = {}  # oldest first


def random_tokens(num_tokens: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(0, VOCAB_SIZE, (num_tokens,), generator=generator).tolist()
    return ids


def save_model(
    folder: Path,
    architecture: str = "LlamaForCausalLM",
    *,
    seed: int = 0,
    max_shard_size: str = "5GB",
    dtype: torch.dtype = torch.float32,
    **settings: object,
) -> "transformers.PreTrainedModel":
    """Write a small model to `folder`; returns it, in fp32, for comparison.

    Weights, norms and biases are all random, so that a missing one cannot hide.
    """
    values: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 88,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        **MIXTURES.get(architecture, {}),
        **DEEPSEEKS.get(architecture, {}),
        **FAMILIES.get(architecture, {}),
        **settings,
    }
    if architecture == "MistralForCausalLM":
        values.setdefault("sliding_window", None)
    config = getattr(transformers, CONFIG_CLASSES[architecture])(**values)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    fill_randomly(model, architecture, seed=seed)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    if dtype != torch.float32:  # its rotary frequencies are rounded, too, which no file has
        return _load_causal(folder, _digest(folder), torch.float32)
    finished = _as_file_says(model.eval())
    _remember(folder, finished)
    return finished


def fill_randomly(model: "transformers.PreTrainedModel", architecture: str, *, seed: int) -> None:
    """Give all parameters random values, norms around what leaves numbers as they are."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                offset = 0 if architecture.startswith("Gemma") else 1
                parameter.copy_(offset + 0.3 * noise)
            elif name.endswith(("bias", "sinks")):
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))


def save_embedding_model(
    folder: Path,
    architecture: str = "Qwen3ForCausalLM",
    *,
    seed: int = 0,
    is_normalised: bool = True,
    max_shard_size: str = "5GB",
    dtype: torch.dtype = torch.float32,
    **settings: object,
) -> None:
    """Write a small embedding model as Qwen3-Embedding is published: without head and prefix.

    Pooling and modules are written as sentence-transformers writes them.
    """
    whole = save_model(folder, architecture, seed=seed, tie_word_embeddings=True, **settings)
    (folder / "model.safetensors").unlink()
    body: transformers.PreTrainedModel = whole.base_model
    body.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    kinds = ["Transformer", "Pooling", *(["Normalize"] if is_normalised else [])]
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": "" if index == 0 else f"{index}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    write_pooling(folder, {"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True})


def write_pooling(folder: Path, modes: dict[str, object]) -> None:
    """Change which pooling the folder asks for."""
    (folder / "1_Pooling").mkdir(exist_ok=True)
    path = folder / "1_Pooling" / "config.json"
    path.write_text(json.dumps({"word_embedding_dimension": 64, "include_prompt": True} | modes))


def reference_embedding(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """What transformers computes for one prompt: its last token's final hidden state, fp32.

    The folder is read once and must not change afterwards.
    """
    with torch.inference_mode():
        hidden: torch.Tensor = _load_body(folder)(torch.tensor([token_ids])).last_hidden_state
    return hidden[0, -1]


@lru_cache(maxsize=4)
def _load_body(folder: Path) -> "transformers.PreTrainedModel":
    body: transformers.PreTrainedModel = transformers.AutoModel.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    return body.eval()


def edit_config(folder: Path, *, remove: tuple[str, ...] = (), **values: object) -> None:
    """Change config.json by hand, as users do."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key in remove:
        del config[key]
    config.update(values)
    path.write_text(json.dumps(config))


def reference_logits(
    folder: Path, token_ids: list[int], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """What transformers computes in `dtype` for one sequence with the model of `folder`.

    It loads the folder itself, unless it has just written it and nobody has changed it. Returns
    fp32 [T, vocab].
    """
    digest = _digest(folder)
    saved = _saved.get(digest) if dtype == torch.float32 else None
    model = saved or _load_causal(folder, digest, dtype)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits
    return logits[0].float()


def _remember(folder: Path, model: "transformers.PreTrainedModel") -> None:
    """Keep the last few models that were saved, by what is in their folders."""
    while len(_saved) >= MAX_SAVED:
        del _saved[next(iter(_saved))]
    _saved[_digest(folder)] = model


def _digest(folder: Path) -> bytes:
    """Of all that is in its files: a test may change them and ask again."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.digest()


@lru_cache(maxsize=4)
def _load_causal(folder: Path, digest: bytes, dtype: torch.dtype) -> "transformers.PreTrainedModel":
    model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=dtype
    )
    return _as_file_says(model.eval())


def _as_file_says(model: "transformers.PreTrainedModel") -> "transformers.PreTrainedModel":
    """Mend what transformers 5.17 takes from nowhere: it has a limit of 7.0, whatever was asked."""
    if (limit := getattr(model.config, "swiglu_limit", None)) is not None:
        for layer in model.model.layers:
            layer.mlp.experts.limit = limit
    return model
