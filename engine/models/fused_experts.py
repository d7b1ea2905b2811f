"""Knows the second layout of experts in a file: one tensor for all experts of a layer.

    published             <block>.experts.<e>.gate_proj.weight   [I, hidden], up_proj, down_proj
    as transformers has   mlp.experts.gate_up_proj   [experts, 2 I, hidden], rows of gate first
    them in memory        mlp.experts.down_proj      [experts, hidden, I]
                          mlp.gate.weight            [experts, hidden], Mixtral's too

`save_pretrained(save_original_format=False)` writes the second. Both hold the same numbers, so that
a fused tensor counts as its parts under their published names. gpt-oss has a layout of its own
(gpt_oss_experts.py). Knows names and shapes, no tensors.
"""

import re

from engine.models.gpt_oss_experts import gpt_oss_tensor
from engine.models.mixture_spec import ExpertLayout, MixtureSpec
from engine.models.sources import FusedTensor, Source
from engine.models.spec import ModelSpec

_FUSED = re.compile(r"^(model\.layers\.(\d+)\.)mlp\.(experts\.(gate_up|down)_proj|gate\.weight)$")


def find_fused(name: str, spec: ModelSpec) -> FusedTensor | None:
    """The tensor that `name` stands for in the second layout; None = it is not of that layout."""
    mixture = spec.mixture
    if mixture is not None and mixture.layout is not ExpertLayout.BY_EXPERT:
        return gpt_oss_tensor(name, spec.hidden_size, mixture)
    found = _FUSED.match(name)
    mixture = None if found is None else spec.mixture_at(int(found[2]))
    if found is None or mixture is None:
        return None
    block = f"{found[1]}{mixture.names.block}"
    num_experts, hidden, inner = mixture.num_experts, spec.hidden_size, mixture.expert_size
    match found[4]:
        case "gate_up":
            parts = _gate_up_parts(name, block, mixture)
            return FusedTensor((num_experts, 2 * inner, hidden), parts)
        case "down":
            return FusedTensor((num_experts, hidden, inner), _down_parts(name, block, mixture))
        case _:
            return FusedTensor((num_experts, hidden), {f"{block}.gate.weight": Source(name)})


def _gate_up_parts(name: str, block: str, mixture: MixtureSpec) -> dict[str, Source]:
    halves = {mixture.names.gate: 0, mixture.names.up: mixture.expert_size}
    return {
        f"{block}.experts.{expert}.{half}.weight": Source(name, expert, first_row)
        for expert in range(mixture.num_experts)
        for half, first_row in halves.items()
    }


def _down_parts(name: str, block: str, mixture: MixtureSpec) -> dict[str, Source]:
    return {
        f"{block}.experts.{expert}.{mixture.names.down}.weight": Source(name, expert)
        for expert in range(mixture.num_experts)
    }
