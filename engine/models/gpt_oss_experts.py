"""Knows the layout of experts in gpt-oss's files: one tensor for all experts of a layer.

    bf16     mlp.experts.gate_up_proj         [experts, hidden, 2 I], gate and up alternate
             mlp.experts.down_proj            [experts, I, hidden]
    MXFP4    mlp.experts.gate_up_proj_blocks  [experts, 2 I, hidden / 32, 16], rows alternate
             mlp.experts.down_proj_blocks     [experts, hidden, I / 32, 16]
             ..._scales                       the blocks' shape without its last dimension
    both     mlp.experts.gate_up_proj_bias    [experts, 2 I], alternating
             mlp.experts.down_proj_bias       [experts, hidden]

They count as the tensors of each expert, under the names that other families publish: blocks as
`weight_packed` and scales as `weight_scale` of compressed-tensors. Knows names and shapes, no
tensors.
"""

import re

from engine.models.mixture_spec import ExpertLayout, MixtureSpec
from engine.models.sources import FusedTensor, Source

BLOCK = 32  # numbers of MXFP4 that share a scale
BLOCK_BYTES = BLOCK // 2
_NAME = re.compile(r"^(.*\.mlp\.experts\.)(gate_up|down)_proj(_bias|_blocks|_scales)?$")


def gpt_oss_tensor(name: str, hidden: int, mixture: MixtureSpec) -> FusedTensor | None:
    """The tensors that `name` stands for in a file; None = it is a published name itself."""
    found = _NAME.match(name)
    if found is None:
        return None
    experts, which, kind = found.groups()
    num_experts = mixture.num_experts
    num_rows = 2 * mixture.expert_size if which == "gate_up" else hidden
    num_columns = hidden if which == "gate_up" else mixture.expert_size
    is_packed = mixture.layout is ExpertLayout.GPT_OSS_MXFP4
    num_blocks = num_columns // BLOCK
    match kind, is_packed:
        case "_bias", _:
            parts = _parts(name, experts, which, mixture, suffix="bias")
            return FusedTensor((num_experts, num_rows), parts)
        case "_blocks", True:
            parts = _parts(name, experts, which, mixture, suffix="weight_packed")
            return FusedTensor((num_experts, num_rows, num_blocks, BLOCK_BYTES), parts, ("U8",))
        case "_scales", True:
            parts = _parts(name, experts, which, mixture, suffix="weight_scale")
            return FusedTensor((num_experts, num_rows, num_blocks), parts, ("U8",))
        case None, False:
            parts = _parts(name, experts, which, mixture, suffix="weight", is_transposed=True)
            return FusedTensor((num_experts, num_columns, num_rows), parts)
    return None  # of the other kind: an unexpected tensor


def _parts(
    name: str,
    experts: str,
    which: str,
    mixture: MixtureSpec,
    *,
    suffix: str,
    is_transposed: bool = False,
) -> dict[str, Source]:
    names = mixture.names
    halves = (names.gate, names.up) if which == "gate_up" else (names.down,)
    return {
        f"{experts}{expert}.{half}.{suffix}": Source(
            name,
            expert,
            first_row=first_row,
            row_step=len(halves),
            is_transposed=is_transposed,
        )
        for expert in range(mixture.num_experts)
        for first_row, half in enumerate(halves)
    }
