"""An EAGLE-3 head in plain torch, in the public checkpoint's names: to train one, and as an oracle.

    g_t = fc([a_t | b_t | c_t])       hidden states that enter three layers of the target at token t
    x_t = [input_layernorm(embed(token_t+1)) | hidden_norm(g_t)]
    r_t = g_t + attention(x_<=t);  h_t = r_t + mlp(post_attention_layernorm(r_t))
    lm_head(norm(h_t))                guesses token_t+2; h_t stands in for g_t+1 when it goes on

Li et al. 2025, "EAGLE-3", https://arxiv.org/abs/2503.01840. Knows nothing of the engine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class EagleHead(nn.Module):
    """The head's parameters and one pass over them; [B, T] = sequences, entries."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.num_heads, self.num_kv_heads = (
            config["num_attention_heads"],
            config["num_key_value_heads"],
        )
        self.head_dim = config.get("head_dim") or hidden // self.num_heads
        entering = 3 * config.get("target_hidden_size", hidden)
        shapes = {
            "fc.weight": (hidden, entering),
            "midlayer.hidden_norm.weight": (hidden,),
            "midlayer.input_layernorm.weight": (hidden,),
            "midlayer.post_attention_layernorm.weight": (hidden,),
            "midlayer.self_attn.q_proj.weight": (self.num_heads * self.head_dim, 2 * hidden),
            "midlayer.self_attn.k_proj.weight": (self.num_kv_heads * self.head_dim, 2 * hidden),
            "midlayer.self_attn.v_proj.weight": (self.num_kv_heads * self.head_dim, 2 * hidden),
            "midlayer.self_attn.o_proj.weight": (hidden, self.num_heads * self.head_dim),
            "midlayer.mlp.gate_proj.weight": (inner, hidden),
            "midlayer.mlp.up_proj.weight": (inner, hidden),
            "midlayer.mlp.down_proj.weight": (hidden, inner),
            "norm.weight": (hidden,),
            "lm_head.weight": (config["draft_vocab_size"], hidden),
        }
        self.names = list(shapes)
        for name, shape in shapes.items():
            start = torch.ones(shape) if "norm" in name else torch.randn(shape) * shape[-1] ** -0.5
            self.register_parameter(name.replace(".", "/"), nn.Parameter(start))
        self.register_buffer("d2t", torch.arange(config["draft_vocab_size"]) * 0)

    def weight(self, name: str) -> Tensor:
        return self.get_parameter(f"{name}.weight".replace(".", "/"))

    @property
    def target_ids(self) -> Tensor:
        """[draft vocabulary]  the target's id of each of the head's."""
        return torch.arange(len(self.d2t)) + self.d2t

    def features(self, entering: Tensor) -> Tensor:
        """entering: [B, T, 3 * target's hidden]; returns g [B, T, hidden]."""
        return functional.linear(entering, self.weight("fc"))

    def project(self, features: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q, k and v, [B, heads, T, head_dim], of entries at the positions 0, 1, ..."""
        eps, layer = self.config["rms_norm_eps"], "midlayer"
        x = torch.cat(
            [
                _rms_norm(embedded, self.weight(f"{layer}.input_layernorm"), eps),
                _rms_norm(features, self.weight(f"{layer}.hidden_norm"), eps),
            ],
            dim=-1,
        )

        def heads(name: str) -> Tensor:
            projected = functional.linear(x, self.weight(f"{layer}.self_attn.{name}_proj"))
            return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        repeats = self.num_heads // self.num_kv_heads
        k, v = (heads(name).repeat_interleave(repeats, dim=1) for name in "kv")
        return self._rotate(heads("q")), self._rotate(k), v

    def _rotate(self, x: Tensor) -> Tensor:
        exponents = torch.arange(0, self.head_dim, 2) / self.head_dim
        angles = torch.arange(x.shape[2]).outer(self.config["rope_theta"] ** -exponents)
        cos, sin = (torch.cat([f(angles), f(angles)], -1).to(x) for f in (torch.cos, torch.sin))
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], -1) * sin

    def finish(self, features: Tensor, attended: Tensor) -> Tensor:
        """attended: [B, heads, T, head_dim]; returns h [B, T, hidden]."""
        out = self.weight("midlayer.self_attn.o_proj")
        stream = features + functional.linear(attended.transpose(1, 2).flatten(2), out)
        eps = self.config["rms_norm_eps"]
        x = _rms_norm(stream, self.weight("midlayer.post_attention_layernorm"), eps)
        gate, up, down = (self.weight(f"midlayer.mlp.{n}_proj") for n in ("gate", "up", "down"))
        inner = functional.silu(functional.linear(x, gate)) * functional.linear(x, up)
        return stream + functional.linear(inner, down)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [..., hidden]; returns [..., draft vocabulary]."""
        normed = _rms_norm(hidden, self.weight("norm"), self.config["rms_norm_eps"])
        return functional.linear(normed, self.weight("lm_head"))

    def forward(self, features: Tensor, embedded: Tensor) -> Tensor:
        """h [B, T, hidden] of entries that see each other causally."""
        q, k, v = self.project(features, embedded)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.finish(features, attended)

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Write the folder as heads are published."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: self.get_parameter(name.replace(".", "/")) for name in self.names}
        tensors = {name: t.detach().to(dtype).contiguous() for name, t in tensors.items()}
        is_known = torch.zeros(self.config["vocab_size"], dtype=torch.bool)
        is_known[self.target_ids] = True
        maps = {"d2t": self.d2t.clone(), "t2d": is_known}
        save_file(tensors | maps, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> EagleHead:
        """The head in fp32."""
        head = cls(json.loads((folder / "config.json").read_text()))
        tensors = load_file(folder / "model.safetensors")
        with torch.no_grad():
            for name in head.names:
                head.get_parameter(name.replace(".", "/")).copy_(tensors[name])
            head.d2t.copy_(tensors["d2t"])
        return head
