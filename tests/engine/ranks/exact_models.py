"""Models whose sums are exact in any order, so that ranks must give one rank's very bits.

Weights are small whole numbers, and what is not linear ends on a grid of 1/8: norms, activations
and attention. Products of such numbers are added without rounding, however they are split.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.layers import decoder, moe
from engine.layers.context import Comm
from engine.layers.row_exchange import RowExchange
from engine.layers.token_exchange import Dispatched, Gathered, gather_tokens, scatter_rows
from engine.layers.vocabulary import SharedEmbedding, SharedHead
from engine.models.llama import CausalLM, attention_shape
from engine.models.llama_weights import Split, StackedTensor
from engine.models.registry import AS_PUBLISHED, WeightSource, build_model
from engine.ranks.comm import GlooRanks
from engine.ranks.rank import Rank
from kernels.attention.latent import LatentShape, PhasedLatent
from kernels.attention.latent_reference import ReferenceLatent
from kernels.attention.phased import PhasedAttention, Phases
from kernels.attention.reference import ReferenceAttention
from kernels.moe import form, reference
from kernels.moe.routes import Routes
from kernels.reference import TorchOps, silu_mul
from kernels.sampling.choices import GreedyChoice
from tests.engine.runner.graph_story import RowTensorAttention

CPU = torch.device("cpu")
_GRID = 8


def _snap(x: Tensor) -> Tensor:
    return torch.round(x * _GRID) / _GRID


class SnappingOps(TorchOps):
    """Ends on the grid wherever ranks would add what is not whole."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _snap(super().rms_norm(x, weight, eps))

    def rms_norm_add(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        normed, stream = super().rms_norm_add(x, residual, weight, eps)
        return _snap(normed), stream

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return _snap(super().silu_mul(gate_up))


class SnappingSums:
    """Sums with the norm after them, in two steps; see `FusedSums`."""

    def __init__(self, comm: Comm) -> None:
        self.num_taken = 0
        self._comm = comm

    def fits(self, x: Tensor) -> bool:
        return len(x) != 2  # some sums are apart

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        self.num_taken += 1
        return SnappingOps().rms_norm_add(self._comm.all_reduce(x), residual, weight, eps)

    def fits_share(self, x: Tensor) -> bool:
        return len(x) % 3 > 0  # some are apart

    def share_add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        self.num_taken += 1
        return SnappingOps().rms_norm_add(scatter_rows(x, self._comm), residual, weight, eps)


class SnappingAttention(ReferenceAttention):
    """Each head's result ends on the grid."""

    def run(self, *args: Any, **named: Any) -> Tensor:
        return _snap(super().run(*args, **named))


class SnappingLatent(ReferenceLatent):
    """Each head's result ends on the grid."""

    def run(self, *args: Any, **named: Any) -> Tensor:
        return _snap(super().run(*args, **named))


class SnappingGraphAttention(RowTensorAttention):
    """Each head's result ends on the grid."""

    def run(self, *args: Any, **named: Any) -> Tensor:
        return _snap(super().run(*args, **named))


def save_whole_numbers(folder: Path, seed: int) -> None:
    """Replace all weights but the norms by whole numbers from -2 to 2."""
    path = folder / "model.safetensors"
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if "norm" not in name and tensor.is_floating_point():
            drawn = torch.randint(-2, 3, tensor.shape, generator=generator)
            tensors[name] = drawn.to(tensor.dtype)
    save_file(tensors, path, metadata={"format": "pt"})


def build_exact(
    folder: Path,
    rank: Rank,
    *,
    captures: bool = False,
    source: WeightSource = AS_PUBLISHED,
) -> tuple[CausalLM, Phases]:
    """The rank's model, and the attention that goes with it.

    captures: the attention can be in graphs, as `RerunRecorder` makes them; it knows no windows.
    """
    model = build_model(
        folder, dtype=torch.float32, device=CPU, ops=SnappingOps(), rank=rank, source=source
    )
    shape = attention_shape(model.spec)
    if isinstance(shape, LatentShape):
        latent = SnappingLatent(shape, block_size=4, dtype=torch.float32, device=CPU)
        return model, PhasedLatent(prefill=latent, decode=latent, graph=None)
    if captures:
        both = SnappingGraphAttention(shape)
        return model, PhasedAttention(prefill=both, decode=both, graph=both, prompt_graph=both)
    attention = SnappingAttention(shape, block_size=4, dtype=torch.float32, device=CPU)
    return model, PhasedAttention(prefill=attention, decode=attention, graph=None)


def _snapped_route(*args: Any, **named: Any) -> Routes:
    routes = _route(*args, **named)
    return replace(routes, weights=_snap(routes.weights))


def _snapped_combine(
    outputs: Tensor, shared: Tensor | None = None, gate: Tensor | None = None
) -> Tensor:
    total = outputs.sum(dim=1)
    if shared is not None:
        total += shared if gate is None else _snap(torch.sigmoid(gate)) * shared
    return total


_route = reference.route


@contextmanager
def snapped_mixtures() -> Iterator[None]:
    """Weights of routes, activations and gates of experts end on the grid."""
    with (
        patch.object(reference, "route", _snapped_route),
        patch.object(form, "silu_mul", lambda x: _snap(silu_mul(x))),
        patch.object(reference, "combine", _snapped_combine),
    ):
        yield


# ---- wrong shards --------------------------------------------------------------------------------


def _other_kv_head(self: Rank, length: int, what: str, unit: int | None = None) -> slice:
    num_units = length // (unit or 1)
    if num_units % self.size == 0:
        return slice(self.index * length // self.size, (self.index + 1) * length // self.size)
    assert unit is not None
    first = self.index % num_units
    return slice(first * unit, (first + 1) * unit)


def _swapped_columns(share_of: Any) -> Any:
    def share(self: StackedTensor, name: str, rank: Rank) -> tuple[slice, ...] | None:
        if self.split is Split.COLUMNS:
            rank = Rank(rank.size - 1 - rank.index, rank.size)
        found: tuple[slice, ...] | None = share_of(self, name, rank)
        return found

    return share


def _wrong_first_id(init: Any) -> Any:
    def begin(self: SharedEmbedding, weight: Tensor, first: int) -> None:
        init(self, weight, max(first - 1, 0))

    return begin


def _other_order(self: SharedHead, own: Tensor, comm: Comm) -> Tensor:
    by_rank = comm.all_gather(own).view(-1, *own.shape)
    return torch.cat(list(by_rank.flip(0)), dim=1)[:, : self._shares[-1].stop]


def _beside_best(best_tokens: Any) -> Any:
    def beside(self: SharedHead, own: Tensor, comm: Comm) -> GreedyChoice:
        best: GreedyChoice = best_tokens(self, own, comm)
        return replace(best, token_ids=(best.token_ids + 1) % self._shares[-1].stop)

    return beside


def _next_experts(held_routes: Any) -> Any:
    def of_others(routes: Routes, held: range) -> Routes:
        found: Routes = held_routes(routes, range(held.start + 1, held.stop + 1))
        return found

    return of_others


_FAULTS: dict[str, Any] = {
    "another rank's KV head": lambda: patch.object(Rank, "share", _other_kv_head),
    "a bias on every rank": lambda: patch.object(StackedTensor, "is_on", lambda self, rank: True),
    "another rank's columns": lambda: patch.object(
        StackedTensor, "share_of", _swapped_columns(StackedTensor.share_of)
    ),
    "ids one too low": lambda: patch.object(
        SharedEmbedding, "__init__", _wrong_first_id(SharedEmbedding.__init__)
    ),
    "logits in another order": lambda: patch.object(SharedHead, "whole_logits", _other_order),
    "sums of one rank": lambda: patch.object(GlooRanks, "all_reduce", lambda self, x: x),
}
FAULTS = tuple(_FAULTS)
_EXPERT_FAULTS: dict[str, Any] = {
    "another rank's experts": lambda: patch.object(
        reference, "held_routes", _next_experts(reference.held_routes)
    ),
    "all routes taken for a rank's own": lambda: patch.object(
        reference, "held_routes", lambda routes, held: _wrapped(routes, held)
    ),
    "a part of a shared expert on every rank, not added": lambda: patch.object(
        GlooRanks, "all_reduce", lambda self, x: x
    ),
}
EXPERT_FAULTS = tuple(_EXPERT_FAULTS)
BEST_FAULT = "tokens beside the best"
_BEST_FAULTS: dict[str, Any] = {
    BEST_FAULT: lambda: patch.object(
        SharedHead, "best_tokens", _beside_best(SharedHead.best_tokens)
    ),
}
_EXCHANGE_FAULTS: dict[str, Any] = {
    "outputs of other rows": lambda: patch.object(moe, "send_back", _flipped(moe.send_back)),
    "rows that only one rank adds": lambda: patch.object(moe, "add_parts", _first_part),
    "shared experts of all tokens on every rank": lambda: patch.object(
        moe, "_share_own", moe._share
    ),
    "another rank's rows": lambda: patch.object(decoder, "own_rows", _others_rows),
}
EXCHANGE_FAULTS = tuple(_EXCHANGE_FAULTS)
GATHER_FAULT = "routes of another row"
_GATHER_FAULTS: dict[str, Any] = {
    GATHER_FAULT: lambda: patch.object(moe, "gather_tokens", _other_routes),
}


DP_FAULTS = ("routes of another rank's rows", "another rank's outputs", "own rows alone")
_DP_FAULTS: dict[str, Any] = {
    DP_FAULTS[0]: lambda: patch.object(RowExchange, "gather", _other_ranks_routes),
    DP_FAULTS[1]: lambda: patch.object(RowExchange, "scatter", _other_outputs(RowExchange.scatter)),
    DP_FAULTS[2]: lambda: patch.object(RowExchange, "_to_all", _own_alone(RowExchange._to_all)),
}


def _other_ranks_routes(self: RowExchange, x: Tensor, routes: Routes) -> Gathered:
    found: Gathered = _gather_rows(self, x, routes)
    routes = found.routes
    flipped = replace(routes, ids=routes.ids.flip(0), weights=routes.weights.flip(0))
    return replace(found, routes=flipped)


_gather_rows = RowExchange.gather


def _other_outputs(scatter: Any) -> Any:
    def of_others(self: RowExchange, parts: Tensor, num_rows: int) -> Tensor:
        found: Tensor = scatter(self, parts.flip(0), num_rows)
        return found

    return of_others


def _own_alone(to_all: Any) -> Any:
    def of_own(self: RowExchange, own: Tensor) -> Tensor:
        found: Tensor = to_all(self, own)
        start = sum(self.num_rows[: self.comm.rank.index])
        kept = torch.zeros_like(found)
        kept[start : start + len(own)] = own
        return kept

    return of_own


def _flipped(send_back: Any) -> Any:
    def send(outputs: Tensor, *others: Any) -> Tensor:
        found: Tensor = send_back(outputs.flip(0), *others)
        return found

    return send


def _other_routes(x: Tensor, routes: Routes, comm: Comm) -> Gathered:
    found = gather_tokens(x, routes, comm)
    return replace(found, routes=replace(found.routes, ids=found.routes.ids.flip(0)))


def _first_part(parts: Tensor, dispatched: Dispatched) -> Tensor:
    num_first = dispatched.sent[0]
    total = parts.new_zeros((dispatched.num_own, parts.shape[1]))
    return total.index_add_(0, dispatched.rows[:num_first], parts[:num_first])


def _others_rows(x: Tensor, comm: Comm, fill: int = 0) -> Tensor:
    num_own = comm.rank.padded_length(len(x))
    whole = torch.cat((x, x.new_full((num_own * comm.rank.size - len(x), *x.shape[1:]), fill)))
    return whole.chunk(comm.rank.size)[-1 - comm.rank.index]


def _wrapped(routes: Routes, held: range) -> Routes:
    return replace(routes, ids=routes.ids.remainder(len(held)))


@contextmanager
def planted(fault: str | None) -> Iterator[None]:
    """Build and run with a mistake in how ranks share a model; None = with none."""
    if fault is None:
        yield
        return
    known = _FAULTS | _BEST_FAULTS | _EXPERT_FAULTS | _EXCHANGE_FAULTS | _GATHER_FAULTS | _DP_FAULTS
    with known[fault]():
        yield
