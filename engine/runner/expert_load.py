"""How many tokens every expert gets: counted on the device, read from time to time without waiting.

    every step          the router's routes are added to counts, in graphs too
    every n-th step     a copy of the counts begins, to the host
    a later step        ... has ended: `newest`

Counts are those of this rank's routes: all tokens, where every rank routes all. With DP attention
each routes its own, and those of all ranks are counted where they meet.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.layers.moe import Mixture, Router
from engine.models.llama import CausalLM
from kernels.moe import reference
from kernels.moe.routes import Routes


class Count(Protocol):
    def __call__(self, routes: Routes, counts: Tensor) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad:
    """One entry for each mixture of a model, in the order of its layers."""

    layers: tuple[int, ...]  # indices among the model's layers
    counts: tuple[tuple[int, ...], ...]  # tokens of each expert since the start
    # Of the tokens between the last two reads: the fullest over the mean; 0 = there were none.
    expert_imbalance: tuple[float, ...]
    # The same of ranks that hold whole experts; () = one rank, or each has a part of every expert.
    rank_imbalance: tuple[float, ...]


class CountingRouter:
    """A router whose routes are counted."""

    def __init__(self, router: Router, counts: Tensor, count: Count) -> None:
        """counts: int64 [experts], added to."""
        self.router = router
        self._counts = counts
        self._count = count

    def __call__(self, x: Tensor, slots: Tensor | None) -> Routes:
        routes = self.router(x, slots)
        self._count(routes=routes, counts=self._counts)
        return routes


class ExpertLoads:
    """Counts the routes of one model. One thread launches steps; any may ask for `newest`."""

    def __init__(self, model: CausalLM, *, read_every: int, num_ranks: int = 1) -> None:
        """read_every: steps. num_ranks: that share the model. Replaces the model's routers."""
        spec = model.spec.mixture
        assert spec is not None, "the model has no experts"
        mixtures = {
            index: layer.mlp
            for index, layer in enumerate(model.layers)
            if isinstance(layer.mlp, Mixture)
        }
        shape, device = (len(mixtures), spec.num_experts), model.device
        self._layers = tuple(mixtures)
        self._num_groups = num_ranks if spec.has_whole_experts else 1
        self._counts = torch.zeros(shape, dtype=torch.int64, device=device)
        is_cuda = device.type == "cuda"
        self._copy = torch.zeros(shape, dtype=torch.int64, pin_memory=is_cuda)
        self._event: Any = torch.cuda.Event() if is_cuda else None
        self._is_copying = False
        self._read_every = read_every
        self._num_steps = 0
        self._known = self._copy.clone()
        self.newest: ExpertLoad | None = None  # None = none was read yet
        count = _count_on(device)
        for mixture, row in zip(mixtures.values(), self._counts, strict=True):
            if mixture.has_dp_attention:
                mixture.on_gathered = partial(count, counts=row)
                continue
            router = mixture.router
            if isinstance(router, CountingRouter):  # of an engine that is gone
                router = router.router
            mixture.router = CountingRouter(router, row, count)

    def reset(self) -> None:
        """Forget what was counted and read so far: steps that nobody asked for."""
        self._counts.zero_()
        self._known = torch.zeros_like(self._copy)
        self._is_copying = False
        self._num_steps = 0
        self.newest = None

    def on_step(self) -> None:
        """After a step was launched. Never waits for the device."""
        self._num_steps += 1
        if self._is_copying and (self._event is None or self._event.query()):
            self._is_copying = False
            self.newest, self._known = self._load_of(self._copy), self._copy.clone()
        if self._num_steps % self._read_every == 0 and not self._is_copying:
            self._copy.copy_(self._counts, non_blocking=True)
            if self._event is not None:
                self._event.record(torch.cuda.current_stream(self._counts.device))
            self._is_copying = True

    def _load_of(self, counts: Tensor) -> ExpertLoad:
        newly = counts - self._known
        by_rank = newly.unflatten(1, (self._num_groups, -1)).sum(dim=2)
        return ExpertLoad(
            layers=self._layers,
            counts=tuple(map(tuple, counts.tolist())),
            expert_imbalance=tuple(map(imbalance, newly.tolist())),
            rank_imbalance=tuple(map(imbalance, by_rank.tolist())) if self._num_groups > 1 else (),
        )


def imbalance(numbers: Sequence[int]) -> float:
    """The largest number over their mean; 1 = all are equal, 0 = all are 0."""
    total = sum(numbers)
    return max(numbers) * len(numbers) / total if total else 0.0


def _count_on(device: torch.device) -> Count:
    if device.type != "cuda":
        return reference.count_routes
    from kernels.moe.load import count_routes

    return count_routes
