"""Architecture name -> how its model is built; the one door to a loaded model."""

from collections.abc import Callable
from pathlib import Path

import torch

from engine.errors import ConfigError
from engine.models.decoder import CausalLM, build_decoder
from engine.models.spec import load_spec
from engine.models.weights import load_weights

# All four are one composition; what differs between them is in the spec.
BUILDERS: dict[str, Callable[..., CausalLM]] = {
    "LlamaForCausalLM": build_decoder,
    "MistralForCausalLM": build_decoder,
    "Qwen2ForCausalLM": build_decoder,
    "Qwen3ForCausalLM": build_decoder,
}


def build_model(
    folder: Path, *, dtype: torch.dtype, device: torch.device, max_model_len: int | None = None
) -> CausalLM:
    """Load a Hugging Face folder; `.spec` of the result says what it is.

    `max_model_len` (tokens) may shorten what the model allows, never lengthen it.
    Raises ConfigError for anything in the folder that is missing, unsupported or inconsistent.
    """
    spec = load_spec(folder)
    allowed = spec.max_model_len
    if max_model_len is not None and max_model_len > allowed:
        raise ConfigError(
            f"{folder / 'config.json'}: the model allows {allowed} tokens, max_model_len is"
            f" {max_model_len}"
        )
    weights = load_weights(folder, spec, dtype=dtype, device=device)
    return BUILDERS[spec.architecture](spec, weights, max_model_len=max_model_len or allowed)
