"""Loads a model from its folder: what it is, its weights, its layers. The only entry point."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from engine.errors import ConfigError
from engine.models.llama import CausalLM, build_decoder
from engine.models.mixture_spec import ExpertSharing
from engine.models.quantization.published_tensors import check_shares
from engine.models.spec import load_spec
from engine.models.weights import load_weights, random_weights
from engine.ranks.rank import WHOLE_MODEL, Rank
from kernels.ops import Ops
from kernels.reference import TorchOps


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSource:
    """Where weights come from, and what becomes of them while they are read."""

    is_random: bool = False  # for benchmarks: only config.json is read
    quantization: Literal["auto", "fp8"] = "auto"  # as in `load_spec`
    sharing: ExpertSharing = "units"  # likewise


AS_PUBLISHED = WeightSource()


def build_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int | None = None,
    ops: Ops | None = None,
    source: WeightSource = AS_PUBLISHED,
    is_deterministic: bool = False,
    rank: Rank = WHOLE_MODEL,
) -> CausalLM:
    """Load one rank's part of a Hugging Face folder; `.spec` of the result describes the part.

    `max_model_len` (tokens) may shorten the model's context, never lengthen it. `ops` None: the
    Triton kernels on a GPU, torch elsewhere.
    `is_deterministic`: on a GPU, a token's numbers do not depend on the batch it is in.
    Raises ConfigError for anything in the folder that is missing, unsupported or inconsistent, and
    for a model that the ranks cannot share.
    """
    spec = load_spec(folder, quantization=source.quantization, sharing=source.sharing)
    spec.of_rank(rank)  # before the weights, so that the error comes early
    check_shares(spec, rank, is_on_gpu=device.type == "cuda")
    allowed = spec.max_model_len
    if max_model_len is not None and max_model_len > allowed:
        raise ConfigError(
            f"{folder / 'config.json'}: the model allows {allowed} tokens, max_model_len is"
            f" {max_model_len}"
        )
    load = random_weights if source.is_random else partial(load_weights, folder)
    weights = load(spec, dtype=dtype, device=device, rank=rank)
    # One builder for all architectures that `load_spec` knows: the spec holds their differences.
    return build_decoder(
        spec,
        weights,
        max_model_len=max_model_len or allowed,
        ops=ops or build_ops(device),
        is_deterministic=is_deterministic,
        rank=rank,
    )


def build_ops(device: torch.device) -> Ops:
    """The implementation of the operations for `device`."""
    if device.type != "cuda":
        return TorchOps()
    # A host without a GPU need not have Triton.
    from kernels.fused import TritonOps

    return TritonOps()
