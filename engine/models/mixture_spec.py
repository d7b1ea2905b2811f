"""Reads what config.json says of a mixture of experts. Knows no tensors and no weights.

Mixtral             every layer is a mixture; `num_local_experts` of `intermediate_size`
Qwen2-MoE, Qwen3-MoE  some layers may be dense (`mlp_only_layers`, `decoder_sparse_step`);
                    experts of `moe_intermediate_size`; Qwen2-MoE adds a shared expert
"""

from dataclasses import dataclass, replace

from engine.models.config_file import ConfigFile
from engine.ranks.rank import Rank


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Where a family's published files have a mixture's tensors, below the layer's name."""

    block: str
    gate: str
    up: str
    down: str


QWEN_NAMES = ExpertNames(block="mlp", gate="gate_proj", up="up_proj", down="down_proj")
MIXTRAL_NAMES = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureSpec:
    """The experts of a model; all its mixture layers are alike."""

    num_experts: int
    num_active: int  # experts a token
    expert_size: int  # intermediate size of one expert
    shared_size: int | None  # of the expert that every token passes; None = there is none
    normalises: bool  # the weights of a token's experts are divided by their sum
    layers: tuple[int, ...]  # those that are mixtures; the others are dense
    names: ExpertNames

    def of_rank(self, rank: Rank) -> "MixtureSpec":
        """With a rank's units of every expert. Raises ConfigError if equal parts are impossible."""
        inner = rank.share(self.expert_size, "intermediate units of an expert")
        shared_size = self.shared_size
        if shared_size is not None:
            shared = rank.share(shared_size, "intermediate units of the shared expert")
            shared_size = shared.stop - shared.start
        return replace(self, expert_size=inner.stop - inner.start, shared_size=shared_size)


def read_mixtral(config: ConfigFile, num_layers: int) -> MixtureSpec:
    """Mixtral's experts. Raises ConfigError as all readers of config.json do."""
    num_experts = config.integer("num_local_experts", 8)
    return MixtureSpec(
        num_experts=num_experts,
        num_active=_num_active(config, num_experts, 2),
        expert_size=config.integer("intermediate_size"),
        shared_size=None,
        normalises=True,
        layers=tuple(range(num_layers)),
        names=MIXTRAL_NAMES,
    )


def read_qwen3_moe(config: ConfigFile, num_layers: int) -> MixtureSpec:
    """Qwen3-MoE's experts; none of them is shared."""
    return _read_qwen(config, num_layers, num_experts=128, num_active=8, shared_size=None)


def read_qwen2_moe(config: ConfigFile, num_layers: int) -> MixtureSpec:
    """Qwen2-MoE's experts, one of which every token passes."""
    shared_size = config.integer("shared_expert_intermediate_size")
    return _read_qwen(config, num_layers, num_experts=60, num_active=4, shared_size=shared_size)


def _read_qwen(
    config: ConfigFile,
    num_layers: int,
    *,
    num_experts: int,
    num_active: int,
    shared_size: int | None,
) -> MixtureSpec:
    """num_experts, num_active: the family's defaults."""
    num_experts = _num_experts(config, num_experts)
    return MixtureSpec(
        num_experts=num_experts,
        num_active=_num_active(config, num_experts, num_active),
        expert_size=config.integer("moe_intermediate_size"),
        shared_size=shared_size,
        normalises=config.flag("norm_topk_prob", False),
        layers=_qwen_layers(config, num_layers),
        names=QWEN_NAMES,
    )


def _num_experts(config: ConfigFile, default: int) -> int:
    """transformers 5 writes `num_local_experts` where folders were published with the other."""
    published = config.optional_integer("num_experts")
    renamed = config.optional_integer("num_local_experts")
    if published is not None and renamed is not None and published != renamed:
        raise config.error("num_experts", f"is {published}, but num_local_experts is {renamed}")
    return published or renamed or default


def _num_active(config: ConfigFile, num_experts: int, default: int) -> int:
    num_active = config.integer("num_experts_per_tok", default)
    if num_active > num_experts:
        raise config.error("num_experts_per_tok", f"is {num_active} of {num_experts} experts")
    return num_active


def _qwen_layers(config: ConfigFile, num_layers: int) -> tuple[int, ...]:
    dense = config.integers("mlp_only_layers", minimum=0)
    beyond = [layer for layer in dense if layer >= num_layers]
    if beyond:
        raise config.error("mlp_only_layers", f"names layer {beyond[0]} of {num_layers} layers")
    step = config.integer("decoder_sparse_step", 1)
    layers = tuple(i for i in range(num_layers) if (i + 1) % step == 0 and i not in dense)
    if not layers:
        raise config.error("mlp_only_layers", "and decoder_sparse_step leave no layer with experts")
    return layers
