"""Reads a model's specification from the JSON files of a Hugging Face folder.

transformers is not imported, because that would add seconds to start-up. Knows no tensors and no
weights.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Literal, cast, get_args

from engine.kv.layout import ComputeDtype, KvDtype, KvLayout
from engine.layers.rope_spec import RopeSpec
from engine.models.config_file import ConfigFile
from engine.models.latent_spec import DEEPSEEK, GLM, LatentDefaults, LatentSpec, read_latent
from engine.models.layer_windows import (
    alternating_windows,
    qwen2_moe_windows,
    qwen_window,
    qwen_windows,
)
from engine.models.mixture_spec import (
    ExpertLayout,
    ExpertSharing,
    MixtureSpec,
    read_deepseek_v2,
    read_deepseek_v3,
    read_glm4_moe,
    read_glm4_moe_lite,
    read_gpt_oss,
    read_mixtral,
    read_qwen2_moe,
    read_qwen3_moe,
)
from engine.models.pooling import Pooling, read_pooling
from engine.models.quantization.config import read_quantization
from engine.models.quantization.scheme import GPT_OSS_MXFP4, ONLINE_FP8, Quantization
from engine.models.rope_config import (
    DEFAULT_THETA,
    max_tokens_of,
    parse_layer_ropes,
    parse_partial_rope,
    parse_rope,
)
from engine.ranks.rank import Rank


class Activation(Enum):
    """Of the gate in a dense feed-forward part."""

    SILU = "silu"
    GELU_TANH = "gelu in its tanh form"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder with grouped-query or latent attention and gated feed-forward parts."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of dense layers
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # with latent attention, of a query
    rms_norm_eps: float
    has_tied_embeddings: bool
    has_qkv_bias: bool
    has_output_bias: bool  # attention's output projection
    has_mlp_bias: bool
    has_qk_norm: bool
    # One per layer: a query sees itself and the window - 1 keys before it; None = all before it.
    layer_windows: tuple[int | None, ...]
    rope: RopeSpec
    local_rope: RopeSpec | None = None  # of layers with a window; None = `rope`
    query_scale: float | None = None  # on the scores; None = 1 / sqrt(head_dim)
    attention_softcap: float | None = None  # scaled scores s become cap * tanh(s / cap)
    logit_softcap: float | None = None  # likewise the head's logits
    has_sinks: bool = False  # one more logit in every head's softmax, without a value
    activation: Activation = Activation.SILU
    norm_offset: float = 0.0  # added to the weights of all norms
    has_output_norms: bool = False  # also after attention and MLP, before they are added
    embedding_scale: float | None = None  # on the embedding's output; None = 1
    file_prefix: str = ""  # of all names in the files; without it: of parts that are not served
    max_model_len: int  # tokens
    eos_token_ids: tuple[int, ...]  # config.json's, then generation_config.json's others
    dtype: ComputeDtype  # of the weights as published
    pooling: Pooling | None = None  # None = it generates; else it has no head and makes embeddings
    mixture: MixtureSpec | None = None  # None = every layer is dense
    quantization: Quantization | None = None  # of the layers' linear maps; None = not quantised
    latent: LatentSpec | None = None  # None = K and V of every KV head are kept
    # Layers after the last that guess further tokens, in the files; a drafter's, not the model's.
    num_guessing_layers: int = 0

    @property
    def rotary_dim(self) -> int:
        """Numbers of a head that are rotated."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    def mixture_at(self, layer: int) -> MixtureSpec | None:
        """The experts of `layer`; None = it is dense."""
        mixture = self.mixture
        return mixture if mixture is not None and layer in mixture.layers else None

    @property
    def has_dp_attention(self) -> bool:
        """Whether ranks share nothing but experts: each computes all else, of its own requests."""
        return self.mixture is not None and self.mixture.has_dp_attention

    def of_rank(self, rank: Rank) -> "ModelSpec":
        """The model as one rank computes it: with its heads and its intermediate units.

        Of experts it has some, or of each a part of the units. Vocabulary and hidden size stay
        whole, and so does the latent of latent attention, which every rank keeps. Of fewer KV heads
        than ranks, several ranks hold the same one. With DP attention all but the experts stays
        whole. Raises ConfigError if the ranks cannot share the model equally.
        """
        if self.mixture is not None and self.mixture.has_dp_attention:
            return replace(self, mixture=self.mixture.of_rank(rank))
        heads = f"{self.num_heads} attention heads and {self.num_kv_heads} KV heads"
        query = rank.share(self.num_heads, f"query heads ({heads})")
        kv = rank.share(self.num_kv_heads, f"KV heads ({heads})", unit=1)
        mixture, inner_size = self.mixture, self.intermediate_size
        if mixture is None or len(mixture.layers) < self.num_layers:  # else it means nothing
            inner = rank.share(inner_size, "intermediate units")
            inner_size = inner.stop - inner.start
        return replace(
            self,
            num_heads=query.stop - query.start,
            num_kv_heads=kv.stop - kv.start,
            intermediate_size=inner_size,
            mixture=None if mixture is None else mixture.of_rank(rank),
        )

    def kv_layout(self, *, block_size: int, dtype: KvDtype, scales: str = "") -> KvLayout:
        """Layout of this model's KV blocks of `block_size` tokens; scales: as of `KvLayout`."""
        if self.latent is not None:
            return KvLayout.latent(
                num_layers=self.num_layers,
                block_size=block_size,
                width=self.latent.width,
                dtype=dtype,
                scales=scales,
            )
        return KvLayout.with_heads(
            num_layers=self.num_layers,
            block_size=block_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=dtype,
            scales=scales,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What differs between architectures, read from each architecture's own keys."""

    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    default_num_kv_heads: int | None = None  # None = as many as query heads
    default_head_dim: int | None = None  # None = hidden_size / heads
    default_rms_norm_eps: float = 1e-6
    default_theta: float = DEFAULT_THETA
    layer_windows: tuple[int | None, ...]
    mixture: MixtureSpec | None = None
    has_sinks: bool = False
    latent: LatentSpec | None = None
    num_guessing_layers: int = 0
    # None = as config.json has for all layers
    rope: RopeSpec | None = None
    local_rope: RopeSpec | None = None
    partly_rotated: float | None = None  # the share of a head, where config.json says none
    query_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    is_gemma: bool = False
    file_prefix: str = ""


def _llama(config: ConfigFile, num_layers: int) -> _Family:
    has_attention_bias = config.flag("attention_bias", False)
    return _Family(
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        has_mlp_bias=config.flag("mlp_bias", False),
        layer_windows=(None,) * num_layers,
    )


def _mistral(config: ConfigFile, num_layers: int) -> _Family:
    # Absent and null differ here: the family's default is 4096 tokens, null means no window.
    window = config.optional_integer("sliding_window")
    if window is None and not config.has_key("sliding_window"):
        window = 4096
    if len(set(config.texts("layer_types") or ())) > 1:
        raise config.error("layer_types", "of two kinds are not supported for this architecture")
    return _Family(default_num_kv_heads=8, layer_windows=(window,) * num_layers)


def _qwen2(config: ConfigFile, num_layers: int) -> _Family:
    return _Family(
        has_qkv_bias=True,
        default_num_kv_heads=32,
        layer_windows=qwen_windows(config, num_layers),
    )


def _qwen3(config: ConfigFile, num_layers: int) -> _Family:
    has_attention_bias = config.flag("attention_bias", False)
    return _Family(
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        has_qk_norm=True,
        default_num_kv_heads=32,
        default_head_dim=128,
        layer_windows=qwen_windows(config, num_layers),
    )


def _mixtral(config: ConfigFile, num_layers: int) -> _Family:
    window = config.optional_integer("sliding_window")  # absent and null are the same here
    return _Family(
        default_num_kv_heads=8,
        default_rms_norm_eps=1e-5,
        default_theta=1e6,
        layer_windows=(window,) * num_layers,
        mixture=read_mixtral(config, num_layers),
    )


def _qwen2_moe(config: ConfigFile, num_layers: int) -> _Family:
    return _Family(
        has_qkv_bias=config.flag("qkv_bias", True),
        default_num_kv_heads=16,
        layer_windows=qwen2_moe_windows(config, num_layers),
        mixture=read_qwen2_moe(config, num_layers),
    )


def _qwen3_moe(config: ConfigFile, num_layers: int) -> _Family:
    has_attention_bias = config.flag("attention_bias", False)
    window = qwen_window(config)  # of every layer
    return _Family(
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        has_qk_norm=True,
        default_num_kv_heads=4,
        layer_windows=(window,) * num_layers,
        mixture=read_qwen3_moe(config, num_layers),
    )


def _gpt_oss(config: ConfigFile, num_layers: int) -> _Family:
    if config.section("rope_scaling") is None and config.section("rope_parameters") is None:
        raise config.error("rope_scaling", "is missing; gpt-oss has YaRN")
    has_attention_bias = config.flag("attention_bias", True)
    return _Family(
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        default_num_kv_heads=8,
        default_head_dim=64,
        default_rms_norm_eps=1e-5,
        default_theta=150000.0,
        layer_windows=alternating_windows(config, num_layers, default=128, full_every=2),
        mixture=read_gpt_oss(config, num_layers),
        has_sinks=True,
    )


def _gemma2(config: ConfigFile, num_layers: int) -> _Family:
    _refuse_unlike_gemma(config)
    has_attention_bias = config.flag("attention_bias", False)
    return _Family(
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        default_num_kv_heads=4,
        default_head_dim=256,
        layer_windows=alternating_windows(config, num_layers, default=4096, full_every=2),
        query_scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_softcap=_softcap(config, "attn_logit_softcapping", 50.0),
        logit_softcap=_softcap(config, "final_logit_softcapping", 30.0),
        is_gemma=True,
    )


def _softcap(config: ConfigFile, key: str, default: float) -> float | None:
    """Absent and null differ: null means no cap."""
    cap = config.optional_number(key) if config.has_key(key) else default
    if cap is not None and cap <= 0:
        raise config.error(key, f"{cap} is not supported; supported: null and positive numbers")
    return cap


def _refuse_unlike_gemma(config: ConfigFile) -> None:
    activation = config.text("hidden_activation", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise config.error("hidden_activation", f"{activation!r} is not supported for Gemma")
    if config.flag("use_bidirectional_attention", False):
        raise config.error("use_bidirectional_attention", "true is not supported")


def _gemma3(config: ConfigFile, num_layers: int) -> _Family:
    _refuse_unlike_gemma(config)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.optional_number(key) is not None:
            raise config.error(key, "is not supported; supported: null")
    rope, local_rope = parse_layer_ropes(config, default_theta=1e6, default_local_theta=1e4)
    has_attention_bias = config.flag("attention_bias", False)
    every = config.integer("sliding_window_pattern", 6)
    return _Family(
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        has_qk_norm=True,
        default_num_kv_heads=4,
        default_head_dim=256,
        layer_windows=alternating_windows(config, num_layers, default=4096, full_every=every),
        rope=rope,
        local_rope=local_rope,
        query_scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        is_gemma=True,
    )


def _gemma3_with_vision(config: ConfigFile, num_layers: int) -> _Family:
    return replace(_gemma3(config, num_layers), file_prefix="language_model.")


def _deepseek_v2(config: ConfigFile, num_layers: int) -> _Family:
    mixture = read_deepseek_v2(config, num_layers)
    return _deepseek(config, num_layers, mixture, DEEPSEEK, is_interleaved=True)


def _deepseek_v3(config: ConfigFile, num_layers: int) -> _Family:
    mixture = read_deepseek_v3(config, num_layers)
    return _like_deepseek_v3(config, num_layers, mixture, DEEPSEEK)


def _glm4_moe(config: ConfigFile, num_layers: int) -> _Family:
    return _Family(
        has_qkv_bias=config.flag("attention_bias", False),
        has_qk_norm=config.flag("use_qk_norm", False),
        default_num_kv_heads=8,
        default_rms_norm_eps=1e-5,
        layer_windows=(None,) * num_layers,
        mixture=read_glm4_moe(config, num_layers),
        num_guessing_layers=config.integer("num_nextn_predict_layers", 1, minimum=0),
        partly_rotated=0.5,
    )


def _glm4_moe_lite(config: ConfigFile, num_layers: int) -> _Family:
    mixture = read_glm4_moe_lite(config, num_layers)
    family = _like_deepseek_v3(config, num_layers, mixture, GLM)
    return replace(family, default_rms_norm_eps=1e-5)


def _like_deepseek_v3(
    config: ConfigFile, num_layers: int, mixture: MixtureSpec | None, default: LatentDefaults
) -> _Family:
    # Absent and null differ here: transformers reads null as false.
    is_interleaved = config.flag("rope_interleave", not config.has_key("rope_interleave"))
    family = _deepseek(config, num_layers, mixture, default, is_interleaved=is_interleaved)
    num_guessing = config.integer("num_nextn_predict_layers", 1, minimum=0)
    return replace(family, num_guessing_layers=num_guessing)


def _deepseek(
    config: ConfigFile,
    num_layers: int,
    mixture: MixtureSpec | None,
    default: LatentDefaults,
    *,
    is_interleaved: bool,
) -> _Family:
    has_attention_bias = config.flag("attention_bias", False)
    latent = read_latent(
        config, config.integer("num_attention_heads"), default, is_interleaved=is_interleaved
    )
    return _Family(
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        layer_windows=(None,) * num_layers,
        mixture=mixture,
        latent=latent,
    )


_WITH_VISION = "Gemma3ForConditionalGeneration"  # served as the text model that it contains
# What published text_configs leave out where it is the family's default.
_GEMMA3_DEFAULTS: dict[str, object] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
}


_FAMILIES: dict[str, Callable[[ConfigFile, int], _Family]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "MixtralForCausalLM": _mixtral,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "GptOssForCausalLM": _gpt_oss,
    "DeepseekV2ForCausalLM": _deepseek_v2,
    "DeepseekV3ForCausalLM": _deepseek_v3,
    "Glm4MoeForCausalLM": _glm4_moe,
    "Glm4MoeLiteForCausalLM": _glm4_moe_lite,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    _WITH_VISION: _gemma3_with_vision,
}
SUPPORTED_ARCHITECTURES = tuple(_FAMILIES)
_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads")


def load_spec(
    folder: Path,
    *,
    quantization: Literal["auto", "fp8"] = "auto",
    sharing: ExpertSharing = "units",
) -> ModelSpec:
    """Read `config.json` and, where present, `generation_config.json`.

    quantization: auto = as config.json says; fp8 = quantise. sharing: of experts, by ranks.
    Raises ConfigError, naming the file, the key and what is supported.
    """
    config = ConfigFile.read(folder / "config.json")
    pooling = read_pooling(folder, config)
    architecture = _architecture(config, has_head=pooling is None)
    if architecture == _WITH_VISION:
        config = config.around("text_config", _GEMMA3_DEFAULTS)
    num_layers, hidden_size, num_heads = map(config.integer, _SIZES)
    family = _FAMILIES[architecture](config, num_layers)
    _refuse_unsupported(config, family)
    head_dim = _head_dim(config, family, hidden_size // num_heads)
    rope, max_model_len = _context(config, family, head_dim)
    vocab_size = config.integer("vocab_size")
    has_tied_embeddings = config.flag("tie_word_embeddings", family.is_gemma)
    has_head = pooling is None and not has_tied_embeddings
    return ModelSpec(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(config, family, num_heads),
        head_dim=head_dim,
        rms_norm_eps=config.number("rms_norm_eps", family.default_rms_norm_eps),
        has_tied_embeddings=has_tied_embeddings,
        has_qkv_bias=family.has_qkv_bias,
        has_output_bias=family.has_output_bias,
        has_mlp_bias=family.has_mlp_bias,
        has_qk_norm=family.has_qk_norm,
        layer_windows=family.layer_windows,
        has_sinks=family.has_sinks,
        rope=rope,
        local_rope=family.local_rope,
        query_scale=family.query_scale,
        attention_softcap=family.attention_softcap,
        logit_softcap=family.logit_softcap,
        activation=Activation.GELU_TANH if family.is_gemma else Activation.SILU,
        norm_offset=1.0 if family.is_gemma else 0.0,
        has_output_norms=family.is_gemma,
        embedding_scale=hidden_size**0.5 if family.is_gemma else None,
        file_prefix=family.file_prefix,
        max_model_len=max_model_len,
        eos_token_ids=_eos_token_ids(config, folder, vocab_size),
        dtype=_dtype(config),
        pooling=pooling,
        mixture=_shared_mixture(config, family, sharing),
        latent=family.latent,
        num_guessing_layers=family.num_guessing_layers,
        quantization=_quantization(config, quantization, family, has_head=has_head),
    )


def _shared_mixture(
    config: ConfigFile, family: _Family, sharing: ExpertSharing
) -> MixtureSpec | None:
    if sharing == "units":
        return family.mixture
    if family.mixture is None:
        keys, instead = "expert_parallel", ""
        if sharing == "dp_attention":
            keys = "enable_dp_attention and expert_parallel"
            instead = ": its ranks split heads, or more workers of one rank serve more requests"
        raise config.error("architectures", f"has no experts; set workers.{keys} to false{instead}")
    return replace(family.mixture, sharing=sharing)


def _num_kv_heads(config: ConfigFile, family: _Family, num_heads: int) -> int:
    default = family.default_num_kv_heads
    if default is None or config.has_key("num_key_value_heads"):  # null, unlike absent
        default = num_heads
    num_kv_heads = config.integer("num_key_value_heads", default)
    if num_heads % num_kv_heads:
        raise config.error(
            "num_key_value_heads", f"{num_kv_heads} does not divide {num_heads} query heads"
        )
    return num_kv_heads


def _context(config: ConfigFile, family: _Family, head_dim: int) -> tuple[RopeSpec, int]:
    """The rotary settings of all but local layers, and the longest context in tokens."""
    max_positions = config.integer("max_position_embeddings")
    if family.rope is not None:
        return family.rope, max_positions  # which is the extended length
    if family.partly_rotated is None:
        rope = parse_rope(config, family.default_theta)
    else:
        rope = parse_partial_rope(config, family.partly_rotated)
        num_rotated = int(head_dim * rope.rotated_share)
        if num_rotated % 2 or num_rotated == 0:
            raise config.error(
                "partial_rotary_factor", f"leaves {num_rotated} of {head_dim} numbers, no pairs"
            )
    return rope, max_tokens_of(rope, max_positions)


def _quantization(
    config: ConfigFile, asked: str, family: _Family, *, has_head: bool
) -> Quantization | None:
    mixture = family.mixture
    if mixture is not None and mixture.layout is not ExpertLayout.BY_EXPERT:
        if asked != "auto":
            raise config.error("architectures", f"has no model.quantization: {asked}; leave it out")
        return GPT_OSS_MXFP4 if mixture.layout is ExpertLayout.GPT_OSS_MXFP4 else None
    published = read_quantization(config, has_head=has_head, file_prefix=family.file_prefix)
    if asked == "auto":
        return published
    if published is not None:
        raise config.error(
            "quantization_config",
            "says that these weights are quantised already; leave model.quantization at auto",
        )
    return ONLINE_FP8


def _head_dim(config: ConfigFile, family: _Family, default: int) -> int:
    if family.latent is not None:
        return family.latent.query_dim  # the files' head_dim is of the rotated part
    head_dim = config.integer("head_dim", family.default_head_dim or default)
    if head_dim % 2:
        raise config.error("head_dim", f"{head_dim} is odd; rotary embedding needs pairs")
    return head_dim


def _architecture(config: ConfigFile, *, has_head: bool) -> str:
    names = config.texts("architectures") or ()
    for name in names:
        # What is published without a head may have the name of the model without it.
        family = name if has_head else name.replace("Model", "ForCausalLM")
        if family in _FAMILIES:
            return family
    raise config.error(
        "architectures",
        f"{list(names)} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}",
    )


def _refuse_unsupported(config: ConfigFile, family: _Family) -> None:
    if not config.flag("is_causal", True):
        raise config.error("is_causal", "false is not supported: tokens see those before them only")
    if family.is_gemma:
        return  # its `hidden_act` is not read: `hidden_activation` is
    activation = config.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise config.error("hidden_act", f"{activation!r} is not supported; supported: silu")


def _eos_token_ids(config: ConfigFile, folder: Path, vocab_size: int) -> tuple[int, ...]:
    ids = list(config.ids("eos_token_id"))
    generation_path = folder / "generation_config.json"
    if generation_path.exists():
        ids += ConfigFile.read(generation_path).ids("eos_token_id")
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise config.error(
                "eos_token_id", f"{token_id} lies outside a vocabulary of {vocab_size}"
            )
    return tuple(dict.fromkeys(ids))


def _dtype(config: ConfigFile) -> ComputeDtype:
    name = config.text("dtype", config.text("torch_dtype", "float32"))
    supported = get_args(ComputeDtype)
    if name not in supported:
        raise config.error("dtype", f"{name!r} is not supported; supported: {list(supported)}")
    return cast("ComputeDtype", name)
