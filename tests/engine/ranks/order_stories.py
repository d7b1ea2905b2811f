"""What every rank does in the tests of sums in rank order, on a CPU.

`NcclRanks` run on gloo's group there instead of NCCL's: its sums, too, add parts in an order that
follows from the tensor's size. Other processes import this file, so it leaves out transformers.
"""

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from engine.layers.context import Comm
from engine.ranks.comm import GlooRanks, NcclRanks
from engine.ranks.rank import Rank
from tests.engine.ranks.exact_models import build_exact
from tests.engine.runner.determinism_trials import hash_ways
from tests.engine.runner.step_driver import StepDriver
from tests.harness.rank_processes import TIMEOUT_S

SHAPE = 80, 24
CPU = torch.device("cpu")


class _Options:
    def __init__(self, *, is_high_priority_stream: bool) -> None: ...


class _GlooAsNccl:
    Options = _Options

    def __init__(self, store: dist.Store, rank: int, size: int, _: _Options) -> None:
        self._host = GlooRanks(Rank(rank, size), store, TIMEOUT_S)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host._group, name)


class _RoundedSums:
    """Sums in bfloat16 of parts that round when they are added; what follows takes fp32."""

    fused_sums = None

    def __init__(self, comm: Comm) -> None:
        self.rank = comm.rank
        self.all_gather = comm.all_gather
        self._comm = comm

    def all_reduce(self, x: Tensor) -> Tensor:
        part = x * (1 / 3 + self.rank.index)
        return self._comm.all_reduce(part.bfloat16()).float()


def _as_nccl(host: Comm, path: str, *, in_rank_order: bool) -> NcclRanks:
    store = dist.FileStore(path, host.rank.size)
    given: Any = host.rank, store, host, CPU, TIMEOUT_S
    with patch.object(dist, "ProcessGroupNCCL", _GlooAsNccl, create=True):
        return NcclRanks(*given, in_rank_order=in_rank_order)


def draw_parts(rank: int) -> list[Tensor]:
    """In fp32 and bfloat16."""
    generator = torch.Generator().manual_seed(rank)
    drawn = torch.randn(SHAPE, generator=generator)
    return [drawn, drawn.bfloat16()]


def sum_parts(host: Comm, path: str, in_rank_order: bool) -> list[list[Tensor]]:
    """By dtype: of all rows, of some of them at a time, and scattered."""
    comm = _as_nccl(host, path, in_rank_order=in_rank_order)
    found = []
    for x in draw_parts(host.rank.index):
        halves = [comm.all_reduce(half.clone()) for half in x.split((28, 52))]
        shares = comm.all_gather(comm.reduce_scatter(x.clone()))
        found.append([comm.all_reduce(x.clone()), torch.cat(halves), shares])
    return found


def hash_rounded(
    host: Comm, folder: Path, path: str, in_rank_order: bool, num_trials: int
) -> set[str]:
    """Of a model whose products are exact, and whose sums over the ranks are not."""
    comm = _RoundedSums(_as_nccl(host, path, in_rank_order=in_rank_order))
    model, attention = build_exact(folder, host.rank)
    return hash_ways(partial(_start, model=model, phased=attention, comm=comm), num_trials)


def _start(seed: int, **given: Any) -> StepDriver:
    return StepDriver(seed=seed, num_blocks=640, **given)
