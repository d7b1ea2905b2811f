"""Multi-token prediction as DeepSeek-V3 is published: a layer after the last guesses tokens.

    x_t = eh_proj([enorm(embed(token_t+1)) | hnorm(h_t)])    h_t: the target's, after its final norm
    g_t = shared_head.norm(layer(x_<=t))                     one more layer like the target's last
    head(g_t)                                                logits of token_t+2

g_t stands in for h_t+1 where the target has not computed it, so one layer guesses any number of
tokens. Embedding and head are the target's; the copies of them in the files are not read. Of
several such layers the first one guesses, which was trained for the next token but one.

Ranks share it as they share the target's layers. Of eh_proj each has columns: with two ranks the
first one multiplies the embeddings, the other one the vectors. With DP attention each has all.

Facts: arXiv 2412.19437, section 2.2; README_WEIGHTS.md of deepseek-ai/DeepSeek-V3 (names, and what
is shared); `deepseek_mtp.py` of vLLM and `deepseek_nextn.py` of SGLang (both streams are taken
after the norm). vLLM puts zeros in the place of a request's first embedding; the others do not.
"""

from dataclasses import replace
from pathlib import Path

import torch

from engine.errors import ConfigError
from engine.layers.attention import SelfAttention
from engine.layers.build_linear import build_linear
from engine.layers.linear import Linear, LinearWeight
from engine.layers.mlp import FeedForward
from engine.layers.norm import RmsNorm
from engine.layers.operations import Flow
from engine.models.feature_head import FeatureHead, FeatureLayer
from engine.models.llama import (
    CausalLM,
    Export,
    FinalStream,
    build_feed_forward,
    build_norm,
    build_self_attention,
)
from engine.models.llama_weights import Split, StackedTensor
from engine.models.spec import ModelSpec
from engine.models.weights import load_layer
from engine.ranks.rank import WHOLE_MODEL, Rank
from kernels.ops import Ops


def read_mtp(folder: Path, target: ModelSpec) -> ModelSpec:
    """The layer as a model of its own. Raises ConfigError where the target has none."""
    if target.num_guessing_layers == 0:
        raise ConfigError(
            f"speculation.drafter: mtp, but {folder / 'config.json'} has no layer that guesses"
            " (num_nextn_predict_layers, of DeepSeek-V3); set ngram, draft_model or eagle3"
        )
    mixture = _with_layer(target).mixture_at(target.num_layers)
    return replace(
        target,
        num_layers=1,
        layer_windows=target.layer_windows[-1:],
        mixture=None if mixture is None else replace(mixture, layers=(0,)),
        num_guessing_layers=0,
    )


def _with_layer(target: ModelSpec) -> ModelSpec:
    """The target with its first guessing layer, which is as its last one, as one layer more."""
    mixture, last = target.mixture, target.num_layers - 1
    if mixture is not None and last in mixture.layers:
        mixture = replace(mixture, layers=(*mixture.layers, target.num_layers))
    return replace(
        target,
        num_layers=target.num_layers + 1,
        layer_windows=(*target.layer_windows, target.layer_windows[-1]),
        mixture=mixture,
        num_guessing_layers=target.num_guessing_layers - 1,
    )


def _extra_tensors(target: ModelSpec) -> dict[str, StackedTensor]:
    """What the layer has that decoder layers have not, by field."""
    prefix, hidden = f"model.layers.{target.num_layers}.", target.hidden_size
    norms = {"enorm": "enorm", "hnorm": "hnorm", "final_norm": "shared_head.norm"}
    tensors = {
        field: StackedTensor(num_rows={f"{prefix}{name}.weight": hidden})
        for field, name in norms.items()
    }
    joint = {f"{prefix}eh_proj.weight": hidden}
    split = Split.NONE if target.has_dp_attention else Split.COLUMNS
    tensors["eh_proj"] = StackedTensor(num_rows=joint, num_columns=2 * hidden, split=split)
    return tensors


class MtpLayer(FeatureLayer):
    """A layer whose stream begins with a token's embedding and a vector of the token before."""

    __slots__ = ("_columns", "_embedding_norm", "_hidden_norm", "_join")

    def __init__(
        self,
        *,
        embedding_norm: RmsNorm,
        hidden_norm: RmsNorm,
        join: Linear,
        columns: slice,
        attention_norm: RmsNorm,
        attention: SelfAttention,
        mlp_norm: RmsNorm,
        mlp: FeedForward,
    ) -> None:
        """join: `columns` of 2 * hidden, of embedding and vector, -> hidden, a part of a sum."""
        super().__init__(
            attention_norm=attention_norm, attention=attention, mlp_norm=mlp_norm, mlp=mlp
        )
        self._embedding_norm = embedding_norm
        self._hidden_norm = hidden_norm
        self._join = join
        self._columns = columns

    def _prepare(self, flow: Flow) -> None:
        both = (self._embedding_norm(flow.x), self._hidden_norm(self._read(flow)))
        own = torch.cat(both, dim=-1)[:, self._columns].contiguous()
        flow.x = flow.ctx.comm.all_reduce(self._join(own))
        super()._prepare(flow)


def build_mtp(
    folder: Path,
    target: CausalLM,
    whole: ModelSpec,
    ops: Ops,
    *,
    is_deterministic: bool = False,
    rank: Rank = WHOLE_MODEL,
) -> FeatureHead:
    """Load the rank's part of the layer to the target's device, in its dtype.

    target: of the rank; whole: the target's spec. Raises ConfigError as `load_weights` does.
    """
    layer_spec = read_mtp(folder, whole)
    spec = layer_spec.of_rank(rank)
    ends = WHOLE_MODEL if whole.has_dp_attention else rank
    weights, extra = load_layer(
        folder,
        _with_layer(whole),
        whole.num_layers,
        _extra_tensors(whole),
        dtype=target.dtype,
        device=target.device,
        rank=rank,
    )
    layer = MtpLayer(
        embedding_norm=build_norm(spec, extra["enorm"], ops),
        hidden_norm=build_norm(spec, extra["hnorm"], ops),
        join=build_linear(LinearWeight(extra["eh_proj"]), is_deterministic=is_deterministic),
        columns=ends.share(2 * spec.hidden_size, "columns of eh_proj"),
        attention_norm=build_norm(spec, weights.input_norm, ops),
        attention=build_self_attention(spec, 0, weights, ops, is_deterministic),
        mlp_norm=build_norm(spec, weights.post_norm, ops),
        mlp=build_feed_forward(spec, 0, weights, ops, is_deterministic),
    )
    model = CausalLM(
        spec=spec,
        embedding=target.embedding,
        layers=[layer],
        final_norm=build_norm(spec, extra["final_norm"], ops),
        head=target.head,
        rotary=target.rotary,
    )
    model.export(Export(final=FinalStream.CHOSEN))
    export = Export(final=FinalStream.ALL)
    return FeatureHead(
        spec=layer_spec, model=model, layer=layer, export=export, width=spec.hidden_size
    )
