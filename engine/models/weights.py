"""Streams safetensors files into the model's own tensors. Nothing is ever unpickled.

Destinations are allocated first, with q, k and v (and gate and up) side by side in one tensor, so
that each published tensor is read once, converted, and written where it belongs. Names and shapes
are those of `weight_shapes`; how the tensors are then used is the model's business.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ConfigError
from engine.models.spec import ModelSpec
from engine.models.staging import TensorCopier, copier_for
from engine.models.weight_files import check_weights
from engine.models.weight_shapes import StackedTensor, layer_tensors, outer_tensors


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
    files = check_weights(folder, spec)
    weights, destinations = allocate_weights(spec, dtype=dtype, device=device)
    with copier_for(device) as copier:
        for path, names in files.items():
            _copy_file(path, names, destinations, copier)
    return weights


def _copy_file(
    path: Path, names: Sequence[str], destinations: Mapping[str, Tensor], copier: TensorCopier
) -> None:
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            for name in names:
                copier.copy(file.get_tensor(name), destinations[name])
            copier.wait_copied()  # while the file is still mapped
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: not a readable safetensors file: {error}") from error


# ---- destinations -------------------------------------------------------------------------------


def allocate_weights(
    spec: ModelSpec, *, dtype: torch.dtype, device: torch.device
) -> tuple[ModelWeights, dict[str, Tensor]]:
    """The model's tensors, unfilled, and published name -> the part of them it fills.

    The parts cover every tensor, do not overlap and are contiguous.
    """
    destinations: dict[str, Tensor] = {}

    def allocate(tensors: Mapping[str, StackedTensor]) -> dict[str, Tensor]:
        allocated = {}
        for field, stacked in tensors.items():
            tensor = torch.empty(stacked.shape, dtype=dtype, device=device)
            parts = torch.split(tensor, list(stacked.num_rows.values()))
            destinations.update(zip(stacked.num_rows, parts, strict=True))
            allocated[field] = tensor
        return allocated

    outer = allocate(outer_tensors(spec))
    layers = [_layer(allocate(layer_tensors(spec, i))) for i in range(spec.num_layers)]
    weights = ModelWeights(
        embedding=outer["embedding"],
        layers=layers,
        final_norm=outer["final_norm"],
        head=outer.get("head", outer["embedding"]),
    )
    return weights, destinations


def _layer(tensors: Mapping[str, Tensor]) -> LayerWeights:
    return LayerWeights(
        input_norm=tensors["input_norm"],
        post_norm=tensors["post_norm"],
        qkv=tensors["qkv"],
        qkv_bias=tensors.get("qkv_bias"),
        output=tensors["output"],
        output_bias=tensors.get("output_bias"),
        gate_up=tensors["gate_up"],
        gate_up_bias=tensors.get("gate_up_bias"),
        down=tensors["down"],
        down_bias=tensors.get("down_bias"),
        q_norm=tensors.get("q_norm"),
        k_norm=tensors.get("k_norm"),
    )
