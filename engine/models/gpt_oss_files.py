"""Knows the layout of experts in gpt-oss's files: one tensor for all experts of a layer.

    bf16     mlp.experts.gate_up_proj         [experts, hidden, 2 I], gate and up alternate
             mlp.experts.down_proj            [experts, I, hidden]
    MXFP4    mlp.experts.gate_up_proj_blocks  [experts, 2 I, hidden / 32, 16], rows alternate
             mlp.experts.down_proj_blocks     [experts, hidden, I / 32, 16]
             ..._scales                       the blocks' shape without its last dimension
    both     mlp.experts.gate_up_proj_bias    [experts, 2 I], alternating
             mlp.experts.down_proj_bias       [experts, hidden]

They count as the tensors of each expert, under the names that other families publish. Knows names
and shapes, no tensors.
"""

import re

from engine.errors import ConfigError
from engine.models.mixture_spec import ExpertLayout, MixtureSpec
from engine.models.sources import FusedTensor, Source

BLOCK = 32  # numbers of MXFP4 that share a scale
BLOCK_BYTES = BLOCK // 2
_NAME = re.compile(r"^(.*\.mlp\.experts\.)(gate_up|down)_proj(_bias|_blocks)?$")


def gpt_oss_tensor(name: str, hidden: int, mixture: MixtureSpec) -> FusedTensor | None:
    """The tensors that `name` stands for in a file; None = it is a published name itself."""
    found = _NAME.match(name)
    if found is None:
        return None
    experts, which, kind = found.groups()
    num_rows = 2 * mixture.expert_size if which == "gate_up" else hidden
    num_columns = hidden if which == "gate_up" else mixture.expert_size
    is_packed = mixture.layout is ExpertLayout.GPT_OSS_MXFP4
    if kind == "_bias":
        parts = _parts(name, experts, which, mixture, suffix="bias")
        return FusedTensor((mixture.num_experts, num_rows), parts)
    if (kind == "_blocks") is not is_packed:
        return None  # of the other kind: an unexpected tensor
    if not is_packed:
        parts = _parts(name, experts, which, mixture, is_transposed=True)
        return FusedTensor((mixture.num_experts, num_columns, num_rows), parts)
    scales = f"{experts}{which}_proj_scales"
    parts = _parts(name, experts, which, mixture, scales=scales)
    num_blocks = num_columns // BLOCK
    return FusedTensor((mixture.num_experts, num_rows, num_blocks, BLOCK_BYTES), parts, ("U8",))


def scale_shapes(
    hidden: int, mixture: MixtureSpec | None, num_layers: int
) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the scales that files in MXFP4 have to hold; none in other files.

    Raises ConfigError for sizes that do not fill their blocks.
    """
    if mixture is None or mixture.layout is not ExpertLayout.GPT_OSS_MXFP4:
        return {}
    inner, num_experts = mixture.expert_size, mixture.num_experts
    for size in (hidden, inner):
        if size % BLOCK:
            raise ConfigError(
                f"quantization_config: mxfp4 has blocks of {BLOCK} inputs, which {size} do not fill"
            )
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(num_layers):
        experts = f"model.layers.{layer}.mlp.experts."
        shapes[f"{experts}gate_up_proj_scales"] = (num_experts, 2 * inner, hidden // BLOCK)
        shapes[f"{experts}down_proj_scales"] = (num_experts, hidden, inner // BLOCK)
    return shapes


def _parts(
    name: str,
    experts: str,
    which: str,
    mixture: MixtureSpec,
    *,
    suffix: str = "weight",
    is_transposed: bool = False,
    scales: str | None = None,
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
            scales=scales,
        )
        for expert in range(mixture.num_experts)
        for first_row, half in enumerate(halves)
    }
