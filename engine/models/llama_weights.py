"""The tensors of a model and the published ones they are made of: names and shapes, no torch.

The one definition: the loader allocates by it, and a folder is checked against it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from engine.models.spec import ModelSpec

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedTensor:
    """One tensor in memory: published ones of equal width, one above the other."""

    num_rows: Mapping[str, int]  # of each part, by its published name; in this order
    num_columns: int | None = None  # None = vectors, one behind the other

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape(sum(self.num_rows.values()))

    def part_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        return ((name, self._shape(num_rows)) for name, num_rows in self.num_rows.items())

    def _shape(self, num_rows: int) -> tuple[int, ...]:
        return (num_rows,) if self.num_columns is None else (num_rows, self.num_columns)


def outer_tensors(spec: ModelSpec) -> dict[str, StackedTensor]:
    """Field of `ModelWeights` -> tensor; there is no `head` where it is the embedding."""
    hidden = spec.hidden_size
    tensors = {
        "embedding": StackedTensor(num_rows={EMBEDDING: spec.vocab_size}, num_columns=hidden),
        "final_norm": StackedTensor(num_rows={"model.norm.weight": hidden}),
    }
    if not spec.has_tied_embeddings:
        tensors["head"] = StackedTensor(num_rows={HEAD: spec.vocab_size}, num_columns=hidden)
    return tensors


def layer_tensors(spec: ModelSpec, layer: int) -> dict[str, StackedTensor]:
    """Field of `LayerWeights` -> tensor; a field that the model lacks is not there."""
    prefix, hidden = f"model.layers.{layer}.", spec.hidden_size
    tensors: dict[str, StackedTensor] = {}
    for field, names, sizes, num_columns, has_bias in _linears(spec):
        weights = {f"{prefix}{n}.weight": size for n, size in zip(names, sizes, strict=True)}
        tensors[field] = StackedTensor(num_rows=weights, num_columns=num_columns)
        if has_bias:
            biases = {f"{prefix}{n}.bias": size for n, size in zip(names, sizes, strict=True)}
            tensors[f"{field}_bias"] = StackedTensor(num_rows=biases)
    norms = [("input_norm", "input_layernorm", hidden)]
    norms += [("post_norm", "post_attention_layernorm", hidden)]
    if spec.has_qk_norm:
        norms += [(f"{x}_norm", f"self_attn.{x}_norm", spec.head_dim) for x in ("q", "k")]
    for field, name, size in norms:
        tensors[field] = StackedTensor(num_rows={f"{prefix}{name}.weight": size})
    return tensors


def _linears(
    spec: ModelSpec,
) -> Iterator[tuple[str, Sequence[str], Sequence[int], int, bool]]:
    """Field, published names, outputs of each, inputs, and whether there is a bias."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    yield "qkv", qkv, (q_size, kv_size, kv_size), hidden, spec.has_qkv_bias
    gate_up = ("mlp.gate_proj", "mlp.up_proj")
    yield "gate_up", gate_up, (inner, inner), hidden, spec.has_mlp_bias
    yield "output", ("self_attn.o_proj",), (hidden,), q_size, spec.has_output_bias
    yield "down", ("mlp.down_proj",), (hidden,), inner, spec.has_mlp_bias


def published_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Published name -> shape, of every tensor that the model needs."""
    groups = [outer_tensors(spec), *(layer_tensors(spec, i) for i in range(spec.num_layers))]
    return {
        name: shape
        for group in groups
        for tensor in group.values()
        for name, shape in tensor.part_shapes()
    }
