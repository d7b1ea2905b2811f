"""Chooses the experts of a mixture at random, for benchmarks: random weights route badly.

A router with random weights may send all tokens to a few experts, and a step then reads fewer
weights than any trained model would. Here the i-th token of a step gets experts drawn without
replacement, uniformly, from a seed, others in every layer, the same in every step. The model's own
router still runs, and its weights are used, so that its time counts. Padding is routed like a
token: use sizes that have a graph of their own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from configs.schema import AppConfig
from engine.layers.moe import Mixture, Router
from engine.model_folder import DTYPES, compute_dtype
from engine.models.llama import CausalLM
from engine.models.registry import WeightSource, build_model
from engine.models.spec import load_spec
from engine.ranks.rank import WHOLE_MODEL, Rank
from kernels.moe.routes import Routes


class PinnedRouter:
    """Experts from a table, weights from the router that it stands for."""

    def __init__(self, router: Router, experts: Tensor) -> None:
        """experts: int32 [max_tokens, k]."""
        self._router = router
        self.experts = experts

    def __call__(self, x: Tensor, slots: Tensor | None) -> Routes:
        routes = self._router(x, slots)
        return Routes(ids=self.experts[: x.shape[0]], weights=routes.weights)


@dataclass(frozen=True, slots=True)
class DistinctExperts:
    """Of a step's layers: the experts that have tokens."""

    num_tokens: int
    least: int
    mean: float
    most: int

    def describe(self) -> str:
        return f"{self.num_tokens} tokens: {self.mean:.1f} ({self.least} to {self.most})"


def uniform_experts(
    num_tokens: int, num_experts: int, num_active: int, *, seed: int, device: torch.device
) -> Tensor:
    """Experts of each token, all as likely: int32 [num_tokens, num_active]."""
    generator = torch.Generator(device).manual_seed(seed)
    draws = torch.rand(num_tokens, num_experts, generator=generator, device=device)
    return draws.topk(num_active, dim=1).indices.int()


def pin_routing(model: CausalLM, max_tokens: int, seed: int) -> int:
    """Replace every router of `model`; returns how many there were."""
    spec = model.spec.mixture
    mixtures = list(_mixtures(model))
    for index, mixture in enumerate(mixtures):
        assert spec is not None, "a model with mixtures says so"
        experts = uniform_experts(
            max_tokens,
            spec.num_experts,
            spec.num_active,
            seed=1000 * seed + index,
            device=model.device,
        )
        mixture.router = PinnedRouter(mixture.router, experts)
    return len(mixtures)


def count_distinct(model: CausalLM, sizes: Sequence[int]) -> list[DistinctExperts]:
    """For steps of so many tokens of a model whose routing is pinned."""
    tables = [m.router.experts for m in _mixtures(model) if isinstance(m.router, PinnedRouter)]
    found = []
    for size in sizes:
        counts = [len(set(table[:size].flatten().tolist())) for table in tables]
        if counts:
            mean = sum(counts) / len(counts)
            found.append(DistinctExperts(size, min(counts), mean, max(counts)))
    return found


def build_pinned(config: AppConfig, seed: int, rank: Rank = WHOLE_MODEL) -> CausalLM:
    """A rank's part of the model of `config` with pinned routing, for steps of any size.

    Raises ConfigError as `build_engine` does.
    """
    model, scheduler = config.model, config.scheduler
    sizes = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    assert all(isinstance(size, int) for size in sizes), f"{sizes}: steps have a size"
    max_tokens = max(int(size) for size in sizes)
    sharing, spec = config.workers.expert_sharing_of(rank.size), load_spec(Path(model.path))
    built = build_model(
        Path(model.path),
        dtype=DTYPES[compute_dtype(model, spec)],
        device=torch.device(model.device),
        max_model_len=model.max_model_len or spec.max_model_len,
        source=WeightSource(is_random=model.weights == "random", sharing=sharing),
        is_deterministic=model.deterministic,
        rank=rank,
    )
    # With DP attention the i-th tokens of two ranks are different ones.
    own_seed = seed + rank.index if built.spec.has_dp_attention else seed
    pin_routing(built, max_tokens, own_seed)
    return built


def _mixtures(model: CausalLM) -> Iterator[Mixture]:
    return (layer.mlp for layer in model.layers if isinstance(layer.mlp, Mixture))
