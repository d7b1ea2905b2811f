"""Defines a model's tensors and the published tensors they consist of: names and shapes, no torch.

The loader allocates by this definition, and a folder is checked against it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from engine.models.latent_spec import LatentSpec
from engine.models.mixture_spec import MixtureSpec
from engine.models.spec import ModelSpec
from engine.ranks.rank import Rank

BODY = "model."  # begins the names of all tensors but the head
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class Split(Enum):
    """Which part of a tensor one rank holds."""

    NONE = "all of it"
    ROWS = "its share of the rows of each part: outputs, by heads or by intermediate units"
    COLUMNS = "its share of the columns: inputs; the ranks' products are to be added"
    FIRST = "all of it on the first rank, nothing elsewhere: a bias of products that are added"
    EXPERTS = "its share of the parts: those of whole experts"
    VOCABULARY = "its share of the rows: token ids; the last ranks' are padded to an equal number"


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedTensor:
    """One tensor in memory: published tensors of equal width, concatenated by rows."""

    num_rows: Mapping[str, int]  # rows of each part by its published name, in this order
    num_columns: int | None = None  # None = vectors, concatenated
    split: Split = Split.NONE
    unit: int | None = None  # ROWS: rows of a head, which no rank holds in part
    replicated: frozenset[str] = frozenset()  # parts that every rank holds whole, beside ROWS
    num_experts: int | None = None  # whose matrices it consists of, one after the other
    may_be_quantised: bool = True
    is_decoded: bool = False  # computed with as a matrix, however it is published
    is_float32: bool = False  # held in fp32, whatever the model's dtype is

    def of_rank(self, rank: Rank) -> "StackedTensor":
        """The part of the tensor that one rank holds; it need not hold every published tensor."""
        if rank.size == 1:
            return self
        columns = self.num_columns
        if self.split is Split.COLUMNS and columns is not None:
            columns //= rank.size
        if self.split is Split.EXPERTS:
            return self._of_experts(rank)
        num_rows = {name: self._num_held_rows(name, rank) for name in self.num_rows}
        return replace(self, num_rows=num_rows, num_columns=columns)

    def _of_experts(self, rank: Rank) -> "StackedTensor":
        assert self.num_experts is not None, f"of no experts: {next(iter(self.num_rows))}"
        held = rank.share(self.num_experts, "experts")
        per_expert = len(self.num_rows) // self.num_experts
        names = list(self.num_rows)[held.start * per_expert : held.stop * per_expert]
        num_rows = {name: self.num_rows[name] for name in names}
        return replace(self, num_rows=num_rows, num_experts=held.stop - held.start)

    def is_on(self, rank: Rank) -> bool:
        """Whether the rank holds any of it."""
        return self.split is not Split.FIRST or rank.index == 0

    def _num_held_rows(self, name: str, rank: Rank) -> int:
        if self.split is Split.VOCABULARY:
            return rank.padded_length(self.num_rows[name])
        share = self.share_of(name, rank)
        return self.num_rows[name] if share is None else share[0].stop - share[0].start

    def share_of(self, name: str, rank: Rank) -> tuple[slice, ...] | None:
        """Slices of rows, and columns if any, of a published tensor of `of_rank`; None = all."""
        is_whole = self.split in (Split.NONE, Split.FIRST, Split.EXPERTS)
        if rank.size == 1 or is_whole or name in self.replicated:
            return None
        num_rows = self.num_rows[name]
        if self.split is Split.COLUMNS:
            assert self.num_columns is not None, f"{name} is a vector"
            return slice(0, num_rows), rank.share(self.num_columns, name)
        is_vocabulary = self.split is Split.VOCABULARY
        rows = (
            rank.padded_share(num_rows)
            if is_vocabulary
            else rank.share(num_rows, name, unit=self.unit)
        )
        return (rows,) if self.num_columns is None else (rows, slice(0, self.num_columns))

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape(sum(self.num_rows.values()))

    def part_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        return ((name, self._shape(num_rows)) for name, num_rows in self.num_rows.items())

    def _shape(self, num_rows: int) -> tuple[int, ...]:
        return (num_rows,) if self.num_columns is None else (num_rows, self.num_columns)


def outer_tensors(spec: ModelSpec) -> dict[str, StackedTensor]:
    """Field of `ModelWeights` -> tensor; no `head` if it is tied to the embedding or not used."""
    hidden = spec.hidden_size
    split = Split.NONE if spec.has_dp_attention else Split.VOCABULARY

    def by_token(name: str) -> StackedTensor:
        return StackedTensor(num_rows={name: spec.vocab_size}, num_columns=hidden, split=split)

    tensors = {
        "embedding": by_token(EMBEDDING),
        "final_norm": StackedTensor(num_rows={"model.norm.weight": hidden}),
    }
    if not spec.has_tied_embeddings and spec.pooling is None:
        tensors["head"] = by_token(HEAD)
    return tensors


def layer_tensors(spec: ModelSpec, layer: int) -> dict[str, StackedTensor]:
    """Field of `LayerWeights` -> tensor; fields that the model lacks are left out."""
    prefix = f"model.layers.{layer}."
    tensors: dict[str, StackedTensor] = {}
    mixture = spec.mixture_at(layer)
    feed_forward = _mlp(spec) if mixture is None else _experts(spec, mixture)
    attention = _attention(spec) if spec.latent is None else _latent_attention(spec, spec.latent)
    for field, names, sizes, num_columns, has_bias in (*attention, *feed_forward):
        split = _split_of(field, spec, mixture)
        num_experts = mixture.num_experts if mixture is not None and field in _EXPERTS else None
        unit = spec.head_dim if field == "qkv" else None
        weights = {f"{prefix}{n}.weight": size for n, size in zip(names, sizes, strict=True)}
        tensors[field] = StackedTensor(
            num_rows=weights,
            num_columns=num_columns,
            split=split,
            unit=unit,
            replicated=_replicated(weights),
            num_experts=num_experts,
            may_be_quantised=field not in _NEVER_QUANTISED,
            is_decoded=field in _DECODED,
        )
        if has_bias:
            biases = {f"{prefix}{n}.bias": size for n, size in zip(names, sizes, strict=True)}
            # Where products are summed over the ranks, one rank adds the bias.
            bias_split = Split.FIRST if split is Split.COLUMNS else split
            tensors[f"{field}_bias"] = StackedTensor(
                num_rows=biases,
                split=bias_split,
                unit=unit,
                replicated=_replicated(biases),
                num_experts=num_experts,
            )
    if spec.has_sinks:
        sinks = {f"{prefix}self_attn.sinks": spec.num_heads}
        split = _split_of("sinks", spec, mixture)
        tensors["sinks"] = StackedTensor(num_rows=sinks, split=split)
    for field, name, size in _norms(spec):
        tensors[field] = StackedTensor(num_rows={f"{prefix}{name}.weight": size})
    if mixture is not None and mixture.has_route_bias:
        name = f"{prefix}{mixture.names.block}.gate.e_score_correction_bias"
        # Rounded, it would choose other experts.
        tensors["route_bias"] = StackedTensor(num_rows={name: mixture.num_experts}, is_float32=True)
    return tensors


# Field, published names, outputs of each, inputs, and whether there is a bias.
_Linear = tuple[str, Sequence[str], Sequence[int], int, bool]
# Those that are not split by rows.
_SPLITS = {
    "output": Split.COLUMNS,
    "down": Split.COLUMNS,
    "shared_down": Split.COLUMNS,
    # Every rank routes all tokens: of each expert it has a part, or of all experts some.
    "router": Split.NONE,
    "shared_gate": Split.NONE,
}
_EXPERTS = ("gate_up", "down")
_SHARED = ("shared_gate_up", "shared_down")
# Of latent attention every rank makes what all heads share.
_FOR_ALL_HEADS = (".q_a_proj.", ".kv_a_proj_with_mqa.")
# Small maps whose rounding would change which experts compute: no format is published with them.
_NEVER_QUANTISED = ("router", "shared_gate")
# Of latent attention: it multiplies with a head's part of the matrix.
_DECODED = ("kv_up",)


def _split_of(field: str, spec: ModelSpec, mixture: MixtureSpec | None) -> Split:
    if mixture is not None and mixture.has_whole_experts and field in _EXPERTS:
        return Split.EXPERTS
    if spec.has_dp_attention:
        return Split.NONE
    if mixture is not None and mixture.replicates_shared and field in _SHARED:
        return Split.NONE
    return _SPLITS.get(field, Split.ROWS)


def _norms(spec: ModelSpec) -> Iterator[tuple[str, str, int]]:
    """Field, published name and length of every norm of a layer."""
    hidden = spec.hidden_size
    yield "input_norm", "input_layernorm", hidden
    if spec.has_output_norms:
        yield "attention_output_norm", "post_attention_layernorm", hidden
        yield "post_norm", "pre_feedforward_layernorm", hidden
        yield "mlp_output_norm", "post_feedforward_layernorm", hidden
    else:
        yield "post_norm", "post_attention_layernorm", hidden
    if spec.has_qk_norm:
        for x in ("q", "k"):
            yield f"{x}_norm", f"self_attn.{x}_norm", spec.head_dim
    if spec.latent is not None:
        yield "k_norm", "self_attn.kv_a_layernorm", spec.latent.rank
        if spec.latent.q_rank is not None:
            yield "q_norm", "self_attn.q_a_layernorm", spec.latent.q_rank


def _replicated(names: Iterable[str]) -> frozenset[str]:
    return frozenset(name for name in names if any(part in name for part in _FOR_ALL_HEADS))


def _attention(spec: ModelSpec) -> Iterator[_Linear]:
    hidden = spec.hidden_size
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    yield "qkv", qkv, (q_size, kv_size, kv_size), hidden, spec.has_qkv_bias
    yield "output", ("self_attn.o_proj",), (hidden,), q_size, spec.has_output_bias


def _latent_attention(spec: ModelSpec, latent: LatentSpec) -> Iterator[_Linear]:
    """Queries, or the vector that they are made from, share one product with the latent."""
    hidden, has_bias = spec.hidden_size, spec.has_qkv_bias
    q_size = spec.num_heads * latent.query_dim
    q = ("q_proj", q_size) if latent.q_rank is None else ("q_a_proj", latent.q_rank)
    names = (f"self_attn.{q[0]}", "self_attn.kv_a_proj_with_mqa")
    yield "qkv", names, (q[1], latent.width), hidden, has_bias
    if latent.q_rank is not None:
        yield "q_up", ("self_attn.q_b_proj",), (q_size,), latent.q_rank, False
    up_size = spec.num_heads * (latent.nope_dim + latent.value_dim)
    yield "kv_up", ("self_attn.kv_b_proj",), (up_size,), latent.rank, False
    inputs = spec.num_heads * latent.value_dim
    yield "output", ("self_attn.o_proj",), (hidden,), inputs, spec.has_output_bias


def _mlp(spec: ModelSpec) -> Iterator[_Linear]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    gate_up = ("mlp.gate_proj", "mlp.up_proj")
    yield "gate_up", gate_up, (inner, inner), hidden, spec.has_mlp_bias
    yield "down", ("mlp.down_proj",), (hidden,), inner, spec.has_mlp_bias


def _experts(spec: ModelSpec, mixture: MixtureSpec) -> Iterator[_Linear]:
    """The experts' gate and up alternate by expert, so that one expert's rows are adjacent."""
    hidden, inner, names = spec.hidden_size, mixture.expert_size, mixture.names
    block, experts = names.block, range(mixture.num_experts)
    has_bias = mixture.has_bias
    yield "router", (f"{block}.{names.router}",), (mixture.num_experts,), hidden, has_bias
    gate_up = [f"{block}.experts.{i}.{name}" for i in experts for name in (names.gate, names.up)]
    yield "gate_up", gate_up, (inner,) * len(gate_up), hidden, has_bias
    down = [f"{block}.experts.{i}.{names.down}" for i in experts]
    yield "down", down, (hidden,) * len(down), inner, has_bias
    if mixture.shared_size is not None:
        shared, size = f"{block}.{names.shared}", mixture.shared_size
        both = (f"{shared}.{names.gate}", f"{shared}.{names.up}")
        yield "shared_gate_up", both, (size, size), hidden, False
        yield "shared_down", (f"{shared}.{names.down}",), (hidden,), size, False
        if mixture.has_shared_gate:
            yield "shared_gate", (f"{block}.{names.shared}_gate",), (1,), hidden, False
