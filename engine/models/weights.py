"""Streams safetensors files into the model's own tensors. Nothing is ever unpickled.

Destinations are allocated first, with q, k and v (and gate and up) side by side in one tensor, so
that each published tensor is read once, converted, and written where it belongs. Knows names and
shapes; how the tensors are then used is the model's business.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ConfigError
from engine.models.spec import ModelSpec
from engine.models.staging import TensorCopier, copier_for
from engine.models.weight_files import weight_files

_READABLE_DTYPES = ("F64", "F32", "BF16", "F16")
# Tensors some exporters leave in that carry no information of their own.
_HARMLESS = re.compile(r"(^|\.)rotary_emb\.inv_freq$")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Tensors of one decoder layer; H heads, K KV heads, D head_dim, I intermediate size."""

    # [hidden]
    input_norm: Tensor
    # [hidden]
    post_norm: Tensor
    # [(H + 2 K) D, hidden], [(H + 2 K) D]
    qkv: Tensor
    qkv_bias: Tensor | None
    # [hidden, H D], [hidden]
    output: Tensor
    output_bias: Tensor | None
    # [2 I, hidden], [2 I]
    gate_up: Tensor
    gate_up_bias: Tensor | None
    # [hidden, I], [hidden]
    down: Tensor
    down_bias: Tensor | None
    # [D]
    q_norm: Tensor | None
    k_norm: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """All tensors of a model, in one dtype on one device."""

    # [vocab, hidden]
    embedding: Tensor
    layers: list[LayerWeights]
    # [hidden]
    final_norm: Tensor
    # [vocab, hidden]; the embedding itself where tied
    head: Tensor


def load_weights(
    folder: Path, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device
) -> ModelWeights:
    """Raises ConfigError naming file, tensor, expected and found shape."""
    weights, destinations = allocate_weights(spec, dtype=dtype, device=device)
    missing = dict(destinations)
    with copier_for(device) as copier:
        for path, names in weight_files(folder):
            for name in _copy_file(path, names, destinations, spec, copier):
                missing.pop(name, None)
    if missing:
        first = min(missing)
        raise ConfigError(
            f"{folder}: {len(missing)} tensors are missing, the first is {first!r} with shape "
            f"{list(missing[first].shape)}"
        )
    return weights


# ---- files --------------------------------------------------------------------------------------


def _copy_file(
    path: Path,
    names: frozenset[str] | None,
    destinations: dict[str, Tensor],
    spec: ModelSpec,
    copier: TensorCopier,
) -> list[str]:
    """Copy one file's tensors to their destinations; returns the names it held."""
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            held = list(file.keys())
            absent = sorted((names or frozenset()) - set(held))
            if absent:
                raise ConfigError(f"{path}: tensor {absent[0]!r} is in the index but not here")
            for name in held:
                destination = destinations.get(name)
                if destination is not None:
                    _check_tensor(path, name, file.get_slice(name), destination)
                    copier.copy(file.get_tensor(name), destination)
                elif not _is_harmless(name, spec):
                    raise ConfigError(
                        f"{path}: unexpected tensor {name!r} for {spec.architecture}; the weights"
                        " and config.json describe different models"
                    )
            copier.wait_copied()  # while the file is still mapped
            return held
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: not a readable safetensors file: {error}") from error


def _check_tensor(path: Path, name: str, found: object, destination: Tensor) -> None:
    shape, dtype = list(found.get_shape()), found.get_dtype()  # type: ignore[attr-defined]
    if shape != list(destination.shape):
        raise ConfigError(
            f"{path}: tensor {name!r} has shape {shape}, config.json means"
            f" {list(destination.shape)}"
        )
    if dtype not in _READABLE_DTYPES:
        raise ConfigError(
            f"{path}: tensor {name!r} has dtype {dtype}; supported: {', '.join(_READABLE_DTYPES)}"
        )


def _is_harmless(name: str, spec: ModelSpec) -> bool:
    is_duplicate_head = name == "lm_head.weight" and spec.has_tied_embeddings
    return is_duplicate_head or _HARMLESS.search(name) is not None


# ---- destinations -------------------------------------------------------------------------------


def allocate_weights(
    spec: ModelSpec, *, dtype: torch.dtype, device: torch.device
) -> tuple[ModelWeights, dict[str, Tensor]]:
    """The model's tensors, unfilled, and published name -> the part of them it fills.

    The parts cover every tensor, do not overlap and are contiguous.
    """

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    embedding = empty(spec.vocab_size, spec.hidden_size)
    head = embedding if spec.has_tied_embeddings else empty(spec.vocab_size, spec.hidden_size)
    final_norm = empty(spec.hidden_size)
    destinations = {"model.embed_tokens.weight": embedding, "model.norm.weight": final_norm}
    if not spec.has_tied_embeddings:
        destinations["lm_head.weight"] = head
    layers = []
    for layer in range(spec.num_layers):
        weights = _allocate_layer(spec, dtype, device)
        for name, destination in _layer_destinations(spec, weights):
            destinations[f"model.layers.{layer}.{name}"] = destination
        layers.append(weights)
    return (
        ModelWeights(embedding=embedding, layers=layers, final_norm=final_norm, head=head),
        destinations,
    )


def _allocate_layer(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> LayerWeights:
    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    hidden, q_size = spec.hidden_size, spec.num_heads * spec.head_dim
    qkv_size = q_size + 2 * spec.num_kv_heads * spec.head_dim
    return LayerWeights(
        input_norm=empty(hidden),
        post_norm=empty(hidden),
        qkv=empty(qkv_size, hidden),
        qkv_bias=empty(qkv_size) if spec.has_qkv_bias else None,
        output=empty(hidden, q_size),
        output_bias=empty(hidden) if spec.has_output_bias else None,
        gate_up=empty(2 * spec.intermediate_size, hidden),
        gate_up_bias=empty(2 * spec.intermediate_size) if spec.has_mlp_bias else None,
        down=empty(hidden, spec.intermediate_size),
        down_bias=empty(hidden) if spec.has_mlp_bias else None,
        q_norm=empty(spec.head_dim) if spec.has_qk_norm else None,
        k_norm=empty(spec.head_dim) if spec.has_qk_norm else None,
    )


def _layer_destinations(spec: ModelSpec, weights: LayerWeights) -> Iterator[tuple[str, Tensor]]:
    kv_size = spec.num_kv_heads * spec.head_dim
    fused = (
        (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), weights.qkv,
         weights.qkv_bias, [spec.num_heads * spec.head_dim, kv_size, kv_size]),
        (("mlp.gate_proj", "mlp.up_proj"), weights.gate_up,
         weights.gate_up_bias, [spec.intermediate_size] * 2),
        (("self_attn.o_proj",), weights.output, weights.output_bias, [spec.hidden_size]),
        (("mlp.down_proj",), weights.down, weights.down_bias, [spec.hidden_size]),
    )  # fmt: skip
    for names, weight, bias, sizes in fused:
        for name, part in zip(names, torch.split(weight, sizes), strict=True):
            yield f"{name}.weight", part
        if bias is not None:
            for name, part in zip(names, torch.split(bias, sizes), strict=True):
                yield f"{name}.bias", part
    yield "input_layernorm.weight", weights.input_norm
    yield "post_attention_layernorm.weight", weights.post_norm
    if weights.q_norm is not None and weights.k_norm is not None:
        yield "self_attn.q_norm.weight", weights.q_norm
        yield "self_attn.k_norm.weight", weights.k_norm
