"""Reads what a model's folder and the configuration say before any weight is read.

That is the model, the scales of its K and V, and the layouts of its blocks.
"""

from pathlib import Path

import msgspec
from torch import Tensor

from configs.schema import AppConfig
from engine.kv.layout import DTYPE_BYTES, KvDtype, KvLayout
from engine.models.eagle3 import read_eagle3
from engine.models.kv_scales import digest_of_scales, load_kv_scales
from engine.models.mtp import read_mtp
from engine.models.spec import ModelSpec, load_spec
from engine.ranks.rank import WHOLE_MODEL, Rank
from engine.runner.replica import compute_dtype


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


def read_folder(
    config: AppConfig, rank: Rank
) -> tuple[ModelSpec, Tensor | None, KvLayout, KvLayout]:
    """The model, its scales of K and V, and the layouts of the rank's blocks and of whole ones."""
    spec = _load_spec(config, rank)
    kv_scales = load_scales(config, spec)
    part = rank_layout(config, spec, rank, kv_scales)
    return spec, kv_scales, part, rank_layout(config, spec, WHOLE_MODEL, kv_scales)


def rank_layout(
    config: AppConfig, spec: ModelSpec, rank: Rank, kv_scales: Tensor | None
) -> KvLayout:
    part, block_size = spec.of_rank(rank), config.cache.block_size
    computed = compute_dtype(config.model, spec)
    dtype: KvDtype = computed if kv_scales is None else "fp8_e4m3"
    scales = "" if kv_scales is None else digest_of_scales(kv_scales)
    layout = part.kv_layout(block_size=block_size, dtype=dtype, scales=scales)
    width = _feature_width(config, spec)
    if width is None:
        return layout
    # Each rank has its heads of the vectors, which are in the model's dtype.
    num_elements = width * DTYPE_BYTES[computed] // DTYPE_BYTES[dtype]
    whole = spec.kv_layout(block_size=block_size, dtype=dtype).with_features(num_elements)
    return msgspec.structs.replace(layout, num_feature_layers=whole.num_feature_layers)


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
