"""Reads what config.json says of a mixture of experts. Knows no tensors and no weights.

Mixtral             every layer is a mixture; `num_local_experts` of `intermediate_size`
gpt-oss             every layer is a mixture; biases, a clamped gate, files of their own layout
Qwen2-MoE, Qwen3-MoE  some layers may be dense (`mlp_only_layers`, `decoder_sparse_step`);
                    experts of `moe_intermediate_size`; Qwen2-MoE adds a shared expert
DeepSeek-V2, V3     the first layers are dense; shared experts without gate; a token's experts come
                    from a few of the groups
GLM-4.7-Flash       as DeepSeek-V3; a list says which layers are dense (`mlp_layer_types`)
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from engine.models.config_file import ConfigFile
from engine.ranks.rank import Rank
from kernels.moe.clamped_gate import ClampedGate

Scores = Literal["softmax", "sigmoid"]
# units      each rank has a part of the units of every expert, and of a shared one
# experts    each rank has whole experts, and a part of a shared one
# exchanged  each rank has whole experts, and all of a shared one; tokens may travel to experts
# gathered   the same; all tokens may travel to all ranks
# dp_attention  each rank has whole experts, all else of the model, and requests of its own
ExpertSharing = Literal["units", "experts", "exchanged", "gathered", "dp_attention"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Where a family's published files have a mixture's tensors, below the layer's name."""

    block: str
    gate: str
    up: str
    down: str
    router: str = "gate"
    shared: str = "shared_expert"


class ExpertLayout(Enum):
    """How a family's files have the numbers of its experts."""

    BY_EXPERT = "a tensor for each matrix of each expert, or one for all in the same order"
    GPT_OSS = "one tensor for all, inputs by rows, gate and up alternating"
    GPT_OSS_MXFP4 = "blocks and scales for all, outputs by rows, gate and up alternating"


QWEN_NAMES = ExpertNames(block="mlp", gate="gate_proj", up="up_proj", down="down_proj")
DEEPSEEK_NAMES = replace(QWEN_NAMES, shared="shared_experts")
MIXTRAL_NAMES = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")

GPT_OSS_NAMES = replace(QWEN_NAMES, router="router")


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
    has_bias: bool = False  # of the router and of every expert's maps
    gate: ClampedGate | None = None  # None = silu
    layout: ExpertLayout = ExpertLayout.BY_EXPERT
    has_shared_gate: bool = True  # the shared expert's output is multiplied by sigmoid(gate)
    scores: Scores = "softmax"
    has_route_bias: bool = False  # added to a token's scores, but not to its weights
    # Experts in `num_groups` equal groups; a token's are in the best `num_chosen_groups` of them.
    num_groups: int = 1
    num_chosen_groups: int = 1
    route_scale: float = 1.0  # of the weights, after they were divided by their sum
    sharing: ExpertSharing = "units"  # by ranks
    held: range | None = None  # the experts that this rank holds; None = all

    @property
    def is_plain(self) -> bool:
        """Whether the experts of the largest softmax are chosen, and nothing else counts."""
        is_unscaled = self.route_scale == 1.0 and not self.has_route_bias
        return self.scores == "softmax" and self.num_groups == 1 and is_unscaled

    @property
    def has_whole_experts(self) -> bool:
        return self.sharing != "units"

    @property
    def replicates_shared(self) -> bool:
        """Whether every rank has all of the shared expert, for its own share of the tokens."""
        return self.may_share_tokens or self.has_dp_attention

    @property
    def has_dp_attention(self) -> bool:
        """Whether ranks share the experts only, and each has requests of its own."""
        return self.sharing == "dp_attention"

    @property
    def may_share_tokens(self) -> bool:
        """Whether ranks may have shares of a step's tokens between attention and attention."""
        return self.sharing in ("exchanged", "gathered")

    @property
    def num_held(self) -> int:
        """Experts that this rank holds."""
        return self.num_experts if self.held is None else len(self.held)

    def of_rank(self, rank: Rank) -> "MixtureSpec":
        """With a rank's experts, or its units of every expert.

        Raises ConfigError if equal parts are impossible.
        """
        expert_size, held, shared_size = self.expert_size, self.held, self.shared_size
        if self.has_whole_experts and rank.size > 1:
            share = rank.share(self.num_experts, "experts")
            held = range(share.start, share.stop)
        else:
            inner = rank.share(expert_size, "intermediate units of an expert")
            expert_size = inner.stop - inner.start
        if shared_size is not None and not self.replicates_shared:
            shared = rank.share(shared_size, "intermediate units of the shared expert")
            shared_size = shared.stop - shared.start
        return replace(self, expert_size=expert_size, held=held, shared_size=shared_size)


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


def read_gpt_oss(config: ConfigFile, num_layers: int) -> MixtureSpec:
    """gpt-oss's experts; a softmax over the chosen ones is one over all, divided by its sum."""
    num_experts = _num_experts(config, 128)
    return MixtureSpec(
        num_experts=num_experts,
        num_active=_num_active(config, num_experts, 4),
        expert_size=config.integer("intermediate_size", 2880),
        shared_size=None,
        normalises=True,
        layers=tuple(range(num_layers)),
        names=GPT_OSS_NAMES,
        has_bias=True,
        gate=ClampedGate(
            alpha=config.number("swiglu_alpha", 1.702), limit=config.number("swiglu_limit", 7.0)
        ),
        layout=_gpt_oss_layout(config),
    )


def _gpt_oss_layout(config: ConfigFile) -> ExpertLayout:
    section = config.section("quantization_config")
    if section is None:
        return ExpertLayout.GPT_OSS
    method = section.text("quant_method", "")
    if method != "mxfp4":
        raise section.error(
            "quant_method", f"{method!r} is not supported for gpt-oss; supported: mxfp4, or none"
        )
    return ExpertLayout.GPT_OSS_MXFP4


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


def read_deepseek_v2(config: ConfigFile, num_layers: int) -> MixtureSpec | None:
    """DeepSeek-V2's experts: shares by softmax, a group is as good as its best expert."""
    if config.flag("norm_topk_prob", False):
        raise config.error(
            "norm_topk_prob",
            "true is not supported for DeepSeek-V2: transformers ignores it and its makers' code"
            " does not",
        )
    method = config.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise config.error(
            "topk_method",
            f"{method!r} is not supported; supported: greedy, group_limited_greedy",
        )
    groups = (1, 1) if method == "greedy" else _groups(config, None, None)
    default = _DeepseekDefaults(
        num_experts=64, num_active=None, expert_size=1407, num_shared=2, scale=1.0
    )
    layers = _after_dense(config, num_layers, num_dense=0)
    return _read_deepseek(config, layers, default, "softmax", groups, normalises=False)


def read_deepseek_v3(config: ConfigFile, num_layers: int) -> MixtureSpec | None:
    """DeepSeek-V3's experts: sigmoid scores; a bias chooses, a group counts its best two."""
    default = _DeepseekDefaults(
        num_experts=256, num_active=8, expert_size=2048, num_shared=1, scale=2.5
    )
    layers = _after_dense(config, num_layers, num_dense=3)
    return _read_biased(config, layers, default, _groups(config, 8, 4))


def read_glm4_moe_lite(config: ConfigFile, num_layers: int) -> MixtureSpec | None:
    """GLM-4.7-Flash's experts, which are chosen as DeepSeek-V3's."""
    default = _DeepseekDefaults(
        num_experts=64, num_active=4, expert_size=1536, num_shared=1, scale=1.8
    )
    layers = _listed_layers(config, num_layers)
    return _read_biased(config, layers, default, _groups(config, 1, 1))


def _read_biased(
    config: ConfigFile,
    layers: tuple[int, ...],
    default: "_DeepseekDefaults",
    groups: tuple[int, int],
) -> MixtureSpec | None:
    method = config.text("topk_method", "noaux_tc")
    if method != "noaux_tc":
        raise config.error("topk_method", f"{method!r} is not supported; supported: noaux_tc")
    normalises = config.flag("norm_topk_prob", not config.has_key("norm_topk_prob"))  # null: false
    return _read_deepseek(config, layers, default, "sigmoid", groups, normalises=normalises)


def _after_dense(config: ConfigFile, num_layers: int, *, num_dense: int) -> tuple[int, ...]:
    """The layers with experts behind dense ones. num_dense: the family's default."""
    first = config.integer("first_k_dense_replace", num_dense, minimum=0)
    return tuple(range(first, num_layers))


def _listed_layers(config: ConfigFile, num_layers: int) -> tuple[int, ...]:
    """The layers that a list calls sparse; without one all but the first."""
    kinds = config.texts("mlp_layer_types")
    if kinds is None:
        kinds = ("dense",) + ("sparse",) * (num_layers - 1)
    if len(kinds) != num_layers or not set(kinds) <= {"dense", "sparse"}:
        raise config.error("mlp_layer_types", f"must be dense or sparse for {num_layers} layers")
    num_dense = config.optional_integer("first_k_dense_replace")
    if num_dense is not None and "sparse" in kinds and kinds.index("sparse") != num_dense:
        # transformers does not read it, others do not read the list.
        raise config.error(
            "first_k_dense_replace", f"is {num_dense}, but mlp_layer_types says otherwise"
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "sparse")


def _groups(config: ConfigFile, num_groups: int | None, num_chosen: int | None) -> tuple[int, int]:
    """Groups of experts, and those that a token's experts may be in; from the defaults given."""
    num_groups = config.integer("n_group", num_groups)
    num_chosen = config.integer("topk_group", num_chosen)
    if num_chosen > num_groups:
        raise config.error("topk_group", f"is {num_chosen} of {num_groups} groups")
    return num_groups, num_chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class _DeepseekDefaults:
    """What a family's files may leave out."""

    num_experts: int
    num_active: int | None  # None = it must be there
    expert_size: int
    num_shared: int  # shared experts
    scale: float


def _read_deepseek(
    config: ConfigFile,
    layers: tuple[int, ...],
    default: _DeepseekDefaults,
    scores: Scores,
    groups: tuple[int, int],
    *,
    normalises: bool,
) -> MixtureSpec | None:
    """layers: those with experts; None if there are none."""
    expected = config.text("scoring_func", scores)
    if expected != scores:
        raise config.error("scoring_func", f"{expected!r} is not supported; supported: {scores}")
    if config.integer("moe_layer_freq", 1) != 1:
        raise config.error("moe_layer_freq", "other than 1 is not supported")
    if config.flag("mlp_bias", False):
        raise config.error("mlp_bias", "true is not supported for DeepSeek's models")
    num_experts = config.integer("n_routed_experts", default.num_experts)
    chosen = _num_active(config, num_experts, default.num_active)
    num_groups, num_chosen = groups
    group_size = num_experts // num_groups
    least = 2 if scores == "sigmoid" else 1  # experts by which a group is judged
    if num_experts % num_groups or group_size < least or chosen > num_chosen * group_size:
        raise config.error(
            "n_group",
            f"is {num_groups}: {num_experts} experts in such groups, of which {num_chosen} are"
            f" chosen, do not give {chosen} a token",
        )
    expert_size = config.integer("moe_intermediate_size", default.expert_size)
    shared = config.integer("n_shared_experts", default.num_shared, minimum=0) * expert_size
    if not layers:
        return None
    return MixtureSpec(
        num_experts=num_experts,
        num_active=chosen,
        expert_size=expert_size,
        shared_size=shared or None,
        normalises=normalises,
        layers=layers,
        names=DEEPSEEK_NAMES,
        has_shared_gate=False,
        scores=scores,
        has_route_bias=scores == "sigmoid",
        num_groups=num_groups,
        num_chosen_groups=num_chosen,
        route_scale=config.number("routed_scaling_factor", default.scale),
    )


def _num_experts(config: ConfigFile, default: int) -> int:
    """transformers 5 writes `num_local_experts` where folders were published with the other."""
    published = config.optional_integer("num_experts")
    renamed = config.optional_integer("num_local_experts")
    if published is not None and renamed is not None and published != renamed:
        raise config.error("num_experts", f"is {published}, but num_local_experts is {renamed}")
    return published or renamed or default


def _num_active(config: ConfigFile, num_experts: int, default: int | None) -> int:
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
