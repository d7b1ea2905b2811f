"""Small models with a layer that guesses, and what an independent implementation makes of it."""

from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

from tests.harness.tiny_models import edit_config, save_model

NUM_LAYERS = 2  # of the target: one dense, one a mixture
_PREFIX = f"model.layers.{NUM_LAYERS}."


def save_mtp_model(
    folder: Path, *, seed: int, architecture: str = "DeepseekV3ForCausalLM", **settings: object
) -> None:
    """A model whose last layer is published as the one that guesses: it is like the others.

    Beside the layer: its norms and its map, and copies of embedding and head, which are wrong.
    """
    settings = {"num_hidden_layers": NUM_LAYERS + 1, **settings}
    save_model(folder, architecture, seed=seed, **settings)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(seed)
    hidden = len(tensors["model.norm.weight"])

    def drawn(*shape: int) -> Tensor:
        noise = torch.randn(shape, generator=generator, dtype=torch.float32)
        return noise.to(tensors["lm_head.weight"].dtype)

    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{_PREFIX}{name}.weight"] = 1 + 0.3 * drawn(hidden)
    tensors[f"{_PREFIX}eh_proj.weight"] = drawn(hidden, 2 * hidden) * (2 * hidden) ** -0.5
    for name in ("embed_tokens", "shared_head.head"):
        tensors[f"{_PREFIX}{name}.weight"] = torch.zeros_like(tensors["lm_head.weight"])
    save_file(tensors, path, metadata={"format": "pt"})
    counts = {"num_hidden_layers": NUM_LAYERS, "num_nextn_predict_layers": 1}
    edit_config(folder, **counts, mlp_layer_types=None)  # GLM's list has the layer that guesses


def make_guessable(folder: Path, seed: int, strength: float) -> None:
    """The more, the more a token alone says which one follows, in the model and in its layer."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    embedding = tensors["model.embed_tokens.weight"]
    generator = torch.Generator().manual_seed(seed)
    follows = torch.randperm(len(embedding), generator=generator)
    tensors["lm_head.weight"][follows] = embedding
    tensors["model.embed_tokens.weight"] = strength * embedding
    join = tensors[f"{_PREFIX}eh_proj.weight"]
    join[:, : len(join)] += 16 * strength * torch.eye(len(join))
    save_file(tensors, path, metadata={"format": "pt"})


class PlainMtp:
    """The published formula around transformers' decoder layer; it has no such module itself."""

    def __init__(self, folder: Path) -> None:
        self._tensors = load_file(folder / "model.safetensors")
        self._target = self._model(folder, NUM_LAYERS)
        whole = self._model(folder, NUM_LAYERS + 1)  # the guessing layer where it was made
        self._layer = whole.model.layers[NUM_LAYERS]
        self._rotary = whole.model.rotary_emb
        self._eps = whole.config.rms_norm_eps

    @staticmethod
    def _model(folder: Path, num_layers: int) -> PreTrainedModel:
        config = AutoConfig.from_pretrained(folder, num_hidden_layers=num_layers)
        if config.model_type == "glm4_moe_lite":  # its list was made before
            config.mlp_layer_types = ["dense"] + ["sparse"] * (num_layers - 1)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32, config=config
        ).eval()
        return model

    @torch.inference_mode()
    def greedy_drafts(self, tokens: list[int], num_drafts: int) -> list[int]:
        """Each from the whole text, with the layer's own states where none is true."""
        known = torch.tensor([tokens[:-1]])
        states = self._target.model(known).last_hidden_state
        drafts: list[int] = []
        for _ in range(num_drafts):
            guessed = self._guess(torch.tensor([[*tokens[1:], *drafts]]), states)
            drafts.append(int(self._target.lm_head(guessed[0, -1]).argmax()))
            states = torch.cat([states, guessed[:, -1:]], dim=1)
        return drafts

    def _guess(self, following: Tensor, states: Tensor) -> Tensor:
        """following: [1, T] the token after each; states: [1, T, hidden]."""
        embedded = self._target.get_input_embeddings()(following)
        both = torch.cat([self._norm("enorm", embedded), self._norm("hnorm", states)], dim=-1)
        x = both @ self._tensors[f"{_PREFIX}eh_proj.weight"].T
        positions = torch.arange(x.shape[1])[None]
        mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)[None, None]
        out = self._layer(
            x,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=self._rotary(x, positions),
        )
        return self._norm("shared_head.norm", out[0] if isinstance(out, tuple) else out)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        norm = DeepseekV3RMSNorm(x.shape[-1], self._eps)
        norm.weight.copy_(self._tensors[f"{_PREFIX}{name}.weight"])
        normed: Tensor = norm(x)
        return normed


@lru_cache(maxsize=1)
def plain_mtp(folder: Path) -> PlainMtp:
    return PlainMtp(folder)
