"""EAGLE-3 heads as they are published (`LlamaForCausalLMEagle3`): one layer that guesses tokens.

    g_t = fc([a_t | b_t | c_t])       streams that enter three layers of the target at token t
    x_t = [input_layernorm(embed(token_t+1)) | hidden_norm(g_t)]
    r_t = g_t + attention(x_<=t);  h_t = r_t + mlp(post_attention_layernorm(r_t))
    lm_head(norm(h_t))                logits of token_t+2, over the head's own vocabulary

h_t stands in for g_t+1 where the target has not computed it. So entry t reads a vector, at its
slot, and never asks whose it is. The head has an embedding of its own or shares the target's. Its
vocabulary is a part of the target's: token = i + d2t[i]. All other tokens get logits that no draw
chooses as long as there is a better one.

Ranks share its layer and both ends of its vocabulary as they share the target's. `fc`, which is
part of the target's steps, is whole on each.

Facts: SafeAILab/EAGLE (cnets.py), `llama_eagle3.py` of SGLang and of vLLM; arXiv 2503.01840. Names
of layers: `eagle_config.eagle_aux_hidden_state_layer_ids` counts outputs (SGLang),
`eagle_aux_hidden_state_layer_ids` at the top inputs (vLLM); without either 2, L / 2 and L - 3 are
inputs in all three.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ConfigError
from engine.layers.attention import ProjectedTokens, SelfAttention
from engine.layers.build_linear import build_linear
from engine.layers.context import Comm
from engine.layers.linear import LinearWeight
from engine.layers.mlp import FeedForward
from engine.layers.norm import RmsNorm
from engine.layers.operations import Flow
from engine.layers.vocabulary import Embedding, Head, build_embedding, build_head
from engine.models.config_file import ConfigFile
from engine.models.feature_head import FeatureHead, FeatureLayer
from engine.models.llama import (
    CausalLM,
    Export,
    build_feed_forward,
    build_norm,
    build_rotary,
    build_self_attention,
)
from engine.models.rope_config import parse_rope
from engine.models.spec import ModelSpec
from engine.models.weight_files import read_header, weight_files
from engine.models.weights import LayerWeights
from engine.ranks.rank import WHOLE_MODEL, Rank
from kernels.ops import Ops
from kernels.sampling.choices import GreedyChoice
from kernels.sampling.rows import greedy

ARCHITECTURE = "LlamaForCausalLMEagle3"
# Of a token that the head does not know: below every logit, and finite in all dtypes, so that rows
# whose constraint allows no other token still have something to draw.
UNKNOWN_LOGIT = -3e4


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Spec:
    """What a head's config.json says, beside the target's."""

    decoder: ModelSpec  # its one layer, with the target's vocabulary and context
    entered_layers: tuple[int, ...]  # of the target, whose incoming streams the head reads
    target_hidden_size: int
    draft_vocab_size: int
    norm_before_residual: bool  # the stream begins with hidden_norm(g_t)


def read_eagle3(folder: Path, target: ModelSpec) -> Eagle3Spec:
    """Raises ConfigError if the folder is no such head, or not of a target like this one."""
    config = ConfigFile.read(folder / "config.json")
    _refuse_others(config)
    _check_target(config, target)
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise config.error(
            "num_key_value_heads", f"{num_kv_heads} does not divide {num_heads} query heads"
        )
    decoder = ModelSpec(
        architecture=ARCHITECTURE,
        vocab_size=target.vocab_size,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=1,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=config.integer("head_dim", hidden_size // num_heads),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        has_tied_embeddings=False,
        has_qkv_bias=False,
        has_output_bias=False,
        has_mlp_bias=False,
        has_qk_norm=False,
        layer_windows=(None,),
        rope=parse_rope(config),
        # Positions are relative, so the length of training (often 2048) is no bound.
        max_model_len=target.max_model_len,
        eos_token_ids=target.eos_token_ids,
        dtype=target.dtype,
    )
    return Eagle3Spec(
        decoder=decoder,
        entered_layers=_entered_layers(config, target.num_layers),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=config.integer("draft_vocab_size", target.vocab_size),
        norm_before_residual=config.flag("norm_before_residual", False),
    )


def _refuse_others(config: ConfigFile) -> None:
    names = config.texts("architectures") or ()
    if ARCHITECTURE not in names:
        raise config.error(
            "architectures", f"{list(names)} is not an EAGLE-3 head; supported: {ARCHITECTURE}"
        )
    if config.integer("num_hidden_layers", 1) != 1:
        raise config.error("num_hidden_layers", "above 1 is not supported for EAGLE-3 heads")
    for key in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
        if config.flag(key, False):
            raise config.error(key, "true is not supported for EAGLE-3 heads")
    if config.section("quantization_config") is not None:
        raise config.error("quantization_config", "is not supported for EAGLE-3 heads")
    if config.text("hidden_act", "silu") not in ("silu", "swish"):
        raise config.error("hidden_act", "other than silu is not supported")
    if set(config.texts("layer_types") or ()) - {"full_attention"}:
        raise config.error("layer_types", "other than full_attention are not supported here")


def _check_target(config: ConfigFile, target: ModelSpec) -> None:
    vocab_size = config.integer("vocab_size")
    if vocab_size != target.vocab_size:
        raise config.error(
            "vocab_size", f"{vocab_size} is not the model's {target.vocab_size}; use its own head"
        )
    width = config.integer("target_hidden_size", config.integer("hidden_size"))
    if width != target.hidden_size:
        raise config.error("target_hidden_size", f"{width} is not the model's {target.hidden_size}")


def _entered_layers(config: ConfigFile, num_layers: int) -> tuple[int, ...]:
    key = "eagle_aux_hidden_state_layer_ids"
    nested = config.section("eagle_config")
    if nested is not None and not nested.flag("use_aux_hidden_state", True):
        raise nested.error("use_aux_hidden_state", "false is not supported")
    layers = config.integers(key, minimum=0)
    if nested is not None and nested.integers(key, minimum=0):
        layers = tuple(layer + 1 for layer in nested.integers(key, minimum=0))
    layers = layers or (2, num_layers // 2, num_layers - 3)
    if min(layers) < 0 or max(layers) >= num_layers:
        raise config.error(
            key, f"means the streams that enter the layers {list(layers)}; the model has layers 0"
            f" to {num_layers - 1}"
        )  # fmt: skip
    return layers


# ---- weights ------------------------------------------------------------------------------------

_LAYER = "midlayer."
_MAPS = ("d2t", "t2d")
_OPTIONAL = ("embed_tokens.weight", "fc.bias", *_MAPS)


def _shapes(spec: Eagle3Spec) -> dict[str, tuple[int, ...]]:
    """Of all tensors that a folder may have, by name."""
    one = spec.decoder
    hidden, inner = one.hidden_size, one.intermediate_size
    q_width, kv_width = one.num_heads * one.head_dim, one.num_kv_heads * one.head_dim
    return {
        "fc.weight": (hidden, len(spec.entered_layers) * spec.target_hidden_size),
        "fc.bias": (hidden,),
        f"{_LAYER}hidden_norm.weight": (hidden,),
        f"{_LAYER}input_layernorm.weight": (hidden,),
        f"{_LAYER}post_attention_layernorm.weight": (hidden,),
        f"{_LAYER}self_attn.q_proj.weight": (q_width, 2 * hidden),
        f"{_LAYER}self_attn.k_proj.weight": (kv_width, 2 * hidden),
        f"{_LAYER}self_attn.v_proj.weight": (kv_width, 2 * hidden),
        f"{_LAYER}self_attn.o_proj.weight": (hidden, q_width),
        f"{_LAYER}mlp.gate_proj.weight": (inner, hidden),
        f"{_LAYER}mlp.up_proj.weight": (inner, hidden),
        f"{_LAYER}mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "lm_head.weight": (spec.draft_vocab_size, hidden),
        "embed_tokens.weight": (one.vocab_size, hidden),
        "d2t": (spec.draft_vocab_size,),
        "t2d": (one.vocab_size,),
    }


def _load(folder: Path, spec: Eagle3Spec) -> dict[str, Tensor]:
    """The tensors by name, on the host as published; ConfigError for any that does not fit."""
    shapes, found = _shapes(spec), dict[str, Tensor]()
    for path, _ in weight_files(folder):
        read_header(path)  # for errors that say what is wrong with the file
        try:
            with safe_open(str(path), framework="pt", device="cpu") as file:
                for published in file.keys():  # noqa: SIM118  (it is no mapping)
                    found[published.removeprefix("model.")] = file.get_tensor(published)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path}: not a readable safetensors file: {error}") from error
    for name, tensor in found.items():
        expected = shapes.get(name)
        if expected is None:
            raise ConfigError(f"{folder}: tensor {name!r} is not known in an EAGLE-3 head")
        if tuple(tensor.shape) != expected:
            raise ConfigError(
                f"{folder}: tensor {name!r} has shape {list(tensor.shape)}, expected"
                f" {list(expected)}"
            )
    missing = sorted(set(shapes) - set(found) - set(_OPTIONAL))
    if missing:
        raise ConfigError(f"{folder}: tensor {missing[0]!r} is missing")
    return found


def _target_ids(folder: Path, spec: Eagle3Spec, tensors: dict[str, Tensor]) -> Tensor | None:
    """int64 [draft vocabulary]  the target's id of each of the head's; None = they are equal."""
    num_ids, vocab_size = spec.draft_vocab_size, spec.decoder.vocab_size
    if "d2t" not in tensors:
        if num_ids != vocab_size:
            raise ConfigError(f"{folder}: tensor 'd2t' is missing, which names {num_ids} tokens")
        return None
    ids = torch.arange(num_ids) + tensors["d2t"].long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(set(ids.tolist())) < num_ids:
        raise ConfigError(f"{folder}: 'd2t' does not name {num_ids} of {vocab_size} tokens")
    if "t2d" in tensors and not torch.equal(tensors["t2d"].bool().nonzero()[:, 0], ids.sort()[0]):
        raise ConfigError(f"{folder}: 't2d' marks other tokens than 'd2t' names")
    return ids


_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_COLUMNS = ("o_proj", "down_proj")
_BY_TOKEN = ("lm_head", "embed_tokens")


def _share(name: str, tensor: Tensor, rank: Rank, head_dim: int) -> Tensor:
    """The rank's part of a tensor; of tokens padded to equally many on every rank."""
    field = name.split(".")[-2] if "." in name else name
    unit = head_dim if "self_attn" in name else None
    if field in _BY_ROWS:
        return tensor[rank.share(len(tensor), f"rows of {name}", unit)]
    if field in _BY_COLUMNS:
        return tensor[:, rank.share(tensor.shape[1], f"columns of {name}", unit)].contiguous()
    if field in _BY_TOKEN:
        own = tensor[rank.padded_share(len(tensor))]
        return torch.cat(
            [own, own.new_zeros(rank.padded_length(len(tensor)) - len(own), own.shape[1])]
        )
    return tensor


# ---- the model ----------------------------------------------------------------------------------


class Eagle3Layer(FeatureLayer):
    """A layer whose attention reads the token's embedding beside a vector of the token before."""

    __slots__ = ("_hidden_norm", "_norm_before_residual")

    def __init__(
        self,
        *,
        attention_norm: RmsNorm,
        hidden_norm: RmsNorm,
        attention: SelfAttention,
        mlp_norm: RmsNorm,
        mlp: FeedForward,
        norm_before_residual: bool,
    ) -> None:
        super().__init__(
            attention_norm=attention_norm, attention=attention, mlp_norm=mlp_norm, mlp=mlp
        )
        self._hidden_norm = hidden_norm
        self._norm_before_residual = norm_before_residual

    def _prepare(self, flow: Flow) -> None:
        features = self._read(flow)
        normed = self._hidden_norm(features)
        x = torch.cat([self._attention_norm(flow.x), normed], dim=-1)
        residual = normed if self._norm_before_residual else features
        q, k, v = self._attention.project(x, flow.ctx)
        flow.leave(tokens=ProjectedTokens(q=q, k=k, v=v, residual=residual))
        flow.x, flow.residual = x, residual


class DraftHead:
    """Logits over the target's vocabulary, from a head that knows a part of it."""

    __slots__ = ("_head", "_ids", "_vocab_size")

    def __init__(self, head: Head, ids: Tensor, vocab_size: int) -> None:
        """head: hidden -> logits of `ids`, int64 [draft vocabulary]."""
        self._head = head
        self._ids = ids
        self._vocab_size = vocab_size

    def own_logits(self, hidden: Tensor) -> Tensor:
        return self._head.own_logits(hidden)

    def whole_logits(self, own: Tensor, comm: Comm) -> Tensor:
        known = self._head.whole_logits(own, comm)
        logits = known.new_full((len(known), self._vocab_size), UNKNOWN_LOGIT)
        return logits.index_copy_(1, self._ids, known)

    def best_tokens(self, own: Tensor, comm: Comm) -> GreedyChoice:
        return greedy(self.whole_logits(own, comm))


def build_eagle3(
    folder: Path,
    spec: Eagle3Spec,
    target: Embedding,
    *,
    dtype: torch.dtype,
    ops: Ops,
    max_model_len: int,
    is_deterministic: bool = False,
    rank: Rank = WHOLE_MODEL,
) -> FeatureHead:
    """Load the rank's part of the head to the target's device.

    target: the rank's embedding, for heads without one. Raises ConfigError as `_load` does, and if
    the ranks cannot share the head.
    """
    device, one = target.weight.device, spec.decoder.of_rank(rank)
    tensors = _load(folder, spec)
    ids = _target_ids(folder, spec, tensors)
    held = {
        name: _share(name, tensor, rank, one.head_dim).to(device, dtype)
        for name, tensor in tensors.items()
        if name not in _MAPS
    }
    weights = _layer_weights(held)
    layer = Eagle3Layer(
        attention_norm=build_norm(one, weights.input_norm, ops),
        hidden_norm=build_norm(one, held[f"{_LAYER}hidden_norm.weight"], ops),
        attention=build_self_attention(one, 0, weights, ops, is_deterministic),
        mlp_norm=build_norm(one, weights.post_norm, ops),
        mlp=build_feed_forward(one, 0, weights, ops, is_deterministic),
        norm_before_residual=spec.norm_before_residual,
    )
    linear = build_linear(LinearWeight(held["lm_head.weight"]), is_deterministic=is_deterministic)
    head = build_head(linear, spec.draft_vocab_size, rank)
    if ids is not None:
        head = DraftHead(head, ids.to(device), one.vocab_size)
    model = CausalLM(
        spec=one,
        embedding=_embedding(folder, spec, held, target, rank),
        layers=[layer],
        final_norm=build_norm(one, held["norm.weight"], ops),
        head=head,
        rotary=build_rotary(one, max_model_len, device, ops),
    )
    model.export(Export(layers=(1,)))
    fc = LinearWeight(held["fc.weight"], held.get("fc.bias"))
    project = build_linear(fc, is_deterministic=is_deterministic)
    export = Export(layers=spec.entered_layers, project=project)
    return FeatureHead(
        spec=spec.decoder, model=model, layer=layer, export=export, width=one.hidden_size
    )


def _embedding(
    folder: Path, spec: Eagle3Spec, held: dict[str, Tensor], target: Embedding, rank: Rank
) -> Embedding:
    weight = held.get("embed_tokens.weight")
    if weight is None and spec.decoder.hidden_size != spec.target_hidden_size:
        raise ConfigError(
            f"{folder}: tensor 'embed_tokens.weight' is missing, and the model's embedding has"
            f" {spec.target_hidden_size} columns for a head of {spec.decoder.hidden_size}"
        )
    own = target.weight if weight is None else weight
    return build_embedding(own, spec.decoder.vocab_size, rank)


def _layer_weights(held: dict[str, Tensor]) -> LayerWeights:
    def stacked(part: str, *names: str) -> LinearWeight:
        return LinearWeight(torch.cat([held[f"{_LAYER}{part}.{n}_proj.weight"] for n in names]))

    return LayerWeights(
        input_norm=held[f"{_LAYER}input_layernorm.weight"],
        post_norm=held[f"{_LAYER}post_attention_layernorm.weight"],
        qkv=stacked("self_attn", "q", "k", "v"),
        output=stacked("self_attn", "o"),
        gate_up=stacked("mlp", "gate", "up"),
        down=stacked("mlp", "down"),
        q_norm=None,
        k_norm=None,
    )
