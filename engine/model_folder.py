"""Reads what a model's folder and the configuration say before any weight is read.

That is the model, the scales of its K and V, and the layouts of its blocks.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from configs.schema import AppConfig, ModelConfig
from engine.kv.layout import DTYPE_BYTES, ComputeDtype, KvDtype, KvLayout
from engine.models.eagle3 import read_eagle3
from engine.models.kv_scales import digest_of_scales, load_kv_scales
from engine.models.mtp import read_mtp
from engine.models.spec import ModelSpec, load_spec
from engine.ranks.rank import WHOLE_MODEL, Rank

DTYPES: dict[ComputeDtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def compute_dtype(model: ModelConfig, spec: ModelSpec) -> ComputeDtype:
    """The dtype of weights and activations: as configured; "auto" = fp32 on a CPU, else the files'.

    That of K and V too, unless cache.kv_dtype says another.
    """
    if model.dtype != "auto":
        return model.dtype
    return "float32" if model.device == "cpu" else spec.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """What one rank knows of its model before it reads any weight."""

    spec: ModelSpec  # of the whole model
    # fp32 [layers, 2, KV heads of all ranks]; None = K and V are kept as they are computed
    kv_scales: Tensor | None
    layout: KvLayout  # of this rank's blocks: they hold its KV heads
    whole_layout: KvLayout  # of blocks with the heads of all ranks


def _load_spec(config: AppConfig, rank: Rank) -> ModelSpec:
    return load_spec(
        Path(config.model.path),
        quantization=config.model.quantization,
        sharing=config.workers.expert_sharing_of(rank.size),
    )


def load_scales(config: AppConfig, spec: ModelSpec) -> Tensor | None:
    """As of `load_kv_scales`; None = K and V are kept as they are computed."""
    if config.cache.kv_dtype == "auto":
        return None
    return load_kv_scales(
        Path(config.model.path),
        spec,
        file=None if config.cache.kv_scales is None else Path(config.cache.kv_scales),
        is_random=config.model.weights == "random",
    )


def read_folder(config: AppConfig, rank: Rank) -> ModelFolder:
    spec = _load_spec(config, rank)
    kv_scales = load_scales(config, spec)
    return ModelFolder(
        spec=spec,
        kv_scales=kv_scales,
        layout=rank_layout(config, spec, rank, kv_scales),
        whole_layout=rank_layout(config, spec, WHOLE_MODEL, kv_scales),
    )


def rank_layout(
    config: AppConfig, spec: ModelSpec, rank: Rank, kv_scales: Tensor | None
) -> KvLayout:
    part, block_size = spec.of_rank(rank), config.cache.block_size
    computed = compute_dtype(config.model, spec)
    dtype: KvDtype = computed if kv_scales is None else "fp8_e4m3"
    scales = "" if kv_scales is None else digest_of_scales(kv_scales)
    layout = part.kv_layout(block_size=block_size, dtype=dtype, scales=scales)
    if config.moves_draft_kv:
        return _with_drafter(config, spec, rank, layout)
    width = _feature_width(config, spec)
    if width is None:
        return layout
    # Each rank has its heads of the vectors, which are in the model's dtype.
    num_elements = width * DTYPE_BYTES[computed] // DTYPE_BYTES[dtype]
    whole = spec.kv_layout(block_size=block_size, dtype=dtype).with_features(num_elements)
    return msgspec.structs.replace(layout, num_feature_layers=whole.num_feature_layers)


def _with_drafter(config: AppConfig, spec: ModelSpec, rank: Rank, layout: KvLayout) -> KvLayout:
    """The same with room for the draft model's K and V, unless they do not go into its blocks.

    layout: of `rank`, or of the whole model.
    """
    folder, dtype = drafter_folder(config), layout.dtype
    own, scales = load_spec(folder), ""
    if dtype == "fp8_e4m3":
        scales = digest_of_scales(load_kv_scales(folder, own, file=None, is_random=False))
    whole = own.kv_layout(block_size=layout.block_size, dtype=dtype, scales=scales)
    # Workers of other numbers of ranks find a head by its place among the target's.
    is_shared = max(config.workers.num_ranks.values()) > 1
    has_other_heads = (own.num_kv_heads, own.head_dim) != (spec.num_kv_heads, spec.head_dim)
    if not layout.can_hold(whole) or (is_shared and has_other_heads):
        return layout
    part = own.of_rank(WHOLE_MODEL if spec.has_dp_attention else rank)
    return layout.with_drafter(
        part.kv_layout(block_size=layout.block_size, dtype=dtype, scales=scales)
    )


def _feature_width(config: AppConfig, spec: ModelSpec) -> int | None:
    """Of the vector that a drafter reads of each token; None = none does."""
    match config.speculation.drafter:
        case "eagle3":
            return read_eagle3(drafter_folder(config), spec).decoder.hidden_size
        case "mtp":
            return read_mtp(drafter_folder(config), spec).hidden_size
        case _:
            return None


def drafter_folder(config: AppConfig) -> Path:
    return Path(config.speculation.model_path or config.model.path)
